"""What a rank runs on, as far as the simulator needs to know: what operations cost, and what they share.

An operation becomes an :class:`Activity`: the seconds that it takes alone, and what it asks of shared resources
meanwhile.

* On a GPU a copy is a flow over its route, bounded by the profile's copy rate. With a single copy engine, copies in
  both directions wait for each other. Kernels take the device as a whole: what two streams run at the same time
  shares it, and so do allocations that no cache serves, because the driver makes the device wait for them. What
  launches kernels takes host cores.
  Where one process drives several devices, one thread issues the copies of all.
* On a CPU everything, copies included, is threads: it asks for cores and for memory bandwidth. Threads of one
  operation wait for each other at barriers, so an operation that loses part of one core slows down as a whole, and
  the scheduler is taken to be fair among threads: all slow down alike.
* A block is read from all drives of its host at once, and written to all, each its part by its bandwidth. Ranks of a host share
  them.
* A collective is what this rank sends to the next one of its ring: a flow over the route between their devices, or,
  between CPU ranks of one host, a copy in its memory. A payload that takes less time than the messages' latency
  occupies nothing, but for weights that come ahead within a host whose cores all have a rank: those messages wait for cores, and take
  them, as the profile says. Between hosts of CPU ranks the cores carry the bytes in and out of the network, and what runs beside
  them gets the rest: the kernel's own work comes first.
* A message is a flow, too, and takes its path at the sender's; the receiver of one within a CPU's memory copies as much.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from costmodel.devices.collectives import COLLECTIVES, CollectiveName, point_to_point_s
from costmodel.devices.nccl import Communicator
from costmodel.estimate import CopyDirection, OperationCost, estimate
from costmodel.rates.profile import Bound, Profile
from topology.errors import ProfileError
from zosim.program import Program
from zosim.program.contents import FrozenWeights, ParamGroupWeights
from zosim.program.instructions import Instruction, Space, Stream
from zosim.program.operations import Collective, Recv, Send

if TYPE_CHECKING:
    from topology.graph import Topology
from topology.routes import Route

_HOST_TERMS = ("dispatch", "overhead")


@dataclass(frozen=True, slots=True)
class Activity:
    """An operation as the simulator sees it."""

    seconds: float  # duration with nothing else running
    bound: float = 1.0  # its rate then, in a unit of its own: bytes/s for a flow, 1 for everything else
    weight: float = 1.0  # rate that counts as much as full speed does for an activity of bound 1
    uses: tuple[tuple[str, float], ...] = ()  # resources, with what a unit of rate takes of each
    limiter: str = ""  # what the duration consists of mostly

    def loads(self) -> Iterator[tuple[str, float]]:
        """Yield what it takes of every resource in all, by name: seconds times rate."""
        return ((name, use * self.bound * self.seconds) for name, use in self.uses)


@dataclass(frozen=True, slots=True)
class Hop:
    """The path from a rank to another."""

    latency_s: float  # of one message
    bandwidth_bytes_per_s: float  # of the narrowest link on the path
    # What lies on the way, with what a byte sent takes of each; nothing within one host's memory.
    uses: tuple[tuple[str, float], ...] = ()
    wire: str = "memory"  # technology of the narrowest link; `memory` within one host's memory
    # Seconds of a host's core for a byte that is sent and one that comes, where cores carry them; 0 within one host's memory says that
    # it is a core all the time.
    core_s_per_byte: float = 0.0
    # Seconds that an exchange takes beyond that where ranks compute: its threads wait for their turns on a core. Between hosts of a
    # large one, within a host's memory of each message that brings weights.
    busy_latency_s: float = 0.0
    busy_core_s: float = 0.0  # seconds that such a message within a host takes of a core
    # Of GPUs: what chooses an algorithm and says what it takes. Without it, the better of ring and recursive doubling.
    nccl: Communicator | None = None

    def message_s(self, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of a message of so many bytes.

        A mebibyte over 1 GiB/s takes a 1,024th of a second, after 10 us of latency:

        >>> round(1e3 * Hop(1e-5, 2**30).message_s(2**20), 4)
        0.9866
        """
        if self.nccl is not None:
            return self.nccl.message_s(size_bytes, bound)
        return point_to_point_s(
            size_bytes, latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class Ring(Hop):
    """A rank's position in the ring of a group: the path to the next rank, which keeps pace with the slowest hop of the ring."""

    num_ranks: int = field(kw_only=True)

    def seconds(self, function: CollectiveName, size_bytes: float, bound: Bound = "central") -> float:
        """Return the seconds of a sum over buffers of so many bytes, or until every rank has all shares of so many bytes together."""
        if self.nccl is not None:
            return self.nccl.seconds(function, size_bytes, bound)
        latency_s, bandwidth = self.latency_s, self.bandwidth_bytes_per_s
        return COLLECTIVES[function].by_messages(
            size_bytes, self.num_ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth
        )


@dataclass(frozen=True, slots=True)
class Drives:
    """The drives of a host, which every byte is spread over."""

    # read_bytes_per_s, write_bytes_per_s: of all together.
    read_bytes_per_s: float
    write_bytes_per_s: float
    # reads, writes: what lies on the way, with what a byte takes of each.
    reads: tuple[tuple[str, float], ...]
    writes: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, topology: Topology, device: str) -> Drives | None:
        """Return the drives of a device's host; None where it has none."""
        disks = topology.disks_of(device)
        if not disks:
            return None
        total = sum(disk.bandwidth_bytes_per_s for disk in disks)
        memory = topology.host_memory(device).id
        reads: dict[str, float] = defaultdict(float)
        writes: dict[str, float] = defaultdict(float)
        for disk in disks:
            share = disk.bandwidth_bytes_per_s / total
            for name in topology.route(disk.id, memory).resource_ids:
                reads[name] += share
            for name in topology.route(memory, disk.id).resource_ids:
                # A disk's bandwidth is that of its reads: a byte written takes more of it.
                writes[name] += share / (disk.write_share if name == disk.id else 1.0)

        def rate(uses: Mapping[str, float]) -> float:
            return min(topology.resources[name].bandwidth_bytes_per_s / taken for name, taken in uses.items())

        return cls(rate(reads), rate(writes), tuple(reads.items()), tuple(writes.items()))


@dataclass(frozen=True)
class Machine:
    """One rank's hardware.

    Attributes
    ----------
    profile : Profile
        What its operations cost.
    capacities : mapping of str to float
        Shared resources, bytes/s or cores or 1 for a device as a whole. Ranks share those of equal names.
    fifo : frozenset of str
        Those that serve one activity at a time, in order of arrival.
    routes : mapping of {"h2d", "d2h"} to tuple of str
        Resources on the way of a copy; empty on a CPU.
    wires : mapping of {"h2d", "d2h"} to str
        Technology of the narrowest link of each route, such as ``pcie``, to say what limits a copy.
    kernels : str
        Resource that kernels take, the device as a whole; empty on a CPU, where they take cores.
    cores : str
        Resource of host cores.
    memory : str
        Resource of host memory bandwidth that a CPU's operations take; empty if it never limits.
    issuer : str
        Thread that issues the copies of several devices, where one process drives them; empty where a rank has its own.
    rings : mapping of str to Ring
        How the rank takes part in the collectives of each group.
    channels : mapping of Send or Recv to Hop
        How its messages go. Resources on the way count at the sender.
    host_channels : mapping of Send or Recv to Hop
        How those go that a codec has left in the host's memory, where that is another than the device's.
    far_routes : mapping of {"h2d", "d2h"} to tuple of str
        Resources on the way of copies from and to another NUMA domain, where what lies on the host is more than the nearest holds.
    far_share : float
        Share of the bytes on the host that lie there.
    drives : Drives or None
        Where blocks may live that host memory has no space for.
    """

    profile: Profile
    capacities: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    fifo: frozenset[str] = frozenset()
    routes: Mapping[CopyDirection, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    wires: Mapping[CopyDirection, str] = field(default_factory=lambda: MappingProxyType({}))
    kernels: str = ""
    cores: str = ""
    memory: str = ""
    issuer: str = ""
    rings: Mapping[str, Ring] = field(default_factory=lambda: MappingProxyType({}))
    channels: Mapping[Send | Recv, Hop] = field(default_factory=lambda: MappingProxyType({}))
    host_channels: Mapping[Send | Recv, Hop] = field(default_factory=lambda: MappingProxyType({}))
    far_routes: Mapping[CopyDirection, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    far_share: float = 0.0
    drives: Drives | None = None

    def __post_init__(self) -> None:
        named = {self.kernels, self.cores, self.memory, self.issuer, *self.fifo} - {""}
        named.update(
            name for known in (self.routes, self.far_routes) for route in known.values() for name in route
        )
        paths = (self.rings, self.channels, self.host_channels)
        named.update(name for known in paths for path in known.values() for name, _ in path.uses)
        if self.drives is not None:
            named.update(name for name, _ in (*self.drives.reads, *self.drives.writes))
        missing = sorted(named - set(self.capacities))
        if missing:
            message = f"machine {self.profile.device_name} shares {missing[0]!r}, which has no capacity"
            raise ProfileError(
                message, hint=f"resources with a capacity: {', '.join(self.capacities) or 'none'}"
            )

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """The machine without the names of its resources: equal where machines differ in nothing else."""
        index = {name: number for number, name in enumerate(self.capacities)}
        return (
            id(self.profile),
            tuple(self.capacities.values()),
            tuple(sorted(index[name] for name in self.fifo)),
            tuple(
                (direction, tuple(index[name] for name in route))
                for known in (self.routes, self.far_routes)
                for direction, route in known.items()
            ),
            self.far_share,
            tuple(self.wires.items()),
            tuple(index.get(name) for name in (self.kernels, self.cores, self.memory, self.issuer)),
            tuple(
                (name, replace(path, uses=tuple((str(index[item]), share) for item, share in path.uses)))
                for paths in (self.rings, self.channels, self.host_channels)
                for name, path in paths.items()
            ),
            None
            if self.drives is None
            else tuple(
                tuple((index[name], share) for name, share in uses)
                for uses in (self.drives.reads, self.drives.writes)
            ),
        )

    @cached_property
    def alone(self) -> tuple[object, ...]:
        """What decides what activities take with nothing beside them: of a GPU's links and memories, what limits each route."""
        if not self.kernels:
            return self.shape
        profile, _, *others = self.shape
        own = (self.kernels, self.cores, self.issuer)
        capacities = (self.capacities[name] if name in own else None for name in self.capacities)
        return (profile, *capacities, *self._limits, *others)

    @cached_property
    def alone_s(self) -> tuple[object, ...]:
        """What decides how many seconds activities take with nothing beside them, whatever they take of which resource."""
        if not self.kernels:
            return self.shape
        paths = (
            (name, replace(path, uses=()))
            for known in (self.rings, self.channels, self.host_channels)
            for name, path in known.items()
        )
        return (id(self.profile), self.far_share, tuple(self.wires.items()), *self._limits, *paths)

    @property
    def _limits(self) -> tuple[object, ...]:
        """The bandwidth of each way of copies, and of drives."""
        limits = (
            min((self.capacities[name] for name in route), default=math.inf)
            for known in (self.routes, self.far_routes)
            for route in known.values()
        )
        drives = self.drives and (self.drives.read_bytes_per_s, self.drives.write_bytes_per_s)
        return (*limits, drives)

    def among_ranks(self) -> Machine:
        """Return the machine of a rank that has others on its host: cores that all work at once do less than one alone."""
        slowdown = self.profile.values().get("ranks_slowdown", 1.0)
        if self.kernels or slowdown <= 1:
            return self
        capacities = {**self.capacities, self.cores: self.profile.num_cores / slowdown}
        return replace(self, capacities=MappingProxyType(capacities))

    def spilled(self, topology: Topology, device: str, share: float) -> Machine:
        """Return the machine of a rank with part of its host memory in another NUMA domain: the one reached best.

        Parameters
        ----------
        topology : Topology
            The machine as a whole.
        device : str
            Id of the rank's device.
        share : float
            Share of the rank's bytes on the host that lie in the other domain, 0 to 1.

        Raises
        ------
        TopologyError
            If the host has no other memory that the device reaches.
        """
        near = topology.host_memory(device).id
        others = [memory.id for memory in topology.memories_of(device) if memory.id != near]
        routes = [(topology.route(memory, device), topology.route(device, memory)) for memory in others]
        h2d, d2h = min(
            routes, key=lambda pair: (-pair[0].bandwidth_bytes_per_s, pair[0].latency_s, pair[0].source)
        )
        capacities = dict(self.capacities)
        wires = dict(self.wires)
        far: dict[CopyDirection, tuple[str, ...]] = {}
        by_direction: dict[CopyDirection, Route] = {"h2d": h2d, "d2h": d2h}
        for direction, route in by_direction.items():
            # A copy engine that all copies of a device share is no part of its routes.
            engines = tuple(name for name in self.routes[direction] if name not in topology.resources)
            far[direction] = (*route.resource_ids, *engines)
            for name in route.resource_ids:
                capacities.setdefault(name, topology.resources[name].bandwidth_bytes_per_s)
            nearest = min((capacities[name] for name in self.routes[direction]), default=math.inf)
            if min(capacities[name] for name in far[direction]) < nearest:
                wires[direction] = route.narrowest_technology
        return replace(
            self,
            capacities=MappingProxyType(capacities),
            far_routes=MappingProxyType(far),
            far_share=share,
            wires=MappingProxyType(wires),
            fifo=self.fifo
            | {
                name
                for name in capacities
                if name in topology.resources and topology.resources[name].sharing == "fifo"
            },
        )

    @classmethod
    def from_topology(cls, topology: Topology, device: str, profile: Profile) -> Machine:
        """Return the machine around one device of a topology.

        A calibrated rate is a measurement: where a resource on a copy's route was declared smaller than the copy
        was measured, its capacity is raised to it. A rate from a datasheet is not, so there the route limits.

        Raises
        ------
        TopologyError
            If there is no such device, or no route between it and its host's memory.
        ProfileError
            If the profile is of another type of device.
        """
        machine, drives = cls._without_drives(topology, device, profile), Drives.of(topology, device)
        if drives is None:
            return machine
        capacities = dict(machine.capacities)
        for name, _ in (*drives.reads, *drives.writes):
            capacities.setdefault(name, topology.resources[name].bandwidth_bytes_per_s)
        return replace(machine, capacities=MappingProxyType(capacities), drives=drives)

    @classmethod
    def _without_drives(cls, topology: Topology, device: str, profile: Profile) -> Machine:
        spec = topology.device_spec(device)
        if spec.type != profile.device_type:
            message = f"device {device!r} is a {spec.type}, but the profile is of a {profile.device_type}"
            raise ProfileError(message, hint=f"use a profile of {spec.name}")
        host, memory = topology.host_of(device).id, topology.host_memory(device).id
        cores = f"{host}:cores"
        capacities: dict[str, float] = {cores: float(profile.num_cores)}
        if spec.type == "cpu":
            declared = topology.resources[memory].bandwidth_bytes_per_s
            measured = profile.values()["elementwise_bandwidth"] if profile.origin == "calibrated" else 0.0
            capacities[memory] = max(declared, measured)
            # What threads of one operation take from each other is in its rates; what operations take from each other is not.
            slowdown = profile.values().get("ranks_slowdown", 1.0)
            capacities[cores] = max(float(profile.num_threads), profile.num_cores / max(1.0, slowdown))
            return cls(profile, MappingProxyType(capacities), cores=cores, memory=memory)
        routes = {"h2d": topology.route(memory, device), "d2h": topology.route(device, memory)}
        kernels, engine = f"{device}:kernels", f"{device}:copy_engine"
        capacities[kernels] = 1.0
        taken: dict[CopyDirection, tuple[str, ...]] = {}
        for direction in ("h2d", "d2h"):
            taken[direction] = routes[direction].resource_ids
            for name in taken[direction]:
                declared = topology.resources[name].bandwidth_bytes_per_s
                measured = _copy_rate(profile, direction) if profile.origin == "calibrated" else 0.0
                capacities[name] = max(declared, measured, capacities.get(name, 0.0))
        fifo = {
            name for route in taken.values() for name in route if topology.resources[name].sharing == "fifo"
        }
        if spec.num_copy_engines == 1:
            capacities[engine] = math.inf
            fifo.add(engine)
            taken = {direction: (*route, engine) for direction, route in taken.items()}
        return cls(
            profile,
            MappingProxyType(capacities),
            frozenset(fifo),
            MappingProxyType(taken),
            MappingProxyType({direction: routes[direction].narrowest_technology for direction in taken}),
            kernels=kernels,
            cores=cores,
        )

    def activity(
        self,
        program: Program,
        instruction: Instruction,
        bound: Bound = "central",
        known: dict[Hashable, OperationCost] | None = None,
    ) -> Activity:
        """Return an instruction's activity.

        Parameters
        ----------
        program : Program
            Where the instruction's buffers are declared.
        instruction : Instruction
            Instruction of `program`.
        bound : {"central", "low", "high"}
            Which end of the profile's intervals.
        known : dict, optional
            Costs that machines of the same profiles, which must stay alive, were asked for; more are added.

        Raises
        ------
        ProfileError
            If the profile has no rate for the work's formats.
        """
        direction = self.direction(program, instruction)
        known, key = {} if known is None else known, (id(self.profile), instruction.work, direction, bound)
        if key not in known:
            known[key] = estimate(instruction.work, self.profile, bound=bound, direction=direction)
        cost = known[key]
        if cost.limiter == "copy":
            cost = replace(cost, limiter=self.wires.get(direction, "memory"))
        if instruction.work.disk_bytes:
            return self._disk(cost, instruction)
        if isinstance(instruction.op, Collective):
            return self._collective(cost, program, instruction, bound)
        if isinstance(instruction.op, Send | Recv):
            return self._message(cost, program, instruction, bound)
        if self.profile.device_type == "gpu" and instruction.work.copy_bytes:
            return self._flow(cost, instruction.work.copy_bytes, direction, bound)
        return self._threads(cost) if self.profile.device_type == "cpu" else self._kernels(cost)

    @staticmethod
    def direction(program: Program, instruction: Instruction) -> CopyDirection:
        """Return the direction of a copy's bytes: by where it writes, or by its stream if it writes nothing.

        Of copies between a drive and its host, reads are to the host and writes from it.

        Parameters
        ----------
        program : Program
            Where the instruction's buffers are declared.
        instruction : Instruction
            A copy.
        """
        if instruction.writes:
            return "d2h" if program.buffer(instruction.writes[0].buffer).space == Space.HOST else "h2d"
        return "d2h" if instruction.stream == Stream.D2H else "h2d"

    def step_s(self, bound: Bound = "central") -> float:
        """Return the host's own seconds between two steps, before the next step's first computation.

        Parameters
        ----------
        bound : {"central", "low", "high"}
            End of the intervals of the profile's constants; the values themselves if ``central``.
        """
        return self.profile.values(bound)["step_s"]

    def _flow(self, cost: OperationCost, size_bytes: int, direction: CopyDirection, bound: Bound) -> Activity:
        route, far = self.routes.get(direction, ()), self.far_routes.get(direction, ())
        # Latency is spread over the transfer, so that alone it takes exactly its cost.
        limit = min((self.capacities[name] for name in route), default=math.inf)
        seconds = max(cost.seconds, size_bytes / limit)
        shares = dict.fromkeys(route, 1.0)
        if far:
            # Which blocks lie far is not known: each is taken to lie there with its share of bytes.
            far_s = max(seconds, size_bytes / min(self.capacities[name] for name in far))
            seconds += self.far_share * (far_s - seconds)
            shares = {name: 1.0 if name in far else 1 - self.far_share for name in route}
            shares |= {name: self.far_share for name in far if name not in route}
        uses = tuple(shares.items()) + self._issued(size_bytes, bound)
        return Activity(seconds, size_bytes / seconds, self._flow_weight(bound), uses, cost.limiter)

    def _disk(self, cost: OperationCost, instruction: Instruction) -> Activity:
        if self.drives is None:
            raise ProfileError(
                f"{instruction.id} needs a drive, but the host of {self.profile.device_name} has none",
                hint="add a node of type disk with a bandwidth to the topology, or use --residency offloaded",
            )
        size_bytes, reads = instruction.work.disk_bytes, instruction.stream == Stream.DISK_READ
        rate = self.drives.read_bytes_per_s if reads else self.drives.write_bytes_per_s
        seconds = cost.seconds + size_bytes / rate
        uses = self.drives.reads if reads else self.drives.writes
        return Activity(seconds, size_bytes / seconds, rate, uses, "drive")

    def _issued(self, size_bytes: int, bound: Bound) -> tuple[tuple[str, float], ...]:
        """Return what a byte of a copy takes of the thread that issues it: all of it, or the time of the launch."""
        if not self.issuer:
            return ()
        launch_s = self.profile.values(bound)["copy_latency_s"]
        return ((self.issuer, 1.0 if self.issuer in self.fifo else launch_s / size_bytes),)

    def issued_by(self, issuer: str) -> Machine:
        """Return the machine of a rank whose copies a thread called `issuer` issues, with those of other ranks.

        A copy that a core carries (``copy_cores``), as one from pageable memory is, keeps the thread until it ends: copies
        of all devices queue. Others keep it for their launch (``copy_latency_s``).
        """
        waits = self.profile.values()["copy_cores"] > 0
        capacities = {**self.capacities, issuer: math.inf if waits else 1.0}
        fifo = self.fifo | {issuer} if waits else self.fifo
        return replace(self, capacities=MappingProxyType(capacities), fifo=fifo, issuer=issuer)

    def _collective(
        self, cost: OperationCost, program: Program, instruction: Instruction, bound: Bound
    ) -> Activity:
        assert isinstance(instruction.op, Collective)
        function, group = instruction.op.function, instruction.op.process_group
        size_bytes = instruction.work.link_bytes
        if program.process_groups.get(group, 1) == 1:
            return Activity(cost.seconds, limiter=cost.limiter)
        ring = self.rings.get(group)
        if ring is None:
            message = (
                f"{instruction.id} is a collective of {group}, but {self.profile.device_name} has no path to "
                "its ranks"
            )
            raise ProfileError(message, hint="create the machines of all ranks with machines_for")
        exchange_s = ring.seconds(function, COLLECTIVES[function].whole(size_bytes, ring.num_ranks), bound)
        # Weights come ahead of the blocks that need them, while ranks compute; losses are what ranks wait for.
        is_ahead = any(
            isinstance(item.what, ParamGroupWeights | FrozenWeights) for item in instruction.writes
        )
        if is_ahead and ring.wire == "memory" and ring.busy_latency_s:
            return self._beside_work(cost, exchange_s, size_bytes, ring)
        return self._on_link(replace(cost, seconds=cost.seconds + exchange_s), size_bytes, ring, bound)

    def _message(
        self, cost: OperationCost, program: Program, instruction: Instruction, bound: Bound
    ) -> Activity:
        op, size_bytes = instruction.op, instruction.work.link_bytes
        assert isinstance(op, Send | Recv)
        wires = (*instruction.reads, *instruction.writes)
        on_host = any(program.buffer(wire.buffer).space == Space.HOST for wire in wires)
        hop = (self.host_channels if on_host and op in self.host_channels else self.channels).get(op)
        if hop is None:
            message = (
                f"{instruction.id} sends {op.offset:+d} ranks along {op.process_group}, but "
                f"{self.profile.device_name} has no path there"
            )
            raise ProfileError(
                message, hint="create the machines of all ranks with machines_for, which connects neighbours"
            )
        seconds = cost.seconds + hop.message_s(size_bytes, bound)
        if isinstance(op, Recv) and hop.wire != "memory":
            return Activity(seconds, limiter=hop.wire)
        return self._on_link(replace(cost, seconds=seconds), size_bytes, hop, bound)

    def _on_link(self, cost: OperationCost, size_bytes: int, path: Hop, bound: Bound) -> Activity:
        """Return an exchange of so many bytes, which takes `cost` alone."""
        seconds, transfer_s = cost.seconds, size_bytes / path.bandwidth_bytes_per_s
        if transfer_s <= seconds - transfer_s:
            return Activity(seconds, limiter="latency")
        waits_s = 0.0 if path.wire == "memory" else path.busy_latency_s
        cost = replace(cost, seconds=(seconds := seconds + waits_s))
        # One thread sends and receives: a core at most, which does not slow the exchange down when nothing runs beside it.
        core_s = min(path.core_s_per_byte, seconds / size_bytes)
        if path.wire == "memory":
            # A hop of a ring keeps pace with the others, and its thread waits meanwhile.
            busy = core_s * size_bytes / seconds if core_s else 1.0
            demands = {self.cores: busy, self.memory: 2 * size_bytes / seconds}
            return self._demanding(replace(cost, limiter="memory"), demands)
        uses = (*path.uses, (self.cores, core_s)) if core_s else path.uses
        return Activity(seconds, size_bytes / seconds, self._flow_weight(bound), uses, path.wire)

    def _beside_work(self, call: OperationCost, exchange_s: float, size_bytes: int, ring: Ring) -> Activity:
        """Return an exchange of CPU ranks of one host on whose cores all of them compute.

        Notes
        -----
        A message wakes threads, which wait for their turn on a core, and take it from what computes there. What is copied
        waits as all work does that shares cores: by being slower.
        """
        transfer_s = size_bytes / ring.bandwidth_bytes_per_s
        num_rounds = (exchange_s - transfer_s) / ring.latency_s if ring.latency_s else 1.0
        copied_s = min(exchange_s, ring.core_s_per_byte * size_bytes)
        waits_s = num_rounds * ring.busy_latency_s * (1 - copied_s / exchange_s)
        seconds = call.seconds + exchange_s + waits_s
        busy_s = copied_s + num_rounds * ring.busy_core_s
        demands = {self.cores: min(1.0, busy_s / seconds), self.memory: 2 * size_bytes / seconds}
        is_short = transfer_s <= exchange_s - transfer_s
        limiter = "latency" if is_short else "memory"
        return self._demanding(replace(call, seconds=seconds, limiter=limiter), demands)

    def _flow_weight(self, bound: Bound) -> float:
        """Flows share links evenly whatever their own bounds, so all of a device's flows weigh the same."""
        return max(_copy_rate(self.profile, "h2d", bound), _copy_rate(self.profile, "d2h", bound))

    def _kernels(self, cost: OperationCost) -> Activity:
        host_s = sum(cost.terms.get(name, 0.0) for name in _HOST_TERMS)
        busy_s = max(sum(cost.terms.values()) - host_s, 0.0)
        share = min(busy_s / cost.seconds, 1.0) if cost.seconds else 0.0
        return self._demanding(cost, {self.kernels: share, self.cores: cost.cores})

    def _threads(self, cost: OperationCost) -> Activity:
        traffic = cost.memory_bytes / cost.seconds if cost.seconds else 0.0
        return self._demanding(cost, {self.cores: cost.cores, self.memory: traffic})

    def _demanding(self, cost: OperationCost, demands: Mapping[str, float]) -> Activity:
        """Return an activity that asks for these; alone it gets them, whatever the capacity says.

        The profile's rates were reached on the machine, so a demand above the declared capacity means that
        the capacity is understated (or that caches served it), not that the operation is slower.
        """
        uses = tuple(
            (name, min(demand, self.capacities[name]))
            for name, demand in demands.items()
            if name and demand > 0
        )
        return Activity(cost.seconds, uses=uses, limiter=cost.limiter)


def _copy_rate(profile: Profile, direction: str, bound: Bound = "central") -> float:
    return profile.values(bound)[f"copy_{direction}_bandwidth"]
