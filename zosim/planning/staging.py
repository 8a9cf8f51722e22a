"""Which meshes of several stages are worth a look: those of the least bounds, of the many that there are.

A mesh and its split points are bounded by :mod:`zosim.planning.split_search` alone, so that hundreds take as long as a few plans do.
Those that could undercut what is known without stages, and the best in any case, become plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from topology.errors import PlanError
from zosim.planning.request import Request
from zosim.planning.space import FOR_WEIGHTS, PlanShape, layouts, pipeline_of, shares
from zosim.planning.split_search import BoundedSplitPoints, Costs, Ranking
from zosim.plans import Estimator, Mesh

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

    Raises
    ------
    PlanError
        If the request is for stages and there are none.
    """
    listed = sorted(_bounded_meshes(request, costs), key=lambda shape: shape.sort_key)
    if not listed and request.config.search.method == "sparq":
        raise PlanError(
            f"--method sparq needs at least 2 ranks, but has {request.max_ranks} of the devices of "
            f"{request.hardware.name} and a batch of {request.config.batch}",
            hint="raise --ranks (several may share a CPU, a GPU takes one)",
        )
    for shape in listed[:_NUM_TRIED]:
        split_points, mesh = shape.best.split_points, shape.mesh
        model = request.split_options.split(request.config.spec, split_points)
        placement = next(layouts(request, mesh.world_size))
        split = shape.ranking.split(split_points)
        yield PlanShape(mesh, placement, model, split, shape.ranking.least_s(split_points))


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
