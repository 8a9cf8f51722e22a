"""Plans of several ranks made from plans of one, and the other way round."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from costmodel.models.groups import joined_halves
from costmodel.models.model_spec import ModelSpec
from zosim.config import PlanConfig
from zosim.planning.resolve import resolve, spread
from zosim.plans import Mesh, Plan, Split


def on_one_rank(plan: Plan) -> Plan:
    """Return the plan of one rank that computes what all ranks of `plan` do, but for the rounding of sums.

    Codecs are left out, too: what they change are losses alone.
    """
    if plan.placement.world_size == 1:
        return plan
    config = PlanConfig.of(plan).model_copy(update={"mesh": Mesh(), "split": Split()})
    return resolve(spread(config, lambda blocks: plan.model if blocks else unsplit(plan.model), known=plan))


def unsplit(model: ModelSpec) -> ModelSpec:
    """Return a model with its split blocks whole."""
    if not model.split_blocks:
        return model
    param_groups = [group.model_dump() for group in joined_halves(model.param_groups)]
    return ModelSpec.model_validate(model.model_dump() | {"split_blocks": (), "param_groups": param_groups})


def stage_of(plan: Plan, rank: int) -> str:
    """Describe a rank's stage, with the split points that it lies between; "" for a model in one stage."""
    num_stages, split_points = plan.num_stages, plan.split_points
    if num_stages == 1:
        return ""
    stage = plan.mesh.coordinates(rank).stage
    behind = [f"after split point {split_points[stage - 1]}"] if stage else []
    before = [f"before split point {split_points[stage]}"] if stage + 1 < num_stages else []
    return f"stage {stage + 1} of {num_stages}, {', '.join(behind + before)}"


_AS_PLANNED = ", as planned; where torch finds no such device it stops, unless --device names another."


def launch_lines(
    plan: Plan, arguments: Sequence[str], *, device: str | None = None, port: int = 29500
) -> str:
    """Return the commands that start the ranks of a plan on several hosts, to be copied.

    - `arguments`: of this command.
    - `port`: free on the first host.

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
    lines = [f"The plan has ranks on {len(hosts)} hosts. Start them with ssh:", "", *by_ssh, ""]
    lines += ["or with Slurm:", "", by_slurm, ""]
    lines.append(
        "While it runs, these hosts have open ports: docs/how-to/several-hosts.md says which, and how to close them."
    )
    if device is not None:
        is_named = any(word.partition("=")[0] == "--device" for word in arguments)
        lines += ["", f"Every rank runs on {device}" + ("." if is_named else _AS_PLANNED)]
    if max(map(len, hosts)) > 1 and "--threads" not in arguments:
        lines += ["", "torchrun gives each of several ranks of a host one thread: --threads N gives it more."]
    return "\n".join(lines)
