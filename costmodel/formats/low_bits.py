"""Weights in few bits: which values they can take, what shares a scale, and what memory the two take.

Nothing here has a tensor: executors round, pack and multiply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from costmodel.formats import FORMATS, QuantFormat, ScaleScope
from costmodel.formats.distributions import COUNTER_BLOCK_ELEMENTS
from costmodel.formats.quant_passes import QuantPass
from costmodel.models.model_spec import ParamGroup
from costmodel.work import Work
from topology.errors import PlanError

Fit = Literal["range", "least-error"]
"""How scales are taken: such that the grid spans the largest weight, or such that the mean squared error is least."""

Linear = tuple[int, int]
"""Outputs and inputs of a linear layer."""

UPDATED_ELEMENTS = 1 << 16
"""Quantized values that an update changes at a time on a CPU, whose cache their temporaries fit into."""

_LEAST_UPDATED = 1 << 12
"""Quantized values that take about as long to update as to begin the passes over them."""

UNIFORMS_AT_ONCE = 1 << 20
"""Random numbers that a CPU's threads draw for updates before torch's threads pass over them."""

SHARED_UNIFORMS = 1 << 17
"""Random numbers that take longer than to get threads together that share them."""

ROUNDED_AT_ONCE = 1 << 19
"""Numbers of a perturbation that are drawn there, and as many to round them by, before they become quantized."""

SEQUENTIAL_AT_ONCE = 1 << 18
"""Numbers of a perturbation that one generator after the other draws, or threads that share its numbers, before they become quantized."""

PASSED_ELEMENTS = 1 << 17
"""Of these, those that become quantized together on a CPU, in its caches."""

TILE_ELEMENTS = 3 << 17
"""Outputs of a product of bytes that are summed and scaled at a time on a CPU, whose cache their temporaries fit into."""

TILE_ROWS = 1024
"""Most rows of them: weights are laid out anew for every product."""

PACKED_ELEMENTS = 1 << 15
"""Quantized values of a perturbation that are taken out of bytes that they share, or put there, at a time on a CPU, in the thread that asks."""

FILLED_ROWS = 32
"""Rows of a sparse perturbation are filled up to a multiple of so many before they are multiplied."""

EXACT_TERMS = 1 << 10
"""Products of two bytes, 2**14 at most, whose sum float32 holds exactly: every integer up to 2**24."""

FLOAT_TILE_COLUMNS = 256
"""Outputs of a product of bytes that is made of numbers, on a CPU without instructions for integers, at a time."""

_TILE_COLUMNS = 64
"""Columns come in multiples of so many."""

_UPDATE_TEMPORARY_BYTES = 23
"""Bytes of temporaries that are alive for each of them beside the random numbers."""

_UPDATE_KERNELS = 24
"""Passes over such temporaries, the counts of what changed among them."""

_UNIFORM_SHARE = 0.5
"""Part of a random number's time that passing over one takes: assumed, no probe tells it."""

_FLOAT_TEMPORARY_BYTES = 13
"""Bytes of temporaries besides where the distance between neighbours on the grid is each number's own."""

_CONTAINERS = (2, 4, 8)
"""Bits that a quantized value takes in memory: a byte holds one, two or four."""


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How the weights of linear layers are quantized: format, scales and zero points.

    >>> int4 = QuantConfig("int4", "group", group_elements=128, dtype="bfloat16")
    >>> int4.qvalue_bytes((768, 3072)), int4.scale_bytes((768, 3072))
    (1179648, 36864)
    """

    format: QuantFormat  # format of the stored values
    scales: ScaleScope = "channel"  # what shares a scale
    group_elements: int = 128  # neighbouring inputs that share one, where `scales` is `"group"`
    # Whether quantized values count from a number of their own, so that the grid spans the least and the largest weight; else it is
    # symmetric, and 0 is stored as 0.
    has_zero_point: bool = False
    dtype: str = "float32"  # format of the scales, and of parameters beside them that are no matrices
    is_full_range: bool = False  # whether symmetric integers use their lowest number, too: -8 of int4
    # Whether scales span the largest weight, or are those with the least mean squared error.
    fit: Fit = "range"
    # Format of the A and B of adapters beside these layers, one scale for each; None where they are numbers.
    adapters: QuantFormat | None = None

    @property
    def of_adapters(self) -> QuantConfig | None:
        """How A and B of adapters are quantized; None if they are not."""
        return None if self.adapters is None else QuantConfig(self.adapters, "tensor", dtype=self.dtype)

    def tuned(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return the quantized matrices of a group that are tuned: of its layers, or of adapters."""
        of_side_path = self.of_adapters
        adapters = [] if of_side_path is None else [(one, of_side_path) for one in group.trainable_matrices]
        return [*((one, self) for one in group.linears), *adapters]

    def frozen(self, group: ParamGroup) -> list[QuantizedMatrix]:
        """Return the quantized matrices of a group that are frozen."""
        return [(one, self) for one in group.frozen_linears]

    @property
    def container_bits(self) -> int:
        """Bits of a stored value in memory."""
        return next(bits for bits in _CONTAINERS if bits >= FORMATS[self.format].bits)

    def num_scales(self, linear: Linear) -> int:
        """Return the number of scales of a weight."""
        outputs, inputs = linear
        return {"tensor": 1, "channel": outputs, "group": outputs * (inputs // self.group_elements)}[
            self.scales
        ]

    def qvalue_bytes(self, linear: Linear) -> int:
        """Return the bytes of a weight's stored values; each output channel begins with a new byte."""
        outputs, inputs = linear
        return outputs * -(-inputs * self.container_bits // 8)

    def scale_bytes(self, linear: Linear) -> int:
        """Return the bytes of a weight's scales."""
        return FORMATS[self.dtype].bytes(self.num_scales(linear))

    def zero_bytes(self, linear: Linear) -> int:
        """Return the bytes of a weight's zero points, one for each scale."""
        return self.num_scales(linear) if self.has_zero_point else 0

    @property
    def num_arrays(self) -> int:
        """Stretches of memory that a weight takes: quantized values, scales, and what else there is."""
        return 2 + self.has_zero_point

    def size_bytes(self, linears: Iterable[Linear]) -> int:
        """Return the bytes of some weights."""
        return sum(self.qvalue_bytes(one) + self.scale_bytes(one) + self.zero_bytes(one) for one in linears)

    def check(self, linears: Iterable[Linear]) -> None:
        """Refuse weights that have no whole number of groups.

        Raises
        ------
        PlanError
        """
        linears = list(linears)
        for outputs, inputs in linears:
            if self.scales == "group" and inputs % self.group_elements:
                sizes = (128, 64, 32, 16, 8)
                divisors = [size for size in sizes if not any(columns % size for _, columns in linears)]
                raise PlanError(
                    f"groups of {self.group_elements} do not divide the {inputs} inputs of a linear layer with "
                    f"{outputs} outputs",
                    hint=f"use --weight-group {divisors[0]}, or --weight-scales channel"
                    if divisors
                    else "use --weight-scales channel",
                )


QuantizedMatrix = tuple[Linear, QuantConfig]
"""Outputs and inputs of a matrix, and how it is kept."""


def tile_columns(rows: int, outputs: int) -> int:
    """Return how many of the outputs of so many rows are made at a time on a CPU.

    >>> tile_columns(512, 768), tile_columns(512, 3072), tile_columns(1024, 3000)
    (768, 768, 384)
    """
    num_tiles = -(-rows * outputs // TILE_ELEMENTS)
    even = -(-outputs // num_tiles)
    return min(outputs, even + -even % _TILE_COLUMNS)


def num_elements(matrices: Iterable[QuantizedMatrix]) -> int:
    """Return the elements of some matrices that are quantized."""
    return sum(outputs * inputs for (outputs, inputs), _ in matrices)


def quantized_forward_work(
    work: Work,
    linears: Sequence[Linear],
    quant_config: QuantConfig,
    *,
    kernel: str,
    are_inputs_quantized: bool,
    has_side_path: bool,
    nonzero_share: float = 1.0,
    kept_bytes: int = 0,
    perturbation_format: str = "int8",
) -> Work:
    """Return the work of a segment's forward whose linear layers are quantized, from that with plain weights.

    - `work`: of the forward with plain weights, with a product for each linear layer.
    - `linears`: those that are quantized.
    - `are_inputs_quantized`: whether inputs are rounded to a byte before they are multiplied.
    - `has_side_path`: whether a rounded perturbation is added.
    - `nonzero_share`: share of its rows that are not 0, for which alone something is added.
    - `kept_bytes`: what of the segment is alive beside a layer: the sum that residuals are added to.
    - `perturbation_format`: that the quantized values of the perturbation are kept in.

    ``dequantize`` makes one weight at a time of its quantized values, a temporary; quantized values that share a byte are parted before. Those of
    floating-point formats are made float32 first, by a table of 32-bit places where they have four bits. Under
    ``int_mm`` weight and perturbation are products of their own, of integers, whose sums are scaled in passes of their own;
    ``scaled_mm`` is the same in e4m3, to which the perturbation is cast. What
    is alive at one layer is its input, its output and its temporaries; the segment's other temporaries are smaller then.
    """
    plain, products = list(work.matmuls), []
    passes: Counter[QuantPass] = Counter()
    param_pass_bytes = num_kernels = largest = 0
    is_packed = FORMATS[perturbation_format].bits < 8
    width = FORMATS[work.dtype].element_bytes
    # Quantized values and scales of a norm's output, which queries, keys and values share, live as long as it does.
    shared = (kept_bytes // width + 4 * max((one.m for one in plain), default=0)) * are_inputs_quantized
    for outputs, inputs in linears:
        product = next((part for part in plain if (part.n, part.k) == (outputs, inputs)), None)
        if product is None:
            continue
        plain.remove(product)
        # A product that is made several times makes weights of quantized values as often.
        rows, elements, times = product.m, outputs * inputs, product.num
        is_parted = quant_config.container_bits < 8
        passes["layers"] += times
        passes["layers.sparse"] += times * (has_side_path and nonzero_share < 1)
        passes["parting"] += times * elements * is_parted
        num_kernels += 4 * times * is_parted
        alive = max(product.alive_bytes, rows * inputs * width + kept_bytes)
        levels = elements * (is_parted + 4 * quant_config.has_zero_point)
        if are_inputs_quantized:
            passes["inputs"] += times * rows * inputs
            num_kernels += 5 * times
            alive += rows * (inputs + 4) + shared
            largest = max(largest, alive + _quantizing_bytes(rows, inputs, width, kernel))
        # Rows of the perturbation that are not 0: their mean, which time is made of, and their most, which memory is.
        nonzero, most = round(outputs * nonzero_share) * has_side_path, _most_rows(outputs, nonzero_share)
        passes["unpacking"] += times * nonzero * inputs * is_packed
        if kernel != "dequantize":
            kind = "int8" if kernel == "int_mm" else "float8_e4m3"
            products.append(product.model_copy(update={"format": kind}))
            if nonzero:
                products.append(product.model_copy(update={"n": nonzero, "format": kind}))
            cast = nonzero * inputs * (kernel == "scaled_mm")
            param_pass_bytes += 2 * times * cast
            num_kernels += times * (bool(cast) + 3 * (1 + has_side_path))
            sums, is_gathered = rows * outputs * 4, most < outputs
            passes["sums"] += times * rows * (outputs + nonzero * (not is_gathered))
            passes["gathering"] += times * rows * nonzero * is_gathered
            made = most + -most % FILLED_ROWS if is_gathered else outputs
            of_rows = rows * made * 4
            numbers = _numbers_bytes(rows, outputs, inputs) if kernel == "int_mm" else 0
            taken = (most if is_gathered else outputs) * inputs
            passing = max(taken_out_bytes(taken, perturbation_format) - taken, 0)
            along = of_rows + max(of_rows, numbers, passing) + taken * (kernel == "scaled_mm")
            if is_gathered:  # that of a sparse perturbation's rows is made first, and stays
                along += taken + made * inputs
            else:
                along += sums + taken * is_packed
            kept = of_rows * is_gathered * has_side_path
            # While sums are made, while the perturbation's are, and while they become the output.
            alive += max(
                kept + sums + max(sums, numbers) + levels,
                along * has_side_path,
                kept + sums + rows * outputs * width,
            )
        else:
            products.append(product)
            passes[_of_format("levels", quant_config.format)] += times * elements
            passes["zeros"] += times * elements * quant_config.has_zero_point
            passes["side_path"] += times * nonzero * inputs
            num_kernels += times * (1 + has_side_path)
            is_gathered = has_side_path and most < outputs
            gathered = most * inputs * (width + (not is_packed)) * is_gathered
            if is_packed and has_side_path:  # in chunks, where all rows are added
                num = most * inputs if is_gathered else min(elements, PACKED_ELEMENTS)
                gathered += taken_out_bytes(num, perturbation_format)
            if FORMATS[quant_config.format].is_float:
                levels = elements * max(4, is_parted * (9 - width))
            # The weight as numbers outlives what it is made of, and is there when the output is.
            alive += elements * width + max(levels, gathered, rows * outputs * width)
            alive += rows * inputs * width * are_inputs_quantized
        largest = max(largest, alive)
    return work.model_copy(
        update={
            "matmuls": (*plain, *products),
            "param_pass_bytes": work.param_pass_bytes + param_pass_bytes,
            "quant_passes": (Work(quant_passes=_counted(passes)) + work).quant_passes,
            "num_kernels": work.num_kernels + num_kernels,
            "workspace_bytes": max(work.workspace_bytes + shared, largest),
        }
    )


def _quantizing_bytes(rows: int, inputs: int, width: int, kernel: str) -> int:
    """Return what inputs take while they become quantized, in float32 a part at a time, and where these become numbers again, whole."""
    elements = rows * inputs
    if kernel == "dequantize":
        return elements * (4 + width * (width != 4))
    return 4 * min(elements, max(TILE_ELEMENTS, inputs))


def _of_format(name: Literal["levels", "updates"], quantized: QuantFormat) -> QuantPass:
    """Return the pass over quantized values of a format: those of floating-point formats are passes of their own."""
    stored = FORMATS[quantized]
    return cast("QuantPass", f"{name}.float{stored.bits}" if stored.is_float else name)


def _counted(passes: Mapping[QuantPass, int]) -> tuple[tuple[QuantPass, int], ...]:
    return tuple(sorted((name, num) for name, num in passes.items() if num))


def taken_out_bytes(num_elements: int, perturbation_format: str) -> int:
    """Return the bytes of some quantized values of a perturbation while they are taken out of bytes that they share; none where they share none.

    >>> taken_out_bytes(1000, "int4"), taken_out_bytes(1000, "int8")
    (2500, 0)
    """
    kept = FORMATS[perturbation_format]
    is_packed = kept.bits < 8
    return (num_elements + kept.bytes(num_elements) + min(num_elements, PACKED_ELEMENTS)) * is_packed


def quantized_sampling_work(
    num_elements: int,
    *,
    is_sign: bool,
    num_tensors: int,
    perturbation_format: str,
    sparse: Sequence[Linear] = (),
    sequential_elements: int | None = None,
) -> Work:
    """Return what quantizing drawn numbers takes besides.

    - `perturbation_format`: that quantized values are kept in.
    - `sparse`: outputs and inputs of those that are 0 in most of their rows.
    - `sequential_elements`: elements of the largest tensor, where one generator draws one after the other.
    """
    at_once = min(num_elements, ROUNDED_AT_ONCE)
    is_packed = FORMATS[perturbation_format].bits < 8
    # What is drawn of blocks that have rows which move is there beside these.
    rounded = min(max((outputs * inputs for outputs, inputs in sparse), default=0), ROUNDED_AT_ONCE)
    numbers_bytes = (8 * at_once + 4 * rounded) * (not is_sign)
    if sequential_elements is not None:
        numbers_bytes = 4 * min(num_elements, SEQUENTIAL_AT_ONCE)
        numbers_bytes += 8 * min(sequential_elements, PASSED_ELEMENTS) * (not is_sign)
    return Work(
        quant_passes=_counted(
            {
                "draws": 1,
                "tensors": num_tensors,
                "tensors.sparse": len(sparse),
                "signs" if is_sign else "rounding": num_elements,
                "packing": num_elements * is_packed,
            }
        ),
        workspace_bytes=numbers_bytes + 2 * min(num_elements, PACKED_ELEMENTS) * is_packed,
    )


def unpacking_work(num_elements: float, perturbation_format: str, *, at_once: int = 0) -> Work:
    """Return the work of taking quantized values of a perturbation out of bytes that they share, `at_once` at a time."""
    is_packed = FORMATS[perturbation_format].bits < 8
    return Work(
        quant_passes=_counted({"unpacking": round(num_elements) * is_packed}),
        workspace_bytes=taken_out_bytes(at_once, perturbation_format),
    )


def _numbers_bytes(rows: int, outputs: int, inputs: int) -> int:
    """Return what numbers made of bytes take at a time where a CPU multiplies them in float32."""
    at_once, terms, columns = min(rows, TILE_ROWS), min(inputs, EXACT_TERMS), min(outputs, FLOAT_TILE_COLUMNS)
    return 4 * (at_once * terms + columns * terms + 2 * at_once * columns)


def quantized_update_work(
    linears: Sequence[Linear],
    quant_config: QuantConfig,
    nonzero_share: float = 1.0,
    *,
    perturbation_format: str = "int8",
) -> Work:
    """Return the work of updating quantized values along a perturbation, rounded at random: in chunks, whose temporaries stay near.

    Of the rows, only `nonzero_share` are touched. Chunks are kernels of their own on a CPU, whose threads share them.
    """
    elements = round(nonzero_share * sum(outputs * inputs for outputs, inputs in linears))
    temporaries = _UPDATE_TEMPORARY_BYTES + FORMATS[quant_config.format].is_float * _FLOAT_TEMPORARY_BYTES
    most = max((updated_at_once(one, nonzero_share) for one in linears), default=0)
    at_once = min(most, UPDATED_ELEMENTS)
    uniforms = samples_for_rows(linears, nonzero_share, COUNTER_BLOCK_ELEMENTS)
    nonzero = [round(nonzero_share * outputs * inputs) for outputs, inputs in linears]
    return Work(
        dtype="float32",
        sampling_dtype="float32",
        # Quantized values are read and written, those of the perturbation read.
        param_pass_bytes=2 * round(nonzero_share * sum(map(quant_config.qvalue_bytes, linears))) + elements,
        quant_passes=_counted(
            {
                "matrices": len(linears),
                _of_format("updates", quant_config.format): elements,
                "unpacking": elements * (FORMATS[perturbation_format].bits < 8),
            }
        ),
        num_rounded=uniforms.num_sampled + round(_UNIFORM_SHARE * uniforms.num_passed),
        # A matrix of fewer uniforms is drawn by the thread that asks.
        num_shared_samplings=sum(-(-num // UNIFORMS_AT_ONCE) for num in nonzero if num >= SHARED_UNIFORMS),
        num_seeds=uniforms.num_blocks,
        num_kernels=_UPDATE_KERNELS * len(linears),
        num_shared_kernels=_UPDATE_KERNELS * sum(-(-num // UPDATED_ELEMENTS) for num in nonzero),
        workspace_bytes=temporaries * at_once + 4 * min(most, UNIFORMS_AT_ONCE),
    )


def updated_at_once(linear: Linear, share: float) -> int:
    """Return how many quantized values of a matrix an update changes at once at most, where the perturbation is not 0 in that share of the rows.

    Weights that decay do so in all rows: with a sparse perturbation, too, no more of them are updated at a time.

    >>> (
    ...     updated_at_once((3072, 768), 1.0),
    ...     updated_at_once((3072, 768), 0.02),
    ...     updated_at_once((768, 768), 0.0001),
    ... )
    (2359296, 65280, 4096)
    """
    outputs, inputs = linear
    return max(_most_rows(outputs, share) * inputs, min(outputs * inputs, _LEAST_UPDATED))


class RowSamples(NamedTuple):
    """What it takes to draw those rows of matrices that are not 0, from blocks of random numbers."""

    num_blocks: int  # that hold any of them
    # num_sampled, num_passed: numbers from the first of them to the last in each block, which are drawn, and those before, which are
    # passed over.
    num_sampled: int
    num_passed: int


def samples_for_rows(linears: Iterable[Linear], share: float, block_elements: int) -> RowSamples:
    """Return what drawing the rows of some matrices takes each of which moves with probability `share`.

    >>> samples_for_rows([(3072, 768)], 1.0, 16384)
    RowSamples(num_blocks=144, num_sampled=2359296, num_passed=0)
    >>> samples_for_rows([(3072, 768)], 0.02, 16384)
    RowSamples(num_blocks=50, num_sampled=97747, num_passed=364163)
    """
    num_blocks = num_sampled = num_passed = 0.0
    for outputs, inputs in linears:
        rows = min(float(outputs), max(1.0, block_elements / inputs))
        blocks, rests = outputs / rows, (1 - share) ** rows
        # The sum, over a block's rows, of the probability that one of those from it on moves; as many lie before the first as behind the last.
        last = rows - (1 - share) * (1 - rests) / share if share else 0.0
        before = rows * (1 - rests) - last
        num_blocks += blocks * (1 - rests)
        num_sampled += blocks * (last - before) * inputs
        num_passed += blocks * before * inputs
    return RowSamples(round(num_blocks), round(num_sampled), round(num_passed))


def nonzero_rows_bytes(linears: Iterable[Linear], share: float) -> int:
    """Return the most bytes, in hardly any step more, of the numbers of the rows that are not 0 of some matrices."""
    return 8 * sum(_most_rows(outputs, share) for outputs, _ in linears) if share < 1 else 0


def _most_rows(num: int, share: float) -> int:
    """Return how many of `num` rows move in hardly any step more than, where each does with probability `share`."""
    mean = num * share
    # Three standard deviations more.
    return min(num, math.ceil(mean + 3 * math.sqrt(mean * (1 - share))))
