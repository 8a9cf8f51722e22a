"""What ranks on accelerators need beyond those on a CPU: a device each, and a library that connects devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from executors.devices import device_module, device_named, num_devices_of, own_index
from executors.ranks.rank_info import RankInfo
from topology.errors import RunError

_HEARTBEAT_SLACK_S = 60


def backends_of(device_type: str, host_backend: str) -> str:
    """Return the backends of a process group: NCCL or its like on devices, `host_backend` on the host."""
    if device_type == "cpu" or host_backend == "fake":
        return host_backend
    return f"cpu:{host_backend},{device_type}:{dist.get_default_backend_for_device(device_type)}"


def own_accelerator(device_type: str, info: RankInfo) -> torch.device:
    """Return the device of this rank: the one with its local rank, or the only visible one.

    Raises RunError if the host shows several devices, and fewer than it has ranks. Whether two ranks are shown the same
    one is known when they meet: see :func:`refuse_shared`.
    """
    num_devices, index = num_devices_of(device_type), own_index(device_type, info.local_rank)
    if 0 < num_devices <= index:
        raise RunError(
            f"rank {info.rank} is number {info.local_rank} on its host, but only {num_devices} "
            f"{device_type} devices are visible there; each rank needs its own",
            hint=f"start {num_devices} ranks there (--nproc-per-node {num_devices}), or check "
            "CUDA_VISIBLE_DEVICES",
        )
    return device_named(f"{device_type}:{index}")


def watchdog_settings(timeout_s: float) -> Mapping[str, str]:
    """Return environment variables of NCCL's watchdog for a timeout; those that a user has set stay.

    A collective that does not end after the run's timeout ends the process, and is written down nowhere but in its message:
    a launcher then names the rank and its last instruction. The watchdog's own monitor, which ends a process whose watchdog
    is stuck, waits longer than that.
    """
    settings = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(round(timeout_s + _HEARTBEAT_SLACK_S)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    return {name: value for name, value in settings.items() if name not in os.environ}


def identity_of(device: torch.device) -> str:
    """Return what identifies a device among all of a run: the host's name, and the device's UUID or number."""
    properties = device_module(device).get_device_properties(device)
    own = getattr(properties, "uuid", None) or f"{device.type}:{device.index}"
    return f"{socket.gethostname()} {own}"


def refuse_shared(identities: Sequence[str]) -> None:
    """Refuse two ranks on one device: NCCL would hang, or fail without naming them.

    `identities`: by rank: see :func:`identity_of`.

    Raises RunError: naming the ranks and the device.
    """
    # Sorted, ranks of one device are neighbours.
    for (device, first), (other, second) in pairwise(
        sorted((own, rank) for rank, own in enumerate(identities))
    ):
        if device == other:
            host, _, own = device.partition(" ")
            raise RunError(
                f"ranks {first} and {second} use the same device, {own} of {host}",
                hint="give --device without a number, so that every rank takes its own, and start no more ranks "
                "than devices; a launcher that shows each rank one device must show each a different one",
            )
