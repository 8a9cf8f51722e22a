"""Solutions of the exercise of the page on stages: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations

from dataclasses import replace


def points(crossing):
    return 2 * crossing.num_queries if crossing.difference == "central" else crossing.num_queries + 1


def right(crossing):
    bits = crossing.hidden * crossing.residual_bits
    bits += crossing.inner * crossing.activation_bits if crossing.inside else 0
    return points(crossing) * crossing.batch * crossing.seq * bits / 8


def without_residual(crossing):
    whole = right(crossing)
    return right(replace(crossing, residual_bits=0)) if crossing.inside else whole


WRONG = [
    (without_residual, "add its product to"),
    (lambda c: right(c) / points(c), "how many does a step take"),
    (lambda c: right(replace(c, difference="central")), "all queries share"),
    (lambda c: 8 * right(c), "bits, or bytes"),
    (lambda c: 1.1 * right(c), "tokens times"),
    (lambda c: "3 MB", "a number"),
]
