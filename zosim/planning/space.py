"""Shapes that the planner looks at: meshes, the devices that they lie on, and where the model is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, NamedTuple, get_args

from costmodel.models.model_spec import ModelSpec
from topology.errors import PlanError
from topology.validation import readable
from zosim.hardware.machines import machines_for
from zosim.planning.request import Blocks, Request, profiles_of
from zosim.planning.split_search import Costs, PlacedPipeline, Ranking
from zosim.plans import (
    Estimator,
    LowBits,
    Mesh,
    Placement,
    Plan,
    Residency,
    Split,
    Weights,
    in_options,
    naming_options,
)
from zosim.plans.mesh import share

Transfers = Literal["private", "shared", "sliced"]
AxisValues = Mapping[str, Mapping[str, object]]
"""Values of fields, by axis and name."""
# Up to here every number of ranks is tried, beyond only those that fill one host or whole hosts.
_FEW_RANKS = 16
FOR_WEIGHTS = 0.9
"""Part of a device's memory that the weights of a stage may take, beside activations and perturbations."""
# With more hosts, ranks are not spread over more of them than they need.
_FEW_HOSTS = 4


QUANT_CONFIGS: tuple[Mapping[str, object], ...] = (
    {"weights": "int8", "activations": "int8-token"},
    {"weights": "int4", "scales": "group"},
)
"""What linear layers are tried in: int8 by integer kernels, and as few bits as models are usually given in."""


class ForwardFloor(NamedTuple):
    """Seconds that forwards and messages alone take in a step, with linear layers in one format."""

    least_s: float
    blockwise_s: float  # of plans that have each block at all evaluation points before the next one
    forwards: tuple[tuple[int, float], ...] = ((0, 0.0),)  # of one stage, by a rank of each class


@dataclass(frozen=True)
class PlanShape:
    """Ranks, the devices that they are on, and where the model is split."""

    mesh: Mesh
    placement: Placement
    model: ModelSpec
    split: Split
    floors: Mapping[LowBits, ForwardFloor] = field(default_factory=dict)  # by how linear layers are kept

    @property
    def least_s(self) -> float:
        """Seconds of a step of any of its plans, at least."""
        return min((floor.least_s for floor in self.floors.values()), default=0.0)

    def floor(self, plan: Plan) -> ForwardFloor:
        """Return what is known of a plan of the shape."""
        return self.floors.get(plan.low_bits) or ForwardFloor(self.least_s, self.least_s)


def is_quantization_open(request: Request) -> bool:
    """Whether linear layers may be quantized, where nobody says how they are kept."""
    is_open = request.config.search.allow_lossy and request.config.low_bits.given("weights") is None
    # Other lossy choices, codecs between stages and a transfer format that is asked for, do not go with it.
    is_plain = request.axis(Residency).transfer_dtype is None
    has_linears = any(group.linears or group.frozen_linears for group in request.config.spec.param_groups)
    return is_open and is_plain and has_linears


def named_shapes(request: Request, costs: Costs) -> Iterator[PlanShape]:
    """Yield the shapes of one stage, or of the mesh that the request names."""
    for mesh in meshes(request):
        for placement in layouts(request, mesh.world_size):
            if mesh.stage > 1:
                ranking = Ranking(pipeline_of(request, mesh, placement, costs), request.split_options, costs)
                yield from split_shapes(request, mesh, placement, ranking)
                continue
            for shared_out in (mesh, *_in_proportion(request, costs, mesh, placement)):
                floors = _floors(request, costs, shared_out, placement)
                yield PlanShape(shared_out, placement, request.config.spec, Split(), floors)


def split_shapes(request: Request, mesh: Mesh, placement: Placement, ranking: Ranking) -> Iterator[PlanShape]:
    """Yield a mesh of several stages with each of the split points that are worth a look."""
    limits_bytes = [
        FOR_WEIGHTS * min(request.device_limit_bytes(placement.devices[rank]) for rank in ranks)
        for ranks in zip(*mesh.pipelines, strict=True)
    ]
    splits: dict[Split, tuple[str, ...]] = {}
    for split_points in ranking.best(limits_bytes):
        splits.setdefault(ranking.split(split_points), split_points)
    for split_points in splits.values():
        yield staged_shape(request, mesh, placement, ranking, split_points)


def staged_shape(
    request: Request, mesh: Mesh, placement: Placement, ranking: Ranking, split_points: tuple[str, ...]
) -> PlanShape:
    """Return a mesh of several stages with its split points."""
    model = request.split_options.split(request.config.spec, split_points)
    floors: dict[LowBits, ForwardFloor] = {}
    for plan in _formats(request, ranking.plan):
        own = ranking.of(plan)
        least_s = own.least_s(split_points)
        floors[plan.low_bits] = ForwardFloor(least_s, max(least_s, own.blockwise_s(split_points)))
    return PlanShape(mesh, placement, model, ranking.split(split_points), floors)


def _formats(request: Request, plan: Plan) -> Iterator[Plan]:
    """Yield a plan with its linear layers in each format that they may be kept in."""
    yield plan
    for config in QUANT_CONFIGS if is_quantization_open(request) else ():
        kept = plan.model_copy(update={"low_bits": plan.low_bits.model_copy(update=config)})
        if not any(next(axis.conflicts(kept), None) for axis in kept.axes.values()):
            yield kept


def _floors(
    request: Request, costs: Costs, mesh: Mesh, placement: Placement
) -> Mapping[LowBits, ForwardFloor]:
    """Return what the ranks of a mesh of one stage forward; nothing where one forward is at all points."""
    if request.axis(Weights).perturbation == "adapters":
        return {}
    pipelines, topology = _on_each_kind(request, costs, mesh, placement), request.hardware.topology
    batch, num_eval_points = request.config.batch, request.axis(Estimator).num_eval_points
    distinct: dict[tuple[str, int, int], int] = {}
    # Where devices are alike the first rank has the most to do.
    for rank in range(placement.world_size if len(pipelines) > 1 else 1):
        at, kind = mesh.coordinates(rank), topology.device_spec(placement.devices[rank]).id
        num_own = len(share(num_eval_points, mesh.perturb, at.perturb))
        distinct.setdefault((kind, len(mesh.rows_of(at.data, batch)), num_own), rank)

    def forward_s(plan: Plan, kind: str, num_sequences: int) -> float:
        pipeline = _forwarding(replace(pipelines[kind], plan=plan), num_sequences)
        return float(costs.seconds(pipeline).forward.sum())

    floors: dict[LowBits, ForwardFloor] = {}
    for plan in _formats(request, next(iter(pipelines.values())).plan):
        forwards = tuple(
            (rank, num_own * forward_s(plan, kind, num_sequences))
            for (kind, num_sequences, num_own), rank in distinct.items()
        )
        least_s = max(seconds for _, seconds in forwards)
        floors[plan.low_bits] = ForwardFloor(least_s, least_s, forwards)
    return floors


def _on_each_kind(
    request: Request, costs: Costs, mesh: Mesh, placement: Placement
) -> dict[str, PlacedPipeline]:
    """Return the fullest rank of a mesh on one device of each kind, by the name of the kind."""
    topology = request.hardware.topology
    firsts = {topology.device_spec(device).id: device for device in reversed(placement.devices)}
    for device in firsts.values():
        if device not in costs.alone:
            one = Placement(topology=placement.topology, devices=(device,))
            costs.alone[device] = pipeline_of(request, mesh, one, costs)
    return {kind: replace(costs.alone[device], mesh=mesh) for kind, device in firsts.items()}


def _in_proportion(request: Request, costs: Costs, mesh: Mesh, placement: Placement) -> Iterator[Mesh]:
    """Yield a mesh with shares of the batch in proportion to the speed of devices, where these are unlike and the mesh is not named."""
    topology, batch = request.hardware.topology, request.config.batch
    kinds = [topology.device_spec(device).id for device in placement.devices]
    is_named = request.config.given("mesh") is not None
    if mesh.data == 1 or len(set(kinds)) == 1 or is_named:
        return
    line = {
        kind: _line(costs, each, batch)
        for kind, each in _on_each_kind(request, costs, mesh, placement).items()
    }
    slowest: list[set[tuple[float, float]]] = [set() for _ in range(mesh.data)]
    for rank, kind in enumerate(kinds):
        slowest[mesh.coordinates(rank).data].add(line[kind])

    def seconds(shard: int, num_sequences: int) -> float:
        return max(once_s + num_sequences * each_s for once_s, each_s in slowest[shard])

    shares = [1] * mesh.data
    # Each next sequence goes where it ends first: no other shares end earlier.
    for _ in range(batch - mesh.data):
        shard = min(range(mesh.data), key=lambda number: seconds(number, shares[number] + 1))
        shares[shard] += 1
    if tuple(shares) != tuple(len(mesh.rows_of(shard, batch)) for shard in range(mesh.data)):
        yield mesh.model_copy(update={"num_sequences": tuple(shares)})


def _line(costs: Costs, pipeline: PlacedPipeline, batch: int) -> tuple[float, float]:
    """Return the seconds of a step on one device of a kind without a sequence, and of each sequence, from those of one and of all."""

    def taken(num_sequences: int) -> float:
        seconds = costs.seconds(_forwarding(pipeline, num_sequences))
        return float(seconds.once.sum()) + pipeline.num_eval_points * float(seconds.forward.sum())

    one_s, all_s = taken(1), taken(batch)
    each_s = (all_s - one_s) / max(1, batch - 1)
    return one_s - each_s, each_s


def _forwarding(pipeline: PlacedPipeline, num_sequences: int) -> PlacedPipeline:
    """Return a pipeline that forwards so many sequences."""
    return replace(pipeline, mesh=Mesh(data=2, num_sequences=(num_sequences, 1)))


def check(request: Request) -> None:
    """Raise PlanError if the request cannot be met."""
    stored, transferred = request.axis(Weights).dtype, request.axis(Residency).transfer_dtype
    if transferred not in (None, stored) and not request.config.search.allow_lossy:
        raise PlanError(
            f"--transfer-dtype {transferred} is narrower than --dtype {stored}, so every offload loses "
            "precision",
            hint="add --allow-lossy to accept that",
        )
    split_options = request.split_options
    if split_options.is_lossy and not request.config.search.allow_lossy:
        codecs = dict.fromkeys(name for name in split_options.codecs if name != "none")
        raise PlanError(
            f"codecs {', '.join(codecs)} are lossy: they change the activations sent between stages",
            hint="add --allow-lossy to accept that",
        )
    _check_devices(request)


def meshes(request: Request) -> Iterator[Mesh]:
    """Yield the meshes of one stage that the request admits, those of few ranks first; or the one that it names."""
    if request.config.given("mesh") is not None:
        yield request.config.given("mesh")
        return
    points, is_uniform = request.axis(Estimator).num_eval_points, _is_uniform(request)
    admitted = [mesh for mesh in shares(request, stage=1) if request.admits(mesh)]
    for mesh in sorted(admitted, key=lambda mesh: (mesh.world_size, -mesh.perturb)):
        yield mesh
        is_even = request.config.batch % mesh.data == 0 and points % mesh.perturb == 0
        if mesh.data > 1 and mesh.perturb > 1 and not (is_even or is_uniform):
            # Where all ranks do the same on the same devices, their order changes nothing.
            yield mesh.model_copy(update={"inner": "data"})


def shares(request: Request, *, stage: int) -> Iterator[Mesh]:
    """Yield the meshes of so many stages that share a step out among as many ranks as are asked for, or worth a try."""
    limit, points, sizes = (
        request.max_ranks // stage,
        request.axis(Estimator).num_eval_points,
        _sizes(request),
    )
    for data in range(1, min(request.config.batch, limit) + 1):
        for perturb in range(1, min(points, limit // data) + 1):
            # A part more helps only if the largest part gets smaller.
            helps = perturb == 1 or ceil(points / perturb) < ceil(points / (perturb - 1))
            if helps and stage * data * perturb in sizes:
                yield Mesh(data=data, perturb=perturb, stage=stage)


def pipeline_of(
    request: Request, mesh: Mesh, placement: Placement, costs: Costs | None = None
) -> PlacedPipeline:
    """Return what split points are ranked for: the first pipeline of a mesh on its devices."""
    pipeline = placement.model_copy(
        update={"devices": placement.devices[: mesh.stage], "hosts": placement.hosts[: mesh.stage]}
    )
    machines = machines_for(
        request.hardware.topology,
        pipeline.devices,
        profiles_of(pipeline, request.hardware.profile, request.hardware.profiles),
        {"pipeline": (tuple(range(mesh.stage)),)} if mesh.stage > 1 else {},
        known=None if costs is None else costs.paths,
    )
    alone = Placement(topology=placement.topology, devices=placement.devices[:1])
    fixed = request.config.fixed("estimator", "perturbations", "weights", "forward", "low_bits")
    fixed.get("forward", {}).pop("num_new_tokens", None)  # text goes with no split point, as its plans say
    plain = PlanShape(Mesh(), alone, request.config.spec, Split())
    return PlacedPipeline(mesh, machines, plan_on(request, plain, {}, fixed))


def layouts(request: Request, num_ranks: int) -> Iterator[Placement]:
    """Yield the placements of so many ranks: on as few hosts as can be first, then spread out."""
    picks: dict[tuple[str, ...], None] = {}
    for hosts in request.hardware.device_choice.selections():
        num_devices = sum(map(len, hosts.values()))
        if num_ranks <= num_devices or request.hardware.is_on_cpus:
            picks |= dict.fromkeys(_picks_of(request, hosts, num_ranks))
    for picked in picks:
        on = tuple(request.hardware.topology.host_of(device).id for device in picked)
        yield Placement(topology=request.hardware.name, devices=picked, hosts=on if len(set(on)) > 1 else ())


def _picks_of(request: Request, hosts: Mapping[str, list[str]], num_ranks: int) -> list[tuple[str, ...]]:
    """Return which of the devices of some hosts so many ranks may be on."""
    num_devices = sum(map(len, hosts.values()))
    times = ceil(num_ranks / num_devices)  # every CPU is named as often as it takes
    listed = [[device for device in devices for _ in range(times)] for devices in hosts.values()]
    picks: list[tuple[str, ...]] = []
    for per_host in range(min(num_ranks, max(map(len, listed))), 0, -1):
        # As many ranks on each host, on as few hosts as can be, then spread out.
        chosen = listed[: num_ranks // per_host]
        fits = len(chosen) * per_host == num_ranks and all(len(devices) >= per_host for devices in chosen)
        if fits and (not picks or len(hosts) <= _FEW_HOSTS):
            picks += [picked for picked in _picks(request, chosen, per_host) if picked not in picks]
    return picks or [tuple(device for devices in listed for device in devices)[:num_ranks]]


def _picks(request: Request, hosts: list[list[str]], per_host: int) -> Iterator[tuple[str, ...]]:
    """Yield the first devices of every host, and if those share links that others would not, every second or third."""
    # Neighbours often share a switch or a socket: ranks further apart have more links between them.
    stride = min(map(len, hosts)) // per_host
    first, apart = (
        tuple(device for devices in hosts for device in devices[: per_host * step : step])
        for step in (1, max(stride, 1))
    )
    yield first
    topology = request.hardware.topology

    def num_links(devices: tuple[str, ...]) -> int:
        """Return how many shared resources lie between devices and their hosts' memories."""
        routes = (topology.route(topology.host_memory(device).id, device) for device in devices)
        return len({name for route in routes for name in route.resource_ids})

    if first != apart and num_links(apart) > num_links(first):
        yield apart


def _check_devices(request: Request) -> None:
    """Refuse more ranks than there are GPUs, of which each runs one, and blocks where the method has none."""
    num_devices = sum(map(len, request.hardware.device_choice.by_host.values()))
    num_ranks = (
        request.max_ranks if request.config.given("mesh") is None else request.config.given("mesh").world_size
    )
    if request.hardware.topology.node(request.hardware.device).type == "gpu" and num_ranks > num_devices:
        raise PlanError(
            f"{num_ranks} ranks need {num_ranks} GPUs, but {request.hardware.name} has {num_devices}",
            hint=f"use --ranks {num_devices} or less, or a smaller --mesh",
        )
    residency = request.config.residency
    blocks = residency.given("blocks")
    if blocks in get_args(Blocks) and blocks not in request.blocks:
        raise PlanError(
            f"--method {request.config.search.method} keeps blocks {request.blocks[0]}, but --residency "
            f"is {blocks}",
            hint="leave --residency or --method out",
        )
    moving = [name for name in ("num_staging_buffers", "overlap") if name in residency.model_fields_set]
    if moving and {"offloaded", "nvme"}.isdisjoint((blocks,) if blocks is not None else request.blocks):
        raise PlanError(
            in_options(f"residency.{moving[0]}={getattr(residency, moving[0])} applies to offloaded blocks, ")
            + "but blocks are resident",
            hint="leave it out, or use --residency offloaded",
        )
    topology = request.hardware.topology
    if blocks == "nvme" and not topology.disks_of(request.hardware.device):
        raise PlanError(
            f"--residency nvme needs a drive, but {topology.host_of(request.hardware.device).id} of "
            f"{request.hardware.name} has none",
            hint="add a node of type disk with its capacity and bandwidth to the topology, and a link to it",
        )


def _sizes(request: Request) -> frozenset[int]:
    """Return the numbers of ranks to try."""
    limit = request.max_ranks
    if request.config.search.ranks is not None:
        return frozenset({limit})
    if limit <= _FEW_RANKS:
        return frozenset(range(1, limit + 1))
    per_host = max(map(len, request.hardware.device_choice.by_host.values()))
    sizes = {*range(1, min(per_host, limit) + 1), limit}
    size = per_host
    # Whole hosts, doubled each time.
    while size <= limit:
        sizes.add(size)
        size *= 2
    return frozenset(sizes)


def _is_uniform(request: Request) -> bool:
    """Whether the devices are all alike and on one host."""
    choice = request.hardware.device_choice
    return len(choice.by_host) == 1 and choice.is_uniform


def too_few_ranks(request: Request) -> PlanError:
    """Return that the request leaves no mesh."""
    if request.config.search.ranks is not None:
        return PlanError(
            f"{request.max_ranks} ranks cannot share out a batch of {request.config.batch} and "
            f"{request.axis(Estimator).num_perturbations} perturbations by --method {request.config.search.method}",
            hint="use fewer ranks, or a larger --batch; each data shard needs at least one sequence, and each rank one evaluation point",
        )
    least = {
        "sparq": "2 ranks",
        "pertp": "2 ranks",
        "ddp": "2 ranks and 2 sequences",
        "2d": "4 ranks and 2 sequences",
    }
    return PlanError(
        f"--method {request.config.search.method} needs at least "
        f"{least.get(request.config.search.method, 'a device')}, but has {request.max_ranks} of the "
        f"devices of {request.hardware.name} and a batch of {request.config.batch}",
        hint="raise --ranks (several may share a CPU, a GPU takes one) or --batch",
    )


def plan_on(request: Request, shape: PlanShape, point: AxisValues, fixed: AxisValues | None = None) -> Plan:
    """Return the plan of a shape and the values of other axes, with the fields that the request fixes.

    Raises PlanError if they contradict each other.
    """
    fixed = request.config.fixed() if fixed is None else fixed
    axes = {axis: {**point.get(axis, {}), **fixed.get(axis, {})} for axis in {**point, **fixed}}
    # A transfer format is about blocks that move.
    if axes.get("residency", {}).get("blocks", "resident") == "resident":
        axes.get("residency", {}).pop("transfer_dtype", None)
    with naming_options(), readable("the plan", PlanError):
        return Plan.model_validate(
            {
                **axes,
                "model": shape.model,
                "split": shape.split,
                "placement": shape.placement,
                "batch": request.config.batch,
                "seq": request.config.seq,
                "mesh": shape.mesh,
            }
        )


def transfers_on(shape: PlanShape) -> tuple[Transfers, ...]:
    """Return how ranks can share the host's copies: with several alike on each host in all ways, else by themselves."""
    if shape.mesh.stage > 1:
        return ("private",)
    # Shares are equal, so hosts must have as many ranks each, and more than one.
    counts = {len(ranks) for ranks in shape.placement.ranks_by_host}
    shares = len(counts) == 1 and min(counts) > 1
    return ("private", "shared", "sliced") if shares else ("private",)
