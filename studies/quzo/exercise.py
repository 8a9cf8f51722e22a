"""The exercise: rounding without bias. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.exercises import Grade

Rounded = Callable[[Tensor, float, int, torch.Generator], Tensor]
"""From values, step, highest value and generator to quantized values."""

FUNCTION = "rounded"
"""Name of the function in a solution's file."""

_NUM_ROUNDINGS = 20_000
_SIGMAS = 5.0


def check(rounded: Rounded) -> Grade:
    """Return whether `rounded` rounds at random without bias, and if not, what to look at."""

    def in_torch(*arguments: Any) -> Any:
        qvalues = rounded(*arguments)
        qvalues = torch.as_tensor(qvalues) if isinstance(qvalues, np.ndarray) else qvalues
        is_whole = isinstance(qvalues, Tensor) and not qvalues.is_floating_point()
        return qvalues.long() if is_whole else qvalues

    properties = (_about_shape, _about_neighbours, _about_the_mean, _about_independence)
    for done, complaint_of in enumerate(properties):
        complaint = complaint_of(in_torch)
        if complaint:
            return Grade(False, complaint, done / len(properties))
    return Grade(
        True, f"means of {_NUM_ROUNDINGS} roundings are the values, within {_SIGMAS:g} standard errors"
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _about_shape(rounded: Rounded) -> str:
    values = torch.linspace(-3, 3, 24, dtype=torch.float64).view(4, 6)
    kept = values.clone()
    qvalues = rounded(values, 0.5, 3, _generator(0))
    if not isinstance(qvalues, Tensor) or qvalues.shape != values.shape:
        return f"return quantized values as an int64 tensor of shape {tuple(values.shape)}"
    if qvalues.dtype != torch.int64:
        return f"return whole numbers, an int64 tensor, and not {qvalues.dtype}: c, which stands for c times the step"
    if not torch.equal(values, kept):
        return "the values that were given have been changed"
    if not torch.equal(qvalues, rounded(values, 0.5, 3, _generator(0))):
        return "the same generator gave other quantized values: draw from it and from nothing else"
    return ""


def _about_neighbours(rounded: Rounded) -> str:
    """Check that quantized values are next to the values, and within the range."""
    values = 4 * torch.randn(_NUM_ROUNDINGS, dtype=torch.float64, generator=_generator(1))
    step, highest = 0.75, 7
    qvalues = rounded(values, step, highest, _generator(2))
    if int(qvalues.abs().max()) > highest:
        return f"grid values reach {int(qvalues.abs().max())}, the highest is {highest}: clamp them"
    inside = (values / step).abs() <= highest
    far = float((qvalues - values / step)[inside].abs().max())
    if far >= 1:
        return f"a quantized value is {far:.2f} steps from its value: only the two next to it are allowed"
    exact = torch.arange(-3, 4, dtype=torch.float64)
    if not torch.equal(rounded(exact * step, step, highest, _generator(3)), exact.long()):
        return "values on the grid must stay where they are"
    return ""


def _about_the_mean(rounded: Rounded) -> str:
    for value in (0.1, -0.1, 0.5, -2.75, 1.9):
        qvalues = rounded(
            torch.full((_NUM_ROUNDINGS,), value, dtype=torch.float64), 1.0, 7, _generator(4)
        ).double()
        part = value - torch.tensor(value).floor().item()
        stderr = (part * (1 - part) / _NUM_ROUNDINGS) ** 0.5
        off = float(qvalues.mean()) - value
        if abs(off) > _SIGMAS * stderr:
            direction = "towards zero" if off * value < 0 else "away from it"
            seen = f"{value} is {float(qvalues.mean()):.3f} on average, {abs(off) / stderr:.0f} standard errors {direction}"
            up = float(qvalues.mean()) - value + part
            alone = torch.tensor([value], dtype=torch.float64)
            if len({int(rounded(alone, 1.0, 7, _generator(seed))) for seed in range(100)}) == 1:
                return f"{seen}: it is rounded to the same value always; it is to go up with a probability of {part:.2g}"
            if up in (0, 1):
                return f"{seen}: every element needs a random number of its own"
            if abs(up - 0.5) < 0.02:
                return f"{seen}: it goes up half of the time; it is to with a probability of {part:.2g}"
            if abs(up - 1 + part) < 0.02:
                return f"{seen}: it goes up with the probability of going down"
            return seen
    return ""


def _about_independence(rounded: Rounded) -> str:
    """Check that elements are rounded independently: a sum of many must not jump as one."""
    values = torch.full((200, 100), 0.5, dtype=torch.float64)
    sums = rounded(values, 1.0, 7, _generator(5)).double().sum(1)
    if not 0.6 < float(sums.var()) / 25 < 1.6:
        return (
            f"the sum of 100 roundings of 0.5 has a variance of {float(sums.var()):.0f}, 25 if they were independent: every "
            "element needs a random number of its own"
        )
    return ""
