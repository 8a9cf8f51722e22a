"""Updates of several quantized weights: on an accelerator, where a kernel's launch takes longer than its work, in one pass each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.low_bits.grids import Integers, num_nonzero, towards_zero
from executors.low_bits.packed import QValues
from executors.low_bits.stored import Moved, Uniforms

if TYPE_CHECKING:
    from executors.low_bits.quantized import QuantizedTensor

_SHARED_ELEMENTS = 1 << 22
"""Elements that share passes, which bounds their temporaries."""


class Move(NamedTuple):
    """A weight, and along what it moves.

    Attributes
    ----------
    quantized : QuantizedTensor
    direction : torch.Tensor or PackedValues
        In the shape of the weight; a tensor is int8.
    uniforms : callable
        As of :meth:`executors.low_bits.quantized.QuantizedTensor.move`.
    """

    quantized: QuantizedTensor
    direction: QValues
    uniforms: Uniforms


def shares_passes(quantized: QuantizedTensor) -> bool:
    """Whether a weight can be moved with others: integers without zero points, on an accelerator."""
    return (
        quantized.device.type != "cpu"
        and quantized.zeros is None
        and isinstance(quantized.grid, Integers)
        and quantized.shape.numel() <= _SHARED_ELEMENTS
    )


def move_together(
    moves: Sequence[Move], factor: float | DeviceScalar, *, decay: float, counted: Moved
) -> None:
    """Change each weight as :meth:`executors.low_bits.quantized.QuantizedTensor.move` does, to the same bits.

    Parameters
    ----------
    moves : sequence of Move
        Of one QuantConfig, with :func:`shares_passes`.
    factor : float or DeviceScalar
    decay : float
    counted : Moved
        Is added to.
    """
    by = factor.factor(torch.float32) if isinstance(factor, DeviceScalar) else factor
    for batch in _batches(moves):
        _move(batch, by, decay, counted)


def _move(moves: Sequence[Move], by: float | Tensor, decay: float, counted: Moved) -> None:
    weights = [move.quantized for move in moves]
    grid, sizes = weights[0].grid, [quantized.shape.numel() for quantized in weights]
    levels = torch.cat([quantized.levels().reshape(-1) for quantized in weights]).float()
    # The reciprocal before the factor, as a single weight's move has it, so that the bits are the same.
    units = torch.cat([quantized.scales.reshape(-1) for quantized in weights]).float().reciprocal().mul_(by)
    change = torch.empty_like(levels)
    of_scales = units.split([quantized.scales.numel() for quantized in weights])
    for move, own, unit in zip(moves, change.split(sizes), of_scales, strict=True):
        scales = move.quantized.scales
        grouped = (move.quantized.shape[0], -1, move.quantized.group_elements)
        torch.mul(move.direction[:].view(grouped), unit.view(scales.shape)[..., None], out=own.view(grouped))
    if decay:
        change.add_(levels * decay)
    uniform = torch.cat([move.uniforms(0, numel).view(-1) for move, numel in zip(moves, sizes, strict=True)])
    num = num_nonzero(change)
    whole = towards_zero(uniform.copysign_(change).add_(change))
    wanted = levels - whole
    moved = grid.clamped(wanted)
    # What saturates would have moved: it is not among the unmoved.
    counted.add(num, num - num_nonzero(whole), num_nonzero(wanted.sub_(moved)))
    symbols = [
        own.view(quantized.shape)
        for own, quantized in zip(grid.symbols(moved).split(sizes), weights, strict=True)
    ]
    torch._foreach_copy_(
        [quantized.qvalues for quantized in weights],
        [quantized.joined(own) for own, quantized in zip(symbols, weights, strict=True)],
    )


def _batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    batch: list[Move] = []
    for move in moves:
        if batch and sum(m.quantized.shape.numel() for m in (*batch, move)) > _SHARED_ELEMENTS:
            yield batch
            batch = []
        batch.append(move)
    if batch:
        yield batch
