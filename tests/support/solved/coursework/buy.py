"""Solution of the unit on buying."""

from __future__ import annotations

from tests.support.solved import reading_predictions

right, WRONG = reading_predictions.right, reading_predictions.WRONG


def answers(fast_usd, fast_s, slow_usd, slow_s, most, examples):
    hours = 500 / fast_usd
    return {
        "steps": hours * 3600 / fast_s,
        "thousand": slow_usd * 1000 * slow_s / 3600,
        "epochs": hours * 3600 / (fast_s * most) * 16 / examples,
        "turn": slow_usd * slow_s / (fast_usd * fast_s),
    }


MISSES = [
    ("steps", lambda n, right: right / 3600, "3,600"),
    ("thousand", lambda n, right: right / 1000, "one step"),
    ("epochs", lambda n, right: right * n["most"], "slow end"),
    ("turn", lambda n, right: 1 / right, "upside down"),
]
