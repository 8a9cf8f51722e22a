"""Tensors to symbols of few bits, and back.

Shapes: R rows of C columns; C is the last dimension, so that a row is a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.grids import Doubt, Doubting, Fitted, ask_at_once, fit, fitted
from topology.errors import CodecError

CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Elements that are quantized at a time: their temporaries stay in a CPU's cache, and are bounded on a GPU."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor as symbols."""

    spec: CodecSpec
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor that it was
    symbols: Tensor  # uint8, shape (R, C), each below ``2^bits``
    # Of the grids, as :func:`executors.codecs.grids.fit` returns them; none for an empty tensor.
    parameters: tuple[Tensor, ...]
    # Whether the codec can represent the values, where nobody has asked yet: symbols mean nothing where it cannot.
    doubts: tuple[Doubt, ...] = ()


def quantize(tensor: Tensor, spec: CodecSpec, generator: Generator | None = None) -> Quantized:
    """Return `tensor` as symbols.

    - `tensor`: floating-point, of any shape, on any device.
    - `spec`: with bits.
    - `generator`: on the tensor's device; for stochastic rounding, which takes one number for each element.

    Raises CodecError if the codec cannot represent the values, or stochastic rounding has no generator. Of values on a device the first is
    left in doubt, as asking would wait for it.

    Positions on the grid are computed in float32 (float64 for float64). Values come back in the tensor's own
    format, which rounds once more in half precision: stochastic rounding is unbiased up to that.
    """
    assert spec.bits is not None
    if spec.rounding == "stochastic" and generator is None:
        raise CodecError(f"{spec.name} rounds at random, but no generator is given", hint="pass a generator")
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() and tensor.shape[-1] else 1)
    symbols = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    shape = tuple(tensor.shape)
    if not rows.numel():
        return Quantized(spec, shape, tensor.dtype, symbols, ())
    grid_dtype = grid_format(tensor.dtype)
    doubts: list[Doubt] = []
    asks: Doubting = ask_at_once if rows.device.type == "cpu" else doubts.append
    parameters = fit(rows, spec, grid_dtype, asks)
    grids = fitted(parameters, spec)
    source, target = _laid_out(rows, spec), _laid_out(symbols, spec)
    for chunk, chunk_grids in _chunks(grids, source):
        scaled = chunk_grids.scaled(source[chunk].to(grid_dtype))
        levels = scaled.round_() if spec.rounding == "nearest" else rounded_at_random(scaled, generator)
        clamped = torch.clamp(levels, chunk_grids.low, chunk_grids.high)
        target[chunk] = clamped.to(torch.int16).bitwise_and_(2**spec.bits - 1).to(torch.uint8)
    return Quantized(spec, shape, tensor.dtype, symbols, parameters, tuple(doubts))


def dequantize(quantized: Quantized) -> Tensor:
    """Return the tensor that the symbols stand for, in the format that it had."""
    spec, symbols = quantized.spec, quantized.symbols
    assert spec.bits is not None
    out = torch.empty(symbols.shape, dtype=quantized.dtype, device=symbols.device)
    if symbols.numel():
        grids = fitted(quantized.parameters, spec)
        source, target = _laid_out(symbols, spec), _laid_out(out, spec)
        largest = torch.finfo(quantized.dtype).max
        # Clamping changes no number that does not exceed; a device is not asked, as that would wait for it.
        exceeds = symbols.device.type != "cpu" or grids.exceeds(largest)
        for chunk, chunk_grids in _chunks(grids, source):
            values = chunk_grids.values(source[chunk].to(grids.step.dtype), spec.bits)
            target[chunk] = values.clamp_(-largest, largest) if exceeds else values
    return out.reshape(quantized.shape)


def grid_format(dtype: torch.dtype) -> torch.dtype:
    """Return the format that positions on the grid, and its parameters, are computed in."""
    return dtype if dtype == torch.float64 else torch.float32


def rounded_at_random(numbers: Tensor, generator: Generator | None) -> Tensor:
    """Return `numbers` rounded to integers: down, or up with the probability of the fraction cut off.

    .. [1] Connolly, Higham and Mary (2021), Stochastic rounding and its probabilistic backward error analysis.
    """
    assert generator is not None
    below = numbers.floor()
    uniform = torch.rand(numbers.shape, dtype=numbers.dtype, device=numbers.device, generator=generator)
    return below.add_(uniform < numbers - below)


def _laid_out(rows: Tensor, spec: CodecSpec) -> Tensor:
    """Return a view in which a chunk is some rows: where all elements share a grid, rows are of one element."""
    return rows.reshape(-1, 1) if spec.scope == "tensor" else rows


def _chunks(grids: Fitted, rows: Tensor) -> Iterator[tuple[slice, Fitted]]:
    """Yield some rows after the other, each with the grids that they have."""
    num_rows, width = rows.shape
    size = max(1, CHUNK_ELEMENTS.get(rows.device.type, 1 << 20) // width)
    by_row = grids.step.shape[0] > 1
    for begin in range(0, num_rows, size):
        chunk = slice(begin, begin + size)
        chunk_grids = (
            Fitted(*(field[chunk] for field in (grids.offset, grids.step, grids.low, grids.high)))
            if by_row
            else grids
        )
        yield chunk, chunk_grids
