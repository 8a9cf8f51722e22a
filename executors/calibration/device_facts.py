"""What an accelerator does beside the kernels that a profile is fitted to: launches, waits, copies both ways, pinning.

These figures are shown beside the profile. Two of them are constants of it: the memory that the device's runtime takes, and how
fast memory of the host is pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from executors.calibration import pinning
from executors.calibration.device_state import DeviceState, device_state
from executors.calibration.probes import ATTENTION_SHAPES
from executors.calibration.probing import MEMORY_BYTES, random_tensor
from executors.devices import device_module, device_named, num_devices_of, on_stream, own_index
from executors.ranks.communicator import all_gather_flat
from executors.ranks.launch import launch, process_group

_NUM_SAMPLES, _NUM_LAUNCHES = 7, 200
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "products": SDPBackend.MATH,
}
_EXCHANGED_BYTES = (8, 1 << 16, 1 << 22, 1 << 26)
_PIN_REACH = 1.5
"""How fast memory is pinned depends on how the host's is fragmented: the ends of the interval are so many times apart from it."""

_CONTEXT_REACH = 1.25
"""Memory that the runtime takes grows as kernels are loaded; the upper end of its interval."""


@dataclass(frozen=True)
class DeviceFacts:
    """Figures of an accelerator."""

    launch_s: float  # time of the host to launch a kernel
    # From the end of a kernel, which takes next to nothing, to the host that waited for it, the launch included.
    synchronise_s: float
    # Of a large copy from and to pinned memory, alone and while another goes the other way.
    copy_bytes_per_s: Mapping[str, float]
    pin_bytes_per_s: float  # at which new memory of the host is pinned, which no block that torch kept serves
    # Memory of the device that nothing which torch allocated accounts for; other processes' is in it.
    context_bytes: int
    # Seconds of causal attention in bfloat16 on the largest calibrated shape by kernel, where there is one.
    attention_s: Mapping[str, float]
    # By bytes that each of two ranks sends, where there are several devices.
    exchange_s: Mapping[int, float] = field(default_factory=dict)
    states: tuple[DeviceState, ...] = ()  # before and after the measurements, where the driver can be asked


def device_facts(name: str) -> DeviceFacts:
    """Measure an accelerator. Raises RunError if the device is not there."""
    device = device_named(name)
    before = device_state(name)
    with torch.no_grad():
        facts = DeviceFacts(
            launch_s=_launch_s(device),
            synchronise_s=_synchronise_s(device),
            copy_bytes_per_s=_copies(device),
            pin_bytes_per_s=pinning.in_fresh_process(name, MEMORY_BYTES["accelerator"]),
            context_bytes=_context_bytes(device),
            attention_s=dict(_attentions(device)),
            exchange_s=launch(exchange_seconds, name.partition(":")[0], world_size=2)
            if num_devices_of(device.type) > 1
            else {},
            states=tuple(state for state in (before, device_state(name)) if state is not None),
        )
    device_module(device).empty_cache()
    return facts


def with_facts(profile: Profile, facts: DeviceFacts) -> Profile:
    """Return `profile` with what no step tells, as it was measured: memory of the device's runtime, and how fast memory is pinned."""
    pinned, context = facts.pin_bytes_per_s, float(facts.context_bytes)
    measured = {
        "pin_bandwidth": (
            (pinned, pinned / _PIN_REACH, pinned * _PIN_REACH),
            "a large buffer of torch's pinned memory, once, in a process that had pinned none",
        ),
        "context_bytes": (
            (context, context, _CONTEXT_REACH * context),
            "memory of the device that was not free, less what torch's allocator held",
        ),
    }
    constants = [
        Constant(name=name, value=value, low=low, high=high, unit=CONSTANT_UNITS[name], source=source)
        for name, ((value, low, high), source) in measured.items()
        if value
    ]
    return profile.with_constants(*constants, origin="calibrated")


def _host_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the median time of the host in an action that begins on an idle device."""
    seconds = []
    for _ in range(_NUM_SAMPLES):
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def _launch_s(device: torch.device) -> float:
    x = torch.zeros(16, device=device)

    def run() -> None:
        for _ in range(_NUM_LAUNCHES):
            x.add_(1)

    return _host_s(run, device) / _NUM_LAUNCHES


def _synchronise_s(device: torch.device) -> float:
    x = torch.zeros(16, device=device)

    def run() -> None:
        x.add_(1)
        torch.accelerator.synchronize(device)

    return _host_s(run, device)


def _copies(device: torch.device) -> dict[str, float]:
    size = MEMORY_BYTES["accelerator"] // 4
    near, far = (
        [torch.zeros(size, dtype=torch.uint8, **where) for _ in range(2)]
        for where in ({"device": device}, {"pin_memory": True})
    )
    pairs: dict[str, tuple[Tensor, Tensor]] = {"h2d": (near[0], far[0]), "d2h": (far[1], near[1])}
    streams = {direction: torch.Stream(device) for direction in pairs}
    torch.accelerator.synchronize(device)  # zeroed on another stream

    def rate(direction: str, beside: str = "") -> float:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        if beside:  # begun before, and thrice as long
            with on_stream(streams[beside]):
                for _ in range(3):
                    pairs[beside][0].copy_(pairs[beside][1], non_blocking=True)
        with on_stream(streams[direction]):
            begin.record(streams[direction])
            pairs[direction][0].copy_(pairs[direction][1], non_blocking=True)
            end.record(streams[direction])
        torch.accelerator.synchronize(device)
        return size / (float(begin.elapsed_time(end)) * 1e-3)

    rates = {direction: median(rate(direction) for _ in range(_NUM_SAMPLES)) for direction in pairs}
    for direction, other in (("h2d", "d2h"), ("d2h", "h2d")):
        rates[f"{direction} beside {other}"] = median(rate(direction, other) for _ in range(_NUM_SAMPLES))
    return rates


def _context_bytes(device: torch.device) -> int:
    counters = device_module(device)
    free, total = counters.mem_get_info(device)
    return max(0, int(total - free - counters.memory_reserved(device)))


def _attentions(device: torch.device) -> Iterator[tuple[str, float]]:
    batch, heads, tokens, width = ATTENTION_SHAPES["accelerator"][-1]
    q, k, v = (random_tensor(device, "bfloat16", batch, heads, tokens, width) for _ in range(3))
    for name, backend in _KERNELS.items():
        try:
            with sdpa_kernel(backend):
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
                seconds = []
                for _ in range(_NUM_SAMPLES):
                    begin.record(torch.accelerator.current_stream(device))
                    functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    end.record(torch.accelerator.current_stream(device))
                    torch.accelerator.synchronize(device)
                    seconds.append(float(begin.elapsed_time(end)) * 1e-3)
        except RuntimeError:  # torch has no such kernel for this device or shape
            continue
        yield name, median(seconds)


def exchange_seconds(device_type: str) -> dict[int, float]:
    """Return, as one of the ranks of a launch, the seconds of an all-gather between their devices, by bytes of each."""
    with process_group(device_type) as info:
        device = device_named(f"{device_type}:{own_index(device_type, info.local_rank)}")
        seconds = {}
        for size in _EXCHANGED_BYTES:
            own = torch.zeros(size, dtype=torch.uint8, device=device)
            whole = torch.zeros(size * info.world_size, dtype=torch.uint8, device=device)

            def gather(whole: Tensor = whole, own: Tensor = own) -> None:
                all_gather_flat(whole, own, group=None)
                torch.accelerator.synchronize(device)

            gather()
            seconds[size] = _host_s(gather, device)
        return seconds
