"""The exercise: rebuild the weights of a run by hand. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from studies.exercises import Grade
from studies.why_seeds_suffice.training import EPSILON, LogRow, TunedRun, num_differing, train

Rebuild = Callable[[Mapping[str, Tensor], Sequence[LogRow], float], Mapping[str, Tensor]]
"""From base weights, log and ε to the weights after the run."""

FUNCTION = "rebuild"
"""Name of the function in a solution's file."""

_CASES = ((1, 3), (6, 4), (6, 5))
"""Steps and seed of the runs that a solution is tried on."""


def check(rebuild: Rebuild) -> Grade:
    """Return whether `rebuild` gives the weights of several runs, bit for bit, and if not, what to look at."""
    for done, (num_steps, seed) in enumerate(_CASES):
        run = train(num_steps, seed=seed)
        base = {name: tensor.clone() for name, tensor in run.base.items()}
        rebuilt_weights = rebuild(base, run.log, EPSILON)
        complaint = _complaint(rebuilt_weights, run)
        if complaint:
            return Grade(False, f"a run of {num_steps} steps: {complaint}", done / len(_CASES))
    return Grade(True, f"{len(_CASES)} runs rebuilt bit for bit, from {sum(n for n, _ in _CASES)} rows")


def _complaint(answer: object, run: TunedRun) -> str:
    """Return what is wrong with rebuilt weights, or nothing."""
    if not isinstance(answer, Mapping) or answer.keys() != run.tuned.keys():
        return "return a dict with the names of the base weights, every one of them"
    answer = {name: torch.as_tensor(x) if isinstance(x, np.ndarray) else x for name, x in answer.items()}
    for name, tensor in run.tuned.items():
        given = answer[name]
        if not isinstance(given, Tensor) or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            return f"{name} must be a tensor of shape {tuple(tensor.shape)} in {tensor.dtype}"
    differing = num_differing(answer, run.tuned)
    if not differing:
        return ""
    if not num_differing(answer, run.base):
        return "nothing has changed since the base weights"
    distance = max(float((answer[name] - tensor).abs().max()) for name, tensor in run.tuned.items())
    moved = max(float((run.base[name] - tensor).abs().max()) for name, tensor in run.tuned.items())
    if not distance < 1e-3 * moved:
        return (
            f"off by up to {distance:.2g}, where the run moved weights by up to {moved:.2g}: look at which numbers "
            "each parameter draws, at the sign, and at whose learning rate is used"
        )
    return (
        f"very close, but {differing} elements differ in their last bits: the run also perturbed and restored every "
        "weight, and (θ + εz) - 2εz + εz is not θ in floating point; products are (s · z) · ε and η · (g · z), in this order"
    )
