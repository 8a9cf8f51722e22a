"""The command line inside this process, and tiny models and data on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import model_of
from zosim import cli


def zosim(*arguments) -> int:
    """Run one command in this process and return its exit code."""
    try:
        cli.command()([str(argument) for argument in arguments], prog_name="zosim")
    except SystemExit as exit_:
        return exit_.code or 0
    return 0


def run_words(model, data, out, *more, **options):
    """Return the words of a run in this process; options by their names, such as ``steps=4``, before those in `more`."""
    named = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    fixed = ("--no-launch", "--no-tensorboard", "--out", out)
    return ["run", "--model", model, "--data", data, *fixed, *named, *more]


def train(model, data, out, *more, **options):
    """Run in this process, and return the exit code; options as of :func:`run_words`."""
    return zosim(*run_words(model, data, out, *more, **options))


def saved_model(name, folder, **options):
    """Write a tiny model, and return its directory."""
    model_of(name, **options).save_pretrained(folder / name)
    return folder / name


def saved_lines(path: Path, *, count=10, shortest=5, longest=9, seed=3, mask=None):
    """Write lines of tokens of unlike lengths, and return them as batches are made of them; those asked for are masked, if at all."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, 96, (length,), generator=generator).tolist()
        shown = ids if mask is None else [*ids[:2], *[mask] * (length - 2)]
        lines.append({"input_ids": shown, "labels": [-100, -100, *ids[2:]]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def batch_of(lines, number, size):
    """Batch `number` as the interface states it: lines kB to kB+B-1, wrapping, padded on the right."""
    chosen = [lines[(number * size + i) % len(lines)] for i in range(size)]
    width = max(len(line["input_ids"]) for line in chosen)
    ids = torch.zeros((size, width), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, line in enumerate(chosen):
        length = len(line["input_ids"])
        ids[row, :length] = torch.tensor(line["input_ids"])
        labels[row, :length] = torch.tensor(line["labels"])
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def rows_of(directory):
    """Rows of a run's log."""
    return [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]


def loaded(directory, dtype=torch.float32):
    """Load a model directory."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
