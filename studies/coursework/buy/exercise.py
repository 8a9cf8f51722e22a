"""What 500 USD buy: predictions about money, and the exercise of the page on reading predictions."""

from __future__ import annotations

import random

from studies.coursework.pencil import PencilQuestion
from studies.reading_predictions import exercise as shared

FUNCTION, check = shared.FUNCTION, shared.check
CURVE = ("How many times as long the wrong constant makes it", "true factor")


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers: the first machine is dearer and faster, and cheaper for each step."""
    return {
        "fast_usd": r.randint(220, 320) / 100,
        "fast_s": r.randint(80, 110) / 100,
        "slow_usd": r.randint(70, 110) / 100,
        "slow_s": r.randint(55, 80) / 10,
        "most": r.randint(13, 19) / 10,
        "examples": 1000 * r.randint(20, 50),
    }


def questions(
    fast_usd: float, fast_s: float, slow_usd: float, slow_s: float, most: float, examples: int
) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    steps = 500 / fast_usd * 3600 / fast_s
    thousand = 1000 * slow_s / 3600 * slow_usd
    epochs = 500 / fast_usd * 3600 / (most * fast_s) * 16 / examples
    turn = slow_s * slow_usd / (fast_s * fast_usd)
    first = f"a machine of {fast_usd} USD an hour, a step of {fast_s} s"
    second = f"one of {slow_usd} USD an hour and {slow_s} s a step"
    return [
        PencilQuestion(
            "steps",
            f"{first}: steps for 500 USD",
            "",
            steps,
            (
                (500 / fast_usd / fast_s, "the price is by the hour, the step in seconds: 3,600"),
                (500 / fast_usd * 3600, "that is seconds, not steps"),
                (500 * fast_usd * 3600 / fast_s, "the budget is divided by the price"),
            ),
        ),
        PencilQuestion(
            "thousand",
            f"{second}: 1,000 steps cost",
            "USD",
            thousand,
            (
                (1000 * fast_s / 3600 * fast_usd, "that is the first machine"),
                (1000 * slow_s * slow_usd, "the price is by the hour, the step in seconds: 3,600"),
                (slow_s / 3600 * slow_usd, "that is one step"),
            ),
        ),
        PencilQuestion(
            "epochs",
            f"{first}, and up to {most} times as long as that; 16 of {examples:,} examples a step: epochs that 500 USD surely buy",
            "",
            epochs,
            (
                (epochs * most, "that is the prediction's middle; what is sure is at its slow end"),
                (epochs * most**2, "that is its fast end: a longer step buys fewer"),
                (epochs / 16, "a step takes a batch of 16"),
            ),
        ),
        PencilQuestion(
            "turn",
            f"{first}, or {second}: how many times as long as predicted may the first one's step be before the second is cheaper?",
            "",
            turn,
            (
                (1 / turn, "upside down: the first is the cheaper one as predicted"),
                (slow_s / fast_s, "that compares times; money is time times price"),
                (slow_usd / fast_usd, "that compares prices alone"),
            ),
        ),
    ]


def curve(diagnose: shared.Diagnose) -> list[tuple[float, float, float]]:
    """Return the factor that a diagnosis gives by the true one."""
    from studies.reading_predictions.cases import on_cpu, rows_of

    rows = []
    for times in (0.5, 1.5, 3.0, 5.0):
        own = diagnose(rows_of(on_cpu("opt-125m", seq=64), "matmul", times, seed=9))
        rows.append((times, float(own[1]), times))
    return rows
