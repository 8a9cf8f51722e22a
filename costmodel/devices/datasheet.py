"""A profile from data-sheet figures alone: central guesses with intervals wide enough to be honest.

What a data sheet prints is a peak; what runs is a fraction of it. The fractions here are stated with their
sources, and a calibration replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from costmodel.devices.collectives import LOOPBACK_BYTES_PER_S, MESSAGE_S
from costmodel.devices.gpus import (
    architecture_of,
    clocks_per_s,
    float64_fraction,
    half_lengths,
    has_half_warp_lanes,
    int8_peak,
    is_widened,
    multiplies_float8,
    stacks_bytes,
    sustained_flop_per_s,
)
from costmodel.formats import CAST_FORMATS, CAST_PAIRS, COMPUTE_FORMATS, FORMATS, DType
from costmodel.formats.distributions import DISTRIBUTIONS, SamplingClass
from costmodel.formats.quant_passes import PASSES
from costmodel.rates.profile import CONSTANT_UNITS, Bound, Constant, Profile
from topology import Topology
from topology.errors import TopologyError
from topology.schema import DeviceSpec

Spread = tuple[float, float, float]
"""Central value, low and high, as factors of a data-sheet figure or as plain numbers."""

_GEMM_GPU: Spread = (0.77, 0.62, 0.90)
_GEMM_GPU_SOURCE = "products whose tiles fill all multiprocessors reach 70-90 % of the dense peak in cuBLAS"
_LANES_GPU: dict[bool, tuple[Spread, str]] = {
    True: (
        (0.95, 0.70, 1.0),
        (
            "products in float32 leave every other clock of a scheduler to loads, so cuBLAS reaches 0.90 to 0.98 of an A100's peak from 2048 on "
            "(https://github.com/triton-lang/triton/issues/2491); 0.71 is what ZO2 prints for its widest models"
        ),
    ),
    False: (
        (0.70, 0.55, 0.92),
        (
            "products in float32 take every clock of a scheduler, loads among them: about 20 of an A10's 31.2 Tflop/s "
            "(https://github.com/NVIDIA/cutlass/issues/941); other designs assumed as it"
        ),
    ),
}
"""Of products without tensor cores, by whether a scheduler has lanes for half a warp."""
_GEMM_CPU: Spread = (0.70, 0.35, 1.60)
_GEMM_CPU_SOURCE = "oneDNN and MKL reach 60-90 % of the peak at base clock; turbo clocks exceed it"
_INT8_GPU: Spread = (0.60, 0.35, 0.85)
_INT8_GPU_SOURCE = (
    "assumed: integer products of cuBLASLt reach less of their peak than those of half precision"
)
_INT8_CPU: Spread = (4.0, 0.8, 20.0)
_INT8_CPU_SOURCE = (
    "of float32's rate: four int8 products in a lane (VNNI); torch 2.13's `_int_mm` took a tenth of float32's time on one "
    "x86-64 CPU with tiles (AMX); without either, bytes are multiplied as float32, at nine tenths of its rate or less"
)
Reach = tuple[float, float]
"""Factors that take the ends of an interval further from its middle."""
_AS_DECLARED: Reach = (1.0, 1.0)
_CPU_HALF = 0.12
_CPU_HALF_REACH: Reach = (0.9, 9.0)
_CPU_HALF_SOURCE = (
    "assumed without AVX512-FP16: torch 2.13 multiplies it at 0.12 of float32's rate, with it at 1.1 (measured on one x86-64 core with "
    "ONEDNN_MAX_CPU_ISA; declare a peak for such a CPU)"
)
_WIDENED: dict[DType, tuple[float, Reach, str]] = {
    "float16": (
        1.0,
        (0.7, 1.1),
        "multiplied in float32, as fast: 6.86 beside 6.76 Tflop/s on a GTX 1080 (https://github.com/kubeedge/ianvs/issues/888)",
    ),
    "bfloat16": (
        0.5,
        (0.5, 1.6),
        (
            "widened as it is read, multiplied in float32: 0.54 of float32's rate on a GTX 1080 (https://github.com/kubeedge/ianvs/issues/888), less "
            "than half on a T4 (https://github.com/openxla/xla/issues/12429); whole passes took 4.3 times float16's time on a T4 "
            "(https://earino.github.io/applied-deep-learning/site/blog/05_bf16_on_t4.html), 4.7 times on a V100 "
            "(https://github.com/huggingface/diffusers/issues/9095)"
        ),
    ),
}
"""Fraction of float32's rate at which a GPU without units for a format multiplies it."""
_ATTENTION_GPU: Spread = (0.45, 0.25, 0.73)
_ATTENTION_GPU_SOURCE = (
    "FlashAttention-2 reaches 50-73 % of an A100's peak (arXiv:2307.08691, abstract) and 35 % of an H100's "
    "(arXiv:2407.08608, abstract)"
)
_ATTENTION_CPU: Spread = (0.40, 0.08, 1.0)
_ATTENTION_CPU_SOURCE = "assumed: products of short rows"
_STREAM: Spread = (0.85, 0.65, 0.95)
_STREAM_SOURCE = "STREAM reaches 80-90 % of peak memory bandwidth (https://www.cs.virginia.edu/stream/)"
_STREAM_GPU: Spread = (0.89, 0.72, 0.98)
_STREAM_GPU_SOURCE = "BabelStream's kernels reach 0.88 of an A100's and 0.92 of an H100's, less of GDDR's"
_OPERANDS_GPU: Spread = (0.80, 0.62, 0.95)
_OPERANDS_GPU_SOURCE = "cuBLAS reads weights at three quarters (A100) to nine tenths (H100) of the data sheet's bandwidth for 16 rows"
_CACHE_MIB = 12.0
"""Assumed of a GPU of no known architecture: between 6 and 40 of those that are known."""
_CACHE_GPU_SOURCE = (
    "L2 of the architecture (costmodel.devices.gpus), of which a pass finds a part that the pass before left; published additions of "
    "6 to 25 MB on A100s and H100s run at 1.1 to 1.5 times the memory's bandwidth"
)
_CORE_BANDWIDTH: Spread = (10e9, 5e9, 20e9)
_CORE_SOURCE = "assumed: what one core draws from memory, limited by its outstanding cache misses"

_CACHE: Spread = (25e9, 10e9, 80e9)
_CACHE_SOURCE = "assumed: one core in its cache"

_CPU_EXPONENTIALS: Spread = (2e9, 0.8e9, 8e9)
_CPU_EXPONENTIALS_SOURCE = (
    "measured with torch 2.13 on one x86-64 core: softmax 0.6 ns, GELU 0.5 ns per element"
)
_GPU_EXPONENTIALS: Spread = (1.0, 0.3, 4.0)
_GPU_EXPONENTIALS_SOURCE = (
    "assumed: special function units keep up with memory, a number per byte of its bandwidth"
)

_CPU_NORMALS: dict[DType, Spread] = {
    "float64": (0.2e9, 0.08e9, 0.5e9),
    "float32": (0.35e9, 0.15e9, 0.8e9),
    "tf32": (0.35e9, 0.15e9, 0.8e9),
    "bfloat16": (0.25e9, 0.10e9, 0.6e9),
    "float16": (0.25e9, 0.10e9, 0.6e9),
    "float8_e4m3": (0.25e9, 0.05e9, 0.6e9),
}
_CPU_SAMPLING_SOURCE = "measured with torch 2.13 on one x86-64 core: 0.39 G normals/s, 2.45 G signs/s"
_CPU_SAMPLING: dict[SamplingClass, tuple[float, Spread]] = {
    "normal": (1.0, (0.5, 0.2, 1.0)),
    "rademacher": (6.3, (0.15, 0.03, 1.0)),
}
"""Numbers drawn in the time of a normal, and the part of its own time that passing over a number takes."""
_CPU_SKIPPED_SOURCE = (
    "measured with torch 2.13 on one x86-64 core: a random word takes 1.6 ns, a normal 2.9 ns"
)
_CPU_SHARED_SOURCE = "assumed: threads draw their blocks at the same rate, seeding and waiting apart"
_CPU_JUMP: Spread = (0.7e-3, 0.2e-3, 4e-3)
_CPU_JUMP_SOURCE = "measured on one x86-64 core: a jump of the Mersenne Twister takes 0.65 ms"
_CPU_CASTS: Spread = (0.8e9, 0.1e9, 4e9)
_CPU_CASTS_SOURCE = "assumed: one core between memory and a conversion"
_CPU_QUANT: Spread = (1.0, 0.25, 4.0)
_CPU_QUANT_SOURCE = "costmodel.formats.quant_passes.PASSES"

_CPU_HALF_DIMS: dict[str, Spread] = {"m": (8.0, 0.5, 64.0), "n": (8.0, 0.5, 64.0), "k": (32.0, 2.0, 160.0)}
_CPU_HALF_DIM_SOURCE = "assumed: rows of a few registers; short sums write their products often"
_CPU_HALF_LENGTH: Spread = (48.0, 8.0, 400.0)
_CPU_HALF_LENGTH_SOURCE = "assumed: tiles of short sequences are packed for few products; more so where tiles are a core's own (AMX)"
_CPU_DIAGONAL: Spread = (32.0, 32.0, 32.0)
_CPU_DIAGONAL_SOURCE = (
    "torch's CPU kernel takes 32 queries at a time, 64 from 192 on, and every key up to the last of them"
)
_CPU_OUTPUTS: Spread = (5e9, 0.5e9, 50e9)
_CPU_OUTPUTS_SOURCE = "assumed: outputs are brought into the cache, written and driven out again"
_CPU_SCORES: Spread = (0.6e9, 0.1e9, 6e9)
_CPU_SCORES_SOURCE = "assumed: an exponential, a maximum and a sum per score, in registers"
_CPU_GATHER: Spread = (8e-6, 0.5e-6, 150e-6)
_CPU_GATHER_SOURCE = "assumed: threads that wait for work in a loop, or sleep"
_LOOPBACK: Spread = (LOOPBACK_BYTES_PER_S, 0.3e9, 8e9)
_LOOPBACK_SOURCE = "assumed: gloo through the host's loopback, a copy into the socket and one out of it"
ASSUMED_MEMORY = (0.5, 2.0)
"""Between which multiples of it the bandwidth of a host's memory lies where it is assumed: one socket of two, or older channels."""
_REACHED_MEMORY = (0.8, 0.9)
"""Part of the channels' peak that STREAM reaches, where a machine only estimates its own."""
_COPY_GPU: Spread = (1.0, 0.88, 1.12)
_GPU_SAMPLING: dict[SamplingClass, Spread] = {"normal": (1.75, 1.2, 3.5), "rademacher": (3.5, 1.5, 8.0)}
_GPU_SAMPLING_SOURCE = (
    "per multiprocessor and clock, whatever the format: torch drew 2^30 fp16 normals in 2.3-2.4 ms on a Hopper GPU of 132 "
    "multiprocessors (https://github.com/flagos-ai/FlagGems, pull requests 1247 and 1562); signs assumed twice as fast"
)
_CONTEXT: Spread = (0.60e9, 0.30e9, 1.15e9)
_PINNING: Spread = (2.8e9, 1e9, 8e9)
_PINNING_SOURCE = (
    "32 MB of pinned memory took 11.6 ms beside 1.4 ms of pageable (https://github.com/rapidsai/dask-cuda/issues/106); what a page "
    "takes depends on the host, so that the interval is assumed"
)
_CONTEXT_SOURCE = (
    "the stacks of all threads, and besides what an A10 showed: 707 MB of a process, 542 MB more that the driver reserves and old "
    "tools count (https://github.com/mayooot/detect-gpu/issues/3); the least is that of kernels loaded when needed "
    "(https://github.com/pytorch/pytorch/issues/107667)"
)
_ATTENTION_SPREAD = (0.80, 1.15)
"""Chosen so that the published times of attention kernels lie inside (``python -m studies.validation`` counts them)."""
_HALF_LENGTH_SPREAD: Spread = (1.0, 0.4, 1.8)
"""What the papers' figures leave open: rates are printed from 512 tokens on, where a half length of 40 is a difference of 7 %."""
_HALF_LENGTH_SOURCE = "papers of the kernels by the device's operations per byte, costmodel.devices.gpus"
_ATTENTION_KERNELS_SOURCE = "papers of the kernels, costmodel.devices.gpus"

_HOST_CONSTANTS: dict[str, dict[str, Spread]] = {
    "cpu": {
        "matmul_half_dim": (12.0, 2.0, 64.0),
        "attention_half_len": _CPU_HALF_LENGTH,
        "call_s.batch": (200e-6, 40e-6, 1e-3),
        "call_s.embed": (100e-6, 20e-6, 600e-6),
        "call_s.block": (100e-6, 20e-6, 600e-6),
        "call_s.head": (100e-6, 20e-6, 600e-6),
        "cache_bytes": (1 * 2**20, 0.25 * 2**20, 8 * 2**20),
        "kernel_s": (0.0, 0.0, 0.0),
        "dispatch_s": (5e-6, 1e-6, 25e-6),
        "memory_overlap": (0.0, 0.0, 0.0),
        "product_s": (0.0, 0.0, 0.0),
        "product_s.bfloat16": (12e-6, 0.5e-6, 60e-6),
        "product_s.float16": (12e-6, 0.5e-6, 60e-6),
        "kept_row_s": (5e-6, 1e-6, 25e-6),
        "sharing_s": (50e-6, 5e-6, 500e-6),
        "seed_s": (5e-6, 0.5e-6, 50e-6),
        "factor_rate": (12e9, 2e9, 60e9),
        "jump_s": _CPU_JUMP,
        "shared_sampling_fraction": (1.0, 1.0, 1.0),
        "copy_latency_s": (2e-6, 0.2e-6, 50e-6),
        "copy_cores": (1.0, 0.3, 1.5),
        "message_s": (MESSAGE_S["cpu"], 1e-5, 4e-4),
        "allocation_s": (5e-6, 0.5e-6, 50e-6),
        "allocation_s_per_byte": (0.2e-9, 0.05e-9, 0.7e-9),
        "instruction_s": (30e-6, 5e-6, 200e-6),
        "step_s": (1e-3, 0.1e-3, 10e-3),
        "context_bytes": (0.0, 0.0, 0.0),
        "allocator_slack": (0.0, 0.0, 0.05),
        "allocation_granularity": (64.0, 64.0, 64.0),
    },
    "gpu": {
        "matmul_half_dim": (96.0, 16.0, 256.0),
        "attention_half_len": (40.0, 10.0, 80.0),
        "attention_diagonal_len": (256.0, 128.0, 512.0),
        "attention_score_rate": (1e18, 1e18, 1e18),
        "call_s.embed": (100e-6, 20e-6, 600e-6),
        "call_s.block": (60e-6, 10e-6, 400e-6),
        "call_s.head": (60e-6, 10e-6, 400e-6),
        "call_s.collective": (25e-6, 1e-6, 45e-6),
        "kernel_s": (2e-6, 1e-6, 4e-6),
        "factor_rate": (10e9, 1e9, 300e9),
        "kernel_s.product": (2e-6, 0.5e-6, 5e-6),
        "dispatch_s": (6e-6, 3e-6, 20e-6),
        "gather_s": (0.0, 0.0, 0.0),
        "memory_overlap": (1.0, 1.0, 1.0),
        "product_s": (0.0, 0.0, 0.0),
        "kept_row_s": (0.0, 0.0, 0.0),
        "sharing_s": (0.0, 0.0, 0.0),
        "shared_sampling_fraction": (1.0, 1.0, 1.0),
        "skip_fraction": (1.0, 1.0, 1.0),
        "copy_latency_s": (10e-6, 4e-6, 40e-6),
        "copy_cores": (0.0, 0.0, 0.0),
        "message_s": (MESSAGE_S["gpu"],) * 3,
        "allocation_s": (300e-6, 30e-6, 3e-3),
        "allocation_s_per_byte": (0.02e-9, 0.0, 0.2e-9),
        "instruction_s": (30e-6, 5e-6, 200e-6),
        "step_s": (1e-3, 0.1e-3, 10e-3),
        "allocator_slack": (0.10, 0.0, 0.40),
        "allocation_granularity": (512.0, 512.0, 512.0),
    },
}
_HOST_SOURCES = {
    "matmul_half_dim": "assumed: of formats that are not named, tiles that a small dimension does not fill",
    "copy_latency_s": "assumed: a call of memcpy on a CPU; on a GPU a copy's launch and its engine's start",
    "copy_cores": "a CPU's copy is a thread, assumed to keep its core; GPUs copy with engines of their own",
    "message_s": "costmodel.devices.collectives: an all_reduce of 8 bytes over gloo's loopback takes 0.11 ms, two messages; of GPUs the "
    "catalogue's latencies have it",
    "allocation_s": "assumed: a call of malloc, or of cudaMalloc with the device's waiting",
    "instruction_s": "assumed: Python between two instructions of a program",
    "step_s": "assumed: Python between two steps",
    "cache_bytes": "assumed: a core's own cache, or a GPU's L2",
    "attention_score_rate": "part of the attention rate where the architecture is not known",
    "attention_half_len": "arXiv:2307.08691, figures 4 and 5: rates at 512 tokens beside those at 16k",
    "attention_diagonal_len": "tiles of 128, and the last wave's uneven lengths: causal rates of arXiv:2307.08691, figure 4",
    "gather_s": "a GPU's kernels have no threads to wait for",
    "kernel_s.product": "with what any kernel takes, 4 us: published times of small products on A100, H100 and A40",
    "kernel_s": "assumed: what an empty kernel takes between others on a GPU; on a CPU it is part of the dispatch",
    "dispatch_s": "assumed: one kernel through PyTorch's eager dispatcher",
    "memory_overlap": "GPU kernels load tiles ahead; CPU libraries pack operands before they multiply",
    "product_s": "a product is launched as any other kernel",
    "product_s.bfloat16": "measured with torch 2.13: oneDNN finds or makes a primitive for every product",
    "product_s.float16": "assumed as for bfloat16",
    "kept_row_s": "a loop in Python on a CPU, one kernel on a GPU",
    "sharing_s": "assumed: threads of torch's end, others start; a GPU draws with all it has",
    "shared_sampling_fraction": "a GPU draws with all it has; signs are made by torch's own threads",
    "skip_fraction": "a GPU makes the numbers that it passes over",
    "seed_s": "assumed: the Mersenne Twister's 624 words, and the calls around them",
    "jump_s": _CPU_JUMP_SOURCE,
    "factor_rate": "assumed: LAPACK's panels of tens of columns, which few cores share; 8 to 16 Gflop/s on one core of a Zen 5",
    "call_s.collective": "between the time that NCCL's model gives sums below 16 MiB and published ones: the call, its streams' "
    "events, and ranks that come one after the other",
    "call_s.batch": "assumed: tokens looked through for the rows that they name",
    "call_s.embed": "assumed: the model's code from its entry to the first block",
    "call_s.block": "assumed: a block's Python modules",
    "call_s.head": "assumed: the model's code from the last block to the loss",
    "context_bytes": "a CPU's is reported with the process",
    "allocator_slack": "assumed: blocks of temporaries that torch's caching allocator split and cannot join",
    "allocation_granularity": "torch's CUDA allocator rounds to 512 B (c10/cuda/CUDACachingAllocator), its CPU one to 64 B",
    "allocation_s_per_byte": "assumed: page faults on a CPU, mapping pages of 2 MiB on a GPU",
}


def datasheet_profile(topology: Topology, device_id: str, *, num_threads: int | None = None) -> Profile:
    """Return a profile of a device from its data-sheet figures.

    Parameters
    ----------
    topology : Topology
        Machine that has the device.
    device_id : str
        Id of a GPU or a CPU of it.
    num_threads : int, optional
        Threads of a CPU's kernels; all its cores if not given. Compute scales with them in proportion, memory
        bandwidth until the memory is saturated.

    Raises
    ------
    TopologyError
        If the node is no processor or declares no peak for any format.
    ValueError
        If `num_threads` is not between 1 and the device's cores.
    """
    spec = topology.device_spec(device_id)
    if spec.type == "gpu":
        host = topology.host_of(device_id).id
        cpus = [node.id for node in topology.of_type("cpu") if node.host == host]
        host_cores = max(1, sum(topology.device_spec(cpu).num_cores for cpu in cpus))
        constants = _gpu_constants(spec)
        threads = 1
    else:
        host_cores = spec.num_cores
        threads = host_cores if num_threads is None else num_threads
        if not 1 <= threads <= host_cores:
            message = f"num_threads={threads} must lie between 1 and the {host_cores} cores of {device_id!r}"
            raise ValueError(message)
        constants = _cpu_constants(spec, threads)
    own_constants = (*constants, *_copy_constants(topology, device_id, spec))
    # What is known of the device goes before what is assumed of all of its kind.
    known = {constant.name for constant in own_constants}
    assumed = (
        _constant(name, spread, _HOST_SOURCES[name])
        for name, spread in _HOST_CONSTANTS[spec.type].items()
        if name not in known
    )
    return Profile(
        device_name=spec.name,
        device_type=spec.type,
        num_threads=threads,
        num_cores=host_cores,
        origin="datasheet",
        constants=(*own_constants, *assumed),
    )


def _constant(name: str, spread: Spread, source: str, *, scale: float = 1.0) -> Constant:
    value, low, high = (figure * scale for figure in spread)
    unit = CONSTANT_UNITS[name.split(".", 1)[0]]
    return Constant(name=name, value=value, low=low, high=high, unit=unit, source=source)


def _peak(spec: DeviceSpec, dtype: DType) -> tuple[float, Reach, str]:
    """Return a peak in flop/s, how much further its interval reaches, and a remark on its origin."""
    peak = FORMATS[dtype].peak
    declared = None if peak is None else spec.peak_dense.get(peak)
    if declared is not None:
        return declared.in_si("compute"), _AS_DECLARED, f"data sheet peak of {spec.name}"
    fp32 = spec.peak_flop_per_s("fp32")
    if dtype == "tf32":
        return fp32, _AS_DECLARED, f"{spec.name} has no TF32: multiplied in float32"
    undeclared = f"{spec.name} declares no peak for {dtype}"
    if is_widened(spec, dtype):
        fraction, reach, source = _WIDENED[dtype]
        return fp32 * fraction, reach, f"{undeclared}: {source}"
    half = spec.peak_dense.get("fp16")
    if dtype == "float8_e4m3" and half is not None and multiplies_float8(spec):
        return 2 * half.in_si("compute"), _AS_DECLARED, f"{undeclared}: twice that of float16"
    if dtype == "float16":
        return fp32 * _CPU_HALF, _CPU_HALF_REACH, f"{undeclared}: {_CPU_HALF_SOURCE}"
    fraction = float64_fraction(spec) if dtype == "float64" else 0.25
    return fp32 * fraction, (0.25, 1.0), f"{undeclared}: {fraction:.3g} of float32 assumed"


def _in_lanes(spec: DeviceSpec, dtype: DType) -> bool:
    """Whether a GPU multiplies a format in float32's lanes."""
    is_float32 = dtype == "float32" or (dtype == "tf32" and "tf32" not in spec.peak_dense)
    return spec.type == "gpu" and (is_float32 or is_widened(spec, dtype))


def _rates(
    spec: DeviceSpec, share: float, gemm: tuple[Spread, str], attention: tuple[Spread, str]
) -> Iterator[Constant]:
    if "fp32" not in spec.peak_dense:
        message = f"device {spec.name!r} has no fp32 peak, which the other peaks are derived from"
        raise TopologyError(message, hint="add peak_dense.fp32 to its catalogue entry")
    for dtype in COMPUTE_FORMATS:
        peak, (downwards, upwards), remark = _peak(spec, dtype)
        products = _LANES_GPU[has_half_warp_lanes(spec)] if _in_lanes(spec, dtype) else gemm
        for name, ((value, low, high), source) in (("matmul_rate", products), ("attention_rate", attention)):
            spread = (value, low * downwards, high * upwards)
            yield _constant(f"{name}.{dtype}", spread, f"{remark}; {source}", scale=peak * share)


def _int8_rate(spec: DeviceSpec, share: float = 1.0) -> Iterator[Constant]:
    """Yield the rate of products of int8 matrices, where a device is known to have them; others multiply as they compute."""
    known = int8_peak(spec)
    if known is not None:
        peak, remark = known
        yield _constant("matmul_rate.int8", _INT8_GPU, f"{remark}; {_INT8_GPU_SOURCE}", scale=peak * share)
    elif spec.type == "cpu":
        peak = spec.peak_flop_per_s("fp32") * share * _GEMM_CPU[0]
        yield _constant(
            "matmul_rate.int8", _INT8_CPU, f"{_INT8_CPU_SOURCE}; {spec.name} declares no peak", scale=peak
        )


def _gpu_constants(spec: DeviceSpec) -> Iterator[Constant]:
    rates = _rates(spec, 1.0, (_GEMM_GPU, _GEMM_GPU_SOURCE), (_ATTENTION_GPU, _ATTENTION_GPU_SOURCE))
    # Kernels of a known architecture take the place of what is assumed of any.
    known = {constant.name: constant for constant in (*rates, *_attention_constants(spec))}
    bursts = {dtype: _burst(spec, dtype) for dtype in COMPUTE_FORMATS}
    for constant in known.values():
        burst = bursts.get(constant.name.split(".")[1], 1.0) if "." in constant.name else 1.0  # type: ignore[call-overload]
        yield _slower(constant, burst) if constant.quantity in _POWERED else constant
    for dtype, burst in bursts.items():
        if burst > 1:
            yield _constant(f"burst.{dtype}", (burst,) * 3, "costmodel.devices.gpus.sustained_flop_per_s")
    yield from _int8_rate(spec)
    stacks = stacks_bytes(spec)
    value, low, high = _CONTEXT
    yield _constant("context_bytes", (value + stacks, low + stacks, high + stacks), _CONTEXT_SOURCE)
    yield _constant("pin_bandwidth", _PINNING, _PINNING_SOURCE)
    units = float(spec.num_cores)
    yield _constant("multiprocessors", (units, units, units), f"data sheet of {spec.name}")
    memory = spec.memory_bandwidth_bytes_per_s
    source = f"data sheet bandwidth of {spec.name}; {_STREAM_GPU_SOURCE}"
    for name in ("elementwise_bandwidth", "param_pass_bandwidth", "scratch_bandwidth"):
        yield _constant(name, _STREAM_GPU, source, scale=memory)
    yield _constant("memory_bandwidth", _OPERANDS_GPU, _OPERANDS_GPU_SOURCE, scale=memory)
    architecture = architecture_of(spec)
    cache = _CACHE_MIB if architecture is None else architecture.cache_mib
    yield _constant("cache_bytes", (0.6 * cache, 0.3 * cache, cache), _CACHE_GPU_SOURCE, scale=2**20)
    yield _constant("exponential_rate", _GPU_EXPONENTIALS, _GPU_EXPONENTIALS_SOURCE, scale=memory)
    for dtype in CAST_FORMATS:
        width = FORMATS[dtype].element_bytes
        yield _constant(f"cast_rate.{dtype}", _STREAM, source, scale=memory / (3 * width))
    for name in ("elementwise_cache_bandwidth", "param_pass_cache_bandwidth"):
        yield _constant(name, (1.3, 0.9, 2.0), _CACHE_GPU_SOURCE, scale=memory)
    clocks = clocks_per_s(spec)
    for dtype in COMPUTE_FORMATS:
        written = _STREAM[0] * memory / FORMATS[dtype].element_bytes
        for distribution, per_clock in _GPU_SAMPLING.items():
            rate = min(1.0, written / (per_clock[0] * clocks))
            spread = (per_clock[0] * rate, per_clock[1] * rate, per_clock[2])
            yield _constant(
                f"sampling_rate.{distribution}.{dtype}", spread, _GPU_SAMPLING_SOURCE, scale=clocks
            )


_POWERED = ("matmul_rate", "attention_rate")
_BURST_ENERGIES: dict[DType, float] = {"float16": 1.0, "bfloat16": 1.0, "tf32": 2.0, "float8_e4m3": 0.5}
"""Energy of an operation of tensor cores, those of half precision being 1, assumed to grow as their peaks fall (twice the rate, half the
energy); other formats do not reach the power limit."""


def _burst(spec: DeviceSpec, dtype: DType) -> float:
    """Return how many times as fast products are before the power limit slows clocks."""
    energy = _BURST_ENERGIES.get(dtype, 0.0)
    if not energy:
        return 1.0
    return max(1.0, _GEMM_GPU[0] * _peak(spec, dtype)[0] * energy / sustained_flop_per_s(spec))


def _slower(constant: Constant, times: float) -> Constant:
    if times == 1:
        return constant
    ends = {end: getattr(constant, end) / times for end in ("value", "low", "high")}
    source = f"{constant.source}; sustained at the rated power"
    return constant.model_copy(update={**ends, "source": source})


def in_bursts(profile: Profile) -> Profile:
    """Return a profile for what is too short for the power limit: single kernels, one pass."""
    return _with_bursts(profile, 1)


def sustained(profile: Profile) -> Profile:
    """Return the profile of long steps that a profile of bursts belongs to, as :func:`in_bursts` made it."""
    return _with_bursts(profile, -1)


def _with_bursts(profile: Profile, power: Literal[1, -1]) -> Profile:
    changed = []
    for constant in profile.constants:
        burst = profile.values().get(f"burst.{constant.name.split('.')[1]}") if "." in constant.name else None
        if burst is not None and constant.quantity in _POWERED:
            ends = {end: getattr(constant, end) * burst**power for end in ("value", "low", "high")}
            changed.append(constant.model_copy(update=ends))
    return profile.with_constants(*changed, origin=profile.origin) if changed else profile


def _attention_constants(spec: DeviceSpec) -> Iterator[Constant]:
    """Yield what the fused kernels of a known architecture do, in the formats that they are written for."""
    architecture = architecture_of(spec)
    if architecture is None:
        return
    low, high = _ATTENTION_SPREAD
    source = f"{architecture.name}: {_ATTENTION_KERNELS_SOURCE}"
    formats: tuple[DType, ...] = ("float16", "bfloat16")
    for dtype in formats:
        peak = _peak(spec, dtype)[0]
        for (kernel, way), (fraction, clocks) in architecture.attention.items():
            name = ".".join(filter(None, (dtype, kernel, "backward" if way == "backward" else "")))
            yield _constant(
                f"attention_rate.{name}", (fraction, low * fraction, high * fraction), source, scale=peak
            )
            rate = clocks_per_s(spec) / clocks
            yield _constant(f"attention_score_rate.{name}", (1.0, low, high), source, scale=rate)
    for (kernel, way), tokens in half_lengths(spec).items():
        name = ".".join(filter(None, ("attention_half_len", kernel, "backward" if way == "backward" else "")))
        yield _constant(name, _HALF_LENGTH_SPREAD, _HALF_LENGTH_SOURCE, scale=tokens)


def _cpu_constants(spec: DeviceSpec, threads: int) -> Iterator[Constant]:
    share = threads / spec.num_cores
    yield from _rates(spec, share, (_GEMM_CPU, _GEMM_CPU_SOURCE), (_ATTENTION_CPU, _ATTENTION_CPU_SOURCE))
    yield from _int8_rate(spec, share)
    spread = _thread_bandwidth(spec, threads)
    source = f"{_STREAM_SOURCE}; {_CORE_SOURCE}"
    for name in ("memory_bandwidth", "elementwise_bandwidth"):
        yield _constant(name, spread, source)
    yield _constant("memory_bandwidth.output", _CPU_OUTPUTS, _CPU_OUTPUTS_SOURCE, scale=threads)
    yield _constant("elementwise_cache_bandwidth", _CACHE, _CACHE_SOURCE, scale=threads)
    yield _constant("exponential_rate", _CPU_EXPONENTIALS, _CPU_EXPONENTIALS_SOURCE, scale=threads)
    for dtype in COMPUTE_FORMATS:
        width = FORMATS[dtype].element_bytes
        # Formats that a CPU must widen to compute with take their time per element, not per byte.
        factor = width / 4 if width < 4 else 1.0
        for name, (value, low, high) in (
            ("param_pass_bandwidth", spread),
            ("param_pass_cache_bandwidth", _CACHE),
            ("scratch_bandwidth", _CACHE),
        ):
            scale = threads if name != "param_pass_bandwidth" else 1.0
            widened = (value * factor, low * factor, high)
            yield _constant(f"{name}.{dtype}", widened, f"{source}; widened to compute with", scale=scale)
    yield from _cpu_products(threads)
    # Passes over quantized values, and those over numbers in each format that these may be in.
    for name, known in PASSES.items():
        for numbers in (".float32", ".bfloat16", ".float16") if known.num_numbers else ("",):
            yield _constant(
                f"quant_rate.{name}{numbers}", _CPU_QUANT, _CPU_QUANT_SOURCE, scale=known.core_rate
            )
    pairs = [f"{one}.{other}" for pair in CAST_PAIRS for one, other in (pair, pair[::-1])]
    for formats in (*CAST_FORMATS, *pairs):
        yield _constant(f"cast_rate.{formats}", _CPU_CASTS, _CPU_CASTS_SOURCE, scale=threads)
    single_threaded = {known.sampling_class for known in DISTRIBUTIONS.values() if known.is_single_threaded}
    for dtype, normals in _CPU_NORMALS.items():
        for sampling_class, (_, fraction) in _CPU_SAMPLING.items():
            yield _constant(f"skip_fraction.{sampling_class}.{dtype}", fraction, _CPU_SKIPPED_SOURCE)
        shared = (1.1 / threads, 0.8 / threads, 2.5 / threads)
        for sampling_class, (num_sampled, _) in _CPU_SAMPLING.items():
            if sampling_class in single_threaded:
                yield _constant(
                    f"shared_sampling_fraction.{sampling_class}.{dtype}", shared, _CPU_SHARED_SOURCE
                )
            yield _constant(
                f"sampling_rate.{sampling_class}.{dtype}", normals, _CPU_SAMPLING_SOURCE, scale=num_sampled
            )


def _cpu_products(threads: int) -> Iterator[Constant]:
    """Yield what products and attention take beside their rates."""
    yield _constant("matmul_half_dim.int8", _CPU_HALF_DIMS["k"], _CPU_HALF_DIM_SOURCE)
    for dtype in ("float32", "bfloat16", "float16"):
        for dim, spread in _CPU_HALF_DIMS.items():
            yield _constant(f"matmul_half_dim.{dtype}.{dim}", spread, _CPU_HALF_DIM_SOURCE)
        yield _constant(f"attention_score_rate.{dtype}", _CPU_SCORES, _CPU_SCORES_SOURCE, scale=threads)
        yield _constant(f"attention_half_len.{dtype}", _CPU_HALF_LENGTH, _CPU_HALF_LENGTH_SOURCE)
    yield _constant("attention_diagonal_len", _CPU_DIAGONAL, _CPU_DIAGONAL_SOURCE)
    yield _constant("attention_score_rate", _CPU_SCORES, _CPU_SCORES_SOURCE, scale=threads)
    gather = _CPU_GATHER if threads > 1 else (0.0, 0.0, 0.0)
    yield _constant("gather_s", gather, _CPU_GATHER_SOURCE)
    yield _constant("split_s", _CPU_JUMP if threads > 1 else (0.0, 0.0, 0.0), _CPU_JUMP_SOURCE)


def _thread_bandwidth(spec: DeviceSpec, threads: int) -> Spread:
    """Return what `threads` cores draw from memory: each its share until the memory is saturated."""
    memory = spec.memory_bandwidth_bytes_per_s
    value, low, high = (
        min(core * threads, factor * memory) for core, factor in zip(_CORE_BANDWIDTH, _STREAM, strict=True)
    )
    return value, low, high


def host_memory_at(topology: Topology, bound: Bound) -> Topology:
    """Return a machine whose host memories are as fast as makes steps shortest or longest, where their figures are assumed or estimated."""
    (slower, faster), (least, most) = ASSUMED_MEMORY, _REACHED_MEMORY
    factor, reached = {"low": (faster, most), "central": (1.0, None), "high": (slower, least)}[bound]
    return topology.with_assumed_memory(factor, reached)


def _copy_constants(topology: Topology, device_id: str, spec: DeviceSpec) -> Iterator[Constant]:
    if spec.type == "cpu":
        spread = tuple(figure / 2 for figure in _thread_bandwidth(spec, 1))
        for direction in ("h2d", "d2h"):
            name = f"copy_{direction}_bandwidth"
            yield _constant(name, spread, f"memcpy by one thread: {_CORE_SOURCE}")  # type: ignore[arg-type]
        yield _constant("copy_cache_bandwidth", _CACHE, "assumed: memcpy by one thread in its cache")
        yield _constant("loopback_bandwidth", _LOOPBACK, _LOOPBACK_SOURCE)
        return
    memory = topology.host_memory(device_id).id
    slower, faster = (topology.with_assumed_memory(factor) for factor in ASSUMED_MEMORY)
    for direction, ends in (("h2d", (memory, device_id)), ("d2h", (device_id, memory))):
        bandwidth, least, most = (
            machine.route(*ends).bandwidth_bytes_per_s for machine in (topology, slower, faster)
        )
        middle, low, high = _COPY_GPU
        source = "what the route's links reach of their nominal bandwidths; published pinned copies lie within a tenth"
        if least < bandwidth:
            source += f"; the bandwidth of {memory} is assumed"
        spread = middle, low * least / bandwidth, high * most / bandwidth
        yield _constant(f"copy_{direction}_bandwidth", spread, source, scale=bandwidth)
    yield _constant("copy_cache_bandwidth", _COPY_GPU, f"{source}; no cache helps it", scale=bandwidth)
    yield _constant("loopback_bandwidth", (1.0, 1.0, 1.0), "GPUs have links of their own", scale=bandwidth)
