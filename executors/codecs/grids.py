"""Grids of values that the numbers of a tensor are rounded to, fitted to what it holds.

Shapes: N elements; R rows of C columns; G groups that share a grid, laid out so that they broadcast over (R, C).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.formats.codecs import CodecSpec, Scope
from topology.errors import CodecError


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something that a codec cannot represent, if it is there."""

    is_there: Tensor  # a boolean of no axes, on the device of the values
    error: Callable[[], CodecError]  # makes the error that says so


Doubting = Callable[[Doubt], None]
"""Takes a doubt: asks at once, or keeps it until the host reads from the device anyway."""


def ask_at_once(doubt: Doubt) -> None:
    """Raise the error of a doubt that is justified; whoever asks a device waits for it."""
    if bool(doubt.is_there):
        raise doubt.error()


@dataclass(frozen=True, slots=True)
class Fitted:
    """Equidistant values ``offset + n·step`` for levels n from `low` to `high`, by group.

    The symbol of a level is its lowest ``b`` bits. Where 0 is on the grid its level is 0, so its symbol is 0, too,
    whatever group it lies in.
    """

    # offset, step: float32, or float64 for tensors in float64; shape (1, 1), (R, 1) or (1, C).
    offset: Tensor
    step: Tensor
    # low, high: in the same format and shape.
    low: Tensor
    high: Tensor

    def scaled(self, values: Tensor) -> Tensor:
        """Return `values` in steps of the grid."""
        return values.sub(self.offset).div_(self.step)

    def values(self, symbols: Tensor, bits: int) -> Tensor:
        """Return the values of `symbols`, which are whole numbers in the grid's format."""
        levels = torch.where(symbols > self.high, symbols - 2**bits, symbols)
        return levels.mul_(self.step).add_(self.offset)

    def exceeds(self, largest: float) -> bool:
        """Whether a value on the grid is farther from 0 than `largest`."""
        ends = torch.stack([self.low, self.high]).mul_(self.step).add_(self.offset)
        return bool((ends.abs() > largest).any())


def fit(
    rows: Tensor, spec: CodecSpec, dtype: torch.dtype, doubt: Doubting = ask_at_once
) -> tuple[Tensor, ...]:
    """Return the parameters of the grids that span `rows`, as a message carries them.

    - `rows`: shape (R, C), not empty, in its own format.
    - `dtype`: format of the parameters.
    - `doubt`: gets a doubt about values that are not finite, signs that the grid cannot hold, and spans that the format does not:
      parameters then mean nothing.

    Raises CodecError as `doubt` does.
    """
    assert spec.bits is not None
    least, most = (extreme.to(dtype) for extreme in _extremes(rows, spec.scope))

    def infinite() -> CodecError:
        num = rows.numel() - int(torch.isfinite(rows).sum())
        return CodecError(
            f"{num} of {rows.numel()} values are infinite or NaN, which {spec.name} cannot encode",
            hint='find the cause of the divergence, or use the codec "none"',
        )

    largest = torch.maximum(-least, most)
    doubt(Doubt(~torch.isfinite(largest).all(), infinite))
    if spec.grid == "symmetric":
        return (_symmetric_step(rows, spec, largest, dtype, doubt),)
    if spec.grid == "affine-zero":
        return _zero_point(least, most, spec, doubt)
    _refuse_wide(largest, doubt)
    return least, _divisible((most - least) / (2**spec.bits - 1))


def fitted(parameters: tuple[Tensor, ...], spec: CodecSpec) -> Fitted:
    """Return the grids that `parameters` describe."""
    assert spec.bits is not None
    levels = 2**spec.bits - 1
    if spec.grid == "affine":
        offset, step = parameters
        zero = torch.zeros_like(step)
        return Fitted(offset, step, zero, zero + levels)
    step, zero = parameters[0], torch.zeros_like(parameters[0])
    if spec.grid == "affine-zero":
        zero_point = parameters[1].to(step.dtype)
        return Fitted(zero, step, -zero_point, levels - zero_point)
    if spec.bits == 1:
        return Fitted(-step, _divisible(2 * step), zero, zero + 1)
    highest = zero + levels // 2
    return Fitted(zero, step, -highest, highest)


def _extremes(rows: Tensor, scope: Scope) -> tuple[Tensor, Tensor]:
    if scope == "tensor":
        least, most = torch.aminmax(rows)
        return least.reshape(1, 1), most.reshape(1, 1)
    least, most = torch.aminmax(rows, dim=1 if scope == "token" else 0, keepdim=True)
    return least, most


def _symmetric_step(
    rows: Tensor, spec: CodecSpec, largest: Tensor, dtype: torch.dtype, doubt: Doubting
) -> Tensor:
    """Return the distance of grid values, or the value itself where there are only two signs.

    Two values ``±s`` hold every ``x`` on average if ``s`` is the largest; nearest to ``x`` they are if it is the mean.
    """
    assert spec.bits is not None
    levels = 2 ** (spec.bits - 1) - 1
    if levels:
        return _divisible(largest / levels)
    _refuse_wide(largest, doubt)
    if spec.rounding == "stochastic":
        return largest
    magnitudes = rows.abs()
    dim = {"tensor": (0, 1), "token": (1,), "channel": (0,)}[spec.scope]
    return magnitudes.mean(dim=dim, keepdim=True, dtype=dtype)


def _zero_point(least: Tensor, most: Tensor, spec: CodecSpec, doubt: Doubting) -> tuple[Tensor, Tensor]:
    """Return the smallest step, and how many grid values lie below 0, with which the grid spans 0 and all values."""
    assert spec.bits is not None
    levels = 2**spec.bits - 1
    below, above = (-least).clamp_(min=0), most.clamp(min=0)
    share = below / levels + above / levels
    exact = torch.where(share > 0, below / share, torch.zeros_like(share)).clamp_(0, levels)
    candidates = torch.stack([exact.floor(), exact.ceil()]).clamp(
        (below > 0).to(below.dtype), levels - (above > 0).to(below.dtype)
    )
    needed = torch.maximum(_spread(below, candidates), _spread(above, levels - candidates))
    best = needed.argmin(dim=0, keepdim=True)
    step, zero_point = (torch.take_along_dim(values, best, dim=0)[0] for values in (needed, candidates))
    if spec.bits == 1:

        def has_both_signs() -> CodecError:
            return CodecError(
                f"{spec.name} has 1 bit and a zero, so only one other value, but the values have both signs",
                hint="use 2 bits, or the symmetric grid",
            )

        doubt(Doubt(torch.isinf(step).any(), has_both_signs))
    return _divisible(step), zero_point.to(torch.uint8)


def _spread(width: Tensor, levels: Tensor) -> Tensor:
    """Return the step with which `levels` cover `width`: infinite where there are none, and some are needed."""
    return torch.where(width > 0, width / levels, torch.zeros_like(width))


def _divisible(step: Tensor) -> Tensor:
    """Return `step`, no smaller than what can be divided by."""
    return step.clamp(min=torch.finfo(step.dtype).tiny)


def _refuse_wide(largest: Tensor, doubt: Doubting) -> None:
    """Refuse values whose differences cannot be written."""

    def wide() -> CodecError:
        return CodecError(
            f"values up to {largest.max().item():.3g} are too far apart for a grid from the smallest to "
            "the largest",
            hint="use the grid affine-zero, or symmetric with 2 bits or more",
        )

    doubt(Doubt((largest > torch.finfo(largest.dtype).max / 2).any(), wide))
