"""Seconds of NCCL's messages and collectives, by the model with which NCCL itself chooses an algorithm and a protocol.

A collective can go round a ring or along a tree, in one of three protocols: ``LL`` sends a flag with every 4 bytes, and so
has the least latency and half of the bandwidth; ``LL128`` a flag with every 120 bytes, which only NVLinks keep in order;
``Simple`` fences whole slices. For each pair there is a latency, ``base + steps · hop``, and a bandwidth; NCCL takes the
pair with the least ``latency + bytes / bandwidth`` [1]_, and so does this module.

Switches of third-generation NVLink add up what GPUs send (NVLS, which NCCL takes for large sums of more than two GPUs of a
host since 2.17): every GPU then sends and receives its buffer and one share of it, where a ring does nearly twice as much.

.. [1] NCCL, ``src/graph/tuning.cc``, ``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime``,
   https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc (2.29, read on 2026-11-27). 2.18 to 2.21 differ in trees of Simple alone, with 28 µs
   a hop and no base, which decide nothing within a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Literal

from costmodel.devices.collectives import COLLECTIVES, CollectiveName
from costmodel.rates.profile import Bound

Wire = Literal["nvlink", "pcie", "network"]
Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Way = tuple[Literal["tree", "ring", "nvls"], Literal["LL", "LL128", "Simple"]]

_US, _GB = 1e-6, 1e9

_BASE_US: dict[Way, float] = {
    ("tree", "LL"): 6.8, ("tree", "LL128"): 14.0, ("tree", "Simple"): 8.4,
    ("ring", "LL"): 6.6, ("ring", "LL128"): 14.0, ("ring", "Simple"): 8.4,
}  # fmt: skip
_HOP_US: dict[Wire, dict[Way, float]] = {
    "nvlink": {
        ("tree", "LL"): 0.6, ("tree", "LL128"): 1.25, ("tree", "Simple"): 4.0,
        ("ring", "LL"): 0.6, ("ring", "LL128"): 1.9, ("ring", "Simple"): 3.4,
    },
    "pcie": {
        ("tree", "LL"): 1.0, ("tree", "LL128"): 1.9, ("tree", "Simple"): 4.0,
        ("ring", "LL"): 1.0, ("ring", "LL128"): 2.5, ("ring", "Simple"): 5.7,
    },
    "network": {
        ("tree", "LL"): 5.0, ("tree", "LL128"): 8.5, ("tree", "Simple"): 14.0,
        ("ring", "LL"): 2.7, ("ring", "LL128"): 4.0, ("ring", "Simple"): 14.0,
    },
}  # fmt: skip
"""Latencies of one hop."""

_LL_GB: dict[Generation, tuple[float, float, float]] = {
    "volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0), "hopper": (141.0, 45.0, 35.0), "blackwell": (282.0, 90.0, 70.0),
}  # fmt: skip
"""Most that LL moves, on one host, on two, on more. Across hosts NCCL reads the row by the CPU's maker: AMD's is the second."""

_RING_LL128_GB: dict[Generation, float] = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
_TREE_LL128_GB: dict[Generation, tuple[float, float, float]] = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
_TREE_GB: dict[Generation, tuple[float, float, float]] = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
"""Most that a channel moves by protocol and number of hosts."""

_TREE_FRACTIONS = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip
"""Fraction of its bandwidth that a tree reaches, for sizes of 64 bytes times powers of two."""

_CHANNEL_GB = 20.0
"""Of a ring's channel on NVLinks of any generation so far, by which the number of channels is known from their sum."""
_NETWORK_CHANNELS = 2
"""Channels for each network adapter: NCCL doubles the rings that it has laid (``src/graph/connect.cc``, ``ncclTopoPostset``)."""

_NETWORK_POST_US = 2.0
"""What every step of a ring across hosts takes at least: handing a message to the network, three times in Simple. By the CPU's
maker, AMD's 2, Intel's 1."""

_NETWORK_PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4, "blackwell": 1.4}
"""How many times as long the latency of Simple rings across hosts is once slices are full."""

_NVLS: Way = ("nvls", "Simple")
_NVLS_US = 25.0
"""Latency of a sum in the switches of a host, which has no base besides (the same tables)."""
_NVLS_FRACTION: dict[Generation, float] = {"hopper": 0.85, "blackwell": 0.74}
"""Fraction of the links' bandwidth that sums in switches reach (``nvlsEfficiency``). Bus bandwidths of nccl-tests on eight GPUs, without and
with: 370 and 480 GB/s on H100, 695 and 845 on B300 (https://github.com/NVIDIA/nccl/issues/2140), for 474 and 806 by this."""

_REACHED = 0.97
"""Fraction of the planned bandwidth that large exchanges reach: nccl-tests of eight A100s on NVLink switches print bus bandwidths of
230 to 236 GB/s for the 240 that NCCL plans with (https://github.com/stas00/ml-engineering, network/benchmarks)."""

_STEP_BYTES = 512 * 1024
"""A channel's step in Simple, ``NCCL_BUFFSIZE / NCCL_STEPS``. Nothing is passed on before a slice of steps has arrived: two in a ring, one
in trees and switches (``ALLREDUCE_SLICESTEPS``, and ``calcCollChunking`` in ``src/enqueue.cc``). NCCL's own model leaves filling the channels
out; published times of 16 to 64 MiB on A100s show it."""
_RING_STEPS = 2

_SPREAD: dict[Bound, tuple[float, float]] = {"central": (1.0, 1.0), "low": (0.7, 1.02), "high": (2.2, 0.74)}
"""Factors of latencies and of bandwidths at the ends of intervals: what published measurements of equal size differ by. Chosen so that
nine tenths of Vidur's, vTrain's and ml-engineering's times on A100s lie inside (``python -m studies.validation`` counts them)."""

NVLINK_MESSAGE_FRACTION = 0.9
"""Fraction of an NVLink's nominal bandwidth that one large message reaches; rings reach less. Copies between two A100s are published at
274 of 300 GB/s (https://github.com/stas00/ml-engineering, network/benchmarks)."""

_MESSAGE_LL_BYTES = 16 * 1024
"""Messages up to here go in LL (``NCCL_P2P_LL_THRESHOLD``)."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """GPUs that exchange data through NCCL."""

    num_ranks: int
    num_hosts: int
    wire: Wire  # what joins the GPUs of a host
    generation: Generation  # row of NCCL's tables; older and unknown GPUs count as Volta
    bandwidth_bytes_per_s: float  # what a rank sends to the next at once, over all rings
    message_bytes_per_s: float = 0.0  # what a single message between two of them reaches
    in_switch_sums: bool = False  # whether the switches between the GPUs of a host add up

    def seconds(self, function: CollectiveName, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of a collective on buffers of `size_bytes`; of a gather or scatter, of all shares together."""
        if self.num_ranks == 1:
            return 0.0
        _, way = min(
            (
                self._latency_us(way, function, size_bytes) * _US
                + size_bytes / self._bandwidth(way, function, size_bytes),
                way,
            )
            for way in self._ways(function, bound)
        )
        slower, faster = _SPREAD[bound]
        latency_s = self._latency_us(way, function, size_bytes) * _US * slower
        slice_bytes = _STEP_BYTES * (_RING_STEPS if way[0] == "ring" else 1)
        filling = min(size_bytes, self._num_channels * slice_bytes) if way[1] == "Simple" else 0.0
        reached = self._bandwidth(way, function, size_bytes) * _REACHED
        return latency_s + (size_bytes / reached + filling / self.bandwidth_bytes_per_s) / faster

    def message_s(self, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of one message to another rank."""
        way: Way = ("ring", "LL" if size_bytes <= _MESSAGE_LL_BYTES else "Simple")
        slower, faster = _SPREAD[bound]
        latency_us = _BASE_US[way] + _HOP_US[self._slowest_wire][way]
        bandwidth = self.message_bytes_per_s or self.bandwidth_bytes_per_s
        return latency_us * _US * slower + size_bytes / (bandwidth * faster)

    @property
    def _slowest_wire(self) -> Wire:
        return "network" if self.num_hosts > 1 else self.wire

    @property
    def _num_channels(self) -> float:
        if self._slowest_wire == "nvlink":
            return max(1.0, self.bandwidth_bytes_per_s / (_CHANNEL_GB * _GB))
        return 2.0 if self.num_hosts == 1 else 2.0 * _NETWORK_CHANNELS

    def _ways(self, function: CollectiveName, bound: Bound) -> Iterator[Way]:
        """Yield each algorithm in each protocol."""
        # Sums in switches need drivers, containers and settings that allow them: at worst they are not to be had.
        has_nvls = self.num_hosts == 1 and self.num_ranks > 2 and self.generation in _NVLS_FRACTION
        if self.in_switch_sums and has_nvls and function == "all_reduce" and bound != "high":
            yield _NVLS
        for way in _BASE_US:
            # Other functions have no trees; only NVLinks deliver 128 bytes in order.
            if (way[0] == "ring" or function == "all_reduce") and (
                way[1] != "LL128" or self.wire == "nvlink"
            ):
                yield way

    def _latency_us(self, way: Way, function: CollectiveName, size_bytes: float) -> float:
        if way == _NVLS:
            return _NVLS_US
        per_host = self.num_ranks / self.num_hosts
        # With one rank on a host nothing hides the network's latency, and NCCL counts that of trees.
        across = _HOP_US["network"][way if per_host > 1 else ("tree", way[1])]
        within = _HOP_US[self.wire][way]
        if way[0] == "tree":
            return _BASE_US[way] + 2 * ((per_host - 1) * within + log2(self.num_hosts) * across)
        rounds = COLLECTIVES[function].num_passes
        num_across = rounds * (self.num_hosts - 1)
        if self.num_hosts > 1:
            within = max(within, _NETWORK_POST_US * (3 if way[1] == "Simple" else 1))
        latency_us = (
            _BASE_US[way] + (rounds * (self.num_ranks - 1) - num_across) * within + num_across * across
        )
        is_full = size_bytes / (self._num_channels * self.num_ranks) >= 64
        if way[1] == "Simple" and self.num_hosts > 1 and function == "all_reduce" and is_full:
            latency_us *= _NETWORK_PLATEAU[self.generation]
        return latency_us

    def _bandwidth(self, way: Way, function: CollectiveName, size_bytes: float) -> float:
        index = min(self.num_hosts, 3) - 1
        generation, bus, channels = self.generation, self.bandwidth_bytes_per_s / _GB, self._num_channels
        ll = _LL_GB[generation if self.num_hosts == 1 else "ampere"][index]
        match way:
            case ("ring", "LL"):
                bus = min(ll, bus * 0.5)
            case ("ring", "LL128"):
                bus = min(bus * 0.92, channels * _RING_LL128_GB[generation])
            case ("nvls", _):
                return bus * _GB * _NVLS_FRACTION[generation] * self.num_ranks / (self.num_ranks + 1)
            case ("ring", "Simple"):
                pass
            case ("tree", protocol):
                bus = min(bus * 0.92, channels * _TREE_GB[generation][index])
                if protocol == "LL":
                    bus = min(bus / 3.8, ll)
                elif protocol == "LL128":
                    fraction = 7 / 9 if self.num_hosts == 1 else 120 / 128
                    bus = min(bus * fraction, channels * _TREE_LL128_GB[generation][index])
                size = int(log2(max(1.0, size_bytes / 64)))
                fractions = _TREE_FRACTIONS[protocol]
                bus *= fractions[size] if size < len(fractions) else 1.0
        algorithm = bus / 2 if way[0] == "tree" else COLLECTIVES[function].whole(bus, self.num_ranks)
        return algorithm * _GB
