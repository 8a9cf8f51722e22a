"""The exercise: what a server is sent for one probe. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from studies.exercises import Grade


@dataclass(frozen=True)
class LoggedStep:
    """One step beside one matrix."""

    # left, right: ``U`` (outputs, rank) and ``V`` (inputs, rank).
    left: Tensor
    right: Tensor
    projected_gradient: float
    learning_rate: float


Adapter = Callable[[Sequence[LoggedStep], LoggedStep, float, int], tuple[Tensor, Tensor]]
"""From the steps so far, the present one, ``ε`` and the sign to the factors of one adapter."""

FUNCTION = "adapter"
"""Name of the function in a solution's file."""

_OUTPUTS, _INPUTS, _EPSILON = 12, 9, 0.1
_CASES = ((0, 3, 2), (2, 3, 2), (3, 3, 2), (7, 3, 1), (8, 4, 3))
"""Steps so far, steps of a window, and rank."""


def check(adapter: Adapter) -> Grade:
    """Return whether `adapter` makes what a probe needs, of as few columns as it takes, and if not, what to look at."""
    for num_steps, lazy_steps, rank in _CASES:
        rows = _rows(num_steps + 1, lazy_steps, rank)
        for sign in (1, -1):
            own = [replace(row, left=row.left.clone()) for row in rows]
            complaint = _complaint(adapter(own[:-1], own[-1], _EPSILON, sign), rows, sign)
            if complaint:
                where = f"{num_steps} steps, V for {lazy_steps}, rank {rank}, sign {sign:+d}"
                return Grade(False, f"{where}: {complaint}")
    return Grade(True, f"{2 * len(_CASES)} probes are one adapter each, of as few columns as it takes")


def _rows(num_steps: int, lazy_steps: int, rank: int) -> list[LoggedStep]:
    generator = torch.Generator().manual_seed(num_steps)

    def normals(rows: int) -> Tensor:
        return torch.randn(rows, rank, generator=generator, dtype=torch.float64)

    rights = [normals(_INPUTS) for _ in range(num_steps // lazy_steps + 1)]
    return [
        LoggedStep(normals(_OUTPUTS), rights[step // lazy_steps], 0.5 - 0.3 * step, 0.01 / (step + 1))
        for step in range(num_steps)
    ]


def _complaint(answer: object, rows: Sequence[LoggedStep], sign: int) -> str:
    """Return what is wrong with the factors for the last row's probe, or nothing."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(f, Tensor) for f in answer)):
        return "return two tensors, A and B"
    left, right = answer
    if left.shape[:1] != (_OUTPUTS,) or right.shape[:1] != (_INPUTS,) or left.shape[1:] != right.shape[1:]:
        return f"A has shape {tuple(left.shape)} and B {tuple(right.shape)}, not (outputs, columns) and (inputs, columns)"
    *done, probe = rows
    zero = torch.zeros(_OUTPUTS, _INPUTS, dtype=torch.float64)
    learnt = sum(
        (row.left @ row.right.T * (-row.learning_rate * row.projected_gradient) for row in done), zero
    )
    moved = sign * _EPSILON * (probe.left @ probe.right.T)
    product = left @ right.T
    if torch.allclose(product, learnt + moved, rtol=0, atol=1e-12):
        num_intervals = len({id(row.right) for row in rows})
        fewest = num_intervals * probe.right.shape[1]
        if left.shape[1] > fewest:
            return f"right, but of {left.shape[1]} columns where {fewest} will do: what do steps of one V have in common?"
        return ""
    for wrong, advice in (
        (learnt, "the probe is missing"),
        (moved, "what was learnt before is missing: the base has not changed"),
        (learnt - moved, "look at the probe's sign"),
        (moved - learnt, "look at the sign of an update"),
    ):
        if torch.allclose(product, wrong, rtol=0, atol=1e-12):
            return advice
    last = probe.right
    in_last = sum((row.left @ last.T * (-row.learning_rate * row.projected_gradient) for row in done), zero)
    if torch.allclose(product, in_last + moved, rtol=0, atol=1e-12):
        return "each update is along the V of its own window: close an increment before V is drawn anew"
    return f"A·Bᵀ is off by up to {float((product - learnt - moved).abs().max()):.2g}"
