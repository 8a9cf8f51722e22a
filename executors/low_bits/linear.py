"""Linear layers with quantized weights, and their matrix products.

A perturbed forward leaves the stored weights as they are. With a rounded perturbation ``û``, either ``θ + ε·û`` is made for one layer
at a time, or the perturbation's share of the output is a product of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from costmodel.formats.low_bits import (
    FILLED_ROWS,
    TILE_ELEMENTS,
    TILE_ROWS,
    QuantConfig,
    tile_columns,
)
from executors.formats import TORCH_DTYPES
from executors.low_bits.exact_products import exact_sums
from executors.low_bits.quantized import QuantizedTensor, Rows, SidePath
from topology.errors import PlanError
from zosim.plans import LowBits
from zosim.plans.low_bits import InputFormat, InputScales, KernelName

_MULTIPLE, _WIDTH_MULTIPLE = {"cuda": 32}, {"cuda": 16}
"""Rows that a device's products of matrices of bytes want a multiple of, and inputs: int8 ones of 8, e4m3 ones of 16."""

_LARGEST: dict[InputFormat, float] = {"int8": 127.0, "float8": torch.finfo(torch.float8_e4m3fn).max}

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class QuantizedLinear(nn.Linear):
    """A linear layer that can hold a quantized weight. Its parameter ``weight`` then has a shape and no storage.

    - `quantized`: The quantized weight. A function given in its place is called at each access.
    """

    quant_config: QuantConfig | None  # how the weight is, or will be, quantized
    side_path: SidePath | None  # perturbation added to the weight in the current forward
    # Original class: ``torch.nn.Linear``, or transformers' ``Conv1D``, whose weight has shape (inputs, outputs).
    was: type[nn.Module]
    product: KernelName  # see :data:`zosim.plans.low_bits.KernelName`
    # input_scales, input_format: as of :class:`zosim.plans.LowBits`.
    input_scales: InputScales
    input_format: InputFormat
    _quantized: QuantizedTensor | Callable[[], QuantizedTensor] | None

    @property
    def is_transposed(self) -> bool:
        """Whether files have the weight transposed."""
        return not issubclass(self.was, nn.Linear)

    @property
    def quantized(self) -> QuantizedTensor | None:
        """The quantized weight, or None while the layer holds plain numbers."""
        return self._quantized() if callable(self._quantized) else self._quantized

    @quantized.setter
    def quantized(self, given: QuantizedTensor | Callable[[], QuantizedTensor] | None) -> None:
        self._quantized = given

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight, in the shape that files have."""
        quantized = self.quantized
        assert quantized is not None
        values = quantized.values(dtype)
        return values.T.contiguous() if self.is_transposed else values

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return the layer's output."""
        quantized = self.quantized
        if quantized is None:  # numbers may be in their file's format until they become quantized
            return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        if self.product != "dequantize":
            return self._quantized_product(input, quantized)
        if self.input_scales:
            qvalues, scales = self._inputs_of(input)
            input = qvalues.float().mul_(scales).to(input.dtype).view_as(input)  # noqa: A001
        weight = quantized.values(quantized.scales.dtype)
        if self.side_path is not None:
            self.side_path.add_to(weight)
        return nn.functional.linear(input, weight, self.bias)

    def _quantized_product(self, inputs: Tensor, quantized: QuantizedTensor) -> Tensor:
        qvalues, scales = self._inputs_of(inputs)
        levels = (
            quantized.levels() if self.product == "int_mm" else quantized.qvalues.view(torch.float8_e4m3fn)
        )
        weight_scales = quantized.scales.float().T
        side_path = None if self.side_path is None else _PerturbationProduct(qvalues, scales, self.side_path)

        def sums_of(rows: slice, columns: slice) -> Tensor:
            sums = byte_product(qvalues[rows], levels[columns], scales[rows] if len(scales) > 1 else scales)
            sums.mul_(weight_scales if weight_scales.shape[1] == 1 else weight_scales[:, columns])
            if side_path is not None:
                side_path.add_to(sums, rows, columns)
            if self.bias is not None:
                sums += self.bias[columns]
            return sums

        outputs = len(levels)
        tiles = list(_tiles(len(qvalues), outputs, inputs.device.type))
        if len(tiles) == 1:
            output = sums_of(*tiles[0]).to(inputs.dtype)
        else:
            output = inputs.new_empty((len(qvalues), outputs))
            for rows, columns in tiles:
                output[rows, columns] = sums_of(rows, columns)
        return output.view(*inputs.shape[:-1], -1)

    def _inputs_of(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantized inputs and their scales.

        They are cached on the tensor, since the query, key and value projections read the same one.
        """
        kept: _QuantizedInputs | None = getattr(inputs, _QUANTIZED_INPUTS, None)
        if (
            kept is None
            or kept.version != inputs._version
            or kept.by != (self.input_scales, self.input_format)
        ):
            by = self.input_scales, self.input_format
            kept = _QuantizedInputs(
                inputs._version, by, *quantized_inputs(inputs.reshape(-1, inputs.shape[-1]), *by)
            )
            setattr(inputs, _QUANTIZED_INPUTS, kept)
        return kept.qvalues, kept.scales


class _QuantizedInputs(NamedTuple):
    """Cached quantized inputs, with their settings and the version of the tensor."""

    version: int
    by: tuple[InputScales, InputFormat]
    qvalues: Tensor
    scales: Tensor


_QUANTIZED_INPUTS = "_zosim_quantized_inputs"


class _PerturbationProduct:
    """The share of an output that comes from a scaled perturbation (`qvalues`, `scales`: of the inputs)."""

    def __init__(self, qvalues: Tensor, scales: Tensor, side_path: SidePath) -> None:
        rows = side_path.rows
        self._qvalues, self._scales, self._side_path = qvalues, scales * side_path.factor, side_path
        # That of a few rows is made at once. Zeros fill their number up: oneDNN compiles a kernel for every number that it meets.
        self._product: Tensor | None = None
        if rows is not None and (num := rows.numel()):
            filled = nn.functional.pad(self._factors(rows), (0, 0, 0, -num % FILLED_ROWS))
            self._product = byte_product(qvalues, filled, self._scales)[:, :num]

    def _factors(self, rows: Rows) -> Tensor:
        """Return some rows of the perturbation in the format of the inputs, which holds its quantized values: those of 5 bits at most in e4m3."""
        return self._side_path.perturbation[rows].to(self._qvalues.dtype)

    def add_to(self, sums: Tensor, rows: slice, columns: slice) -> None:
        """Add it to some rows and columns of the output."""
        if self._side_path.rows is None:
            scales = self._scales[rows] if len(self._scales) > 1 else self._scales
            sums += byte_product(self._qvalues[rows], self._factors(columns), scales)
        elif self._product is not None:
            nonzero, indices = self._side_path.within(columns)
            sums.index_add_(1, nonzero, self._product[rows, indices])


def _tiles(num_rows: int, num_columns: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of an output's tiles, whose sums fit a CPU's cache."""
    rows, columns = num_rows, num_columns
    if device == "cpu":
        rows = min(num_rows, TILE_ROWS)
        columns = tile_columns(rows, num_columns)
    for begin in range(0, num_columns, columns):
        for first in range(0, num_rows, rows):
            yield slice(first, min(first + rows, num_rows)), slice(begin, min(begin + columns, num_columns))


def quantized_inputs(
    inputs: Tensor, scope: InputScales, input_format: InputFormat = "int8"
) -> tuple[Tensor, Tensor]:
    """Quantize inputs to the nearest int8 or e4m3 value, with a scale per token or one for all.

    - `inputs`: shape (tokens, features), floating point.
    - `scope`: what shares a scale.

    Returns
    -------
    qvalues : torch.Tensor
        int8 or float8_e4m3fn, shape of `inputs`.
    scales : torch.Tensor
        float32, shape (tokens, 1) or (1, 1).
    """
    num_rows, width = inputs.shape
    by_token = scope == "token"
    qvalues = torch.empty_like(inputs, dtype=torch.int8 if input_format == "int8" else torch.float8_e4m3fn)
    scales = torch.empty((num_rows if by_token else 1, 1), dtype=torch.float32, device=inputs.device)
    # Without temporaries as large as the inputs: fresh memory costs more than another pass.
    length = max(1, TILE_ELEMENTS // width) if inputs.device.type == "cpu" else num_rows
    chunks = [slice(begin, begin + length) for begin in range(0, num_rows, length)]
    if not by_token:
        largest = torch.stack([_largest(inputs[rows]).amax(0, keepdim=True) for rows in chunks])
        scales.copy_(_scales_of(_as_numbers(largest.amax(0), inputs.dtype), input_format))
    for rows in chunks:
        part = inputs[rows]
        if by_token:
            scales[rows] = _scales_of(_as_numbers(_largest(part), inputs.dtype), input_format)
        by = scales[rows] if by_token else scales
        quotients = part / by if part.dtype == torch.float32 else part.float().div_(by)
        # The largest integer is 127 and a rounding, so nothing has to be clamped.
        qvalues[rows] = (
            quotients.round_()
            if input_format == "int8"
            else quotients.clamp_(-_LARGEST[input_format], _LARGEST[input_format])
        )
    return qvalues, scales


def _largest(part: Tensor) -> Tensor:
    """Return the bits, as integers, of the largest magnitude of each row: without their sign, bits are in the order of numbers.

    A vectorised pass over integers takes a fifth of the time of two over 16-bit numbers. The largest of all is what is no number.
    """
    integer = _INTEGERS[part.element_size()]
    return part.view(integer).bitwise_and(torch.iinfo(integer).max).amax(-1, keepdim=True)


def _as_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(dtype).float()


def _scales_of(largest: Tensor, input_format: InputFormat) -> Tensor:
    """Return the scale with which a magnitude, which is lost, becomes the largest quantized value."""
    return largest.div_(_LARGEST[input_format]).clamp_(min=torch.finfo(torch.float32).tiny)


def byte_product(inputs: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Return ``inputs @ weights.T`` times `scales` of its rows, in float32.

    Of int8 matrices the sums are exact, and rounded once before; others are of e4m3.
    """
    left, right = _filled_up(inputs), _filled_up(weights)
    if inputs.dtype == torch.int8:
        return exact_sums(left, right)[: len(inputs), : len(weights)].mul_(scales)
    one = torch.ones((), dtype=torch.float32, device=inputs.device)
    product = torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product[: len(inputs), : len(weights)].mul_(scales)


def _filled_up(matrix: Tensor) -> Tensor:
    """Return a matrix with as many rows and inputs as a device's products of bytes want: zeros, which add nothing."""
    rows = -len(matrix) % _MULTIPLE.get(matrix.device.type, 1)
    inputs = -matrix.shape[1] % _WIDTH_MULTIPLE.get(matrix.device.type, 1)
    return nn.functional.pad(matrix, (0, inputs, 0, rows)) if rows or inputs else matrix


def quantize_layers(
    blocks: Iterable[nn.Module],
    low_bits: LowBits,
    device: torch.device,
    quant_config: QuantConfig | None = None,
) -> None:
    """Let the linear layers of some blocks take quantized weights, as :func:`make_quantizable`, and multiply by them as a plan says.

    `quant_config`: how their weights are kept; by default as `low_bits` says, with scales in float32.

    Raises PlanError if the device lacks the kernel, and no other may take its place.
    """
    product, blocks = present_product(low_bits, device), list(blocks)
    make_quantizable(blocks, quant_config or low_bits.quant_config("float32"))
    for block in blocks:
        for path, module in block.named_modules():
            if isinstance(module, QuantizedLinear) and not is_of_adapter(path):
                module.product, module.input_scales = product, low_bits.input_scales
                module.input_format = low_bits.input_format


def make_quantizable(blocks: Iterable[nn.Module], quant_config: QuantConfig | None) -> None:
    """Let the linear layers of some blocks take quantized weights; until they are given any, they compute what they did.

    `quant_config`: how their weights are kept then.

    The weight of a layer that keeps it transposed (GPT-2's) is turned, without being copied.
    """
    for block in blocks:
        for path, module in list(block.named_modules()):
            if is_of_adapter(path) or not is_linear(module):
                continue
            if not isinstance(module, QuantizedLinear):
                if is_transposed(module):
                    module.weight.data = module.weight.data.T
                become_quantizable(module)
            module.quant_config = quant_config


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies what it is given by its weight, and returns nothing else."""
    from transformers.pytorch_utils import Conv1D

    if type(module) in (nn.Linear, Conv1D, QuantizedLinear):
        return True
    if not isinstance(module, nn.Linear):
        return False
    # What derives from a linear layer may compute something else: a router chooses experts. Shapes say so without memory.
    without_values = copy.copy(module)
    without_values._parameters = {
        name: None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    rows = torch.empty((3, module.in_features), dtype=module.weight.dtype, device="meta")
    try:
        output = type(module).forward(without_values, rows)
    except (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError):
        return False
    return isinstance(output, Tensor) and output.shape == (3, module.out_features)


def become_quantizable(module: nn.Module, quant_config: QuantConfig | None = None) -> QuantizedLinear:
    """Let a linear layer take quantized weights, in place, so that hooks and adapters stay where they are."""
    layer: Any = module
    layer.was = type(module)
    layer.__class__ = QuantizedLinear
    layer.out_features, layer.in_features = layer.weight.shape
    layer.quant_config, layer.quantized, layer.side_path = quant_config, None, None
    layer.product, layer.input_scales, layer.input_format = "dequantize", "", ""
    return layer  # type: ignore[no-any-return]


def become_plain(layer: Any) -> None:
    """Let a layer hold numbers in place of quantized values, as the layer that it was; one that holds none stays as it is."""
    if isinstance(layer, QuantizedLinear) and (quantized := layer.quantized) is not None:
        layer.weight.data = layer.numbers(quantized.scales.dtype)
        layer.quantized = None
        layer.__class__ = layer.was  # type: ignore[assignment]


def is_transposed(module: nn.Module) -> bool:
    """Whether files have the weight of a linear layer transposed."""
    return module.is_transposed if isinstance(module, QuantizedLinear) else not isinstance(module, nn.Linear)


def is_of_adapter(name: str) -> bool:
    """Whether a module or a parameter is a part of a low-rank adapter, by its name."""
    return any(part.startswith("lora_") for part in name.rsplit(".", 2)[-2:])


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the name of the weight and the layer of all that can take quantized weights."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield f"{name}.weight", module


class Deferred(NamedTuple):
    """A tensor that is made when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]


def deferred_numbers(model: nn.Module, dtype: str | None = None) -> dict[str, Tensor | Deferred]:
    """Return what the weights of a model that are quantized stand for, by name: rounded once, to the format that they are written in."""
    named: dict[str, Tensor | Deferred] = {}
    for name, layer in quantized_layers(model):
        if (quantized := layer.quantized) is not None:
            to = TORCH_DTYPES[dtype] if dtype else quantized.scales.dtype
            shape = quantized.shape[::-1] if layer.is_transposed else quantized.shape
            named[name] = Deferred(torch.Size(shape), to, partial(layer.numbers, to))
    return named


def present_product(low_bits: LowBits, device: torch.device) -> KernelName:
    """Return what multiplies by quantized weights on a device.

    Raises PlanError if the device lacks the kernel that the plan counts on, and no other may take its place.
    """
    if low_bits.product == "dequantize" or has_byte_product(device, low_bits.product):
        return low_bits.product
    if low_bits.may_dequantize:
        return "dequantize"
    input_format = "int8" if low_bits.product == "int_mm" else "e4m3"
    raise PlanError(
        f"{device} has no product of {input_format} matrices (torch._{low_bits.product}), which the plan counts on",
        hint="add --kernel-fallback, or plan with --kernel dequantize",
    )


def has_byte_product(device: torch.device, kernel: KernelName) -> bool:
    """Whether a device multiplies int8 matrices, or e4m3 ones, faster than numbers made of them."""
    if kernel == "scaled_mm" and device.type == "cpu":
        return False  # torch 2.13 multiplies one number after the other there, a thousand times slower than in float32
    try:
        # torch says what a device lacks when it is asked to multiply, by one of three errors.
        ones = torch.ones((32, 32), device=device)
        ones = ones.to(torch.int8 if kernel == "int_mm" else torch.float8_e4m3fn)
        scales = torch.ones(1, device=device)
        return bool((byte_product(ones, ones, scales) == 32).all())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
