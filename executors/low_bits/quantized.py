"""Quantized weights: stored values, scales and zero points, in memory of their own or in a program's buffer.

Rows are output channels. A weight is ``(q - zero)·scale``, with one scale per matrix, row, or group of neighbours in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel.formats.low_bits import UNIFORMS_AT_ONCE, UPDATED_ELEMENTS, QuantConfig, updated_at_once
from executors.device_scalars import DeviceScalar
from executors.formats import TORCH_DTYPES
from executors.low_bits.grids import Floats, Grid, Integers, grid_of, num_nonzero, towards_zero
from executors.low_bits.joint_updates import JointUpdate, shares_passes, update_jointly
from executors.low_bits.packed import CHUNK_ELEMENTS, QValues
from executors.low_bits.stored import (
    Along,
    BoundParameter,
    DenseTensor,
    PerturbationStep,
    Stored,
    Uniforms,
    UpdateCounts,
    UpdateStep,
    nothing,
)
from topology.errors import ModelError

Rows = slice | Tensor
"""Rows of a weight: a range, or ascending indices."""

_QUANTIZED_ELEMENTS = {"cpu": UPDATED_ELEMENTS, "cuda": 1 << 22}
"""Elements that are quantized or updated at a time: their temporaries stay in a CPU's cache, and are bounded on a GPU."""

_FIT_STEPS = 20
"""Scales that are tried, from the one that spans the largest weight down to a third of it."""


class SidePath(NamedTuple):
    """A scaled perturbation that a layer adds to its weight."""

    perturbation: QValues  # torch.Tensor or PackedValues: in the shape of the weight; a tensor is int8
    factor: float
    rows: Tensor | None = None  # indices of its nonzero rows; None for all
    rows_on_host: Tensor | None = None  # the same on the host, unless `rows` are there

    def bind(self, bound: BoundParameter) -> None:
        """Make the layer add this perturbation."""
        assert bound.layer is not None
        bound.layer.side_path = self

    def within(self, outputs: slice) -> tuple[Tensor, slice]:
        """Return the nonzero rows within some outputs, counted from the first of these, and their positions among `rows`."""
        assert self.rows is not None
        # Asked on the host: to slice by what is on a device waits for it.
        on_host = self.rows if self.rows_on_host is None else self.rows_on_host
        first, last = torch.searchsorted(on_host, on_host.new_tensor((outputs.start, outputs.stop))).tolist()
        return self.rows[first:last] - outputs.start, slice(first, last)

    def add_to(self, weight: Tensor) -> None:
        """Add the perturbation to a dequantized weight, in place."""
        if self.rows is not None:
            weight[self.rows] = weight[self.rows].add_(self.perturbation[self.rows], alpha=self.factor)
            return
        # Packed values are unpacked in chunks that stay in a CPU's cache.
        most = weight.numel() if isinstance(self.perturbation, Tensor) else CHUNK_ELEMENTS[weight.device.type]
        num = max(1, most // weight.shape[1])
        for begin in range(0, len(weight), num):
            chunk = weight[begin : begin + num]
            chunk.add_(self.perturbation[begin : begin + len(chunk)], alpha=self.factor)


@dataclass(frozen=True)
class QuantizedTensor(Stored):
    """A quantized weight: stored values, scales and, where there are any, zero points."""

    quant_config: QuantConfig
    shape: torch.Size  # outputs and inputs
    qvalues: Tensor  # uint8, shape (outputs, bytes per row); several values of fewer than 8 bits share a byte
    scales: Tensor  # shape (1, 1), (outputs, 1) or (outputs, groups)
    zeros: Tensor | None = None  # uint8, in the shape of `scales`

    @classmethod
    def empty(cls, quant_config: QuantConfig, shape: torch.Size, device: torch.device) -> QuantizedTensor:
        """Allocate a quantized weight of zeros."""
        shapes = shapes_of(quant_config, shape).values()
        tensors = [torch.zeros(of, dtype=dtype, device=device) for of, dtype in shapes]
        return cls(quant_config, shape, *tensors)

    @classmethod
    def of_symbols(
        cls, quant_config: QuantConfig, symbols: Tensor, scales: Tensor, zeros: Tensor | None = None
    ) -> QuantizedTensor:
        """Return a weight of uint8 `symbols`, shape (outputs, inputs); those of 8 bits are not copied."""
        return cls(quant_config, symbols.shape, _joined(symbols, quant_config.container_bits), scales, zeros)

    def symbols(self) -> Tensor:
        """Return the stored values unpacked: uint8, shape (outputs, inputs), of which the lowest bits count."""
        return _parted(self.qvalues, self.quant_config.container_bits, self.shape[1])

    def dump(self) -> Mapping[str, Tensor]:
        """Return the tensors of the weight, by the suffixes of their names in files."""
        held = {"": self.qvalues, "_scale": self.scales}
        return held if self.zeros is None else held | {"_zero": self.zeros}

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.qvalues.device

    @property
    def grid(self) -> Grid:
        """The values of the format, before zero point and scale."""
        quant_config = self.quant_config
        return grid_of(
            quant_config.format,
            has_zero_point=quant_config.has_zero_point,
            is_full_range=quant_config.is_full_range,
        )

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> QuantizedTensor:  # noqa: ARG002 - quantized values are in no other
        """Return the weight on a device; itself if it is there."""
        if self.device == device:
            return self
        tensors = (tensor.to(device) for tensor in self.dump().values())
        return QuantizedTensor(self.quant_config, self.shape, *tensors)

    def bind(self, bound: BoundParameter) -> None:
        """Make the layer read this weight; the parameter keeps a shape and no storage."""
        assert bound.layer is not None
        # Not by a method: a layer that adapters were merged into meanwhile is a plain one, and nobody reads what it is given here.
        bound.layer.quantized, bound.layer.side_path = self, None
        bound.parameter.data = self._stand_in

    @cached_property
    def _stand_in(self) -> Tensor:
        # The model's code asks its parameter for shape, format and device.
        return nothing(self.shape, self.scales.dtype, self.device)

    def load(self, other: Stored, name: str) -> None:
        """Copy another quantized weight, or quantize numbers."""
        if isinstance(other, DenseTensor):
            self.encode(other.values, name)
            return
        for mine, theirs in zip(self.dump().values(), other.dump().values(), strict=True):
            mine.copy_(theirs)

    # -- at a point --------------------------------------------------------------------------------------------

    @classmethod
    def at(cls, along: Sequence[Along], step: PerturbationStep) -> Sequence[SidePath]:
        """Return the perturbations that layers add; the stored weights stay as they are."""
        assert step.rounding is not None
        scale = step.scale * step.rounding.unit
        return [SidePath(one.perturbation, scale, *(step.rows(one.bound.index) or ())) for one in along]

    # -- values ------------------------------------------------------------------------------------------------

    def levels(self, rows: Rows = slice(None)) -> Tensor:
        """Return the grid values of some rows, before zero point and scale: int8, int16 or float32."""
        symbols = _parted(self.qvalues[rows], self.quant_config.container_bits, self.shape[1])
        return self.grid.values(symbols)

    def values(self, dtype: torch.dtype, rows: Rows = slice(None)) -> Tensor:
        """Return the dequantized weights of some rows."""
        levels = self.levels(rows)
        grouped = levels.view(levels.shape[0], -1, self.group_elements)
        if self.zeros is not None:
            grouped = grouped - self._of(self.zeros, rows)
        values = grouped.new_empty(grouped.shape, dtype=dtype)
        return torch.mul(grouped, self._of(self.scales, rows), out=values).view(levels.shape)

    def has_invalid_qvalues(self) -> bool:
        """Whether a stored value is infinite, NaN or beyond the grid."""
        grid = self.grid
        if isinstance(grid, Floats):
            return bool(grid.num_finite and (self.qvalues.bitwise_and(127) >= grid.num_finite).any())
        uses_lowest = self.quant_config.has_zero_point or self.quant_config.is_full_range
        return not uses_lowest and bool((self.levels() < grid.low).any())

    def encode(self, weights: Tensor, name: str = "") -> None:
        """Quantize `weights` to the nearest value, with scales fitted to them.

        Raises ModelError if a weight is not finite.
        """
        if not bool(torch.isfinite(weights).all()):
            raise ModelError(
                f"{name or 'a weight'} holds numbers that are infinite or not numbers, for which there is no quantized value",
                hint="copy or convert the model again",
            )
        # A scale for the matrix is made of all its rows.
        for rows in self._chunks(self.shape[0], all_rows=self.quant_config.scales == "tensor"):
            part = weights[rows].to(self.device, torch.float32)
            self._fit(part, rows)
            if self.quant_config.fit == "least-error":
                self._fit_least_error(part, rows)
            self._write(rows, self.grid.nearest(self._scaled(part, rows)))

    def write(self, weights: Tensor) -> None:
        """Quantize `weights` to the nearest value, with the present scales."""
        for rows in self._chunks(self.shape[0]):
            part = weights[rows].to(self.device, torch.float32)
            self._write(rows, self.grid.nearest(self._scaled(part, rows)))

    def _fit_least_error(self, part: Tensor, rows: slice) -> None:
        """Shrink each scale to the one with the least squared rounding error."""
        scope = slice(None) if self.quant_config.scales == "tensor" else rows
        widest, best = self.scales[scope].clone(), self.scales[scope].clone()
        least = torch.full(widest.shape, torch.inf, device=part.device)
        for step in range(_FIT_STEPS):
            self.scales[scope] = widest * (1 - step / (1.5 * _FIT_STEPS))
            levels = self.grid.nearest(self._scaled(part, rows)).view(len(part), -1, self.group_elements)
            origin = 0.0 if self.zeros is None else self._of(self.zeros, rows).float()
            values = (levels - origin) * self._of(self.scales, rows).float()
            errors = (values - part.view(values.shape)).square_().sum(-1)
            errors = errors.sum().view(1, 1) if self.quant_config.scales == "tensor" else errors
            is_less = errors < least
            least, best = torch.where(is_less, errors, least), torch.where(is_less, self.scales[scope], best)
        self.scales[scope] = best

    def _fit(self, part: Tensor, rows: slice) -> None:
        """Set scales and zero points such that the grid spans some rows."""
        grid = self.grid
        grouped = (
            part.reshape(1, 1, -1)
            if self.quant_config.scales == "tensor"
            else part.view(len(part), -1, self.group_elements)
        )
        least, most = grouped.amin(-1), grouped.amax(-1)
        if self.zeros is None:
            spans = torch.maximum(-least, most) / grid.high
        else:
            # 0 stays on the grid: a zero point is one of the quantized values.
            least, most = least.clamp(max=0), most.clamp(min=0)
            spans = (most - least) / grid.high
        # Weights that are all 0 have a scale, too: that of a grid up to 1.
        scales = torch.where(spans > 0, spans, torch.full_like(spans, 1 / grid.high)).to(self.scales.dtype)
        # Half precision rounds the scales of tiny weights to 0, by which nothing can be divided.
        scales.clamp_(min=torch.finfo(scales.dtype).tiny)
        scope = slice(None) if self.quant_config.scales == "tensor" else rows
        self.scales[scope] = scales
        if self.zeros is not None:
            self.zeros[scope] = (-least / scales.float()).round_().clamp_(0, grid.high).to(torch.uint8)

    def _scaled(self, part: Tensor, rows: slice) -> Tensor:
        """Return the weights of some rows in units of the grid."""
        grouped = part.view(len(part), -1, self.group_elements) / self._of(self.scales, rows).float()
        if self.zeros is not None:
            grouped = grouped + self._of(self.zeros, rows)
        return grouped.view(part.shape)

    # -- updates -----------------------------------------------------------------------------------------------

    @classmethod
    def update(cls, along: Sequence[Along], step: UpdateStep) -> None:
        """Move quantized values, each weight rounded to its grid at random, by this step or by what several add up to."""
        factor = step.rate * step.gradient * step.rounding.unit
        is_summed = step.sums is not None or not step.is_rounded
        before, sums = iter(step.sums or ()), list[Tensor]()
        together: dict[float, list[JointUpdate]] = {}
        for bound, quantized, perturbation in along:
            uniforms = partial(step.uniforms, parameter=bound.index)
            decay = step.rate * (step.rounded_decay if bound.decays else 0.0)
            if is_summed:
                # Of the host, as what a sum adds is multiplied by: it may have to wait for it.
                alpha, total = float(factor), next(before, None)
                total = (
                    perturbation[:].float().mul_(alpha)
                    if total is None
                    else total.add_(perturbation[:], alpha=alpha)
                )
                if step.is_rounded:
                    quantized.apply(total, 1.0, uniforms, decay=decay, counted=step.counted)
                else:
                    sums.append(total)
                continue
            nonzero = step.rows(bound.index)
            rows, at_once = None if nonzero is None else nonzero.there, None
            if decay and rows is not None:  # all weights decay, in no more memory
                rows = None
                at_once = updated_at_once(
                    (quantized.shape[0], quantized.shape[1]), 1 - step.rounding.sparsity
                )
            if rows is None and shares_passes(quantized):
                together.setdefault(decay, []).append(JointUpdate(quantized, perturbation, uniforms))
                continue
            quantized.apply(
                perturbation, factor, uniforms, rows=rows, decay=decay, counted=step.counted, at_once=at_once
            )
        for decay, updates in together.items():
            update_jointly(updates, factor, decay=decay, counted=step.counted)
        step.sums = sums

    def apply(
        self,
        perturbation: QValues,
        factor: float | DeviceScalar,
        uniforms: Uniforms,
        *,
        rows: Tensor | None = None,
        decay: float = 0.0,
        counted: UpdateCounts | None = None,
        at_once: int | None = None,
    ) -> None:
        """Change the weights by ``-factor·perturbation - decay·weights``, rounded at random to the grid, scales as they are.

        - `perturbation`: in the shape of the weight; a tensor is int8 or floating-point.
        - `uniforms`: of the elements of these rows, one after the other.
        - `rows`: numbers of the rows that change; by default all.
        - `counted`: is added to.
        - `at_once`: elements that are updated at a time, if fewer than usual.

        On a CPU `uniforms` are asked for many at a time, since to draw them in several threads and to pass over them in torch's
        takes turns that cost a part of a millisecond. The mean of the change is exact but for quantized values that saturate, and for the
        resolution of `uniforms`. On integers the change is rounded by itself, so that one of a millionth of a step is not lost
        in the float32 of the stored value.
        """
        by = factor.factor(torch.float32) if isinstance(factor, DeviceScalar) else factor
        num_rows, width = self.shape if rows is None else (len(rows), self.shape[1])

        def take_chunk(chunk: slice, uniform: Tensor) -> None:
            chosen = chunk if rows is None else rows[chunk]
            levels = self.levels(chosen).float()
            grouped = levels.view(len(levels), -1, self.group_elements)
            # A number divided by a tensor is, to the last bit, its reciprocal times the number.
            change = perturbation[chosen].view(grouped.shape) * (
                self._of(self.scales, chosen).float().reciprocal() * by
            )
            if decay:
                origin = self._of(self.zeros, chosen) if self.zeros is not None else 0.0
                change += decay * (grouped - origin)
            change = change.view(levels.shape)
            num = None if counted is None else num_nonzero(change)
            if isinstance(self.grid, Integers):
                # Away from 0 where the change and its uniform reach the next whole number together.
                whole = towards_zero(uniform.copysign_(change).add_(change))
                wanted = levels - whole
                updated = self.grid.clamped(wanted)
            else:
                wanted = levels - change
                updated = self.grid.at_random(wanted, uniform)
            if counted is not None and num is not None:
                # What saturates would have changed.
                if isinstance(self.grid, Integers):
                    beyond, tried = wanted - updated, whole
                else:
                    beyond = wanted - self.grid.clamped(wanted)
                    tried = (updated - levels).add_(beyond)
                counted.add(num, num - num_nonzero(tried), num_nonzero(beyond))
            self._write(chosen, updated)

        sampled_at_once = at_once or (UNIFORMS_AT_ONCE if self.device.type == "cpu" else None)
        for span in self._chunks(num_rows, elements=sampled_at_once):
            sampled = uniforms(span.start * width, span.stop * width).view(-1, width)
            # A call each, so that the temporaries of one are gone before those of the next are made.
            for chunk in self._chunks(len(sampled), elements=at_once and min(at_once, UPDATED_ELEMENTS)):
                here = slice(span.start + chunk.start, span.start + chunk.stop)
                take_chunk(here, sampled[chunk])
            del sampled

    def _write(self, rows: Rows, levels: Tensor) -> None:
        self.qvalues[rows] = self.joined(self.grid.symbols(levels))

    def joined(self, symbols: Tensor) -> Tensor:
        """Return quantized values of a byte each with as many in a byte as fit."""
        return _joined(symbols, self.quant_config.container_bits)

    # -- chunks ------------------------------------------------------------------------------------------------

    @property
    def group_elements(self) -> int:
        """Neighbours in a row that share a scale."""
        return self.quant_config.group_elements if self.quant_config.scales == "group" else self.shape[1]

    def _of(self, scales: Tensor, rows: Rows) -> Tensor:
        """Return the scales or zero points of some rows, to broadcast over (rows, groups, elements)."""
        return (scales if self.quant_config.scales == "tensor" else scales[rows])[..., None]

    def _chunks(
        self, num_rows: int, *, all_rows: bool = False, elements: int | None = None
    ) -> Iterator[slice]:
        """Yield consecutive ranges of so many rows."""
        elements = elements or _QUANTIZED_ELEMENTS.get(self.device.type, 1 << 20)
        num = num_rows if all_rows else max(1, elements // self.shape[1])
        for begin in range(0, num_rows, num):
            yield slice(begin, min(begin + num, num_rows))


def shapes_of(quant_config: QuantConfig, shape: torch.Size) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Return shape and format of what a weight is held in, by suffixes of names, in the order of :class:`QuantizedTensor`'s fields."""
    outputs, inputs = shape
    scaled = {
        "tensor": (1, 1),
        "channel": (outputs, 1),
        "group": (outputs, inputs // quant_config.group_elements),
    }
    dtype = TORCH_DTYPES[quant_config.dtype]
    shapes = {
        "": ((outputs, quant_config.qvalue_bytes((1, inputs))), torch.uint8),
        "_scale": (scaled[quant_config.scales], dtype),
    }
    if quant_config.has_zero_point:
        shapes["_zero"] = scaled[quant_config.scales], torch.uint8
    return shapes


def _joined(symbols: Tensor, bits: int) -> Tensor:
    """Return symbols of a byte each with as many in a byte as fit.

    Lowest bits hold the first part of a row, higher ones the next: passes over neighbours stay passes over neighbours.
    """
    if bits == 8:
        return symbols
    per_byte = 8 // bits
    missing = -symbols.shape[1] % per_byte
    padded = torch.nn.functional.pad(symbols, (0, missing)) if missing else symbols
    lanes = padded.view(len(symbols), per_byte, -1)
    joined = lanes[:, 0].bitwise_and(2**bits - 1)
    for lane in range(1, per_byte):
        joined |= lanes[:, lane].bitwise_and(2**bits - 1) << (lane * bits)
    return joined


def _parted(joined: Tensor, bits: int, num: int) -> Tensor:
    """Return the first `num` symbols of every row."""
    if bits == 8:
        return joined
    per_byte = 8 // bits
    lanes = joined.new_empty((len(joined), per_byte, joined.shape[1]))
    for lane in range(per_byte):
        torch.bitwise_right_shift(joined, lane * bits, out=lanes[:, lane])
    return lanes.bitwise_and_(2**bits - 1).view(len(joined), -1)[:, :num]
