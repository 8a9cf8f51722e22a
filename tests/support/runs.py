"""Runs of several ranks: their commands, what they leave, and ranks that stop or die in them."""

from __future__ import annotations

import json
import shutil
import signal

import psutil

from tests.support.command import rows_of, zosim
from tests.support.forked import Command
from tests.support.waiting import HANG_S, wait_until

STEPS = 8
NUMBERS = ("step", "perturbation", "seed", "loss_plus", "loss_minus", "projected_grad", "learning_rate")
FOREVER = 100_000
PATIENCE_S = (4, 16, 64, 256)
"""On a busy machine ranks that go on are waited for, too: the test is tried with more patience."""


def options(inputs, out, *more, steps=STEPS):
    """Return the command of a run on `inputs`."""
    model, data = inputs
    return [
        "run", "--model", model, "--data", data, "--steps", steps, "--batch", 4, "--lr", "1e-3", "--threads", 1,
        "--digest-every", 3, "--no-tensorboard", "--out", out, *more,
    ]  # fmt: skip


def train(inputs, out, *more, steps=STEPS):
    """Run, and return the exit code."""
    return zosim(*options(inputs, out, *more, steps=steps))


def numbers_of(out):
    """What a log says of every perturbation."""
    return [[row[name] for name in NUMBERS] for row in rows_of(out)]


def digests_of(out):
    """Rows of a run's digests."""
    return [json.loads(line) for line in (out / "digests.jsonl").read_text().splitlines()]


def wait_for_steps(run, out, num_rows):
    """Wait until a run that goes on has logged some steps."""
    log = out / "steps.jsonl"

    def logged():
        assert run.is_running, run.output
        return log.exists() and log.read_bytes().count(b"\n") >= num_rows

    wait_until(logged, f"{num_rows} steps")


def rank_of(run, rank):
    """Return the process of one of its ranks."""
    for process in psutil.Process(run.pid).children(recursive=True):
        if any(mapped.path.endswith(f"/progress-{rank}") for mapped in process.memory_maps()):
            return process
    raise AssertionError


def killed(inputs, out, rank, *more):
    """Kill a rank of a run after some steps; return what is said.

    Ranks have more patience with each other than the test has: that the run ends shows that a death is noticed.
    """
    with Command(*options(inputs, out, *more, "--timeout", 10 * HANG_S, steps=FOREVER)) as run:
        wait_for_steps(run, out, 2)
        rank_of(run, rank).kill()
        output = run.end()
        assert run.exit_code == 2
    return output


def stopped(inputs, folder, rank, *more, wanted):
    """Stop a rank of a run after some steps, and see that each of `wanted` is said, with the patience that it tells."""
    for patience_s in PATIENCE_S:
        out = folder / f"patience-{patience_s}"
        with Command(*options(inputs, out, *more, "--timeout", patience_s, steps=FOREVER)) as run:
            try:
                wait_for_steps(run, out, 2)
            except AssertionError:
                continue
            victim = rank_of(run, rank)
            victim.send_signal(signal.SIGSTOP)
            output = run.end()
            assert run.exit_code == 2
        if all(text.format(patience_s) in output for text in wanted):
            return output
    raise AssertionError(output)


def shorten(out, num_steps):
    """Leave no more steps in a log than a run of `num_steps` has, and no digest of later ones."""
    lines = (out / "steps.jsonl").read_text().splitlines(keepends=True)[: num_steps - 2]
    (out / "steps.jsonl").write_text("".join(lines))
    kept = [line for line in digests_of(out) if line["num_steps"] <= len(lines)]
    (out / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
