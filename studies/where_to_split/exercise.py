"""The exercise: what crosses a boundary in a step. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from studies.exercises import Grade, plain
from studies.where_to_split.cases import BoundaryCase, forward_bytes

Bytes = Callable[[BoundaryCase], float]

FUNCTION = "bytes_forward"
"""Name of the function in a solution's file."""

_BASE = BoundaryCase(64, 256, 4, 32, True, 4, 32, 1, "central")
_CASES = (
    replace(_BASE, inside=False),
    replace(_BASE, activation_bits=32),
    _BASE,
    replace(_BASE, activation_bits=2, residual_bits=8, batch=3),
    replace(_BASE, num_perturbations=5),
    replace(_BASE, num_perturbations=5, difference="forward"),
    replace(_BASE, hidden=96, inner=160, seq=48, difference="forward"),
)
"""Each with something more than those before."""

_TOLERANCE = 1e-3
"""Symbols fill whole bytes; nothing else is rounded."""


def check(bytes_forward: Bytes) -> Grade:
    """Return whether `bytes_forward` agrees with the programs of several plans, and if not, what to look at."""
    for done, case in enumerate(_CASES):
        answer = plain(bytes_forward(case))
        complaint = _complaint(answer, case)
        if complaint:
            return Grade(False, f"{_reported(case)}: {complaint}", done / len(_CASES))
    return Grade(True, f"{len(_CASES)} plans send what you say")


def _complaint(answer: object, case: BoundaryCase) -> str:
    """Return what is wrong with an answer, or nothing."""
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return "return bytes, a number"
    expected = forward_bytes(case)
    if _near(answer, expected):
        return ""
    tokens, width = case.batch * case.seq, case.inner * case.activation_bits / 8
    points = 2 * case.num_perturbations if case.difference == "central" else case.num_perturbations + 1
    if case.inside and _near(answer, points * tokens * width):
        return f"{answer:.6g} bytes are the activation alone; what does the block's second half add its product to?"
    if _near(answer, expected / points):
        return f"{answer:.6g} bytes are those of one forward; how many does a step take?"
    if case.difference == "forward" and _near(answer, expected / points * 2 * case.num_perturbations):
        return f"{answer:.6g} bytes are those of central differences; which point do all perturbations share?"
    if _near(answer, expected * 8) or _near(answer, expected / 8):
        return f"{answer:.6g}, where the program sends {expected:.6g}: bits, or bytes?"
    return (
        f"{answer:.6g} bytes, where the program sends {expected:.6g}: tokens times the bytes of a token, for every tensor "
        "that crosses and every point"
    )


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _TOLERANCE * wanted


def _reported(case: BoundaryCase) -> str:
    where = "inside a block" if case.inside else "between blocks"
    return (
        f"{where}, {case.activation_bits}/{case.residual_bits} bits, {case.num_perturbations} perturbations, "
        f"{case.difference}"
    )
