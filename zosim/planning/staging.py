"""Which meshes of several stages are worth a look: those of the least bounds, of the many that there are.

A mesh, its cuts and its codecs are bounded by :mod:`zosim.planning.cut_search` alone, so that hundreds take as long as a few plans do.
Those that could undercut what is known without stages, and the best in any case, become plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from costmodel.model_spec import ModelSpec
from topology.errors import PlanError
from zosim.planning.cut_search import PLAIN, Codecs, Ranking
from zosim.planning.request import Request
from zosim.planning.segment_costs import Costs
from zosim.planning.space import check, layouts, plans_of, shares, site_of
from zosim.plans import Mesh, Placement, Plan, Split

# Meshes with their codecs that are made plans of.
_NUM_TRIED = 3
# More stages than this leave a pipeline of few points empty most of the time.
_MOST_STAGES = 16
# Part of a device's memory that weights may take, beside activations and directions.
_FOR_WEIGHTS = 0.9


@dataclass(frozen=True)
class _StageShape:
    """A mesh with its cuts and codecs, and the seconds that a step takes at least."""

    mesh: Mesh
    cuts: tuple[str, ...]
    codecs: Codecs
    ranking: Ranking
    bound_s: float

    @property
    def sort_key(self) -> tuple[float, int, bool]:
        return float(f"{self.bound_s:.6g}"), self.mesh.world_size, self.codecs != PLAIN


def staged_plans(request: Request, fastest_s: float = inf) -> Iterator[Plan]:
    """Yield the plans of the best meshes of several stages.

    Parameters
    ----------
    request : Request
    fastest_s : float
        Step time that is known without stages: of the meshes that take longer, only the best is worth showing.

    Raises
    ------
    PlanError
        If the request contradicts itself, or is for stages and there are none.
    """
    check(request)
    listed = sorted(_shapes(request), key=lambda shape: shape.sort_key)
    if not listed and request.method == "sparq":
        raise _no_stages(request)
    chosen = [shape for shape in listed[:_NUM_TRIED] if shape.bound_s < fastest_s]
    plain = [shape for shape in listed if shape.codecs == PLAIN]
    chosen += [shape for shape in (*listed[:1], *plain[:1]) if shape not in chosen]
    yield from plans_of(request, (_placed(request, shape) for shape in dict.fromkeys(chosen)))


def _placed(request: Request, shape: _StageShape) -> tuple[Mesh, Placement, tuple[ModelSpec, Split]]:
    placement = next(layouts(request, shape.mesh.world_size))
    model = request.cutting.cut(request.model, shape.cuts)
    return shape.mesh, placement, (model, shape.ranking.split(shape.cuts, shape.codecs))


def _shapes(request: Request) -> Iterator[_StageShape]:
    """Yield every mesh of several stages with the best cuts, for each pair of codecs."""
    costs = Costs(request.model, request.cutting)
    known: dict[tuple[object, ...], list[_StageShape]] = {}
    for mesh in _meshes(request, costs):
        site = site_of(request, mesh, next(layouts(request, len(mesh.pipelines[0]))))
        key = site.num_stages, site.num_sequences, site.num_points
        if key not in known:
            ranking = Ranking(site, request.cutting, costs)
            known[key] = [
                shape for codecs in ranking.codecs for shape in _best(request, mesh, ranking, codecs)
            ]
        for shape in known[key]:
            yield _StageShape(mesh, shape.cuts, shape.codecs, shape.ranking, shape.bound_s)


def _best(request: Request, mesh: Mesh, ranking: Ranking, codecs: Codecs) -> Iterator[_StageShape]:
    """Yield the best cuts whose stages fit their devices, or the best of all with the uploads that those take."""
    limit = _FOR_WEIGHTS * request.device_limit_bytes(request.device)
    best = ranking.best_of_all(codecs, limit)
    bound_s = best.bound_s
    if not best.cuts or ranking.weight_bytes(best.cuts) > limit:
        best = ranking.best_of_all(codecs)
        if not best.cuts:
            return
        uploads_s = ranking.weight_bytes(best.cuts) / request.profile.values()["copy_h2d_bandwidth"]
        bound_s = max(best.bound_s, uploads_s)
    yield _StageShape(mesh, best.cuts, codecs, ranking, bound_s)


def _meshes(request: Request, costs: Costs) -> Iterator[Mesh]:
    """Yield the meshes of several stages: each way to share out all devices, or all of one host, or any few."""
    num_cuts = len(request.cutting.cuts)
    most = min(_MOST_STAGES, request.max_ranks, len(costs.names) + 1)
    per_host = max(map(len, next(layouts(request, request.max_ranks)).ranks_by_host))
    for stage in (num_cuts + 1,) if num_cuts else range(2, most + 1):
        # Beyond one host, all devices; and each pipeline within a host, or on some of its own.
        is_alike = per_host % stage == 0 or stage % per_host == 0
        for mesh in shares(request, stage=stage):
            if mesh.world_size <= per_host or (is_alike and mesh.world_size == request.max_ranks):
                yield mesh


def _no_stages(request: Request) -> PlanError:
    return PlanError(
        f"--method sparq needs 2 ranks at least, and was given {request.max_ranks} of the devices of "
        f"{request.hardware} and a batch of {request.batch}",
        hint="raise --ranks (several may share a CPU, a GPU takes one)",
    )
