"""Devices that torch finds on this machine, by the names that options give them."""

from __future__ import annotations

import torch

from topology.errors import RunError


def device_named(name: str) -> torch.device:
    """Return the device that is called `name`: ``cpu``, ``cuda`` or ``cuda:1``; ``cuda`` alone is the first.

    Raises
    ------
    RunError
        If torch does not find it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"there is no device {name!r}", hint="use cpu, or cuda:0 and so on") from None
    if device.type == "cpu":
        return device
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if device.type != "cuda" or index >= num_devices:
        raise RunError(
            f"there is no device {name!r}: torch {torch.__version__} finds {num_devices} CUDA devices",
            hint="use --device cpu, or install a torch build that supports this machine's GPU",
        )
    return torch.device("cuda", index)


def device_name(name: str) -> str:
    """Return the product that a device is; ``cpu`` for the processor.

    Raises
    ------
    RunError
        If torch does not find it.
    """
    device = device_named(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
