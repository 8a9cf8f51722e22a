"""``zosim run --ranks N``: the planner chooses what mesh so many ranks form."""

from __future__ import annotations

import pytest

from costmodel.models.configs import read_model_spec
from tests.support.command import rows_of, saved_lines, saved_model, zosim
from tests.support.requests import request_for
from topology import load_preset
from topology.errors import PlanError
from zosim.planning.planner import choose
from zosim.plans import Plan


def plan_of(num_ranks, **search):
    request = request_for(
        read_model_spec("opt-125m"), load_preset("dgx-1v"), batch=8, seq=64, ranks=num_ranks, **search
    )
    return choose(request).plan


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_plan_has_as_many_ranks_as_are_asked_for(num_ranks):
    plan = plan_of(num_ranks)
    assert plan.placement.world_size == plan.mesh.world_size == num_ranks
    for method, mesh in (("ddp", (num_ranks, 1)), ("pertp", (1, num_ranks))):
        if 1 < num_ranks <= (8 if method == "ddp" else 2):
            shaped = plan_of(num_ranks, method=method)
            assert (shaped.mesh.data, shaped.mesh.perturb) == mesh


@pytest.mark.parametrize(("method", "num_ranks"), [("pertp", 3), ("mezo", 2)])
def test_more_ranks_than_there_is_work_for_are_refused(method, num_ranks):
    with pytest.raises(PlanError, match=f"{num_ranks} ranks cannot share out a batch of 8"):
        plan_of(num_ranks, method=method)


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_two_ranks_has_the_planner_s_mesh_and_one_rank_s_losses(tmp_path):
    model = saved_model("opt", tmp_path)
    saved_lines(tmp_path / "data.jsonl")
    words = [
        "run", "--model", model, "--data", tmp_path / "data.jsonl", "--steps", 2, "--batch", 4, "--lr", "1e-3",
        "--threads", 1, "--no-tensorboard", "--rng", "counter",
    ]  # fmt: skip
    assert zosim(*words, "--ranks", 2, "--out", tmp_path / "two") == 0
    plan = Plan.load(tmp_path / "two" / "plan.json")
    assert plan.mesh.world_size == 2
    assert zosim(*words, "--no-launch", "--accumulate", plan.mesh.data, "--out", tmp_path / "one") == 0
    found, alone = (rows_of(tmp_path / name) for name in ("two", "one"))
    assert [row["loss_plus"] for row in found] == pytest.approx([row["loss_plus"] for row in alone], rel=1e-6)


def test_a_mesh_of_another_number_of_ranks_is_refused(tmp_path, capsys):
    model = saved_model("opt", tmp_path)
    saved_lines(tmp_path / "data.jsonl")
    words = ["run", "--model", model, "--data", tmp_path / "data.jsonl", "--out", tmp_path / "out"]
    assert zosim(*words, "--mesh", "data=2", "--ranks", 3) == 2
    assert "--mesh data=2 has 2 ranks, but --ranks is 3" in capsys.readouterr().err
