"""GPU architectures: what a data sheet does not print of a device, but its name tells.

A device is recognised by its product name, as the driver spells it; one that is not known has no architecture, and is
predicted from what its data sheet says alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

from costmodel.devices.nccl import Generation
from costmodel.formats import FORMATS, DType
from costmodel.work import AttentionKernel
from topology.documents import USER_CATALOGUE, user_catalogue
from topology.errors import TopologyError
from topology.reading import shipped_yaml
from topology.renamed import with_present_names
from topology.schema import DeviceSpec

AttentionWay = tuple[AttentionKernel | Literal[""], Literal["forward", "backward"]]


RENAMED: Mapping[str, str] = {"architectures.*.float64_part": "float64_fraction"}
"""Fields of architectures that were renamed (:mod:`topology.renamed`)."""


@dataclass(frozen=True)
class Architecture:
    """What GPUs of one design have in common."""

    name: str
    names: str  # pattern of the products' names
    # Floating-point operations in float32 of one multiprocessor and clock, two for a multiply-add: its lanes, from the architecture's
    # whitepaper. With the peak of the data sheet they tell the boost clock.
    float32_per_clock: int
    nccl: Generation  # row of NCCL's tables
    # What fused kernels of attention do, by kernel (`AttentionKernel`, empty for what torch takes) and way: the part of the peak at
    # which they multiply, and the clocks of a multiprocessor that a score takes besides, for its exponential, maximum and sum. The two
    # are not done at once, except in FlashAttention 3.
    attention: Mapping[AttentionWay, tuple[float, float]] = field(default_factory=dict)
    cache_mib: float = 4.0  # L2 cache, of the largest of these products
    # Energy of one operation of a half-precision product on random numbers, what feeds it included, in joules.
    flop_j: float = 0.0
    # Threads that one multiprocessor keeps at a time (CUDA C++ Programming Guide, technical specifications per compute capability).
    threads: int = 2048
    float64_fraction: float = 0.5  # rate of float64 beside float32's, without tensor cores
    # multiplies_float8, multiplies_int8: whether its tensor cores multiply floats or integers of 8 bits, twice as fast as floats of 16.
    multiplies_float8: bool = False
    multiplies_int8: bool = True


def _read() -> tuple[tuple[Architecture, ...], dict[AttentionWay, float]]:
    """Return the known designs and the half lengths of their attention, of the shipped file and the user's."""
    file = resources.files("costmodel") / "data" / "architectures.yaml"
    data = shipped_yaml(file.read_text(encoding="utf-8"))
    tables: dict[str | None, dict[AttentionWay, tuple[float, float]]] = {
        name: {(kernel, way): (fraction, clocks) for kernel, way, fraction, clocks in rows}
        for name, rows in data["attention"].items()
    }
    # The user's come first: who names a GPU that a shipped pattern has, too, means it.
    own = with_present_names(user_catalogue(), RENAMED).get("architectures") or {}
    rows = own | data["architectures"]
    try:
        listed = tuple(
            Architecture(name=name, **{**row, "attention": tables.get(row.get("attention"), {})})
            for name, row in rows.items()
        )
    except TypeError as error:
        message = f"an architecture of {USER_CATALOGUE} is not valid: {error}"
        raise TopologyError(message, hint="costmodel/data/architectures.yaml has the fields") from None
    return listed, {(kernel, way): tokens for kernel, way, tokens in data["half_lengths"]}


ARCHITECTURES, _HALF_LENGTHS = _read()
_A100_FLOP_PER_BYTE = 312e12 / 2.039e12


def half_lengths(spec: DeviceSpec) -> dict[AttentionWay, float]:
    """Return the tokens at which fused kernels of attention reach half of their rate.

    What a tile loads before its products and stores behind them goes at the memory's pace. The more operations fit into that
    time, the longer must a sequence be to hide it.
    """
    peak = spec.peak_dense.get("fp16")
    if peak is None:
        return {}
    ratio = peak.in_si("compute") / spec.memory_bandwidth_bytes_per_s / _A100_FLOP_PER_BYTE
    return {way: tokens * ratio for way, tokens in _HALF_LENGTHS.items()}


@cache
def _architecture(name: str) -> Architecture | None:
    return next((item for item in ARCHITECTURES if re.search(item.names, name)), None)


def architecture_of(spec: DeviceSpec) -> Architecture | None:
    """Return the architecture of a GPU, None where its name is not known and for other devices.

    >>> from topology.documents import load_preset
    >>> architecture_of(load_preset("dgx-h100").device_spec("gpu0")).name
    'hopper'
    """
    # "RTX 6000 Ada Generation" and "RTX A6000" are of different designs, "A100" is not "RTX A1000".
    return _architecture(spec.name) if spec.type == "gpu" else None


def clocks_per_s(spec: DeviceSpec) -> float:
    """Return the boost clock of a GPU in Hz times its multiprocessors: cycles of all of them in a second.

    It follows from the float32 peak and the lanes. An unknown device counts as having 128 lanes per multiprocessor.
    """
    architecture = architecture_of(spec)
    return spec.peak_flop_per_s("fp32") / (256 if architecture is None else architecture.float32_per_clock)


def has_half_warp_lanes(spec: DeviceSpec) -> bool:
    """Whether a multiprocessor has 64 lanes of float32 for its four schedulers, so that an instruction of a warp of 32 takes two clocks."""
    architecture = architecture_of(spec)
    return architecture is not None and architecture.float32_per_clock == 128


def is_widened(spec: DeviceSpec, dtype: DType) -> bool:
    """Whether a GPU has no units for a 16-bit format, so that torch multiplies it in float32; nor has torch a fused attention in bfloat16 then.

    >>> from topology.documents import load_preset
    >>> t4 = load_preset("t4-1x").device_spec("gpu0")
    >>> is_widened(t4, "bfloat16"), is_widened(t4, "float16")
    (True, False)

    .. [1] https://github.com/pytorch/pytorch/pull/116026: the memory-efficient attention takes bfloat16 from compute capability 8.0 on.
    """
    peak = FORMATS[dtype].peak
    return spec.type == "gpu" and dtype in ("float16", "bfloat16") and peak not in spec.peak_dense


def multiplies_float8(spec: DeviceSpec) -> bool:
    """Whether a device has units for floats of 8 bits; torch refuses to multiply those where it has none [1]_.

    .. [1] https://github.com/pytorch/pytorch/pull/164251
    """
    architecture = architecture_of(spec)
    return "fp8" in spec.peak_dense or (architecture is not None and architecture.multiplies_float8)


def int8_peak(spec: DeviceSpec) -> tuple[float, str] | None:
    """Return a device's peak of int8 products in 1/s with a remark on its origin, None where it has no units for them.

    GeForce cards multiply integers four times as fast as 16-bit floats that are added up in 32 bits, but their peaks are declared.
    """
    declared, half = spec.peak_dense.get("int8"), spec.peak_dense.get("fp16")
    if declared is not None:
        return declared.in_si("compute"), f"data sheet peak of {spec.name}"
    architecture = architecture_of(spec)
    if architecture is None or half is None or not architecture.multiplies_int8:
        return None
    return 2 * half.in_si("compute"), f"{spec.name} declares no peak for int8: twice that of float16"


def float64_fraction(spec: DeviceSpec) -> float:
    """Return float64's rate as a part of float32's, where a data sheet does not print it: a half, or what a known GPU has."""
    architecture = architecture_of(spec)
    return 0.5 if architecture is None else architecture.float64_fraction


_STACK_BYTES = 1024
"""Of a thread, unless a program asks for more (``cudaLimitStackSize``)."""


def stacks_bytes(spec: DeviceSpec) -> int:
    """Return what a context sets aside for the stacks of all threads that a GPU keeps at a time."""
    architecture = architecture_of(spec)
    threads = 2048 if architecture is None else architecture.threads
    return round(spec.num_cores) * threads * _STACK_BYTES


def sustained_flop_per_s(spec: DeviceSpec) -> float:
    """Return the rate of half-precision products at which a GPU draws its rated power; infinite where that is not known.

    ``rate = (tdp - idle) / energy``, where a fifth of the rated power goes into what does not multiply: leakage, clocks,
    memory, links. Clocks that products on random numbers would drive beyond the limit are lowered within milliseconds; short
    kernels, and products of zeros, do not show it: products of 8192 on an A100 of 400 W run at 295 Tflop/s with zeros and at 258
    with normal numbers [1]_, which is A100's energy. H100's is fitted: training steps on 700 W end near 660 where single
    products reach 790 (llm-foundry's tables of training throughput). AMD's MI300X reaches about 45 % of its peak of 1,307 Tflop/s in half precision on
    750 W [2]_; its collectives are taken to be as NCCL's on A100s. Those of other designs are assumed from their processes.

    .. [1] H. He, "Strangely, matrix multiplications on GPUs run faster when given predictable data", 2024,
       https://www.thonking.ai/p/strangely-matrix-multiplications
    .. [2] Ambati et al., "AMD MI300X GPU performance analysis", arXiv:2510.27583, 2025, of products in FP8, BF16 and FP16, and
       81 % of its memory's bandwidth; as https://aiweekly.co/alerts/amd-mi300x-hits-only-45-of-peak-flops-in-practice reports it
       (read on 2026-11-23; the paper's own figures were not at hand).
    """
    architecture, watts = architecture_of(spec), spec.tdp_watts
    if architecture is None or not architecture.flop_j or watts is None:
        return math.inf
    return (1 - _IDLE_FRACTION) * watts / architecture.flop_j


_IDLE_FRACTION = 0.2
"""Assumed. Energies were taken from measured rates with it: where it is wrong they are too, and the rates at that power stay."""
