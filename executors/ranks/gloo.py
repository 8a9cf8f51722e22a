"""gloo whose process groups share one thread for their sockets.

A process group of gloo has a device of its own, and every device a thread that wakes a hundred times a second, whether or
not anything comes, so that as often a kernel finds its caches changed. A rank has ten
groups and more, one for whatever must not wait for something else. Here all of them share one device.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch.distributed as dist

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
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    options._devices = [_device(interface.strip()) for interface in interfaces]
    options._timeout = places.timeout
    options._threads = _NUM_THREADS
    return dist.ProcessGroupGloo(places.store, places.group_rank, places.group_size, options)


@cache
def _device(interface: str) -> Any:
    """Return the device that all groups over an interface share; the host's address decides if none is named."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
