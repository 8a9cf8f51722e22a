"""The exercise: a counterexample to SparQ's lemma 1 as printed. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.exercises import Grade
from studies.proof_against_code.cases import EncodedBoundary

Answer = Callable[[int], object]

FUNCTION = "counterexample"
"""Name of the function in a solution's file."""

_MOST_SMOOTH = 0.1
_BITS = (2, 3, 4, 8)
_CLEARLY = 1.5


def check(counterexample: Answer) -> Grade:
    """Return whether every hypothesis holds and the bound does not, for codecs of several widths; and if not, what is missing."""
    for bits in _BITS:
        complaint = _complaint(counterexample(bits), bits)
        if complaint:
            return Grade(False, f"{bits} bits: {complaint}")
    return Grade(
        True, f"all hypotheses hold, and the gradient is off by more than the lemma allows, at {_BITS} bits"
    )


def _complaint(answer: object, bits: int) -> str:
    """Return what is wrong with an answer, or nothing."""
    try:
        boundary = EncodedBoundary.of(*answer, bits=bits)  # type: ignore[misc]
    except (TypeError, ValueError):
        return "return a matrix and an activation, as lists of numbers"
    n = boundary.activation.size
    if boundary.activation.ndim != 1 or boundary.hessian.shape != (2 * n, 2 * n) or not n:
        return f"H must be 2n by 2n for an activation of n numbers; it is {boundary.hessian.shape} for {n}"
    if not (np.isfinite(boundary.hessian).all() and np.isfinite(boundary.activation).all()):
        return "all numbers must be finite"
    if not np.allclose(boundary.hessian, boundary.hessian.T):
        return "a Hessian is symmetric"
    norm = float(np.linalg.norm(boundary.activation))
    if not 0 < norm <= 1 + 1e-9:
        return f"assumption 4 bounds the activation: take a norm of at most 1, not {norm:.3g}, and not 0"
    if boundary.rest_smoothness > _MOST_SMOOTH:
        return (
            f"assumption 3 holds with L₂ = {boundary.rest_smoothness:.3g}, the norm of H's block of parameters; "
            f"make it {_MOST_SMOOTH} or less"
        )
    if not boundary.kappa:
        return "the codec changes nothing: every number of the activation is a quantized value; put one between two grid values"
    if boundary.gradient_error <= _CLEARLY * boundary.allowed(boundary.rest_smoothness):
        return (
            f"the gradient is off by {boundary.gradient_error:.3g}, and the lemma allows {boundary.allowed(boundary.rest_smoothness):.3g}: which "
            "block of H says how the gradient moves when only the activation does? Assumption 3 does not bound it"
        )
    return ""
