"""A run that was never interrupted, and its copies as deaths leave them."""

from __future__ import annotations

import json

from executors.runs.jsonlines import read_lines
from executors.runs.runlog import read_header, write_header
from tests.support.command import loaded, rows_of, run_words, saved_lines, saved_model, zosim
from tests.support.reference_mezo import differing

STEPS, BATCH = 12, 3
OFFLOADED = ("--residency", "offloaded")
RESIDENT = ("--residency", "resident")


def options(inputs, out, *more):
    """Return the command that runs on `inputs`."""
    named = {"steps": STEPS, "batch": BATCH, "lr": 1e-3, "weight_decay": 0.1, "digest_every": 4}
    return run_words(*inputs, out, *more, **named)


def truncate(run, num_rows, *, torn=b""):
    """Leave the run as a process leaves it that died after `num_rows` steps."""
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join(lines[:num_rows]) + torn)
    kept = [line for line in read_lines(run / "digests.jsonl") if line.row["num_steps"] <= num_rows]
    (run / "digests.jsonl").write_text("".join(json.dumps(line.row) + "\n" for line in kept))
    for path in (run / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step-")) > num_rows:
            path.unlink()
    for name in ("model.safetensors", "timeline.json"):
        (run / name).unlink()
    header = read_header(run)
    header.pop("finished")
    write_header(run, header)


def same(run, whole):
    """Whether two runs logged the same numbers and ended with the same bits."""
    drop = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(d)] for d in (run, whole)]
    return drop[0] == drop[1] and differing(loaded(run), loaded(whole)) == []


def whole_run(inputs, folder):
    """Make a run that was never interrupted."""
    out = folder / "out"
    assert zosim(*options(inputs, out, *OFFLOADED, "--checkpoint-every", 5)) == 0
    return out


def saved_inputs(folder):
    """Write a tiny model and data for it."""
    saved_lines(folder / "data.jsonl")
    return saved_model("opt", folder), folder / "data.jsonl"
