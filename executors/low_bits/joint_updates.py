"""Updates of several quantized weights in shared passes, since a kernel's launch takes longer than its work on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.low_bits.grids import Integers, num_nonzero, towards_zero
from executors.low_bits.packed import QValues
from executors.low_bits.stored import Uniforms, UpdateCounts

if TYPE_CHECKING:
    from executors.low_bits.quantized import QuantizedTensor

_SHARED_ELEMENTS = 1 << 22
"""Maximum elements that share a pass, which bounds temporaries."""


class JointUpdate(NamedTuple):
    """A weight, and the step that updates it."""

    quantized: QuantizedTensor
    perturbation: QValues  # torch.Tensor or PackedValues: in the shape of the weight; a tensor is int8
    uniforms: Uniforms  # as of :meth:`executors.low_bits.quantized.QuantizedTensor.apply`


def shares_passes(quantized: QuantizedTensor) -> bool:
    """Whether a weight can be updated with others: integers without zero points, on an accelerator."""
    return (
        quantized.device.type != "cpu"
        and quantized.zeros is None
        and isinstance(quantized.grid, Integers)
        and quantized.shape.numel() <= _SHARED_ELEMENTS
    )


def update_jointly(
    updates: Sequence[JointUpdate], factor: float | DeviceScalar, *, decay: float, counted: UpdateCounts
) -> None:
    """Update each weight as :meth:`executors.low_bits.quantized.QuantizedTensor.apply` does, bit for bit.

    - `updates`: of weights with one QuantConfig, for which :func:`shares_passes` holds.
    - `counted`: is added to.
    """
    by = factor.factor(torch.float32) if isinstance(factor, DeviceScalar) else factor
    for batch in _batches(updates):
        _update(batch, by, decay, counted)


def _update(updates: Sequence[JointUpdate], by: float | Tensor, decay: float, counted: UpdateCounts) -> None:
    weights = [update.quantized for update in updates]
    grid, sizes = weights[0].grid, [quantized.shape.numel() for quantized in weights]
    levels = torch.cat([quantized.levels().reshape(-1) for quantized in weights]).float()
    # The reciprocal before the factor, as in QuantizedTensor.apply: the same bits.
    units = torch.cat([quantized.scales.reshape(-1) for quantized in weights]).float().reciprocal().mul_(by)
    change = torch.empty_like(levels)
    of_scales = units.split([quantized.scales.numel() for quantized in weights])
    for update, own, unit in zip(updates, change.split(sizes), of_scales, strict=True):
        scales = update.quantized.scales
        grouped = (update.quantized.shape[0], -1, update.quantized.group_elements)
        torch.mul(
            update.perturbation[:].view(grouped), unit.view(scales.shape)[..., None], out=own.view(grouped)
        )
    if decay:
        change.add_(levels * decay)
    uniform = torch.cat(
        [update.uniforms(0, numel).view(-1) for update, numel in zip(updates, sizes, strict=True)]
    )
    num = num_nonzero(change)
    whole = towards_zero(uniform.copysign_(change).add_(change))
    wanted = levels - whole
    updated = grid.clamped(wanted)
    # What saturates would have changed: it is not among the unchanged.
    counted.add(num, num - num_nonzero(whole), num_nonzero(wanted.sub_(updated)))
    symbols = [
        own.view(quantized.shape)
        for own, quantized in zip(grid.symbols(updated).split(sizes), weights, strict=True)
    ]
    torch._foreach_copy_(
        [quantized.qvalues for quantized in weights],
        [quantized.joined(own) for own, quantized in zip(symbols, weights, strict=True)],
    )


def _batches(updates: Sequence[JointUpdate]) -> Iterator[list[JointUpdate]]:
    batch: list[JointUpdate] = []
    for update in updates:
        if batch and sum(m.quantized.shape.numel() for m in (*batch, update)) > _SHARED_ELEMENTS:
            yield batch
            batch = []
        batch.append(update)
    if batch:
        yield batch
