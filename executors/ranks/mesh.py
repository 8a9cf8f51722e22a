"""Plans of several ranks made from plans of one, and the other way round."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.groups import joined_halves
from costmodel.model_spec import ModelSpec
from topology.errors import DoesNotFit, PlanError
from zosim.planning.planner import Candidate, Request, choose
from zosim.planning.space import shares
from zosim.plans import Estimator, Mesh, Plan, Split


def alone(plan: Plan) -> Plan:
    """Return what one rank does in place of all those of `plan`: the same numbers, but for the rounding of sums.

    Codecs are left out, too: what they change are losses alone.
    """
    if plan.placement.world_size == 1:
        return plan
    data = plan.model_dump(mode="json")
    if not plan.directions.draws_by_halves:
        data["model"] = uncut(plan.model).model_dump(mode="json")
    data["mesh"], data["split"] = {}, {}
    data["placement"] |= {
        "devices": data["placement"]["devices"][:1],
        "hosts": data["placement"]["hosts"][:1],
    }
    data["residency"] |= {"transfers": "private"}
    return Plan.model_validate(data)


def uncut(model: ModelSpec) -> ModelSpec:
    """Return a model with its cut blocks whole."""
    if not model.cut_blocks:
        return model
    groups = [group.model_dump() for group in joined_halves(model.groups)]
    return ModelSpec.model_validate(model.model_dump() | {"cut_blocks": (), "groups": groups})


def spread(data: dict[str, Any], mesh: Mapping[str, Any]) -> None:
    """Lay the fields of a plan over the ranks of a mesh of this host, its first device saying of which kind all are."""
    data["mesh"] = dict(mesh)
    world_size = Mesh.model_validate(data["mesh"]).world_size
    first = data["placement"]["devices"][0]
    if len(data["placement"]["devices"]) != world_size:
        kind = first.rstrip("0123456789")
        devices = [f"{kind}{rank}" if kind == "gpu" else first for rank in range(world_size)]
        data["placement"] |= {"devices": devices, "hosts": []}
    if data["mesh"].get("stage", 1) == 1 and not Split.model_validate(data["split"]).is_lossy:
        data["split"] = {}
    if world_size == 1:
        data["residency"]["transfers"] = "private"


def stage_of(plan: Plan, rank: int) -> str:
    """Return a rank's part of the model in words, with the cuts that it lies between; "" for all of it."""
    num_stages, cuts = plan.num_stages, plan.cuts
    if num_stages == 1:
        return ""
    stage = plan.mesh.coordinates(rank).stage
    behind = [f"behind cut {cuts[stage - 1]}"] if stage else []
    before = [f"before cut {cuts[stage]}"] if stage + 1 < num_stages else []
    return f"stage {stage + 1} of {num_stages}, {', '.join(behind + before)}"


def mesh_named(method: str, num_devices: int) -> dict[str, Any]:
    """Return the mesh that a method means where none is given.

    Parameters
    ----------
    method : str
        ``"pertp"``, ``"ddp"``, ``"2d"`` or ``"sparq"``.
    num_devices : int
        There are to share the batch out among.
    """
    if method == "pertp":
        return {"perturb": 2}
    if method == "sparq":
        return {"stage": max(2, num_devices)}
    if method == "ddp":
        return {"data": max(2, num_devices)}
    return {"data": max(2, num_devices // 2), "perturb": 2}


def fastest_plan(request: Request, num_ranks: int) -> Plan:
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
    candidates: list[Candidate] = []
    refused: DoesNotFit | None = None
    for mesh in meshes:
        try:
            candidates.append(choose(replace(request, mesh=mesh)).chosen)
        except DoesNotFit as error:
            refused = error
    if candidates:
        return min(candidates, key=lambda candidate: candidate.sort_key).plan
    if refused is not None:
        raise refused
    raise PlanError(
        f"{num_ranks} ranks cannot share out a batch of {request.batch} and {request.axis(Estimator).num_queries} directions "
        f"by --method {request.method}",
        hint="use fewer ranks, or a larger --batch; data shards have a sequence at least, and points of evaluation a rank",
    )


_AS_PLANNED = ", as planned; where torch finds no such device it stops, unless --device names another."


def launch_lines(
    plan: Plan, arguments: Sequence[str], *, device: str | None = None, port: int = 29500
) -> str:
    """Return, to be read and copied, how the ranks of a plan of several hosts are started.

    Parameters
    ----------
    plan : Plan
    arguments : sequence of str
        Of this command.
    device : str, optional
        That every rank is to run on.
    port : int
        Free on the first host.

    Notes
    -----
    torchrun is started as a module of this interpreter: a shell that ssh opens has no environment activated.
    """
    hosts = plan.placement.ranks_by_host
    names = [plan.placement.hosts[ranks[0]] for ranks in hosts]
    command = "-m zosim " + shlex.join(arguments)
    torchrun = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    # Not c10d, whose state torchrun unpickles from a store that all hosts reach.
    rendezvous = f"--nnodes {len(hosts)} --rdzv-backend static --master-addr {names[0]} --master-port {port}"
    by_ssh = []
    for number, (name, ranks) in enumerate(zip(names, hosts, strict=True)):
        start = f"{torchrun} {rendezvous} --node-rank {number} --nproc-per-node {len(ranks)} {command}"
        by_ssh.append(f"ssh {name} {shlex.quote(f'cd {shlex.quote(str(Path.cwd()))} && {start}')} &")
    start = f"{torchrun} {rendezvous} --node-rank $SLURM_NODEID --nproc-per-node {len(hosts[0])} {command}"
    by_slurm = (
        f"srun --nodes {len(hosts)} --ntasks-per-node 1 --nodelist {','.join(names)} "
        f"bash -c {shlex.quote(start)}"
    )
    lines = [
        f"The plan has ranks on {len(hosts)} hosts. Start them with ssh:",
        "",
        *by_ssh,
        "",
        "or with Slurm:",
    ]
    lines += [
        "",
        by_slurm,
        "",
        "While it runs, these hosts have open ports: docs/runs.md says which, and how to close them.",
    ]
    if device is not None:
        is_named = any(word.partition("=")[0] == "--device" for word in arguments)
        lines += ["", f"Every rank runs on {device}" + ("." if is_named else _AS_PLANNED)]
    if max(map(len, hosts)) > 1 and "--threads" not in arguments:
        lines += ["", "torchrun gives each of several ranks of a host one thread: --threads N gives it more."]
    return "\n".join(lines)
