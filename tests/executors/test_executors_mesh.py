from __future__ import annotations

import shlex
import sys

import pytest

from executors.ranks.mesh import alone, launch_lines, mesh_named, spread
from executors.runs.planning import Asked, even_cuts
from tests.support.distributed import FOURS, PAIRS, plan_for
from topology.errors import PlanError
from zosim.plans import Mesh, Plan

CASES = PAIRS | FOURS


@pytest.mark.parametrize("name", CASES)
def test_alone_is_what_was_spread(name):
    plan, single = plan_for(CASES[name]), plan_for(CASES[name], alone=True)
    taken = alone(plan)
    assert taken.placement.world_size == 1
    assert taken.mesh == single.mesh
    assert (taken.residency.transfers, taken.estimator) == ("private", single.estimator)
    data = single.model_dump(mode="json")
    spread(data, {name: value for name, value in plan.mesh.model_dump().items() if value != 1})
    assert Plan.model_validate(data).mesh == plan.mesh


@pytest.mark.parametrize(
    "text", ["", "data", "data=0", "data=2,data=2", "rows=2", "data=2,perturb=x", "data=-1"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(PlanError, match="--mesh"):
        _ = Asked({"mesh": Mesh.parse(text).model_dump(exclude_defaults=True)}).wanted_mesh


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
    assert Asked({"mesh": Mesh.parse(text).model_dump(exclude_defaults=True)}).wanted_mesh == axes


def test_methods_use_the_devices_that_there_are():
    assert mesh_named("sparq", 4) == {"stage": 4}
    assert mesh_named("sparq", 1) == {"stage": 2}
    assert mesh_named("pertp", 8) == {"perturb": 2}
    assert mesh_named("ddp", 8) == {"data": 8}
    assert mesh_named("2d", 8) == {"data": 4, "perturb": 2}
    assert mesh_named("2d", 1) == {"data": 2, "perturb": 2}


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


def test_cuts_part_blocks_evenly():
    assert even_cuts(12, 2) == ("block.5.mlp",)
    assert even_cuts(3, 2) == ("block.0.mlp",)
    assert even_cuts(4, 4) == ("block.0.mlp", "block.1.mlp", "block.2.mlp")
    assert Asked({"split": {"cuts": ("block.1", "block.2.mlp")}}).wanted_mesh == {"stage": 3}
    assert Asked({"mesh": {"stage": 2}}).wanted_cuts(12, None) == ("block.5.mlp",)
    assert Asked({"mesh": {"data": 2}}).wanted_cuts(12, None) == ()
