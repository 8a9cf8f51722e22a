"""Single kernels on a device, without what launches them; copies, messages and collectives from the call to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, get_args

from costmodel.devices.collectives import CollectiveName, point_to_point_s
from costmodel.estimate import CopyDirection, device_s, estimate
from costmodel.param_passes import copy_work, sampling_work
from costmodel.rates.profile import Bound
from costmodel.work import Attention, AttentionKernel, Matmul, Work
from zosim.applications.validation.codes import KERNEL_NAMES
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.hardware.machines import machines_for
from zosim.program.operations import Send


def kernel(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a kernel, on the first device of a machine.

    `row`: of a kind that ``WORKS`` has.

    Raises Unpredictable if its format is none that computes, or heads are not shared evenly.
    """
    work, profile = WORKS[row["kind"]](row), measured_machine.burst_profile
    return bounded(lambda bound: device_s(estimate(work, profile, bound=bound), profile.device_type))


def _matmul(row: MeasuredRow) -> Work:
    m, n, k = (row.count(name) for name in "mnk")
    if row["dtype"].lower() == "int8":
        # Integers are a format of products alone: what they make is read as numbers that a device computes in.
        return Work(dtype="float16", matmuls=(Matmul(m=m, n=n, k=k, format="int8"),), num_kernels=1)
    return Work(dtype=row.dtype, matmuls=(Matmul(m=m, n=n, k=k),), num_kernels=1)


def _elementwise(row: MeasuredRow) -> Work:
    # Only bytes matter, so the format may be left out.
    dtype = row.dtype if row["dtype"] else "float32"
    return Work(dtype=dtype, elementwise_bytes=row.count("bytes"), num_kernels=1, num_shared_kernels=1)


def _attention(row: MeasuredRow) -> Work:
    heads = row.count("heads")
    shared = row.count_or("kv_heads", heads)
    if heads % shared:
        raise Unpredictable(f"kv_heads={shared} does not divide heads={heads}")
    code = row["code"].lower()
    reported = row.choice("attention_kernel", KERNEL_NAMES)
    is_stored = reported == "eager" or (reported is None and code == "math")
    op = Attention(
        num=row.count("batch") * heads,
        query=row.count("seq"),
        key=row.count("seq"),
        head_dim=row.count("head_dim"),
        materialised=is_stored,
        causal_skip=row.flag("causal") and not is_stored,
        kernel=next((kernel for kernel in get_args(AttentionKernel) if kernel == code), None),
        sharing=heads // shared,
    )
    return Work(dtype=row.dtype, attention=(op,), num_kernels=1)


def _attention_backward(row: MeasuredRow) -> Work:
    forward = _attention(row)
    if forward.attention[0].materialised:
        return forward.model_copy(update={"attention": forward.attention * 2})
    ops = tuple(op.model_copy(update={"backward": True}) for op in forward.attention)
    return forward.model_copy(update={"attention": ops})


def _draw(row: MeasuredRow) -> Work:
    return sampling_work(row.count("elements"), dtype=row.dtype)


WORKS: dict[str, Callable[[MeasuredRow], Work]] = {
    "matmul": _matmul,
    "elementwise": _elementwise,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "draw": _draw,
}
"""Work of a kernel by the kind of its row."""


_DIRECTIONS = {
    **dict.fromkeys(("htod", "host_to_device", "h2d"), "h2d"),
    **dict.fromkeys(("dtoh", "device_to_host", "d2h"), "d2h"),
    **dict.fromkeys(("dtod", "device_to_device", "p2p", "d2d"), "d2d"),
}
"""By what tools call them."""


def copy(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a transfer between a device and its host's memory, or another device.

    Raises Unpredictable if its direction is unknown, or the machine has one device where two are needed.
    """
    direction = _DIRECTIONS.get(row["direction"].lower(), row["direction"])
    size_bytes = row.count("bytes")
    if direction == "d2d":
        here, there = measured_machine.devices_of(row, 2)
        route = measured_machine.topology.route(here, there)
        reached = measured_machine.profile.constant("copy_h2d_bandwidth")

        def seconds(bound: Bound) -> float:
            bandwidth = route.bandwidth_bytes_per_s * reached.at(bound) / reached.value
            return point_to_point_s(size_bytes, latency_s=route.latency_s, bandwidth_bytes_per_s=bandwidth)

        return bounded(seconds)
    if direction not in get_args(CopyDirection):
        raise Unpredictable(f"direction {direction!r} must be one of h2d, d2h, d2d")
    copied: CopyDirection = "h2d" if direction == "h2d" else "d2h"
    work, profile = copy_work(size_bytes), measured_machine.profile
    return bounded(
        lambda bound: device_s(estimate(work, profile, bound=bound, direction=copied), profile.device_type)
    )


def message(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a message between two ranks, on two hosts where there are several.

    Raises Unpredictable if the machine has one device.
    """
    hosts = {
        measured_machine.topology.host_of(device).id: device for device in reversed(measured_machine.devices)
    }
    pair = tuple(reversed(hosts.values()))[:2] if len(hosts) > 1 else measured_machine.devices_of(row, 2)
    machines = machines_for(
        measured_machine.topology, pair, measured_machine.profile, {"pipeline": ((0, 1),)}
    )
    hop = machines[0].channels[Send("pipeline", 1)]
    call_s, size_bytes = measured_machine.profile.values, row.count("bytes")
    return bounded(lambda bound: call_s(bound)["kernel_s"] + hop.message_s(size_bytes, bound))


def collective(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a collective of the first ranks, from the call until the last has what it is to have.

    Of an ``all_gather`` or a ``reduce_scatter`` the row's bytes are those of all shares together.

    Raises Unpredictable if there is one rank, or there are more than devices.
    """
    num_ranks, size_bytes = row.count("ranks"), row.count("bytes")
    if num_ranks < 2:
        raise Unpredictable("a collective needs at least 2 ranks")
    devices = measured_machine.devices_of(row, num_ranks)
    machines = machines_for(
        measured_machine.topology, devices, measured_machine.profile, {"world": (tuple(range(num_ranks)),)}
    )
    function = cast("CollectiveName", row["kind"])

    def seconds(bound: Bound) -> float:
        # Message times of a CPU hold its calls.
        call_s = measured_machine.profile.values(bound).get("call_s.collective", 0.0)
        return call_s + machines[0].rings["world"].seconds(function, size_bytes, bound)

    return bounded(seconds)
