"""Solution of the unit on codecs at a split."""

from __future__ import annotations

from tests.support.solved import where_to_split

right, WRONG = where_to_split.right, where_to_split.WRONG


def answers(hidden, batch, seq, bits, perturbations, mbit_per_s):
    tokens = batch * seq
    inside = tokens * (4 * hidden * bits / 8 + 2 * hidden) / 1e6
    return {
        "between": tokens * 2 * hidden / 1e6,
        "inside": inside,
        "step": 2 * perturbations * inside,
        "seconds": 2 * perturbations * inside * 8 / mbit_per_s,
    }


def activation_mb(n, right):
    return n["batch"] * n["seq"] * 4 * n["hidden"] * n["bits"] / 8 / 1e6


MISSES = [
    ("between", lambda n, right: 8 * right, "bits or bytes"),
    ("inside", activation_mb, "residual stream is forgotten"),
    ("step", lambda n, right: right / (2 * n["perturbations"]), "one forward"),
    ("step", lambda n, right: right * (n["perturbations"] + 1) / (2 * n["perturbations"]), "share a point"),
    ("seconds", lambda n, right: right / 8, "in bits"),
]
