"""Solutions of the exercise of the page on stages: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations

from dataclasses import replace


def points(case):
    return 2 * case.num_perturbations if case.difference == "central" else case.num_perturbations + 1


def right(case):
    bits = case.hidden * case.residual_bits
    bits += case.inner * case.activation_bits if case.inside else 0
    return points(case) * case.batch * case.seq * bits / 8


def without_residual(case):
    whole = right(case)
    return right(replace(case, residual_bits=0)) if case.inside else whole


WRONG = [
    (without_residual, "add its product to"),
    (lambda c: right(c) / points(c), "how many does a step take"),
    (lambda c: right(replace(c, difference="central")), "all perturbations share"),
    (lambda c: 8 * right(c), "bits, or bytes"),
    (lambda c: 1.1 * right(c), "tokens times"),
    (lambda c: "3 MB", "a number"),
]
