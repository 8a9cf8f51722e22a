"""How one rounds without bias: predictions about one number, and the exercise of QuZO's page."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from studies.coursework.pencil import PencilQuestion

if TYPE_CHECKING:  # torch is slow to import, and questions need none
    from studies.exercises import Grade
    from studies.quzo.exercise import Rounded

FUNCTION = "rounded"
CURVE = ("Mean of 4,000 roundings", "value")


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers."""
    return {
        "step": r.choice((0.25, 0.4, 0.6, 0.75, 1.5, 2.5)),
        "whole": r.randint(2, 9),
        "part": r.randint(10, 35) / 100,
        "updates": 10 * r.randint(20, 90),
        "share": r.choice((0.02, 0.03, 0.04)),
    }


def questions(step: float, whole: int, part: float, updates: int, share: float) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    value, update = (whole + part) * step, share * step
    variance = part * (1 - part) * step**2
    case = f"{value:g} on a grid of step {step:g}"
    return [
        PencilQuestion(
            "nearest",
            f"{case}, rounded to the nearest grid value",
            "",
            whole * step,
            (
                ((whole + 1) * step, "that is the grid value above, which is further away"),
                (whole, "that is the stored integer; the value is step times as much"),
            ),
        ),
        PencilQuestion(
            "probability",
            f"{case}, rounded at random without bias: the probability of going up",
            "",
            part,
            (
                (1 - part, "that is the probability of going down: the nearer one is the likelier"),
                (part * step, "a probability is a part of a step: divide by the step"),
                (0.5, "half and half has a bias wherever the value is not in the middle"),
            ),
        ),
        PencilQuestion(
            "variance",
            f"{case}, rounded at random without bias: the variance",
            "",
            variance,
            (
                (math.sqrt(variance), "that is the standard deviation"),
                (part * (1 - part), "that is in steps: a variance has the square of the step"),
                (part * (1 - part) * step, "a variance has the square of the step"),
                (step**2 / 12, "that is the error of the nearest for evenly spread values"),
            ),
        ),
        PencilQuestion(
            "updates",
            f"{updates} updates of {update:g} each on weights of step {step:g}, rounded at random: mean change of a weight",
            "",
            updates * update,
            (
                (0, "that is what rounding to the nearest leaves; at random the mean of every update stays"),
                (updates * share, "that is in steps"),
                (update, "that is one update"),
            ),
        ),
    ]


def check(rounded: Rounded) -> Grade:
    """Return the verdict of the study's exercise."""
    from studies.quzo import exercise

    return exercise.check(rounded)


def curve(rounded: Rounded) -> list[tuple[float, float, float]]:
    """Return the mean of many roundings by value, and the value itself."""
    import torch

    generator = torch.Generator().manual_seed(0)
    values = [round(0.2 * n, 1) for n in range(-5, 6)]
    means = [
        rounded(torch.full((4000,), v, dtype=torch.float64), 1.0, 7, generator).double().mean()
        for v in values
    ]
    return [(value, float(mean), value) for value, mean in zip(values, means, strict=True)]
