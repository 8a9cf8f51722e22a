"""Why seeds suffice: predictions about a log, and the exercise of that page."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from studies.coursework.pencil import PencilQuestion

if TYPE_CHECKING:  # torch is slow to import, and questions need none
    from studies.exercises import Grade
    from studies.why_seeds_suffice.exercise import Rebuild

FUNCTION = "rebuild"
CURVE = ("Distance of the weights from where they began", "rows of the log")


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers."""
    return {
        "billions": r.randint(12, 140) / 10,
        "steps": 100 * r.randint(30, 300),
        "forward_s": r.randint(20, 50) / 100,
        "pass_s": r.randint(25, 50) / 1000,
    }


def questions(billions: float, steps: int, forward_s: float, pass_s: float) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    row, weights = 24, 2e9 * billions
    run = f"{billions} billion parameters in 16 bits, {steps:,} steps, a row of seed, g and learning rate in 8 bytes each"
    times = f"{steps:,} steps; a forward takes {forward_s} s and a pass over the parameters {pass_s} s"
    return [
        PencilQuestion(
            "log",
            f"{run}: size of the log",
            "kB",
            row * steps / 1e3,
            (
                (
                    8 * steps / 1e3,
                    "a row has three numbers: without seed, g and learning rate there is no update",
                ),
                (row * steps * billions * 1e6, "z is not stored: its seed is"),
            ),
        ),
        PencilQuestion(
            "ratio",
            f"{run}: how many times as large as the log is the checkpoint?",
            "",
            weights / (row * steps),
            (
                (2 * weights / (row * steps), "16 bits are two bytes a parameter, not four"),
                (row * steps / weights, "upside down: the checkpoint over the log"),
                (weights / row, "that is a log of one step"),
            ),
        ),
        PencilQuestion(
            "training",
            f"{times}: training in place, central differences, one perturbation",
            "s",
            steps * (2 * forward_s + 4 * pass_s),
            (
                (
                    steps * (2 * forward_s + pass_s),
                    "passes: perturb, perturb back twice as far, restore, update",
                ),
                (steps * (forward_s + 4 * pass_s), "central differences take two forwards"),
                (steps * 2 * forward_s, "the passes over the parameters are missing"),
            ),
        ),
        PencilQuestion(
            "replay",
            f"{times}: replaying the log, bit for bit",
            "s",
            steps * 4 * pass_s,
            (
                (
                    steps * pass_s,
                    "perturbing and restoring leaves rounding behind: replay repeats these passes, too",
                ),
                (steps * (2 * forward_s + 4 * pass_s), "a replay needs no forward: g is in the log"),
                (4 * pass_s, "that is one step"),
            ),
        ),
    ]


def check(rebuild: Rebuild) -> Grade:
    """Return the verdict of the study's exercise."""
    from studies.why_seeds_suffice import exercise

    return exercise.check(rebuild)


def curve(rebuild: Rebuild) -> list[tuple[float, float, float]]:
    """Return how far weights are from the base after each row: as rebuilt, and in the run."""
    from studies.why_seeds_suffice.training import EPSILON, train

    rows = []
    for num_steps in range(1, 5):
        run = train(num_steps, seed=4)
        own = rebuild({name: tensor.clone() for name, tensor in run.base.items()}, run.log, EPSILON)
        far = [
            sum(float((w[n] - t).square().sum()) for n, t in run.base.items()) ** 0.5
            for w in (own, run.tuned)
        ]
        rows.append((float(num_steps), far[0], far[1]))
    return rows
