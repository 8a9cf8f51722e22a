"""Shapes of several stages that are worth a look, and the plans on a shape.

A mesh of stages and its split points are bounded by :mod:`zosim.planning.split_search` alone, so that hundreds take as long as a few
plans do. Those that could undercut what is known without stages, and the best in any case, become shapes. The plans on a shape are
every combination of the values that settings declare as the planner's to choose.

Where blocks may live and how they are visited, of OPT-125M on one GPU without loss:

>>> from costmodel import read_model_spec
>>> from costmodel.devices.datasheet import datasheet_profile
>>> from topology import load_preset
>>> topology = load_preset("a100-80gb-milan")
>>> from zosim.config import PlanConfig
>>> from zosim.planning.request import Hardware, Request
>>> hardware = Hardware(topology, "a100-80gb-milan", "gpu0", datasheet_profile(topology, "gpu0"))
>>> request = Request(PlanConfig(model=read_model_spec("opt-125m"), seq=16), hardware)
>>> plans = [plan.describe() for plan in placements(request)]
>>> len(plans), plans[0], plans[-1]
(52, 'mezo, blockwise', 'zo2, 1 staging buffer, samples ahead, perturbations kept')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from costmodel.formats import FORMATS, TransferFormat
from topology.errors import PlanError
from zosim.planning.request import Request
from zosim.planning.space import (
    FOR_WEIGHTS,
    QUANT_CONFIGS,
    PlanShape,
    Transfers,
    check,
    is_quantization_open,
    layouts,
    named_shapes,
    pipeline_of,
    plan_on,
    shares,
    staged_shape,
    too_few_ranks,
    transfers_on,
)
from zosim.planning.split_search import LOSS_CHUNKS, BoundedSplitPoints, Costs, Ranking, in_chunks
from zosim.plans import AXES, Axis, Estimator, Mesh, Plan, Residency, TransferDType, Weights, fields_of

# Meshes that are made plans of.
_NUM_TRIED = 3
# More stages than this leave a pipeline of few points empty most of the time.
_MOST_STAGES = 16


@dataclass(frozen=True)
class _StageShape:
    """A mesh with its best split points, and what ranked them."""

    mesh: Mesh
    best: BoundedSplitPoints
    ranking: Ranking

    @property
    def sort_key(self) -> tuple[float, int]:
        return float(f"{self.best.bound_s:.6g}"), self.mesh.world_size


def staged_shapes(request: Request, costs: Costs) -> Iterator[PlanShape]:
    """Yield the meshes of several stages with the least bounds, each with its best split points.

    Raises PlanError if the request is for stages and there are none.
    """
    listed = sorted(_bounded_meshes(request, costs), key=lambda shape: shape.sort_key)
    if not listed and request.config.search.method == "sparq":
        raise PlanError(
            f"--method sparq needs at least 2 ranks, but has {request.max_ranks} of the devices of "
            f"{request.hardware.name} and a batch of {request.config.batch}",
            hint="raise --ranks (several may share a CPU, a GPU takes one)",
        )
    for shape in listed[:_NUM_TRIED]:
        placement = next(layouts(request, shape.mesh.world_size))
        yield staged_shape(request, shape.mesh, placement, shape.ranking, shape.best.split_points)


def _bounded_meshes(request: Request, costs: Costs) -> Iterator[_StageShape]:
    """Yield every mesh of several stages that the model can be split for, with the best split points."""
    known: dict[tuple[int, ...], tuple[Ranking, BoundedSplitPoints]] = {}
    num_eval_points = request.axis(Estimator).num_eval_points
    for mesh in _meshes(request, costs):
        # Meshes whose pipelines do the same are ranked once.
        key = (
            len(mesh.pipelines[0]),
            mesh.most_sequences(request.config.batch),
            mesh.most_eval_points(num_eval_points),
        )
        if key not in known:
            placement = next(layouts(request, key[0]))
            ranking = Ranking(pipeline_of(request, mesh, placement, costs), request.split_options, costs)
            known[key] = ranking, _best(request, ranking, placement.devices)
        ranking, best = known[key]
        if best.split_points:
            yield _StageShape(mesh, best, ranking)


def _best(request: Request, ranking: Ranking, devices: Sequence[str]) -> BoundedSplitPoints:
    """Return the best split points whose stages fit their devices, or the best of all with the uploads that those take."""
    limits = [FOR_WEIGHTS * request.device_limit_bytes(device) for device in devices]
    best = ranking.best_of_all(limits)
    if not best.split_points or not ranking.fits(best.split_points, limits):
        best = ranking.best_of_all()
        if not best.split_points:
            return best
        # What does not fit is offloaded, so that a step takes the uploads at least.
        uploads_s = (
            max(ranking.weight_bytes(best.split_points))
            / request.hardware.profile.values()["copy_h2d_bandwidth"]
        )
        best = replace(best, bound_s=max(best.bound_s, uploads_s))
    return best


def _meshes(request: Request, costs: Costs) -> Iterator[Mesh]:
    """Yield the meshes of several stages: each way to share out all devices, or all of one host, or any few."""
    num_boundaries = len(request.split_options.split_points)
    most = min(_MOST_STAGES, request.max_ranks, len(costs.names) + 1)
    per_host = max(map(len, next(layouts(request, request.max_ranks)).ranks_by_host))
    for stage in (num_boundaries + 1,) if num_boundaries else range(2, most + 1):
        # Beyond one host, all devices; and each pipeline within a host, or on some of its own.
        is_alike = per_host % stage == 0 or stage % per_host == 0
        for mesh in shares(request, stage=stage):
            if mesh.world_size <= per_host or (is_alike and mesh.world_size == request.max_ranks):
                yield mesh


_Field = tuple[str, str]
"""An axis, and the name of one of its fields."""
_OF_SHAPES = ("mesh", "placement", "split")
"""Axes that a shape says all of."""
_BLOCKS: _Field = ("residency", "blocks")
_ENDS: _Field = ("residency", "embedding_and_head")
_FORMAT: _Field = ("residency", "transfer_dtype")
_TRANSFERS: _Field = ("residency", "transfers")
_BUFFERS: _Field = ("residency", "num_staging_buffers")
_ON_DISK: _Field = ("residency", "num_disk_blocks")
_STAYING: _Field = ("residency", "num_resident_blocks")
_CHUNK: _Field = ("forward", "loss_chunk_tokens")
_OF_MOVES = (_ENDS, _FORMAT, _TRANSFERS, _BUFFERS)
"""What says how offloaded blocks move. The last two contradict nothing on shapes that have them."""


@dataclass(frozen=True)
class Variant:
    """Values of the axes that a shape leaves open."""

    axes: Mapping[str, Axis]
    # Number of a variant, before this one, that waits for less and so is at least as fast, in more device memory.
    relaxed: int | None


class Variants:
    """Variants of the shapes of one request, worked out once for all shapes that leave the same open."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._known: dict[object, tuple[Variant, ...]] = {}
        self.contradiction: PlanError | None = None
        """Why the first of the plans that contradict the request is none."""

    def of(self, shape: PlanShape) -> tuple[Variant, ...]:
        """Return what a shape leaves open; nothing where all of it contradicts the request."""
        mesh, transfers = shape.mesh, transfers_on(shape)
        key = mesh.world_size > 1, mesh.is_staged, transfers
        if key not in self._known:
            self._known[key] = tuple(self._worked_out(shape, transfers))
        return self._known[key]

    def plans(self, shape: PlanShape) -> list[Plan]:
        """Return the plans of a shape, in the order of its variants."""
        variants = self.of(shape)
        base = self._checked(shape, variants[0].axes) if variants else None
        return [] if base is None else [base.model_copy(update=dict(variant.axes)) for variant in variants]

    def _checked(self, shape: PlanShape, axes: Mapping[str, Axis | Mapping[str, object]]) -> Plan | None:
        try:
            return plan_on(self._request, shape, {name: dict(axis) for name, axis in axes.items()})
        except PlanError as error:
            self.contradiction = self.contradiction or error
            return None

    def _worked_out(self, shape: PlanShape, transfers: tuple[Transfers, ...]) -> Iterator[Variant]:
        tried = _tried(self._request, transfers)
        numbers: dict[frozenset[Any], int] = {}
        axes_of: dict[frozenset[Any], dict[str, Axis] | None] = {}
        base: Plan | None = None
        quantized = list(_quant_configs(self._request, shape.mesh))
        for *values, low_bits in product(*tried.values(), quantized):
            point: dict[_Field, Any] = dict(zip(tried, values, strict=True)) | low_bits
            if point[_BLOCKS] == "resident":
                if any(point[field] != tried[field][0] for field in _OF_MOVES if field in tried):
                    continue  # how blocks move says nothing of those that stay
                point = {field: value for field, value in point.items() if field not in _OF_MOVES}
            candidate = frozenset(item for item in point.items() if item[0] not in (_TRANSFERS, _BUFFERS))
            if candidate not in axes_of:
                base = base or self._checked(shape, _by_axis(point))
                axes_of[candidate] = None if base is None else self._agreeing(base, point)
            if (axes := axes_of[candidate]) is not None:
                how = {name: value for (axis, name), value in point.items() if axis == "residency"}
                residency = axes["residency"].model_copy(update=how)
                relaxed = numbers.get(frozenset(_relaxed(point, tried).items()))
                numbers[frozenset(point.items())] = len(numbers)
                yield Variant({**axes, "residency": residency}, relaxed)

    def _agreeing(self, base: Plan, point: Mapping[_Field, object]) -> dict[str, Axis] | None:
        """Return the axes of a point; None if they contradict each other or what is fixed."""
        axes = {name: getattr(base, name).model_copy(update=of) for name, of in _by_axis(point).items()}
        plan = base.model_copy(update=axes)
        return None if any(next(axis.conflicts(plan), None) for axis in plan.axes.values()) else axes


def _tried(request: Request, transfers: tuple[Transfers, ...]) -> dict[_Field, tuple[Any, ...]]:
    """Return the values that settings declare of every field that the planner chooses and the request leaves open."""
    config = request.config
    tried = {
        # The plainest plan comes first.
        (axis, field.name): (field.default, *(value for value in field.tried if value != field.default))
        for axis, axis_type in AXES.items()
        for field in fields_of(axis_type).values()
        if axis not in _OF_SHAPES
        and field.setting.planned
        and getattr(config, axis).given(field.name) is None
    }
    # These are solved for from the memory that a plan leaves.
    tried.pop(_CHUNK, None)
    tried.pop(_ON_DISK, None)
    tried.pop(_STAYING, None)
    homes = tried.pop(_BLOCKS, (config.residency.given("blocks"),))
    moves: dict[_Field, tuple[Any, ...]] = {_FORMAT: tuple(_transfer_formats(request))}
    moves |= {field: tried.pop(field) for field in _OF_MOVES if field in tried}
    if _TRANSFERS in moves:
        moves[_TRANSFERS] = transfers
    if _BUFFERS in moves:
        moves[_BUFFERS] = tuple(sorted(moves[_BUFFERS], reverse=True))
    named = config.residency.given("blocks")
    if named == "nvme" and _TRANSFERS in moves:
        moves[_TRANSFERS] = ("private",)
    homes = tuple(home for home in homes if home in request.blocks and (home != "nvme" or home == named))
    return {_BLOCKS: homes, **tried, **moves}


def _relaxed(point: Mapping[_Field, Any], tried: Mapping[_Field, tuple[Any, ...]]) -> dict[_Field, Any]:
    """Return the point of which `point` is a restriction: less is copied, or with one staging buffer more; itself if there is none."""
    if point.get(_ENDS) == "offloaded":
        return {**point, _ENDS: "resident"}
    if _BUFFERS in point and (index := tried[_BUFFERS].index(point[_BUFFERS])):
        return {**point, _BUFFERS: tried[_BUFFERS][index - 1]}
    stays = {field: value for field, value in point.items() if field not in _OF_MOVES}
    return {**stays, _BLOCKS: "resident"}


def _by_axis(point: Mapping[_Field, object]) -> dict[str, dict[str, object]]:
    nested: dict[str, dict[str, object]] = {}
    for (axis, name), value in point.items():
        nested.setdefault(axis, {})[name] = value
    return nested


def placements(request: Request) -> Iterator[Plan]:
    """Yield every plan that the request admits, with each those that take its loss in chunks.

    All of them compute the same losses and updates; where the batch is shared out, or a loss is taken in chunks, sums have
    another order. Those with a narrower transfer format, a codec or weights in few bits compute others, and are yielded only
    if loss is allowed.

    Raises PlanError if there is none.
    """
    check(request)
    variants = Variants(request)
    is_any = False
    for shape in shapes(request):
        for plan in variants.plans(shape):
            is_any = True
            yield plan
            yield from (in_chunks(plan, count) for count in chunks(request, plan))
    if not is_any:
        raise variants.contradiction or too_few_ranks(request)


def shapes(request: Request, costs: Costs | None = None) -> Iterator[PlanShape]:
    """Yield the shapes that the request admits, those of several stages last."""
    costs = costs or Costs(request.config.spec, request.split_options)
    yield from named_shapes(request, costs)
    if request.seeks_stages:
        yield from staged_shapes(request, costs)


def chunks(request: Request, plan: Plan) -> tuple[int, ...]:
    """Return the numbers of tokens that the loss of a plan may be taken of at a time, if not of all, the smallest first."""
    if _CHUNK[1] in request.config.forward.model_fields_set:
        return ()
    chunked = in_chunks(plan, 1)
    if any(next(axis.conflicts(chunked), None) for axis in (chunked.forward, chunked.weights)):
        return ()
    num_tokens = plan.mesh.most_sequences(plan.batch) * plan.seq
    return tuple(count for count in LOSS_CHUNKS if count < num_tokens)


def _quant_configs(request: Request, mesh: Mesh) -> Iterator[dict[_Field, object]]:
    """Yield the formats that linear layers may be kept in: as all others, or in few bits."""
    yield {}
    if is_quantization_open(request) and not (mesh.is_staged and request.split_options.is_lossy):
        for config in QUANT_CONFIGS:
            yield {("low_bits", name): value for name, value in config.items()}


def _transfer_formats(request: Request) -> Iterator[TransferDType | None]:
    """Yield the formats of transfers: the one that is fixed, else that of the weights, and if loss is allowed, narrower ones."""
    fixed, stored = request.axis(Residency).transfer_dtype, request.axis(Weights).dtype
    yield None if fixed == stored else fixed
    if request.config.search.allow_lossy and fixed in (None, stored):
        yield from (
            dtype
            for dtype in get_args(TransferFormat)
            if FORMATS[dtype].element_bytes < FORMATS[stored].element_bytes
        )
