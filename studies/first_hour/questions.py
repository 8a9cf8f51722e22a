"""Questions that only a device can answer: what is expected, what is found, and whether that is the same.

The simulated device says the same of streams, captures, sizes, reserved memory and waits, so that the questions are rehearsed;
of seconds it knows nothing.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from executors.low_bits.linear import byte_product
from executors.models.spec import plan_of_model
from executors.runs.adapters import attach
from executors.runs.session import Session
from executors.steps.graphs import Graphs
from executors.steps.streams_accelerator import AcceleratorBackend
from studies.first_hour.parity import padded_batch
from studies.first_hour.paths import PACKED_LINEARS, Check, checked, tiny_model
from studies.first_hour.setting import Content, Setting
from zosim.lowering.buckets import GPU_ALIGNMENT_BYTES
from zosim.plans import Placement
from zosim.program import ALIGNMENT_BYTES

_NUM_STREAMS = 32
_NUM_GRAPHS = 8
_WARM, _TIMED, _AT_ONCE = 3, 9, 20
_SLOWER = 1.02
"""By what a product on coarser alignment may be slower and count as fast."""

_WIDTHS = (52, 60)
"""Inner widths of int8 products that are no multiples of 8, as the tiny models of the tests have them."""


def questions(setting: Setting) -> Iterator[Content]:
    """Yield, question by question, what was expected and what is so."""
    torch.cuda.set_device(setting.device)
    checks: dict[str, Check] = {
        "graphs that share a pool reserve less than half of what others do": _shared_pool,
        "torch's streams go round 32": _streams,
        "a capture that asks for a number is launched kernel by kernel": _capture_that_asks,
        "int8 products of odd widths are refused, and exact once filled up": _odd_widths,
        "a packed step asks the device for no number": _waits_when_packed,
    }
    for dtype in ("float16", "bfloat16", "float32"):
        title = f"products in {dtype} have the same bits at 64 and at 256 bytes, and are no slower at 256"
        checks[title] = partial(_alignment, dtype=dtype)
    return checked(setting, checks)


def _shared_pool(setting: Setting) -> tuple[bool, str]:
    width = 64 if setting.is_rehearsal else 4096
    left, kept = (torch.zeros((width, width), dtype=torch.float16, device=setting.device) for _ in range(2))
    stream, grown = torch.cuda.Stream(), {}

    def launch() -> None:
        kept.copy_((left @ left).relu() @ left)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()  # cuBLAS makes what it keeps
    for name in ("one pool", "a pool each"):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        pool, graphs = torch.cuda.graph_pool_handle(), []
        for _ in range(_NUM_GRAPHS):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool if name == "one pool" else torch.cuda.graph_pool_handle())
                launch()
                graph.capture_end()
            graphs.append(graph)
        grown[name] = torch.cuda.memory_reserved() - before
        del graphs, graph
    reported = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in grown.items())
    is_less = 2 * grown["one pool"] < grown["a pool each"]
    return is_less, f"{_NUM_GRAPHS} graphs of two products of {width}: {reported}"


def _streams(_setting: Setting) -> tuple[bool, str]:
    handles = [torch.cuda.Stream().cuda_stream for _ in range(3 * _NUM_STREAMS)]
    period = next((i for i in range(1, len(handles)) if handles[i] == handles[0]), len(handles))
    return len(set(handles)) == period == _NUM_STREAMS, (
        f"{len(set(handles))} native streams among {len(handles)}; the first comes again as number {period}"
    )


def _capture_that_asks(setting: Setting) -> tuple[bool, str]:
    backend = AcceleratorBackend(setting.device)
    graphs = Graphs(backend.device, backend.capture_stream)
    here = torch.zeros(4, device=backend.device)

    def asks() -> None:
        here.add_(1)
        here.sum().item()

    def asks_nothing() -> None:
        here.add_(1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for launch in (asks, asks_nothing):
            for _ in range(4):
                graphs.run(launch.__name__, launch, memory=(here,))
    total, num_graphs = here.tolist(), len(graphs)
    graphs.close()
    backend.close()
    reported = [str(warning.message) for warning in caught if "could not be captured" in str(warning.message)]
    is_so = total == [8.0] * 4 and num_graphs == 1 and len(reported) == 1
    return (
        is_so,
        f"sums {total[0]:g} of 8, {num_graphs} graph of what asks nothing; reported: {reported or 'nothing'}",
    )


def _odd_widths(setting: Setting) -> tuple[bool, str]:
    generator = torch.Generator().manual_seed(0)
    found, is_so = [], True
    for width in _WIDTHS:
        left, right = (
            torch.randint(-127, 128, (rows, width), generator=generator).to(torch.int8) for rows in (33, 40)
        )
        inputs, weights = left.to(setting.device), right.to(setting.device)
        wanted = (left.long() @ right.long().T).float()
        product = byte_product(inputs, weights, torch.ones(1, device=setting.device)).cpu()
        try:
            torch._int_mm(inputs, weights.T)
            is_refused = False
        except RuntimeError:
            is_refused = True
        is_exact = torch.equal(product, wanted)
        is_so &= is_exact and is_refused
        found.append(
            f"{width} wide: {'refused' if is_refused else 'ACCEPTED'} as it is, {'exact' if is_exact else 'WRONG'} filled up"
        )
    return is_so, "; ".join(found)


def _waits_when_packed(setting: Setting) -> tuple[bool, str]:
    """Count what torch itself calls synchronising: numbers and copies that the host waits for, not events."""
    model = tiny_model()
    attach(model, "linears")
    placement = Placement(topology=setting.topology.name, devices=(setting.node,))
    plan, batch = plan_of_model(model, batch=3, seq=16, placement=placement, **PACKED_LINEARS), padded_batch()
    with Session(plan, model, learning_rate=1e-3, device=setting.device) as session:
        for _ in range(_WARM):
            session.step(batch)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                session.begin_step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    requested = [
        f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    ]
    return not requested, f"{len(requested)} in a step" + (
        f", at {', '.join(requested)}" if requested else ""
    )


def _alignment(setting: Setting, dtype: str) -> tuple[bool, str]:
    rows, width = (8, 32) if setting.is_rehearsal else (2048, 4096)
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((width, width), generator=generator).to(kind)
    inputs = torch.randn((rows, width), generator=generator).to(kind).to(setting.device)
    bias = torch.randn(width, generator=generator).to(kind).to(setting.device)
    memory = torch.zeros(
        numbers.numel() * kind.itemsize + GPU_ALIGNMENT_BYTES, dtype=torch.uint8, device=setting.device
    )
    products, seconds = {}, {}
    for begin in (ALIGNMENT_BYTES, 0):
        weight = memory[begin : begin + numbers.numel() * kind.itemsize].view(kind).view(width, width)
        weight.copy_(numbers)
        products[begin] = nn.functional.linear(inputs, weight, bias).clone()
        seconds[begin] = _seconds(inputs, weight, bias)
    is_alike = torch.equal(products[0], products[ALIGNMENT_BYTES])
    is_fast = setting.is_rehearsal or seconds[0] <= _SLOWER * seconds[ALIGNMENT_BYTES]
    return is_alike and is_fast, (
        f"{'the same' if is_alike else 'OTHER'} bits; {1e6 * seconds[ALIGNMENT_BYTES]:.1f} µs at 64, "
        f"{1e6 * seconds[0]:.1f} µs at 256 bytes, {rows} rows of {width}"
    )


def _seconds(inputs: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Return what a product takes: the median of some, each of many at once."""
    found: list[float] = []
    for _ in range(_WARM + _TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_AT_ONCE):
            nn.functional.linear(inputs, weight, bias)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / _AT_ONCE)
    return median(found[_WARM:])
