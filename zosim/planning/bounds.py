"""What a plan takes at least, on all its ranks: the longest of their lower bounds, and the fullest of what they share.

Ranks that do the same on devices that are placed alike are bounded once, however many they are.

What is known of MeZO's plan for OPT-13B on a GPU with 80 GB before it is lowered, in float32:

>>> from costmodel import read_model_spec
>>> from costmodel.devices.datasheet import datasheet_profile
>>> from topology import load_preset
>>> topology, model = load_preset("a100-80gb-milan"), read_model_spec("opt-13b")
>>> from zosim.config import PlanConfig, Search
>>> from zosim.planning.request import Hardware, Request
>>> hardware = Hardware(topology, "a100-80gb-milan", "gpu0", datasheet_profile(topology, "gpu0"))
>>> request = Request(PlanConfig(model=model, search=Search(max_device_bytes=2**34)), hardware)
>>> placement = Placement(topology="a100-80gb-milan", devices=("gpu0",))
>>> bound = Bounds(request).of(Plan(model=model, batch=1, seq=2048, placement=placement))
>>> print(bound.missing.partition(": ")[0])
needs 50.84 GiB of device memory, 34.84 GiB more than 16 GiB
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from costmodel.memory import Where
from costmodel.models.model_spec import EMBED, HEAD
from topology.units import format_bytes
from zosim.eval_points import BASE
from zosim.hardware.machine import Machine
from zosim.hardware.machines import KnownPaths, machines_for
from zosim.planning.block_bound import BlockBound, BlockBounder, whole_world
from zosim.planning.disks import may_keep_blocks, num_kept
from zosim.planning.footprint import Footprints, HostFootprint, footprints
from zosim.planning.predict import PlannedRun
from zosim.planning.request import Request, profiles_of
from zosim.planning.space import PlanShape
from zosim.plans import Mesh, Placement, Plan
from zosim.simulators.closed_form import step_time_of

_MOST_NAMED = 3
"""Components that the message about a memory that does not suffice names."""


@dataclass(frozen=True)
class Bound:
    """What is known of a plan before it is lowered."""

    seconds: float  # of a step, at least
    num_instructions: int  # of the longest rank's step
    footprints: Footprints  # of one rank and one host of each class
    missing: str  # what does not fit and by how much; empty if everything does
    missing_bytes: int  # how much that is altogether, of a device's memory, of a host's and of its drives
    lacks_host: bool = False  # whether a host's memory is among what does not suffice


@dataclass(frozen=True)
class _RankClasses:
    """Kinds of ranks on a placement, and which of them share a host."""

    # A rank of each class: classes differ in what they do, or in their machines otherwise than by names.
    ranks: tuple[int, ...]
    hosts: dict[str, tuple[tuple[int, int], ...]]  # ranks with their classes, for one host of each class
    pipelines: tuple[tuple[int, ...], ...]  # one of each that is made of other classes
    class_of: tuple[int, ...]  # of each rank


class Bounds:
    """Bounds of the plans for one request; `bounder` brings what requests for the same model have found."""

    def __init__(
        self, request: Request, paths: KnownPaths | None = None, bounder: BlockBounder | None = None
    ) -> None:
        self._request = request
        self._bounder = bounder or BlockBounder(request.config.spec)
        self._isomorphic = request.hardware.topology.isomorphic_hosts
        self._known_classes: dict[tuple[Mesh, Placement], _RankClasses] = {}
        self._paths = paths or KnownPaths()
        self._block_bytes: dict[Hashable, tuple[float, float]] = {}
        self._known: dict[tuple[Placement, int], tuple[Machine, ...]] = {}

    def of(self, plan: Plan) -> Bound:
        """Return the bound of a plan for the request."""
        classes = self._classes(plan)
        machines = self.machines(plan)
        block_bounds = [self._bounder.bound(plan, rank, machines[rank]) for rank in classes.ranks]
        of_type = [bound.footprint for bound in block_bounds]
        hosts = [
            HostFootprint.of(
                host, [rank for rank, _ in members], [of_type[rank_class] for _, rank_class in members]
            )
            for host, members in classes.hosts.items()
        ]
        taken = Footprints(tuple(of_type), tuple(hosts))
        # The slowest rank holds up all others.
        longest = max(block_bounds, key=lambda bound: bound.period_s)
        lacks = list(self._missing(plan, classes, taken))
        return Bound(
            max(
                longest.period_s,
                *(
                    self._bounder.pipeline_s(plan, pipeline, machines)
                    for pipeline in (classes.pipelines if plan.num_stages > 1 else ())
                ),
                self._shared_s(plan, classes, block_bounds),
            ),
            longest.num_instructions,
            taken,
            "; ".join(lack.description for lack in lacks),
            sum(lack.size_bytes for lack in lacks),
            any(lack.where == "host" for lack in lacks),
        )

    def step_time_s(self, planned: PlannedRun, bound: Bound) -> float | None:
        """Return the seconds per step of a plan where they are known without its programs (:func:`whole_world`); else None."""
        plan, topology = planned.plan, self._request.hardware.topology
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank, device in enumerate(plan.placement.devices):
            hosts[topology.host_of(device).id].append(rank)
        of_ranks = [bound.footprints.ranks[number] for number in self._classes(plan).class_of]
        # What lies on a host decides which of its memories copies reach.
        planned.__dict__["footprints"] = footprints(of_ranks, hosts)
        world = whole_world(plan, self._bounder, planned.machines)
        return None if world is None else step_time_of(world)

    def least_s(self, plan: Plan, shape: PlanShape) -> float:
        """Return the seconds of a step of a plan of a shape, at least, by what is known before anything of the plan is written."""
        floor = shape.floor(plan)
        if plan.num_stages > 1:
            is_blockwise = not (plan.is_full_pass or plan.perturbs_by_adapters)
            return floor.blockwise_s if is_blockwise else floor.least_s
        machines = self.machines(plan)
        computed_s = max(
            forwards_s + self._bounder.passes_s(plan, rank, machines[rank])
            for rank, forwards_s in floor.forwards
        )
        return max(computed_s, self._uploads_s(plan, machines))

    def _uploads_s(self, plan: Plan, machines: Sequence[Machine]) -> float:
        """Return the seconds for which blocks that come up once keep the fullest link of any host busy."""
        if not plan.is_offloaded or plan.is_transfer_lossy:
            return 0.0
        key = plan.weights, plan.low_bits
        if key not in self._block_bytes:
            # By block, which has two groups where it is split inside.
            of_blocks: dict[str, float] = defaultdict(float)
            for group in plan.model.param_groups:
                if group.segments[0] not in (EMBED, HEAD):
                    of_blocks[".".join(group.segments[0].split(".")[:2])] += plan.storage.nbytes(group)
            self._block_bytes[key] = sum(of_blocks.values()), max(of_blocks.values())
        (moved_bytes, largest_bytes), busiest_s = self._block_bytes[key], 0.0
        if kept := num_kept(self._request, plan):
            moved_bytes -= kept * largest_bytes  # blocks may be unlike
        elif may_keep_blocks(self._request, plan):
            # Some may stay, as many as a device holds.
            moved_bytes -= min(map(self._request.device_limit_bytes, set(plan.placement.devices)))
        copied_bytes = max(0, moved_bytes) / (plan.num_shares if plan.is_sliced else 1)
        # What a host's nearest memory has no space for passes others.
        memories = {node.id for node in self._request.hardware.topology.of_type("memory")}
        for members in self._classes(plan).hosts.values():
            busy_s: dict[str, float] = defaultdict(float)
            for rank, _ in members:
                for name in machines[rank].routes.get("h2d", ()):
                    busy_s[name] += copied_bytes / machines[rank].capacities[name]
            busiest_s = max(busiest_s, *(s for name, s in busy_s.items() if name not in memories), 0.0)
        return busiest_s

    def left_bytes(self, plan: Plan) -> int:
        """Return what a plan leaves of the memory of the fullest device; below 0 what lacks."""
        devices, machines = plan.placement.devices, self.machines(plan)
        return min(
            self._request.device_limit_bytes(devices[rank])
            - self._bounder.footprint(plan, rank, machines[rank]).device_bytes
            for rank in self._classes(plan).ranks
        )

    def loss_s(self, plan: Plan) -> float:
        """Return the seconds of one forward of the head, whose loss is taken as `plan` says."""
        last = plan.mesh.pipelines[0][-1]
        return self._bounder.loss_s(plan, last, self.machines(plan)[last])

    def machines(self, plan: Plan) -> tuple[Machine, ...]:
        """Return every rank's machine, which of a mesh only the stages change."""
        placement, request = plan.placement, self._request
        # Rings and routes depend on devices; groups on stages alone.
        key = placement, plan.num_stages
        if key not in self._known:
            profiles = profiles_of(placement, request.hardware.profile, request.hardware.profiles)
            self._known[key] = machines_for(
                request.hardware.topology, placement.devices, profiles, plan.process_groups, known=self._paths
            )
        return self._known[key]

    def _classes(self, plan: Plan) -> _RankClasses:
        # Plans of one mesh differ in what ranks do, not in which ranks are alike.
        key = plan.mesh, plan.placement
        if key not in self._known_classes:
            self._known_classes[key] = self._rank_classes(plan)
        return self._known_classes[key]

    def _rank_classes(self, plan: Plan) -> _RankClasses:
        machines, topology = self.machines(plan), self._request.hardware.topology
        number_of: dict[Hashable, int] = {}
        ranks: list[int] = []
        on_host: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for rank, device in enumerate(plan.placement.devices):
            stage = plan.mesh.coordinates(rank).stage
            eval_points = plan.eval_points_of(rank)
            rank_class = (
                len(eval_points),
                BASE in eval_points,
                len(plan.rows_of(rank)),
                stage,
                machines[rank].shape,
            )
            if rank_class not in number_of:
                number_of[rank_class] = len(ranks)
                ranks.append(rank)
            on_host[topology.host_of(device).id].append((rank, number_of[rank_class]))
        alike: dict[Hashable, str] = {}
        for host, members in on_host.items():
            # Hosts whose ranks sit at matching places need one look.
            built = tuple(
                (self._isomorphic.representative(plan.placement.devices[rank]), rank_class)
                for rank, rank_class in members
            )
            alike.setdefault(built, host)
        class_of = dict(member for members in on_host.values() for member in members)
        unlike = {tuple(map(class_of.__getitem__, each)): each for each in reversed(plan.mesh.pipelines)}
        return _RankClasses(
            tuple(ranks),
            {host: tuple(on_host[host]) for host in alike.values()},
            tuple(reversed(unlike.values())),
            tuple(class_of[rank] for rank in range(plan.placement.world_size)),
        )

    def _shared_s(self, plan: Plan, classes: _RankClasses, block_bounds: Sequence[BlockBound]) -> float:
        """Return the seconds that the fullest resource of any host is busy in a step."""
        machines = self.machines(plan)
        # A shared link is busy for the sum of what its ranks take of it, however they are ordered.
        fullest_s = 0.0
        for members in classes.hosts.values():
            busy_s: dict[str, float] = defaultdict(float)
            behind_s: dict[str, float] = defaultdict(float)
            for rank, rank_class in members:
                bound = block_bounds[rank_class]
                amounts = zip(machines[rank].capacities.items(), bound.loads, bound.loads_behind, strict=True)
                for (name, capacity), load, behind in amounts:
                    busy_s[name] += load / capacity
                    behind_s[name] += behind / capacity
            fullest_s = max(fullest_s, *busy_s.values())
            # Whoever ends its uploads behind the exchange last has yet to compute until the next one.
            computed_s = min(block_bounds[rank_class].computed_s for _, rank_class in members)
            if computed_s < inf and plan.num_stages == 1:
                fullest_s = max(fullest_s, computed_s + max(behind_s.values()))
        return fullest_s

    def _missing(self, plan: Plan, classes: _RankClasses, taken: Footprints) -> Iterator[_Lack]:
        """Yield what of the devices and the hosts does not suffice."""
        request, devices = self._request, plan.placement.devices
        for memory, rank in zip(taken.ranks, classes.ranks, strict=True):
            limit = request.device_limit_bytes(devices[rank])
            # One device that is too small is enough to say.
            if memory.device_bytes > limit:
                yield _lacking("device", memory.device_bytes, limit, memory.describe(_MOST_NAMED))
                break
        for host in taken.hosts:
            of_host = tuple(devices[rank] for rank in host.ranks)
            limit = request.host_limit_bytes(of_host)
            if host.size_bytes > limit:
                has = f" of {request.about_host_memory(of_host)}"
                yield _lacking("host", host.size_bytes, limit, host.describe(_MOST_NAMED), has)
                break
        for host in taken.hosts:
            space = request.disk_limit_bytes(tuple(devices[rank] for rank in host.ranks))
            if host.disk_bytes > space:
                size, limit = host.disk_bytes, round(space)
                description = (
                    f"needs {format_bytes(size)} on the drives of {host.host}, {format_bytes(size - limit)} more "
                    f"than {format_bytes(limit)}"
                )
                yield _Lack("disk", size - limit, description)
                break


class _Lack(NamedTuple):
    """What does not suffice, by how much, and in words."""

    where: Where
    size_bytes: int
    description: str


def _lacking(where: Where, needed: int, limit: int, parts: str, has: str = "") -> _Lack:
    description = (
        f"needs {format_bytes(needed)} of {where} memory, {format_bytes(needed - limit)} more than "
        f"{format_bytes(limit)}{has}: {parts}"
    )
    return _Lack(where, needed - limit, description)
