"""Seconds of an operation on a device, term by term.

Each matrix product is a roofline of its own: on a GPU the longer of multiplying and of moving its operands, on a
CPU their sum. A CPU runs one kernel
after the other and dispatches between them; a GPU runs kernels while the host launches the next, so it is either
the kernels or the launches that take the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from costmodel.formats import FORMATS
from costmodel.formats.codec_time import codec_terms
from costmodel.formats.quant_passes import PASSES, Memory, QuantPass, traffic_bytes
from costmodel.rates.profile import Bound, DeviceType, Profile
from costmodel.work import Attention, Matmul, Work
from topology.errors import ProfileError

CopyDirection = Literal["h2d", "d2h"]

_SUM_BYTES = 4
"""Of a sum of products of integers."""

_HOST_TERMS = ("dispatch", "overhead")
_SERIAL_TERMS = frozenset({"sampling", "skip", "allocation", "codec", *_HOST_TERMS})
"""What one core does alone: torch draws on one thread of a CPU, unless the executor cuts a draw for several."""


@dataclass(frozen=True)
class OperationCost:
    """Cost of one operation on one device.

    Attributes
    ----------
    seconds : float
        Duration with nothing else running.
    terms : mapping of str to float
        Seconds by cause: ``matmul``, ``attention``, ``elementwise``, ``exponential``, ``param_pass``, ``sampling``,
        ``shared_sampling``, ``skip``, ``factor``, ``cast``, ``copy``, ``allocation``, ``kernels``, ``gather``, ``dispatch``, ``overhead``,
        and those of :func:`~costmodel.formats.codec_time.codec_terms`. On a CPU they add up to `seconds`; on a GPU launches and kernels overlap.
    limiter : str
        The largest term.
    cores : float
        Number of host cores that it keeps busy, averaged over its duration.
    memory_bytes : int
        Bytes that it moves through the device's memory: what caches serve is left out, and a copy on a CPU counts
        at its source and at its target.
    """

    seconds: float
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    limiter: str = "overhead"
    cores: float = 0.0
    memory_bytes: int = 0


def estimate(
    work: Work, profile: Profile, *, bound: Bound = "central", direction: CopyDirection = "h2d"
) -> OperationCost:
    """Return what `work` costs on the device of `profile`.

    - `bound`: ``low`` and ``high`` set every constant to the end of its interval that makes the work shortest or longest; they
      enclose the truth if the constants' intervals do.
    - `direction`: which way ``copy_bytes`` go.

    Raises ProfileError if the profile has no rate for the work's formats.
    """
    values = profile.values(bound)
    terms = work_terms(work, values, direction)
    if work.codec_work:
        terms |= codec_terms(dict(work.codec_work), values, profile.device_type)
    seconds = combine_terms(terms, profile.device_type)
    return OperationCost(
        seconds=seconds,
        terms=MappingProxyType(terms),
        limiter=max(terms, key=lambda name: terms[name]),
        cores=_busy_cores(terms, seconds, profile),
        memory_bytes=_memory_bytes(work, values["cache_bytes"], profile.device_type),
    )


def work_terms(work: Work, values: Mapping[str, float], direction: CopyDirection = "h2d") -> dict[str, float]:
    """Return the seconds of each cause, for constants given by name (see :data:`~costmodel.rates.profile.CONSTANT_UNITS`)."""
    width = FORMATS[work.dtype].element_bytes
    # What a CPU's threads share in chunks is a kernel for each of them.
    num_kernels = max(work.num_kernels, work.num_shared_kernels if values["gather_s"] else 0)
    terms = {
        "matmul": sum(_matmul_s(op, work.dtype, width, values) for op in work.matmuls),
        "attention": sum(_attention_s(op, work.dtype, width, values) for op in work.attention),
        "elementwise": _cached_s(
            _bytes_of(work, "elementwise", values), work.num_kernels, "elementwise", values
        ),
        "exponential": work.num_exponentials / values["exponential_rate"],
        "param_pass": _param_pass_s(work, values),
        "quantized": sum(
            num / rate for name, num in work.quant_passes if (rate := _quant_rate(name, work.dtype, values))
        ),
        **_sampling_terms(work, values),
        "rounding": _rounding_s(work, values),
        "factor": work.num_factor_flops / values.get("factor_rate", math.inf),
        "cast": _cast_s(work, values),
        "copy": _copy_s(work, values, direction),
        "allocation": work.num_allocations * values["allocation_s"]
        + work.allocation_bytes * values["allocation_s_per_byte"],
        "kernels": work.num_kernels * values["kernel_s"],
        "gather": (work.num_shared_kernels + work.num_products + len(work.attention)) * values["gather_s"],
        "dispatch": num_kernels * values["dispatch_s"]
        + work.num_products * _by_format("product_s", work.dtype, values)
        + sum(values.get(f"call_s.{code}", values.get("call_s", 0.0)) for code in work.calls),
        "overhead": values["instruction_s"],
    }
    return {name: seconds for name, seconds in terms.items() if seconds > 0 or name == "overhead"}


def combine_terms(terms: Mapping[str, float], device_type: DeviceType) -> float:
    """Return the duration: the sum on a CPU, the longer of kernels and launches on a GPU.

    Kernels that a copy is listed with are launched before it.
    """
    if device_type == "cpu":
        return sum(terms.values())
    host = sum(terms.get(name, 0.0) for name in _HOST_TERMS)
    behind_s = terms.get("copy", 0.0) if "dispatch" in terms else 0.0
    return behind_s + max(sum(terms.values()) - behind_s - host, host)


def device_s(cost: OperationCost, device_type: DeviceType) -> float:
    """Return the seconds that the device itself is busy with an operation: without the host's, and what launches kernels."""
    if device_type == "cpu":
        return cost.seconds - cost.terms.get("overhead", 0.0) - cost.terms.get("dispatch", 0.0)
    return sum(seconds for name, seconds in cost.terms.items() if name not in _HOST_TERMS)


def _matmul_s(
    op: Matmul, dtype: str, width: int, values: Mapping[str, float], *, batched: bool = False
) -> float:
    """Return the time of products, launched one by one or all in one kernel (`batched`)."""
    if op.format and f"matmul_rate.{op.format}" in values:
        dtype, width = op.format, FORMATS[op.format].element_bytes
    rate = _rate("matmul_rate", dtype, values)
    moving_s = _moving_s(op, width, values)
    if values.get("multiprocessors"):
        return _tiled_s(op, rate, moving_s, values, batched=batched)
    multiplying_s = op.flops / (rate * _efficiency(op, dtype, values))
    shorter_s = min(multiplying_s, moving_s)
    return multiplying_s + moving_s - values["memory_overlap"] * shorter_s


_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.88), (128, 64, 0.6), (64, 128, 0.6), (64, 64, 0.45))
"""Rows and columns that a multiprocessor makes at a time, and what part of the largest tiles' rate they reach: a smaller tile
reads more for what it multiplies. Fitted to published times of cuBLAS on A100, H100 and A40."""
_SPLITS = (1, 2, 4, 8)


def _tiled_s(
    op: Matmul, rate: float, moving_s: float, values: Mapping[str, float], *, batched: bool
) -> float:
    """Return the time of a product on a GPU: tiles are made in waves, one on each multiprocessor, and the last may be short.

    Libraries choose the tile with the least time, and where tiles are few they split sums into parts, which another pass
    adds up.
    """
    num, launches = (op.num, 1) if batched else (1, op.num)
    units = values["multiprocessors"]
    best_s = math.inf
    for rows, columns, reached in _TILES:
        tiles = math.ceil(op.m / rows) * math.ceil(op.n / columns) * num
        for splits in _SPLITS:
            waves = math.ceil(tiles * splits / units)
            tile_flops = 2 * rows * columns * op.k / splits
            adding_s = 4 * op.m * op.n * num * splits / values["memory_bandwidth"] if splits > 1 else 0.0
            multiplying_s = waves * tile_flops * units / (rate * reached)
            best_s = min(best_s, max(multiplying_s, moving_s / launches) + adding_s)
            if tiles > units:
                break
    return launches * (best_s + values.get("kernel_s.product", 0.0))


def _moving_s(op: Matmul, width: int, values: Mapping[str, float]) -> float:
    """Return the time of reading the operands and of writing the product, each once; a CPU's cache keeps some of it."""
    in_memory = values["memory_bandwidth"]
    out = values.get("memory_bandwidth.output")
    num_outputs = op.m * op.n * op.num
    sum_width = _SUM_BYTES if op.format == "int8" else width
    if out is None:
        return (op.elements * width + num_outputs * (sum_width - width)) / in_memory
    written = sum_width * num_outputs - _cached_bytes(sum_width * num_outputs, op.num, values["cache_bytes"])
    return width * (op.elements - num_outputs) / in_memory + written / out


def _efficiency(op: Matmul, dtype: str, values: Mapping[str, float]) -> float:
    """Return the fraction of the large-product rate that a product of this shape reaches."""
    half = _by_format("matmul_half_dim", dtype, values)
    m, n, k = (values.get(f"matmul_half_dim.{dtype}.{dim}", half) for dim in "mnk")
    return op.m / (op.m + m) * (op.n / (op.n + n)) * (op.k / (op.k + k))


def _attention_s(op: Attention, dtype: str, width: int, values: Mapping[str, float]) -> float:
    """Return the time of attention: one fused kernel, or two batched products where scores are stored."""
    if not op.materialised:
        variant = _variant(op, dtype, values)
        half_len = _half_len(variant.removeprefix(dtype + "."), values)
        saturation = op.key / (op.key + half_len)
        # Tiles that the diagonal crosses are computed whole.
        half = min(1.0, 0.5 * (1 + values.get("attention_diagonal_len", 0.0) / op.query))
        full_flops = 2 * op.flops if op.causal_skip else op.flops
        computed = half if op.causal_skip else 1.0
        products_s = full_flops * computed / (_rate("attention_rate", variant, values) * saturation)
        num_scores = op.score_elements * computed
        computing_s = products_s + num_scores / _by_format("attention_score_rate", variant, values)
        if not values.get("multiprocessors"):
            return computing_s
        # What a GPU computes meanwhile hides the reading, but short sequences compute little.
        return max(computing_s, op.elements * width / values["memory_bandwidth"])
    scores = Matmul(m=op.query, n=op.key, k=op.head_dim, num=op.num)
    mixing = Matmul(m=op.query, n=op.value_dim or op.head_dim, k=op.key, num=op.num)
    return sum(_matmul_s(product, dtype, width, values, batched=True) for product in (scores, mixing))


def _half_len(name: str, values: Mapping[str, float]) -> float:
    """Return the half length of a kernel and way, of the way with any kernel, or of all."""
    names = (f"attention_half_len.{name}", f"attention_half_len.{name.rsplit('.', 1)[-1]}")
    return next((values[known] for known in names if known in values), values["attention_half_len"])


def _variant(op: Attention, dtype: str, values: Mapping[str, float]) -> str:
    """Return the name behind ``attention_rate.`` of what does an attention, as far as the profile tells kernels apart."""
    names = (f"{dtype}.{op.kernel}", dtype)
    ways = (".backward", "") if op.backward else ("",)
    known = (name + way for way in ways for name in names if f"attention_rate.{name}{way}" in values)
    return next(known, dtype)


def _cached_s(
    size_bytes: int, num_kernels: int, quantity: str, values: Mapping[str, float], dtype: str = ""
) -> float:
    """Return the time of a pass of which each kernel finds up to ``cache_bytes`` in cache."""
    cached = _cached_bytes(size_bytes, num_kernels, values["cache_bytes"])
    in_cache = _by_format(f"{quantity}_cache_bandwidth", dtype, values)
    in_memory = _by_format(f"{quantity}_bandwidth", dtype, values)
    return cached / in_cache + (size_bytes - cached) / in_memory


def _cached_bytes(size_bytes: int, num_kernels: int, cache_bytes: float) -> float:
    return min(float(size_bytes), cache_bytes * max(1, num_kernels))


def _param_pass_s(work: Work, values: Mapping[str, float]) -> float:
    scratch_s = _bytes_of(work, "scratch", values) / _by_format("scratch_bandwidth", work.dtype, values)
    return scratch_s + _cached_s(_bytes_of(work, "param_pass", values), 1, "param_pass", values, work.dtype)


def _bytes_of(work: Work, memory: Memory, values: Mapping[str, float]) -> int:
    """Return the bytes of a work's passes, those over quantized values among them of which no rate of their own is known."""
    size_bytes: int = getattr(work, f"{memory}_bytes")
    unknown = [op for op in work.quant_passes if not _quant_rate(op[0], work.dtype, values)]
    return size_bytes + traffic_bytes(unknown, memory, work.dtype)


def _quant_rate(name: QuantPass, dtype: str, values: Mapping[str, float]) -> float | None:
    """Return the elements that a pass over quantized values takes per second, in a format or in all; None where nobody has measured it."""
    rate = values.get(f"quant_rate.{name}.{dtype}") if PASSES[name].num_numbers else None
    return values.get(f"quant_rate.{name}") if rate is None else rate


def _sampling_terms(work: Work, values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of what one thread draws, of what all draw at once, and of what is passed over."""
    if not any((work.num_normals, work.num_skipped, work.num_shared_samplings, work.num_seeds)):
        return {}
    number_s = 1 / _rate(f"sampling_rate.{work.distribution}", work.sampling_dtype, values)
    sampled = f"{work.distribution}.{work.sampling_dtype}"
    alone_s = (work.num_normals - work.num_shared_normals) * number_s
    fraction = _by_format("shared_sampling_fraction", sampled, values) if work.num_shared_samplings else 1.0
    seeding_s = work.num_seeds * values.get("seed_s", 0.0)
    shared_s = (work.num_shared_normals * number_s + seeding_s) * fraction
    split_s = work.num_split_sequences * values.get("split_s", 0.0)
    # A device whose generators cannot jump passes over every number.
    jump_s = values.get("jump_s")
    num_passed = work.num_skipped - (0 if jump_s is None else work.num_jumped)
    # Who shares a draw shares what it passes over, too.
    skipped_s = num_passed * number_s * _by_format("skip_fraction", sampled, values) * fraction
    return {
        "sampling": alone_s + work.num_kept_rows * values["kept_row_s"],
        "shared_sampling": shared_s + work.num_shared_samplings * values["sharing_s"] + split_s,
        "skip": skipped_s + work.num_jumps * (jump_s or 0.0),
    }


def _rounding_s(work: Work, values: Mapping[str, float]) -> float:
    """Return the time of random numbers to round with: no more than that of as many normals, by all threads where they draw together."""
    if not work.num_rounded:
        return 0.0
    fraction = (
        _by_format("shared_sampling_fraction", "normal.float32", values) if work.num_shared_samplings else 1.0
    )
    return fraction * work.num_rounded / _rate("sampling_rate.normal", "float32", values)


def _copy_s(work: Work, values: Mapping[str, float], direction: CopyDirection) -> float:
    if work.copy_bytes == 0:
        return 0.0
    cached = _cached_bytes(work.copy_bytes, 1, values["cache_bytes"])
    in_memory_s = (work.copy_bytes - cached) / values[f"copy_{direction}_bandwidth"]
    return values["copy_latency_s"] + cached / values["copy_cache_bandwidth"] + in_memory_s


def _cast_s(work: Work, values: Mapping[str, float]) -> float:
    if work.num_casts == 0:
        return 0.0
    pair = f"cast_rate.{work.cast_dtype}.{work.cast_target}"
    rate = values[pair] if pair in values else _by_format("cast_rate", work.cast_dtype, values)
    return work.num_casts / rate


def _by_format(quantity: str, name: str, values: Mapping[str, float]) -> float:
    """Return a constant for a format or a kind of code, or the one for all of them."""
    rate = values.get(f"{quantity}.{name}")
    return values[quantity] if rate is None else rate


def _rate(quantity: str, dtype: str, values: Mapping[str, float]) -> float:
    try:
        return values[f"{quantity}.{dtype}"]
    except KeyError:
        known = sorted(
            name.removeprefix(f"{quantity}.") for name in values if name.startswith(f"{quantity}.")
        )
        message = f"the profile has no {quantity} for {dtype}"
        hint = (
            f"it has {', '.join(known)}; use one of these formats" if known else "measure it: zosim calibrate"
        )
        raise ProfileError(message, hint=hint) from None


def _busy_cores(terms: Mapping[str, float], seconds: float, profile: Profile) -> float:
    if seconds <= 0:
        return 0.0
    if profile.device_type == "gpu":
        return min(1.0, sum(terms.get(name, 0.0) for name in _HOST_TERMS) / seconds)
    cores = dict.fromkeys(_SERIAL_TERMS, 1.0) | {"copy": profile.values()["copy_cores"]}
    return sum(cost * cores.get(name, profile.num_threads) for name, cost in terms.items()) / seconds


def _memory_bytes(work: Work, cache_bytes: float, device_type: DeviceType) -> int:
    products = sum(op.elements for op in work.matmuls) * FORMATS[work.dtype].element_bytes
    activations, parameters = _bytes_of(work, "elementwise", {}), _bytes_of(work, "param_pass", {})
    cached = _cached_bytes(activations, work.num_kernels, cache_bytes)
    cached += _cached_bytes(parameters, 1, cache_bytes)
    numbers_bytes = work.num_normals * FORMATS[work.sampling_dtype].element_bytes
    casts = work.num_casts * (FORMATS[work.dtype].element_bytes + FORMATS[work.cast_dtype].element_bytes)
    copies = work.copy_bytes * (2 if device_type == "cpu" else 1)
    return round(products + activations + parameters - cached + numbers_bytes + casts + copies)
