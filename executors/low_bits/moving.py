"""Updates of several weights that are codes: on an accelerator, where a kernel's launch takes longer than its work, in one pass each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.low_bits.grids import Integers, num_nonzero, towards_zero
from executors.low_bits.packed import Codes
from executors.low_bits.stored import Chances, Moved

if TYPE_CHECKING:
    from executors.low_bits.coded import QuantizedTensor

_SHARED_ELEMENTS = 1 << 22
"""Elements that share passes, which bounds their temporaries."""


class Move(NamedTuple):
    """A weight, and along what it moves.

    Attributes
    ----------
    coded : QuantizedTensor
    direction : torch.Tensor or PackedCodes
        In the shape of the weight; a tensor is int8.
    chances : callable
        As of :meth:`executors.low_bits.coded.QuantizedTensor.move`.
    """

    coded: QuantizedTensor
    direction: Codes
    chances: Chances


def shares_passes(coded: QuantizedTensor) -> bool:
    """Whether a weight can be moved with others: integers without zero points, on an accelerator."""
    return (
        coded.device.type != "cpu"
        and coded.zeros is None
        and isinstance(coded.grid, Integers)
        and coded.shape.numel() <= _SHARED_ELEMENTS
    )


def move_together(
    moves: Sequence[Move], factor: float | DeviceScalar, *, decay: float, counted: Moved
) -> None:
    """Change each weight as :meth:`executors.low_bits.coded.QuantizedTensor.move` does, to the same bits.

    Parameters
    ----------
    moves : sequence of Move
        Of one coding, with :func:`shares_passes`.
    factor : float or DeviceScalar
    decay : float
    counted : Moved
        Is added to.
    """
    by = factor.factor(torch.float32) if isinstance(factor, DeviceScalar) else factor
    for batch in _batches(moves):
        _move(batch, by, decay, counted)


def _move(moves: Sequence[Move], by: float | Tensor, decay: float, counted: Moved) -> None:
    weights = [move.coded for move in moves]
    grid, sizes = weights[0].grid, [coded.shape.numel() for coded in weights]
    levels = torch.cat([coded.levels().reshape(-1) for coded in weights]).float()
    # The reciprocal before the factor, as a single weight's move has it, so that the bits are the same.
    units = torch.cat([coded.scales.reshape(-1) for coded in weights]).float().reciprocal().mul_(by)
    change = torch.empty_like(levels)
    of_scales = units.split([coded.scales.numel() for coded in weights])
    for move, own, unit in zip(moves, change.split(sizes), of_scales, strict=True):
        scales = move.coded.scales
        grouped = (move.coded.shape[0], -1, move.coded.group_elements)
        torch.mul(move.direction[:].view(grouped), unit.view(scales.shape)[..., None], out=own.view(grouped))
    if decay:
        change.add_(levels * decay)
    chance = torch.cat([move.chances(0, numel).view(-1) for move, numel in zip(moves, sizes, strict=True)])
    num = num_nonzero(change)
    whole = towards_zero(chance.copysign_(change).add_(change))
    wanted = levels - whole
    moved = grid.clamped(wanted)
    # What saturates would have moved: it is not among the unmoved.
    counted.add(num, num - num_nonzero(whole), num_nonzero(wanted.sub_(moved)))
    symbols = [
        own.view(coded.shape) for own, coded in zip(grid.symbols(moved).split(sizes), weights, strict=True)
    ]
    torch._foreach_copy_(
        [coded.codes for coded in weights],
        [coded.joined(own) for own, coded in zip(symbols, weights, strict=True)],
    )


def _batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    batch: list[Move] = []
    for move in moves:
        if batch and sum(m.coded.shape.numel() for m in (*batch, move)) > _SHARED_ELEMENTS:
            yield batch
            batch = []
        batch.append(move)
    if batch:
        yield batch
