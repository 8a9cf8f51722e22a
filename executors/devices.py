"""Devices that torch finds on this machine, by the names that options give them.

What drives a device asks ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, so that every accelerator that torch
knows is a name. :func:`device_module` is for what torch keeps apart by type: counters of memory, and names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from topology.errors import PlanError, RunError

ACCELERATORS = ("cuda", "xpu", "npu")
"""Types of devices with streams, events and pinned memory; ROCm's are called cuda."""


def device_named(name: str) -> torch.device:
    """Return the device that is called `name`: ``cpu``, ``cuda`` or ``cuda:1``; ``cuda`` alone is the first.

    Raises RunError if torch does not find it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"unknown device {name!r}", hint="use cpu, or cuda:0 and so on") from None
    if device.type == "cpu":
        return device
    num_devices, index = num_devices_of(device.type), device.index or 0
    if index >= num_devices:
        raise RunError(
            f"device {name!r} does not exist: torch {torch.__version__} finds {num_devices} "
            f"{_SPELT.get(device.type, device.type)} devices",
            hint="use --device cpu, or install a torch build that supports this machine's GPU",
        )
    return torch.device(device.type, index)


_SPELT = {"cuda": "CUDA", "xpu": "XPU", "npu": "NPU"}


def accelerator_type() -> str:
    """Return the type of the accelerators that torch finds, ``cuda`` where it finds none."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return present.type if present is not None and present.type in ACCELERATORS else "cuda"


def num_devices_of(device_type: str) -> int:
    """Return how many devices of a type torch finds; a build of torch is for one type."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    is_known = device_type in ACCELERATORS and present is not None and present.type == device_type
    return torch.accelerator.device_count() if is_known else 0


def own_index(device_type: str, local_rank: int) -> int:
    """Return the number of a rank's own device: its own number on its host, or 0 where it is shown a single one.

    Slurm's ``--gpus-per-task=1`` shows each rank one device, all under the number 0.
    """
    return 0 if num_devices_of(device_type) == 1 else local_rank


def check_device(name: str) -> None:
    """Refuse what is no device that runs know, whether torch finds it or not. Raises PlanError."""
    if not re.fullmatch(rf"cpu|({'|'.join(ACCELERATORS)})(:[0-9]{{1,4}})?", name):
        raise PlanError(
            f"--device {name!r} is not the name of a device", hint="use cpu, cuda or cuda:N; or xpu or npu"
        )


def device_module(device: torch.device) -> Any:
    """Return ``torch.cuda`` or its like, for what ``torch.accelerator`` has not, or not before torch 2.9."""
    return torch.get_device_module(device)


def select_device(device: torch.device) -> None:
    """Let this thread's kernels go to a device: by its type, since torch 2.6 has another name for it than later ones."""
    device_module(device).set_device(device)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Let kernels of this thread go to a stream for a while."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


_ATTENTION_KERNELS = {0: "products", 1: "flash", 2: "memory-efficient", 3: "cudnn"}
"""torch's kernels of attention, by the numbers that it has for them."""


def attention_facts(name: str) -> dict[str, Any]:
    """Return the kernels that attention may use on a CUDA device, and cuDNN's version: numbers depend on them. Nothing of others.

    Returns
    -------
    dict
        ``attention_kernels``, as torch prefers them by itself, and ``cudnn``. Where cuDNN's is preferred, as on some devices, is
        torch's and cuDNN's own affair, for which their versions stand.
    """
    if torch.device(name).type != "cuda":
        return {}
    settings = torch.backends.cuda
    enabled = {
        "products": settings.math_sdp_enabled(),
        "flash": settings.flash_sdp_enabled(),
        "memory-efficient": settings.mem_efficient_sdp_enabled(),
        "cudnn": settings.cudnn_sdp_enabled(),
    }
    order = [_ATTENTION_KERNELS.get(number, "") for number in torch._C._get_sdp_priority_order()]
    return {
        "attention_kernels": [kernel for kernel in order if enabled.get(kernel)],
        "cudnn": torch.backends.cudnn.version(),
    }


_STAGING_ALIGNMENT_BYTES = 64
"""Of numbers of tokens and masks, which no product reads; 16 is what attention asks of a mask."""


def staged_on(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the host on a device, which gets them in one copy from pinned memory; the host does not wait for it.

    Pageable memory is copied chunk by chunk, through a buffer of the driver that the host waits for. On a CPU the tensors themselves.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    aligned = [-(-size // _STAGING_ALIGNMENT_BYTES) * _STAGING_ALIGNMENT_BYTES for size in sizes]
    *begins, total = accumulate(aligned, initial=0)
    staged = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    chunks = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    for chunk, tensor in zip(chunks, tensors, strict=True):
        staged[chunk].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = staged.to(device, non_blocking=True)
    return [
        there[chunk].view(tensor.dtype).view(tensor.shape)
        for chunk, tensor in zip(chunks, tensors, strict=True)
    ]


def device_name(name: str) -> str:
    """Return the product that a device is; ``cpu`` for the processor. Raises RunError if torch does not find it."""
    device = device_named(name)
    return "cpu" if device.type == "cpu" else str(device_module(device).get_device_name(device))
