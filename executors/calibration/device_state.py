"""Clocks, power and temperature of a GPU while it is measured: why the same kernel takes longer the second time."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from executors.devices import device_named


@dataclass(frozen=True)
class DeviceState:
    """What the driver says of a GPU at one moment."""

    # clock_mhz, memory_clock_mhz: of the multiprocessors, and of the memory.
    clock_mhz: int
    memory_clock_mhz: int
    power_w: float
    power_limit_w: float
    temperature_c: int
    used_bytes: int  # memory that all processes together have taken
    # pcie_generation, pcie_lanes: of the link as it is now; idle GPUs let it slow down.
    pcie_generation: int
    pcie_lanes: int


def device_state(device: str, nvml: Any | None = None) -> DeviceState | None:
    """Return what the driver says of a GPU; None where it cannot be asked.

    - `device`: as torch calls it; found by its UUID, as torch and the driver may number devices differently.
    - `nvml`: by default ``pynvml``, where it is installed.
    """
    import torch

    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    uuid = getattr(torch.cuda.get_device_properties(device_named(device)), "uuid", None)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return DeviceState(
            clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            power_limit_w=nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            used_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used,
            pcie_generation=nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            pcie_lanes=nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
