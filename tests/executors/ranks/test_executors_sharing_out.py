"""``zosim run --ranks N``: the planner chooses what mesh so many ranks form; and what each has of a batch."""

from __future__ import annotations

import pytest
import torch

from costmodel.models.configs import read_model_spec
from executors.ranks.mesh import on_one_rank
from executors.runs.session import Session
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import tiny
from tests.support.command import rows_of, saved_lines, saved_model, zosim
from tests.support.reference_mezo import LiteralMezo
from tests.support.requests import request_for
from tests.support.runs import STEPS, numbers_of, train
from topology import load_preset
from topology.errors import PlanError
from zosim.planning.planner import choose
from zosim.plans import Mesh, Placement, Plan


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


def test_unequal_shares_are_the_literal_loop_over_these_parts_of_the_batch():
    """One sequence is shorter than the others: a mean weighted by ranks, or by sequences, would be another."""
    model, lines = tiny.model_of("opt"), tiny.batches(3, size=4)
    plan = tiny.plan_of(model, size=4).model_copy(
        update={
            "mesh": Mesh(data=2, num_sequences=(1, 3)),
            "placement": Placement(topology="test", devices=("cpu0", "cpu0")),
        }
    )

    models = [tiny.model_of("opt") for _ in range(2)]

    def rank(number, communicator):
        options = {"communicator": communicator, "learning_rate": 1e-2, "seed": 5}
        with Session(plan, models[number], **options) as session:
            records = [session.step(batch) for batch in lines]
            return (
                [list(each.projected_gradients) for each in records],
                session.digest(),
                session.state_dict(),
            )

    found = on_all_ranks(plan, rank)
    assert found[0][:2] == found[1][:2]

    def loss(batch):
        parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(1), slice(1, 4))]
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        sums = [model(**part).loss.double() * count for part, count in zip(parts, counts, strict=True)]
        return sum(sums) / sum(counts)

    loop = LiteralMezo(model, epsilon=plan.estimator.epsilon, loss=loss)
    with Session(on_one_rank(plan), tiny.model_of("opt"), seed=5) as session:
        seeds = [session.seeds_of(step) for step in range(len(lines))]
    literal = [
        [row[2] for row in loop.step(batch, seed, 1e-2)] for batch, seed in zip(lines, seeds, strict=True)
    ]
    assert found[0][0] == literal
    assert all(torch.equal(found[0][2][name], tensor) for name, tensor in model.named_parameters())


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_unequal_shares_goes_on_with_them(inputs, tmp_path):
    shares, out = ("--mesh", "data=3:1", "--rng", "counter"), tmp_path / "resumed"
    assert train(inputs, tmp_path / "whole", *shares) == 0
    assert train(inputs, out, *shares, "--checkpoint-every", 2, steps=5) == 0
    assert Plan.load(out / "plan.json").mesh.num_sequences == (3, 1)
    assert train(inputs, out, "--resume", "--mesh", "data=2", "--steps", STEPS) == 2
    assert train(inputs, out, "--resume", "--steps", STEPS) == 0
    assert numbers_of(out) == numbers_of(tmp_path / "whole")
