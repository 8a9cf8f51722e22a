"""Solution of the unit on seeds."""

from __future__ import annotations

from tests.support.solved import why_seeds_suffice

right, WRONG = why_seeds_suffice.right, why_seeds_suffice.WRONG


def answers(billions, steps, forward_s, pass_s):
    num_bytes = steps * (8 + 8 + 8)
    return {
        "log": num_bytes / 1000,
        "ratio": billions * 10**9 * 2 / num_bytes,
        "training": steps * (2 * forward_s + 4 * pass_s),
        "replay": steps * 4 * pass_s,
    }


MISSES = [
    ("log", lambda n, right: right / 3, "a row has three numbers"),
    ("log", lambda n, right: 1000 * right, "prefixes"),
    ("ratio", lambda n, right: 2 * right, "two bytes a parameter"),
    ("training", lambda n, right: n["steps"] * 2 * n["forward_s"], "passes over the parameters are missing"),
    ("replay", lambda n, right: right / 4, "replay repeats these passes"),
]
