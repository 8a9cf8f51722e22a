"""What PCI tells of a device: its class, its model, and links that are not to be believed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from topology.building import MachineBuilder, connector_type, pcie_type
from topology.schema import DeviceSpec, LinkType
from topology.units import format_bandwidth

NVIDIA, AMD = 0x10DE, 0x1002
HYPERVISORS = frozenset({0x1B36, 0x1D0F, 0x1414, 0x1AE0, 0x15AD, 0x5853})
"""Red Hat, Amazon, Microsoft, Google, VMware and Xen: their bridges are none of the board's."""
ACCELERATOR, DISPLAY, NETWORK, NVSWITCH, BRIDGE = "0302", "03", "02", "0680", "0604"
PROCESSING = "1200"
"""What AMD's accelerators from the MI300 on are."""
# By vendor and device, https://admin.pci-ids.ucw.cz/read/PC/10de and .../1002
PCI_ID_TO_DEVICE: Final = MappingProxyType(
    {
        (NVIDIA, 0x15F8): "p100-16gb-pcie",
        (NVIDIA, 0x15F9): "p100-16gb-sxm2",
        (NVIDIA, 0x1DB1): "v100-16gb-sxm2",
        (NVIDIA, 0x1DB4): "v100-16gb-pcie",
        (NVIDIA, 0x1DB5): "v100-32gb-sxm2",
        (NVIDIA, 0x1DB6): "v100-32gb-pcie",
        (NVIDIA, 0x1DB8): "v100-32gb-sxm3",
        (NVIDIA, 0x1DF6): "v100s-32gb-pcie",
        (NVIDIA, 0x1E02): "titan-rtx",
        (NVIDIA, 0x1E04): "rtx2080ti",
        (NVIDIA, 0x1E07): "rtx2080ti",
        (NVIDIA, 0x1EB8): "t4",
        (NVIDIA, 0x20B0): "a100-40gb-sxm",
        (NVIDIA, 0x20B2): "a100-80gb-sxm",
        (NVIDIA, 0x20B5): "a100-80gb-pcie",
        (NVIDIA, 0x20B7): "a30",
        (NVIDIA, 0x20F1): "a100-40gb-pcie",
        (NVIDIA, 0x20F3): "a800-80gb-sxm",
        (NVIDIA, 0x2204): "rtx3090",
        (NVIDIA, 0x2206): "rtx3080",
        (NVIDIA, 0x2230): "rtx-a6000",
        (NVIDIA, 0x2231): "rtx-a5000",
        (NVIDIA, 0x2235): "a40",
        (NVIDIA, 0x2236): "a10",
        (NVIDIA, 0x2237): "a10g",
        (NVIDIA, 0x2321): "h100-94gb-nvl",
        (NVIDIA, 0x2324): "h800-80gb-sxm",
        (NVIDIA, 0x2329): "h20-96gb",
        (NVIDIA, 0x2330): "h100-80gb-sxm",
        (NVIDIA, 0x2331): "h100-80gb-pcie",
        (NVIDIA, 0x2335): "h200-141gb-sxm",
        (NVIDIA, 0x2342): "gh200-96gb",
        (NVIDIA, 0x24B0): "rtx-a4000",
        (NVIDIA, 0x2684): "rtx4090",
        (NVIDIA, 0x26B1): "rtx-6000-ada",
        (NVIDIA, 0x26B2): "rtx-5000-ada",
        (NVIDIA, 0x26B5): "l40",
        (NVIDIA, 0x26B9): "l40s",
        (NVIDIA, 0x2704): "rtx4080",
        (NVIDIA, 0x27B8): "l4",
        (NVIDIA, 0x2901): "b200-180gb-sxm",
        (NVIDIA, 0x2941): "gb200-186gb",
        (NVIDIA, 0x2B85): "rtx5090",
        (NVIDIA, 0x2E12): "gb10-128gb",
        (AMD, 0x7408): "mi250x-gcd",
        (AMD, 0x74A1): "mi300x",
        (AMD, 0x74A5): "mi325x",
        (AMD, 0x74B5): "mi300x",  # as a virtual machine sees it
    }
)
_DOUBT = 4
"""A bridge that carries less than this part of a device below it is a virtual machine's, not the board's."""


def hexadecimal(text: str | None) -> int | None:
    """Return the number that ``0x10de`` or ``10de`` spells; None where there is none."""
    match = re.fullmatch(r"(?:0[xX])?([0-9a-fA-F]{1,8})", (text or "").strip())
    return None if match is None else int(match[1], 16)


def pci_class(text: str | None) -> str:
    """The first four digits of a class, such as ``"0302"``; empty where there is none."""
    digits = (text or "").lower().strip().removeprefix("0x")
    return digits[:4] if re.fullmatch("[0-9a-f]{4,8}", digits) else ""


def is_gpu(class_digits: str, vendor: int | None) -> bool:
    """Whether a device computes: an accelerator does, others where their vendor makes GPUs that do."""
    if class_digits == ACCELERATOR:
        return True
    return vendor in {NVIDIA, AMD} and class_digits.startswith((DISPLAY, PROCESSING))


def link_above(
    builder: MachineBuilder,
    name: str,
    reported: LinkType | None,
    *,
    gpu: DeviceSpec | None = None,
    below: Sequence[LinkType] = (),
    vendor: int | None = None,
) -> LinkType:
    """The link above a PCI device: as its file tells, unless a virtual machine hides it or makes it up.

    - `reported`: as its file says.
    - `below`: of the devices and bridges below it, if it is a bridge.
    - `vendor`: of a bridge, where it is known.
    """
    if gpu is not None:
        return _of_gpu(builder, name, reported, gpu)
    if not below:
        return reported or pcie_type(3, 16)  # what NCCL takes
    widest = max(below, key=lambda link: link.nominal_bandwidth_bytes_per_s)
    if reported is None:
        return widest
    has, needs = (link.nominal_bandwidth_bytes_per_s for link in (reported, widest))
    if has * _DOUBT > needs and not (vendor in HYPERVISORS and has < needs):
        return reported
    builder.notes.append(
        f"The bridge {name} of {format_bandwidth(has)} above a device of {format_bandwidth(needs)} is taken for a virtual "
        "machine's, whose links carry what the board's do."
    )
    return widest


def _of_gpu(builder: MachineBuilder, name: str, reported: LinkType | None, gpu: DeviceSpec) -> LinkType:
    """A GPU's link at a generation that it can have: no newer than its connector, and not that which links sleep at."""
    if reported is None:
        link_type = connector_type(gpu)
        builder.notes.append(
            f"The PCIe link of {gpu.name} is unknown; its connector's is assumed, {link_type.name}."
        )
        return link_type
    width = reported.pcie
    if width is None or gpu.pcie is None:
        return reported
    is_asleep = width.generation == 1 and width.lanes >= 4 and gpu.pcie.generation >= 3
    if not is_asleep and width.generation <= gpu.pcie.generation:
        return reported
    believed = pcie_type(gpu.pcie.generation, min(width.lanes, gpu.pcie.lanes))
    has, taken = (format_bandwidth(link.nominal_bandwidth_bytes_per_s) for link in (reported, believed))
    builder.notes.append(
        f"The link of {name} of {has} is taken for one that sleeps: {taken} under load."
        if is_asleep
        else f"{gpu.name} has PCIe {gpu.pcie.generation}.0: {taken} are taken, not the {has} that the file tells."
    )
    return believed
