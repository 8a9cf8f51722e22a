from __future__ import annotations

import shlex
import sys

import pytest

from executors.ranks.mesh import launch_lines, on_one_rank
from tests.support.distributed import FOURS, PAIRS, plan_for
from topology.errors import PlanError
from zosim.config import PlanConfig
from zosim.planning.resolve import even_split_points, laid_over, resolve
from zosim.plans import Mesh

CASES = PAIRS | FOURS


@pytest.mark.parametrize("name", CASES)
def test_alone_is_what_was_spread(name):
    plan, single = plan_for(CASES[name]), plan_for(CASES[name], alone=True)
    taken = on_one_rank(plan)
    assert taken.placement.world_size == 1
    assert taken.mesh == single.mesh
    assert (taken.residency.transfers, taken.estimator) == ("private", single.estimator)
    again = resolve(laid_over(single, PlanConfig(mesh=plan.mesh), lambda _: single.model))
    assert (again.mesh, again.placement.world_size) == (plan.mesh, plan.placement.world_size)


@pytest.mark.parametrize(
    "text", ["", "data", "data=0", "data=2,data=2", "rows=2", "data=2,perturb=x", "data=-1"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(PlanError, match="--mesh"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("data=2, perturb=3", {"data": 2, "perturb": 3}),
        ("perturb=3,data=2", {"data": 2, "perturb": 3, "inner": "data"}),
        ("stage=2,data=2", {"stage": 2, "data": 2}),
        ("perturb=2,stage=2,data=4", {"perturb": 2, "stage": 2, "data": 4, "inner": "data"}),
    ],
)
def test_the_outer_axis_is_named_first_and_stages_are_innermost(text, axes):
    assert Mesh.parse(text).model_dump(exclude_defaults=True) == axes


def test_every_host_gets_its_line():
    plan = plan_for(FOURS["2d-two-hosts"])
    text = launch_lines(plan, ["run", "plan.json", "--out", "my run"])
    for number, host in enumerate("ab"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"ssh {host} ")]
        ssh, name, remote, _ = shlex.split(line)
        assert (ssh, name) == ("ssh", host)
        words = shlex.split(remote)
        assert words[words.index("&&") + 1 :] == [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "static",
            "--master-addr", "a", "--master-port", "29500", "--node-rank", str(number), "--nproc-per-node", "2",
            "-m", "zosim", "run", "plan.json", "--out", "my run",
        ]  # fmt: skip
    (slurm,) = [shlex.split(line) for line in text.splitlines() if line.startswith("srun ")]
    assert "--threads N" in text
    assert "--threads N" not in launch_lines(plan, ["run", "plan.json", "--threads", "2"])
    assert slurm[:7] == ["srun", "--nodes", "2", "--ntasks-per-node", "1", "--nodelist", "a,b"]
    assert "--node-rank $SLURM_NODEID " in slurm[-1]


def test_split_points_divide_blocks_evenly():
    assert even_split_points(12, 2) == ("block.5.mlp",)
    assert even_split_points(3, 2) == ("block.0.mlp",)
    assert even_split_points(4, 4) == ("block.0.mlp", "block.1.mlp", "block.2.mlp")
