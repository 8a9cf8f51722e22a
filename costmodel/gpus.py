"""GPU architectures: what a data sheet does not print of a device, but its name tells.

A device is recognised by its product name, as the driver spells it; one that is not known has no architecture, and is
predicted from what its data sheet says alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from costmodel.nccl import Generation
from topology.schema import DeviceSpec


@dataclass(frozen=True)
class Architecture:
    """What GPUs of one design have in common.

    Attributes
    ----------
    name : str
    names : str
        Pattern of the products' names.
    float32_per_clock : int
        Floating-point operations in float32 of one multiprocessor and clock, two for a multiply-add: its lanes, from the
        architecture's whitepaper. With the peak of the data sheet they tell the boost clock.
    nccl : str
        Row of NCCL's tables.
    """

    name: str
    names: str
    float32_per_clock: int
    nccl: Generation


ARCHITECTURES = (
    Architecture("pascal", r"\bP100\b", 128, "volta"),
    Architecture("volta", r"\bV100S?\b|TITAN V\b", 128, "volta"),
    Architecture("turing", r"\bT4\b|TITAN RTX|RTX 20\d\d|Quadro RTX", 128, "volta"),
    Architecture("ampere", r"\bA100\b|\bA800\b|\bA30\b", 128, "ampere"),
    Architecture("ampere-graphics", r"\bA(40|10|10G|16|2)\b|RTX A\d{4}|RTX 30\d\d", 256, "ampere"),
    Architecture("ada", r"\bAda\b|RTX 40\d\d|\bL40S?\b|\bL4\b", 256, "ampere"),
    Architecture("hopper", r"\bG?H(100|200|20|800)\b", 256, "hopper"),
    Architecture("blackwell", r"\bG?B(100|200|300)\b", 256, "blackwell"),
)
"""Known designs. Lanes: NVIDIA's whitepapers of P100, V100, TU102, GA100, GA102, AD102, H100 and Blackwell."""


@cache
def _architecture(name: str) -> Architecture | None:
    return next((item for item in ARCHITECTURES if re.search(item.names, name)), None)


def architecture_of(spec: DeviceSpec) -> Architecture | None:
    """Return the architecture of a GPU, None where its name is not known.

    Examples
    --------
    >>> from topology.documents import load_preset
    >>> architecture_of(load_preset("dgx-h100").device_spec("gpu0")).name
    'hopper'
    """
    # "RTX 6000 Ada Generation" and "RTX A6000" are of different designs, "A100" is not "RTX A1000".
    return _architecture(spec.name)


def clocks_per_s(spec: DeviceSpec) -> float:
    """Return the boost clock of a GPU in Hz times its multiprocessors: cycles of all of them in a second.

    It follows from the float32 peak and the lanes. An unknown device counts as having 128 lanes per multiprocessor.
    """
    architecture = architecture_of(spec)
    return spec.peak_flop_per_s("fp32") / (256 if architecture is None else architecture.float32_per_clock)
