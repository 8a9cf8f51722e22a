"""On which devices ranks may run: every choice up to devices that are alike, whatever order the topology lists them in.

Devices are alike if their data sheets and their links to the host's memory are. The fastest come first, so that the first ranks, whose
shares of a batch are the longer ones, have them. Where there are several kinds, ranks may be on those of any of them.

Examples
--------
Two cards that are alike stay in the order of the file:

>>> from topology import load_preset
>>> choice = DeviceChoice(load_preset("rtx4090-2x"), "gpu")
>>> choice.by_host, len(list(choice.selections()))
({'host0': ['gpu0', 'gpu1']}, 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Literal

from topology.graph import Topology
from zosim.hardware.isomorphic_hosts import IsomorphicHosts

_FEW_SPEEDS = 4
"""Of devices, any of which may be left out; of more only the slowest are."""
_PRECISIONS: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")

Speed = tuple[float, float, float, float, str]
"""Of a device, the larger the faster: peak, bandwidth of its memory and of its link, size of its memory; and its name."""


class DeviceChoice:
    """The devices of one type of a topology, the fastest first.

    Parameters
    ----------
    device_type : str
        GPUs where there are any, or else processors.
    first : str, optional
        A device that comes first however fast it is, before those that the file lists behind it.

    Attributes
    ----------
    by_host : dict of str to list of str
        Devices of each host: the host with the fastest first, and its fastest.
    """

    def __init__(self, topology: Topology, device_type: str, first: str | None = None) -> None:
        devices = [node.id for node in topology.compute_devices] if device_type == "gpu" else []
        devices = devices or [node.id for node in topology.of_type("cpu")]
        isomorphic = IsomorphicHosts(topology)
        known: dict[str, Speed] = {}
        for device in devices:
            alike = isomorphic.representative(device)
            if alike not in known:
                known[alike] = _speed(topology, alike)
        self._speeds = {device: known[isomorphic.representative(device)] for device in devices}
        # Sorting keeps the file's order among those that are alike.
        if first is None:
            devices.sort(key=self._speeds.__getitem__, reverse=True)
        else:
            begin = devices.index(first)
            devices = [*devices[begin:], *devices[:begin]]
        hosts: dict[str, list[str]] = {}
        for device in devices:
            hosts.setdefault(topology.host_of(device).id, []).append(device)
        if first is None:
            in_order = sorted(
                hosts, key=lambda host: [self._speeds[device] for device in hosts[host]], reverse=True
            )
            hosts = {host: hosts[host] for host in in_order}
        self.by_host = hosts
        self._has_first = first is not None

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike."""
        return len(set(self._speeds.values())) == 1

    def selections(self) -> Iterator[dict[str, list[str]]]:
        """Yield the devices that ranks may be on, by host: all, then those of some kinds alone, unless one has to be first."""
        if self._has_first:
            yield self.by_host
            return
        speeds = sorted(set(self._speeds.values()), reverse=True)
        for num_speeds in range(len(speeds), 0, -1):
            is_few = len(speeds) <= _FEW_SPEEDS
            for chosen in combinations(speeds, num_speeds) if is_few else [tuple(speeds[:num_speeds])]:
                kept = {
                    host: [device for device in devices if self._speeds[device] in chosen]
                    for host, devices in self.by_host.items()
                }
                yield {host: devices for host, devices in kept.items() if devices}


def _speed(topology: Topology, device: str) -> Speed:
    spec = topology.device_spec(device)
    peaks = [spec.peak_dense[dtype].in_si("compute") for dtype in _PRECISIONS if dtype in spec.peak_dense]
    link = topology.route(topology.host_memory(device).id, device).bandwidth_bytes_per_s
    return max(peaks, default=0.0), spec.memory_bandwidth_bytes_per_s, link, float(spec.memory_bytes), spec.id
