"""Make what the tutorial needs: ``python -m studies.first_steps first`` writes a small model and a task to ``first/``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from zosim.console import stdout


def main(
    folder: Annotated[Path, typer.Argument(help="Where to put model and data.")] = Path("first"),
) -> None:
    """Pretrain a byte-level OPT for some seconds, and write the task "documentation or code?" beside it."""
    from executors.models.pretrain import Recipe, pretrained_model, progress_bar

    recipe = Recipe(num_blocks=8, hidden_size=64, num_steps=150, batch=8)
    with progress_bar(recipe) as on_step:
        made = pretrained_model(recipe, on_step=on_step)
    shutil.copytree(made.model, folder / "model", dirs_exist_ok=True)
    for source, name in ((made.train, "train.jsonl"), (made.validation, "validation.jsonl")):
        shutil.copyfile(source, folder / name)
    stdout.print(f"{folder}/model: 8 blocks of width 64, {made.bits_per_byte:.2f} bits per byte")
    stdout.print(f"{folder}/train.jsonl, {folder}/validation.jsonl: is it documentation or source code?")


if __name__ == "__main__":
    typer.run(main)
