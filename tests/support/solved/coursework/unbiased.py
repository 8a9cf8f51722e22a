"""Solution of the unit on rounding."""

from __future__ import annotations

from tests.support.solved import quzo

right, WRONG = quzo.right, quzo.WRONG


def answers(step, whole, part, updates, share):
    return {
        "nearest": whole * step,
        "probability": part,
        "variance": part * step**2 - (part * step) ** 2,
        "updates": updates * share * step,
    }


MISSES = [
    ("probability", lambda n, right: 1 - right, "going down"),
    ("variance", lambda n, right: right**0.5, "standard deviation"),
    ("variance", lambda n, right: right / n["step"] ** 2, "square of the step"),
    ("updates", lambda n, right: 0, "rounding to the nearest leaves"),
]
