"""The fastest plan of a number of ranks: which mesh they form, and where blocks reside."""

from __future__ import annotations

from dataclasses import replace

from topology.errors import DoesNotFit, PlanError
from zosim.planning.planner import Candidate, Request, choose
from zosim.planning.space import shares
from zosim.plans import Estimator, Plan


def fastest_of(request: Request, num_ranks: int) -> Plan:
    """Return the fastest plan that shares a step out among exactly `num_ranks` ranks, in one stage.

    Raises
    ------
    DoesNotFit
        If no such plan fits.
    PlanError
        If the method, the batch and the directions leave no such mesh.
    """
    request = replace(request, max_ranks=num_ranks)
    meshes = [m for m in shares(request, stage=1) if m.world_size == num_ranks and request.admits(m)]
    found: list[Candidate] = []
    refused: DoesNotFit | None = None
    for mesh in meshes:
        try:
            found.append(choose(replace(request, mesh=mesh)).chosen)
        except DoesNotFit as error:
            refused = error
    if found:
        return min(found, key=lambda candidate: candidate.sort_key).plan
    if refused is not None:
        raise refused
    raise PlanError(
        f"{num_ranks} ranks cannot share out a batch of {request.batch} and {request.axis(Estimator).num_queries} directions "
        f"by --method {request.method}",
        hint="use fewer ranks, or a larger --batch; data shards have a sequence at least, and points of evaluation a rank",
    )
