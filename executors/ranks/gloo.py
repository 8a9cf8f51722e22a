"""gloo whose process groups share one thread for their sockets.

A process group of gloo has a device of its own, and every device a thread that wakes a hundred times a second, whether or
not anything comes, so that as often a kernel finds its caches changed. A rank has ten
groups and more, one for whatever must not wait for something else. Here all of them share one device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

BACKEND = "zosim_gloo"
"""Name by which torch makes such groups, once :func:`shared_gloo` was called."""

_NUM_THREADS = 2
"""Of each group, as torch has it by default: they run collectives, and sleep until there is one."""


@cache
def shared_gloo() -> str:
    """Return the name of this backend, of which torch has heard."""
    dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu"])
    return BACKEND


def _made(places: Any, _options: object) -> dist.ProcessGroupGloo:
    return gloo_group(places.store, places.group_rank, places.group_size, places.timeout, _shared_devices)


def gloo_group(
    store: Store, rank: int, size: int, timeout: timedelta, devices: Callable[[], list[Any]]
) -> dist.ProcessGroupGloo:
    """Return a process group of gloo over devices of ours, or over its own where torch has no word for them.

    Parameters
    ----------
    store : Store
    rank, size : int
        Of this process in the group, and how many are in it.
    timeout : timedelta
    devices : callable
        Returns what gloo has its sockets served by.

    Notes
    -----
    The options are private to torch (there from 2.11 to 2.13, as tried); the constructor without them is not.
    """
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout, options._threads = devices(), timeout, _NUM_THREADS
    except AttributeError:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _shared_devices() -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [_device(interface.strip()) for interface in interfaces]


@cache
def _device(interface: str) -> Any:
    """Return the device that all groups over an interface share; the host's address decides if none is named."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
