"""Model directories whose matrices are quantized: those that other tools wrote, read as they are, and such written.

A weight's tensors stay mapped from their files until the quantized values are asked for, one layer at a time. Quantized values of a
byte are never copied before they move into a program's buffers; no weight is ever a matrix of floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from costmodel.formats import FORMATS, DType
from costmodel.formats.low_bits import QuantConfig
from costmodel.formats.stored_quantization import (
    EARLIER_WEIGHTS_NAME,
    OWN_WEIGHTS_NAME,
    QUANTIZED_SUFFIXES,
    Layout,
    own_quantization_config,
    refuse_unwritable,
)
from costmodel.models.configs import stored_quantization_in
from executors.formats import TORCH_DTYPES, WEIGHTS_NAME
from executors.low_bits.linear import (
    Deferred,
    QuantizedLinear,
    make_quantizable,
    present_product,
    quantize_layers,
    quantized_layers,
)
from executors.low_bits.quantized import QuantizedTensor, shapes_of
from executors.models.blocks import find_blocks, linears_of
from executors.models.loading import load_config, model_class, opened_weights, quietly_loading
from executors.models.parameters import stored_parameters
from executors.models.transformers_interface import attention_of
from executors.models.weight_files import save_configuration, saved_tensors, write_tensors
from topology.errors import ModelError
from zosim.plans import LowBits, Plan

_CHUNK_ELEMENTS = 1 << 20
"""Quantized values that are taken out of their words at a time."""


def make_layers_quantizable(model: nn.Module, plan: Plan, device: torch.device | None = None) -> None:
    """Let the layers of a model take quantized weights, if the plan stores any; on a device, multiply by them as it says.

    Raises PlanError if the device lacks what multiplies by them.
    """
    if (quant_config := plan.storage.quant_config) is None:
        return
    blocks = find_blocks(model)
    if device is None:
        make_quantizable(blocks, quant_config)
    else:
        quantize_layers(blocks, plan.low_bits, device, quant_config)


def other_kernel(plan: Plan, device: torch.device) -> str:
    """Return, in words, which kernel a device lacks that the plan counts on; empty where it lacks none."""
    low_bits = plan.low_bits
    if not low_bits.quantizes_weights or present_product(low_bits, device) == low_bits.product:
        return ""
    return f"{device} has no {low_bits.product}, which the plan counts on: weights are dequantized one layer at a time"


def encode(model: nn.Module, low_bits: LowBits, dtype: DType) -> None:
    """Quantize a model's weights where it lies, on the CPU; `dtype` is the format of what is not quantized."""
    if (quant_config := low_bits.quant_config(dtype)) is None:
        return
    quantize_layers(find_blocks(model), low_bits, torch.device("cpu"), quant_config)
    for tensor in stored_parameters(model):
        if not tensor.is_numbers:
            qvalues = QuantizedTensor.empty(quant_config, tensor.shape, torch.device("cpu"))
            qvalues.load(tensor.held, tensor.name)
            tensor.hold(qvalues)


def load_quantized(source: str | Path, plan: Plan) -> nn.Module:
    """Return a model whose layers hold the quantized values of a directory that is quantized already.

    `plan`: with the quantized values that the directory holds. What is not quantized is in its format.

    Raises ModelError if the plan has other quantized values, or a tensor is missing, of another shape or format, or holds scales that are
    none.
    """
    directory, quant_config = Path(source), plan.storage.quant_config
    stored = stored_quantization_in(directory)
    assert stored is not None
    agrees = (
        getattr(plan.low_bits, name) == kept for name, kept in stored.fields.items() if name != "activations"
    )
    if quant_config is None or quant_config.is_full_range != stored.full_range or not all(agrees):
        requested = (
            "numbers" if quant_config is None else f"{quant_config.format} ({quant_config.scales} scales)"
        )
        raise ModelError(
            f"{source} is quantized to {stored.weights} with {stored.scales} scales, but the plan wants "
            f"{requested}",
            hint="make the plan from this directory, or use the model in 16 bits",
        )
    config = load_config(source)
    with quietly_loading(source), torch.device("meta"):
        kind = model_class(config)
        skeleton = kind(config)
    weights_name = WEIGHTS_NAME
    if stored.layout == "zosim":
        weights_name = (
            EARLIER_WEIGHTS_NAME if (directory / EARLIER_WEIGHTS_NAME).is_file() else OWN_WEIGHTS_NAME
        )
    tensors = opened_weights(directory, weights_name)
    files = _Files(directory, stored.layout, quant_config, tensors)
    layers = _shapes_of_layers(skeleton)
    parameters = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    rest = {name: tensor for name, tensor in tensors.items() if not files.is_of(name, layers)}
    _refuse_quantized_elsewhere(source, rest)
    storage = TORCH_DTYPES[quant_config.dtype]
    for name in layers:
        if f"{name}.weight" in tensors and not files.is_quantized(name):
            raise ModelError(
                f"{source}: {name} is not quantized, but the plan quantizes all layers of its blocks",
                hint="use the model in 16 bits with a --weight-format",
            )
        rest[f"{name}.weight"] = torch.zeros((), dtype=storage).expand(parameters[f"{name}.weight"])
    with quietly_loading(source):
        loaded, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=rest,
            dtype=storage,
            attn_implementation=attention_of(kind, plan.forward.attention),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    wrong = [*(str(name) for name, *_ in report["mismatched_keys"]), *map(str, report["missing_keys"])]
    if wrong:
        raise ModelError(
            f"{source}: {min(wrong)} is missing, or has another shape than in its config.json",
            hint="copy the model again",
        )
    make_quantizable(find_blocks(loaded), quant_config)
    modules = dict(loaded.named_modules())
    for name, shape in layers.items():
        files.check(name, shape)
        modules[name].quantized = partial(files.read, name, shape)
    model: nn.Module = loaded.eval()
    return model


def _shapes_of_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the layers whose weights are quantized, by name."""
    linears = (linear for block in find_blocks(model) for linear in linears_of(block))
    shapes = {module: (outputs, inputs) for _, module, inputs, outputs in linears}
    return {name: shapes[module] for name, module in model.named_modules() if module in shapes}


def _refuse_quantized_elsewhere(source: str | Path, names: Mapping[str, Tensor]) -> None:
    """Raise where something else than linear layers of blocks is quantized."""
    for name, tensor in names.items():
        if name.rpartition(".")[2] in QUANTIZED_SUFFIXES or not tensor.dtype.is_floating_point:
            raise ModelError(
                f"{source}: {name} belongs to a quantized layer other than those that zosim keeps quantized",
                hint="quantize the model with its head and embedding left out, or write it with --save-as zosim",
            )


@dataclass(frozen=True)
class _Files:
    """The tensors of a directory, as the layers that they belong to."""

    directory: Path
    layout: Layout
    quant_config: QuantConfig
    tensors: Mapping[str, Tensor]  # mapped from their files

    def is_quantized(self, layer: str) -> bool:
        """Whether a layer's weight is quantized."""
        qvalues_name = f"{layer}.{_QUANTIZED_NAMES[self.layout]}"
        return qvalues_name in self.tensors and not (
            self.layout == "bytes"
            and self.tensors[qvalues_name].dtype in (torch.float32, torch.float16, torch.bfloat16)
        )

    def is_of(self, name: str, layers: Mapping[str, object]) -> bool:
        """Whether a tensor belongs to the weight of one of these layers."""
        layer, _, last = name.rpartition(".")
        return layer in layers and (last == "weight" or last in QUANTIZED_SUFFIXES)

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise where a tensor of a layer is missing, or of a shape or format that cannot be, before any is read."""
        for part, (wanted, kinds) in self._expected(shape).items():
            tensor = self.tensor(layer, part)
            if tensor.dtype not in kinds or not _alike(tuple(tensor.shape), wanted):
                kind, *allowed = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *kinds))
                raise ModelError(
                    f"{self.directory}: {layer}.{part} has shape {tuple(tensor.shape)} and format {kind}, "
                    f"not shape {wanted} and format {' or '.join(sorted(allowed))}",
                    hint="files and quantization_config belong to different models, or the group size differs",
                )
        if (
            order := self.tensors.get(f"{layer}.g_idx", self.tensors.get(f"{layer}.weight_g_idx"))
        ) is not None:
            group = self.quant_config.group_elements if self.quant_config.scales == "group" else shape[1]
            if not torch.equal(order.long(), torch.arange(shape[1]) // group):
                raise ModelError(
                    f"{self.directory}: {layer} reorders its inputs (g_idx)",
                    hint="quantize the model without act-order, or use it in 16 bits",
                )

    def tensor(self, layer: str, part: str) -> Tensor:
        """Return a tensor of a layer.

        Raises ModelError if it is missing.
        """
        try:
            return self.tensors[f"{layer}.{part}"]
        except KeyError:
            raise ModelError(
                f"{self.directory} lacks {layer}.{part}",
                hint="copy the model again; quantized weights need their scales",
            ) from None

    def read(self, layer: str, shape: tuple[int, int]) -> QuantizedTensor:
        """Return a weight: its quantized values and scales, and nothing of it as floating-point numbers.

        Raises ModelError if a scale is zero, negative or no number, or is none in the format of the plan's weights, or a quantized value is
        none.
        """
        if self.layout == "zosim":
            return self._own(layer, torch.Size(shape))
        symbols, scales, zeros = _READERS[self.layout](self, layer, shape)
        if not self.quant_config.has_zero_point:
            zeros = None
        quantized = QuantizedTensor.of_symbols(self.quant_config, symbols, self._scales(layer, scales), zeros)
        self.refuse_invalid(layer, quantized.has_invalid_qvalues())
        return quantized

    def _own(self, layer: str, shape: torch.Size) -> QuantizedTensor:
        """Return a weight whose tensors lie in the file as they do in memory."""
        parts = {}
        for suffix in shapes_of(self.quant_config, shape):
            part = self.tensor(layer, f"weight{suffix}")
            parts[suffix] = self._scales(layer, part) if part.is_floating_point() else part
        quantized = QuantizedTensor(self.quant_config, shape, *parts.values())
        self.refuse_invalid(layer, quantized.has_invalid_qvalues())
        return quantized

    def refuse_invalid(self, layer: str, is_none: bool) -> None:
        """Raise where something in a layer's quantized values stands for nothing."""
        if is_none:
            raise ModelError(
                f"{self.directory}: a value of {layer} is not valid in {self.quant_config.format}",
                hint="copy the model again",
            )

    def _scales(self, layer: str, scales: Tensor) -> Tensor:
        if not bool((torch.isfinite(scales) & (scales > 0)).all()):
            raise ModelError(
                f"{self.directory}: a scale of {layer} is zero, negative, infinite or NaN",
                hint="quantize the model again",
            )
        kept = scales.to(TORCH_DTYPES[self.quant_config.dtype])
        if not torch.equal(kept.to(scales.dtype), scales):
            own = str(scales.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.directory}: the scales of {layer} are in {own}, and would be rounded to "
                f"{self.quant_config.dtype}",
                hint=f"use --dtype {own}",
            )
        return kept.contiguous()

    def _expected(
        self, linear: tuple[int, int]
    ) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Return shape and possible formats of each tensor of a layer."""
        outputs, inputs = linear
        bits = FORMATS[self.quant_config.format].bits
        groups = (
            self.quant_config.num_scales(linear) // outputs if self.quant_config.scales != "tensor" else 1
        )
        words = (torch.int32,)
        if self.layout == "zosim":
            return {
                f"weight{suffix}": (size, _FLOATS if kind.is_floating_point else (kind,))
                for suffix, (size, kind) in shapes_of(self.quant_config, torch.Size(linear)).items()
            }
        if self.layout in ("gptq", "gptq_v2", "awq"):
            packed_inputs = self.layout != "awq"
            qvalues = (inputs * bits // 32, outputs) if packed_inputs else (inputs, outputs * bits // 32)
            return {
                "qweight": (qvalues, words),
                "qzeros": ((groups, outputs * bits // 32), words),
                "scales": ((groups, outputs), _FLOATS),
            }
        scaled = (1, 1) if self.quant_config.scales == "tensor" else (outputs, groups)
        expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
            "weight_scale": (scaled, _FLOATS)
        }
        if self.layout == "packed":
            expected["weight_packed"] = (outputs, -(-inputs * bits // 32)), words
            if self.quant_config.has_zero_point:
                # Zero points of channels are packed along the outputs.
                expected["weight_zero_point"] = (-(-outputs * bits // 32), groups), words
        else:
            kind = torch.int8 if self.grid_is_integer else torch.float8_e4m3fn
            expected["weight"] = (outputs, inputs), (kind,)
            if self.quant_config.has_zero_point:
                expected["weight_zero_point"] = scaled, (torch.int8,)
        return expected

    @property
    def grid_is_integer(self) -> bool:
        """Whether quantized values are integers."""
        return not FORMATS[self.quant_config.format].is_float


# -- written -----------------------------------------------------------------------------------------------------


def save_quantized(model: nn.Module, directory: str | Path, dtype: str) -> None:
    """Write a directory that transformers loads with compressed-tensors: quantized values as they are, and configuration.

    - `model`: its blocks' linear layers are quantized, and no other ones.
    - `dtype`: format of what is not quantized.

    A layer is packed when it is written. Integers of 8 bits, those with a zero point, and e4m3 lie in a byte each; other integers
    side by side in words.
    """
    qvalues = {name.removesuffix(".weight"): layer for name, layer in quantized_layers(model)}
    first = next(iter(qvalues.values())).quantized
    assert first is not None
    quant_config, kind = first.quant_config, FORMATS[first.quant_config.format]
    refuse_unwritable(quant_config)
    layout = "float-quantized" if kind.is_float else "int-quantized" if kind.bits == 8 else "pack-quantized"
    if layout == "pack-quantized" and quant_config.has_zero_point:
        # compressed-tensors 0.20 makes no room for packed zero points when transformers loads a directory.
        layout = "naive-quantized"
    tensors: dict[str, Tensor | Deferred] = {}
    for name, tensor in saved_tensors(model).items():
        layer = name.removesuffix(".weight")
        if layer in qvalues and name.endswith(".weight"):
            tensors |= {f"{layer}.{part}": one for part, one in _written(qvalues[layer], layout).items()}
        else:
            tensors[name] = tensor
    directory = Path(directory)
    save_configuration(
        model,
        directory,
        {"quantization_config": _quantization_config(model, quant_config, layout, set(qvalues))},
    )
    write_tensors(tensors, directory / WEIGHTS_NAME, dtype)


def save_own(model: nn.Module, directory: str | Path, dtype: str) -> None:
    """Write a directory that zosim alone reads: quantized values of any format, in the tensors that they are in memory.

    `model`, `directory`, `dtype`: as of :func:`save_quantized`.

    Rows are output channels, also where the model keeps a layer transposed. Of each weight there are the tensors of
    :func:`executors.low_bits.quantized.shapes_of`, their suffixes behind its name. Quantized values of less than a byte share one, the
    lowest bits the first part of a row.
    """
    qvalues = {name: layer.quantized for name, layer in quantized_layers(model)}
    first = next(iter(qvalues.values()))
    assert first is not None
    tensors: dict[str, Tensor | Deferred] = {}
    for name, tensor in saved_tensors(model).items():
        quantized = qvalues.get(name)
        arrays = {"": tensor} if quantized is None else quantized.dump()
        tensors |= {name + suffix: chunk for suffix, chunk in arrays.items()}
    directory = Path(directory)
    save_configuration(model, directory, {"quantization_config": own_quantization_config(first.quant_config)})
    write_tensors(tensors, directory / OWN_WEIGHTS_NAME, dtype)


def _quantization_config(
    model: nn.Module, quant_config: QuantConfig, layout: str, qvalues: set[str]
) -> dict[str, Any]:
    """Return what compressed-tensors has to know of the quantized values."""
    kind = FORMATS[quant_config.format]
    weights = {
        "num_bits": kind.bits,
        "type": "float" if kind.is_float else "int",
        "symmetric": not quant_config.has_zero_point,
        "strategy": quant_config.scales,
        "group_size": quant_config.group_elements if quant_config.scales == "group" else None,
        "dynamic": False,
    }
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in qvalues
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}},
        "ignore": plain,
    }


def _written(layer: QuantizedLinear, layout: str) -> dict[str, Tensor | Deferred]:
    """Return the tensors of a layer, those of quantized values to be packed when they are written."""
    quantized = layer.quantized
    assert quantized is not None
    bits, zeros = FORMATS[quantized.quant_config.format].bits, quantized.zeros
    scales = quantized.scales.view(-1) if quantized.quant_config.scales == "tensor" else quantized.scales
    parts: dict[str, Tensor | Deferred] = {"weight_scale": scales}
    if layout == "pack-quantized":
        outputs, inputs = quantized.shape
        words = torch.Size((outputs, -(-inputs * bits // 32)))
        parts["weight_packed"] = Deferred(
            words, torch.int32, lambda: _packed(quantized.symbols(), bits, shift=True)
        )
        parts["weight_shape"] = torch.tensor([outputs, inputs])
        return parts
    if layout == "float-quantized":
        return {**parts, "weight": quantized.qvalues.view(torch.float8_e4m3fn)}
    if zeros is None:
        return {**parts, "weight": quantized.qvalues.view(torch.int8)}
    half = 2 ** (bits - 1)
    parts["weight"] = Deferred(
        quantized.shape, torch.int8, lambda: (quantized.symbols() - half).view(torch.int8)
    )
    parts["weight_zero_point"] = (zeros - half).view(torch.int8).view(scales.shape)
    return parts


def _packed(symbols: Tensor, bits: int, *, shift: bool = False) -> Tensor:
    """Return rows of quantized values of a byte as rows of 32-bit words, as :func:`_unpacked` reads them."""
    rows, num = symbols.shape
    words = torch.empty((rows, -(-num * bits // 32)), dtype=torch.int32)
    step = max(1, _CHUNK_ELEMENTS // num)
    for begin in range(0, rows, step):
        chunk = symbols[begin : begin + step].cpu()
        chunk = chunk ^ 2 ** (bits - 1) if shift else chunk
        single = np.unpackbits(chunk.numpy()[..., None], axis=-1, bitorder="little")[..., :bits]
        row = np.packbits(single.reshape(len(single), -1), axis=-1, bitorder="little")
        row = np.pad(row, ((0, 0), (0, 4 * words.shape[1] - row.shape[1])))
        words[begin : begin + step] = torch.from_numpy(row.view(np.int32))
    return words


# -- read --------------------------------------------------------------------------------------------------------


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_QUANTIZED_NAMES: Mapping[Layout, str] = {
    "packed": "weight_packed",
    "bytes": "weight",
    "gptq": "qweight",
    "gptq_v2": "qweight",
    "awq": "qweight",
    "zosim": "weight_scale",
}
_Read = tuple[Tensor, Tensor, Tensor | None]
"""Symbols (outputs, inputs) of a byte each, scales, and zero points where there are any."""


def _alike(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether shapes agree; of a single scale, dimensions do not matter."""
    return shape == wanted or (wanted == (1, 1) and shape in ((), (1,)))


def _read_packed(files: _Files, layer: str, shape: tuple[int, int]) -> _Read:
    bits, is_signed = FORMATS[files.quant_config.format].bits, not files.quant_config.has_zero_point
    symbols = _unpacked(files.tensor(layer, "weight_packed"), bits, shape[1], shift=is_signed)
    scales, zeros = files.tensor(layer, "weight_scale").reshape(*_scales_shape(files, shape)), None
    if not is_signed:
        zeros = _unpacked(files.tensor(layer, "weight_zero_point").T, bits, shape[0]).T.contiguous()
    return symbols, scales, zeros


def _read_bytes(files: _Files, layer: str, shape: tuple[int, int]) -> _Read:
    weight = files.tensor(layer, "weight")
    scales, zeros = files.tensor(layer, "weight_scale").reshape(*_scales_shape(files, shape)), None
    if not files.grid_is_integer:
        return weight.view(torch.uint8), scales, None
    half = 2 ** (FORMATS[files.quant_config.format].bits - 1)
    files.refuse_invalid(layer, int(weight.max()) >= half or int(weight.min()) < -half)
    symbols = weight.view(torch.uint8)
    if files.quant_config.has_zero_point:
        zeros = files.tensor(layer, "weight_zero_point").reshape(scales.shape).view(torch.uint8) + half
        symbols = symbols + half
    return symbols, scales, zeros


def _read_gptq(files: _Files, layer: str, shape: tuple[int, int]) -> _Read:
    bits = FORMATS[files.quant_config.format].bits
    is_signed = not files.quant_config.has_zero_point
    symbols = _unpacked(files.tensor(layer, "qweight").T, bits, shape[1], shift=is_signed)
    # The first version of the layout keeps zero points less one, so that those of 0 become 15 of 4 bits.
    zeros = _unpacked(files.tensor(layer, "qzeros"), bits, shape[0]).T.to(torch.int16)
    zeros = zeros + 1 if files.layout == "gptq" else zeros
    if is_signed and not bool((zeros == 2 ** (bits - 1)).all()):
        raise ModelError(
            f"{files.directory}: {layer} has zero points, but its quantization_config says it has none (sym)",
            hint="correct quantization_config",
        )
    if not is_signed and bool((zeros > 2**bits - 1).any()):
        raise ModelError(f"{files.directory}: a zero point of {layer} exceeds {bits} bits")
    return symbols, files.tensor(layer, "scales").T, zeros.to(torch.uint8).contiguous()


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where among the eight quantized values of a word, lowest bits first, columns lie."""


def _read_awq(files: _Files, layer: str, shape: tuple[int, int]) -> _Read:
    outputs = shape[0]
    order = (torch.arange(outputs).view(-1, 8)[:, list(_AWQ_ORDER)]).reshape(-1)
    symbols = _unpacked(files.tensor(layer, "qweight"), 4, outputs)[:, order].T.contiguous()
    zeros = _unpacked(files.tensor(layer, "qzeros"), 4, outputs)[:, order].T.contiguous()
    return symbols, files.tensor(layer, "scales").T, zeros


_READERS: Mapping[Layout, Callable[[_Files, str, tuple[int, int]], _Read]] = {
    "packed": _read_packed,
    "bytes": _read_bytes,
    "gptq": _read_gptq,
    "gptq_v2": _read_gptq,
    "awq": _read_awq,
}


def _scales_shape(files: _Files, linear: tuple[int, int]) -> tuple[int, int]:
    return (1, 1) if files.quant_config.scales == "tensor" else (linear[0], -1)


def _unpacked(words: Tensor, bits: int, num: int, *, shift: bool = False) -> Tensor:
    """Return the first `num` quantized values of every row of 32-bit words, which lie one after the other without gaps, as uint8.

    - `words`: int32, shape (rows, words).
    - `shift`: whether quantized values count from the lowest number, and are wanted in two's complement.
    """
    rows = words.shape[0]
    starts = torch.arange(num) * bits
    symbols = torch.empty((rows, num), dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // num)
    for begin in range(0, rows, step):
        chunk = words[begin : begin + step].contiguous().view(torch.uint8)
        # A quantized value may begin in one byte and end in the next.
        both = nn.functional.pad(chunk, (0, 1)).to(torch.int16)
        both = both[:, :-1] | (both[:, 1:] << 8)
        qvalues = (both[:, starts // 8].to(torch.int32) & 0xFFFF) >> (starts % 8).to(torch.int32)
        symbols[begin : begin + step] = qvalues.bitwise_and_(2**bits - 1).to(torch.uint8)
    return symbols.bitwise_xor_(2 ** (bits - 1)) if shift else symbols
