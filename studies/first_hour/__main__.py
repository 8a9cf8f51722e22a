"""``python -m studies.first_hour``: everything that a first hour on a device should check, and its report."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer


def main(
    device: Annotated[str, typer.Option(help="As torch calls it.")] = "cuda:0",
    hardware: Annotated[str, typer.Option(help="This machine: host, a preset or a topology file.")] = "host",
    folder: Annotated[Path, typer.Option(help="Keep what is done here, and go on from it.")] = Path(
        "build/first_hour"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs/benchmarks"),
    stop_after_s: Annotated[float, typer.Option(help="End after so long; run it again to go on.")] = 3300,
    part_s: Annotated[float, typer.Option(help="End a part that takes longer.")] = 600,
    found: Annotated[
        Path | None,
        typer.Option(help="JSON file of an earlier report: what it found is not done again."),
    ] = None,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
    left: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check a device: every path, steps of OPT shapes beside what was predicted, parity, calibration, kills, tests.

    Each part runs in a process of its own, and what it found is kept. With exit status 75 there is more to do.
    """
    from executors.devices import device_named
    from executors.ranks.launch import die_with
    from studies.first_hour.hour import contents_of, in_processes, leave, spend, take_over
    from studies.first_hour.parts import parts_of
    from studies.first_hour.report import write
    from studies.first_hour.setting import Setting
    from studies.kept_results import MORE_TO_DO
    from topology.errors import ZosimError

    logging.getLogger("transformers").setLevel(logging.ERROR)
    setting = Setting(device, hardware, folder)
    try:
        device_named(device)
        setting.node  # noqa: B018 - whether it is there
    except ZosimError as error:
        print(f"error: {error.message}\n\nhint: {error.hint}", file=sys.stderr)
        raise typer.Exit(2) from None
    if only is not None and left is not None:
        die_with(os.getppid())
        leave(setting, only, left)
        return
    if found is not None:
        take_over(setting, found)
    # Ended by a launcher, it ends the part that is under way, and all that this has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    words = ["--device", device, "--hardware", hardware, "--folder", str(folder)]
    run = in_processes([sys.executable, "-m", "studies.first_hour", *words], folder, part_s)

    def written() -> Path:
        todo = [part.title for part in parts_of(setting)]
        return write(contents_of(setting), out, "python -m studies.first_hour " + " ".join(words), todo=todo)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        written()  # after every part: whoever ends this process has a report

    is_done = spend(setting, run, stop_after_s=stop_after_s, say=say)
    print(f"report: {written()}")
    if not is_done:
        print("there is more to do: run the same command again", file=sys.stderr)
        raise typer.Exit(MORE_TO_DO)


if __name__ == "__main__":
    typer.run(main)
