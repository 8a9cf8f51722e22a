"""A fault that is planted in one rank is named by the next verification, in every placement; nothing else ever is."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from executors.ranks.launch import launch
from executors.runs.learning_rate import LearningRate
from executors.runs.run import run_in_rank
from executors.runs.session import Session
from executors.runs.settings import DataSettings, RunOptions, RunSettings
from proofs_checks.setups.ranks import on_all_ranks
from tests.support import command, distributed, faults, staged
from tests.support.command import rows_of, zosim
from tests.support.distributed import OFFLOADED, SHARED, SLICED, plan_for
from tests.support.tiny import batches, model_of
from topology.errors import RunError
from zosim.config import merge

COPIES = {"weights": {"perturbation": "copies"}, "schedule": {"traversal": "full"}}
PERTURBATIONS = {"estimator": {"num_perturbations": 2}}
QUANTIZED = {"low_bits": {"weights": "int8"}}

ALONE = {
    "resident": {},
    "offloaded": OFFLOADED,
    "offloaded, immediate": {"residency": {"blocks": "offloaded"}},
    "offloaded, rounded": {
        "residency": {"blocks": "offloaded", "transfer_dtype": "bfloat16"},
        "schedule": {"update": "delayed"},
    },
    "full": {"schedule": {"traversal": "full"}},
    "copies": COPIES,
    "perturbations": PERTURBATIONS,
    "quantized weights": QUANTIZED,
}
SEVERAL = {
    "data": {"mesh": {"data": 2}},
    "perturb": {"mesh": {"perturb": 2}},
    "data, offloaded": {"mesh": {"data": 2}, **OFFLOADED},
    "data, shared": {"mesh": {"data": 2}, **SHARED},
    "perturb, sliced": {"mesh": {"perturb": 2}, **SLICED},
    "data, copies": {"mesh": {"data": 2}, **COPIES},
    "perturb, perturbations": {"mesh": {"perturb": 2}, **PERTURBATIONS},
    "perturb, quantized weights": {"mesh": {"perturb": 2}, **QUANTIZED},
    "2d": {"mesh": {"data": 2, "perturb": 2}},
    "2d, sliced": {"mesh": {"data": 2, "perturb": 2}, **SLICED},
}
STAGES = {
    "stage": staged.Case(("block.0",)),
    "stage, data": staged.Case(("block.0",), mesh=(("data", 2),)),
}
VICTIM = 1
OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1, "checksums": True}


def plan_and_model(placement):
    if placement in STAGES:
        return STAGES[placement].plan(), STAGES[placement].made
    case = SEVERAL.get(placement) or {"mesh": {}, **ALONE[placement]}
    return plan_for(case), lambda: model_of("opt")


def outputs_of_all(placement, fault):
    """Return what each rank is told when rank 1, or the only one, has a fault."""
    plan, model = plan_and_model(placement)
    lines = batches(faults.STEPS, size=4)
    if plan.placement.world_size == 1:
        with Session(plan, model(), **OPTIONS) as session:
            return [faults.disturbed(session, lines, fault, victim=0)]

    def rank(number, communicator):
        with Session(plan, models[number], communicator=communicator, **OPTIONS) as session:
            return faults.disturbed(session, lines, fault, VICTIM)

    models = [model() for _ in range(plan.placement.world_size)]
    return on_all_ranks(plan, rank)


@pytest.mark.crossed(quick=11, slow=3)
@pytest.mark.parametrize("placement", [*ALONE, *STAGES, *SEVERAL])
def test_nothing_is_said_of_a_run_without_a_fault(placement):
    assert set(outputs_of_all(placement, None)) == {""}


def _pairs_of_bits():
    """Every fault in every placement; of one in each placement, and so of all somewhere, every fifth is quick."""
    for row, placement in enumerate([*ALONE, *SEVERAL, *STAGES]):
        for column, fault in enumerate(faults.BITS):
            is_quick = (row + column) % len(faults.BITS) == 0
            yield pytest.param(placement, fault, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.crossed(quick=5, slow=4)
@pytest.mark.parametrize(("placement", "fault"), list(_pairs_of_bits()))
def test_bits_are_named_on_all_ranks(placement, fault):
    if "copies" in placement and fault == "bit in a forward":
        pytest.skip(
            "an evaluation point that is written apart is no weight: it is drawn anew in the next step"
        )
    reported = set(outputs_of_all(placement, fault))
    assert len(reported) == 1
    (output,) = reported
    assert output.startswith("after 4 steps, and not yet after 2, ")
    who = "this process" if placement in ALONE else "rank 1|ranks 0(, 1, 2)? and [13]"
    seen = re.search(
        rf"({who}) found other bits in block\.1.* than were left there, in step 3, step/block\.1/", output
    )
    assert seen, output


def _pairs_of_inputs():
    """Every input in every placement; of one in each placement, and so of all somewhere, every fourth is quick."""
    for row, placement in enumerate([*SEVERAL, *STAGES]):
        for column, fault in enumerate(faults.INPUTS):
            is_quick = (row + column) % len(faults.INPUTS) == 0
            yield pytest.param(placement, fault, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.crossed(quick=4, slow=4)
@pytest.mark.parametrize(("placement", "fault"), list(_pairs_of_inputs()))
def test_other_inputs_of_one_rank_are_named_on_all_ranks(placement, fault):
    reported = set(outputs_of_all(placement, fault))
    who = r"(ranks 0 and 1 differ|rank 1 differs from the other \d)"
    assert len(reported) == 1
    (output,) = reported
    assert re.fullmatch(
        rf"after 4 steps, and not yet after 2, ranks did other steps: {who} in the .*{fault}.* of step 3",
        output,
    ), output


def train(inputs, out, *more, steps=7):
    return command.train(
        *inputs, out, *more, steps=steps, batch=4, lr=1e-3, digest_every=2, checkpoint_every=3
    )


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("residency", ["resident", "offloaded"])
def test_a_run_that_was_refused_goes_on_to_the_right_bits(inputs, tmp_path, capsys, monkeypatch, residency):
    """The log ends where the weights were last as they should be, and keeps apart what followed."""
    out = tmp_path / "out"
    assert train(inputs, tmp_path / "undisturbed", "--residency", residency) == 0

    def step(session, batch, **given):
        if session.num_steps == 4:
            faults.flip_at_rest(session, is_victim=True)
        return real(session, batch, **given)

    real = Session.begin_step
    with monkeypatch.context() as planted:
        planted.setattr(Session, "begin_step", step)
        assert train(inputs, out, "--residency", residency) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "after 6 steps, and not yet after 4, this process found other bits in block.1" in output
    assert "`--resume` continues after 4 steps" in output
    assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3]
    refused = [json.loads(line) for line in (out / "steps-refused.jsonl").read_text().splitlines()]
    assert [row["step"] for row in refused] == [4, 5]
    assert zosim("run", "--out", out, "--resume", "--no-launch", "--no-tensorboard") == 0
    wanted = load_file(tmp_path / "undisturbed" / "model.safetensors")
    tuned = load_file(out / "model.safetensors")
    assert all(torch.equal(tuned[name], tensor) for name, tensor in wanted.items())


def test_a_bit_that_ruins_the_loss_is_named_as_what_it_is(inputs, tmp_path, capsys, monkeypatch):
    """Not as a learning rate that is too large: the weights are not rebuilt from a log that the bit is in."""

    def step(session, batch, **given):
        if session.num_steps == 3:
            session.forward_runner.blocks[1].fc1.weight.data[0, 0] = float("nan")
        return real(session, batch, **given)

    real = Session.begin_step
    monkeypatch.setattr(Session, "begin_step", step)
    assert train(inputs, tmp_path / "out") == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "after 4 steps, and not yet after 3, this process found other bits in block.1" in output
    assert "lower --lr" not in output
    assert len(rows_of(tmp_path / "out")) == 3


def test_a_first_digest_that_is_refused_lets_the_run_begin_again(inputs, tmp_path, monkeypatch):
    def step(session, batch, **given):
        if session.num_steps == 1:
            faults.flip_at_rest(session, is_victim=True)
        return real(session, batch, **given)

    real = Session.begin_step
    with monkeypatch.context() as planted:
        planted.setattr(Session, "begin_step", step)
        assert train(inputs, tmp_path / "out") == 2
    assert rows_of(tmp_path / "out") == []
    assert train(inputs, tmp_path / "out", "--resume") == 0
    assert len(rows_of(tmp_path / "out")) == 7


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_that_disagree_end_and_go_on_to_the_right_bits(inputs, tmp_path):
    settings = RunSettings(
        plan=plan_for({"mesh": {"perturb": 2}, **SLICED}),
        data=DataSettings(path=str(inputs[1])),
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=7),
        run=RunOptions(model=str(inputs[0]), out=str(tmp_path / "out"), digest_every=2),
    )
    with pytest.raises(RunError) as caught:
        launch(distributed.run_with_fault, settings, 5, world_size=2)
    assert (
        "after 6 steps, and not yet after 4, ranks did other steps: ranks 0 and 1 differ in the"
        in caught.value.message
    )
    assert "learning rate of step 5" in caught.value.message
    assert "continues after 4 steps" in caught.value.hint
    assert len(rows_of(tmp_path / "out")) == 4
    resumed = launch(
        run_in_rank, replace(settings, run=merge(settings.run, RunOptions(resume=True))), world_size=2
    )
    undisturbed = launch(
        run_in_rank,
        replace(settings, run=merge(settings.run, RunOptions(out=str(tmp_path / "undisturbed")))),
        world_size=2,
    )
    assert resumed["digest"] == undisturbed["digest"]


def _settings(inputs, out, placement):
    plan = STAGES[placement].plan() if placement in STAGES else plan_and_model(placement)[0]
    return RunSettings(
        plan=plan,
        data=DataSettings(path=str(inputs[1])),
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=7),
        run=RunOptions(model=str(inputs[0]), out=str(out), digest_every=5, checksums=True, tensorboard=False),
    )


def _pairs_of_deaths():
    for row, placement in enumerate(("resident", "data", "perturb, sliced", "stage")):
        for column, fault in enumerate(("label", "seeds", "bit")):
            is_quick = (row, column) == (0, 0)
            if (placement, fault) == ("resident", "seeds"):
                continue  # seeds that are logged are checked as they are read
            yield pytest.param(placement, fault, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.crossed(slow=3)
@pytest.mark.dist
@pytest.mark.parametrize(("placement", "fault"), list(_pairs_of_deaths()))
def test_what_nobody_verified_before_a_death_is_run_again(inputs, tmp_path, capfd, placement, fault):
    """A rank goes astray in step 2, and one dies in step 4, before the verification after 5 steps."""
    settings = _settings(inputs, tmp_path / "out", placement)
    num_ranks = settings.plan.placement.world_size
    undisturbed = launch(
        run_in_rank,
        replace(settings, run=merge(settings.run, RunOptions(out=str(tmp_path / "undisturbed")))),
        world_size=num_ranks,
    )
    with pytest.raises(RunError, match="SIGKILL"):
        launch(distributed.run_astray, settings, fault, 2, 4, num_ranks - 1, world_size=num_ranks)
    assert len(rows_of(tmp_path / "out")) == 4
    capfd.readouterr()
    resumed = launch(
        run_in_rank, replace(settings, run=merge(settings.run, RunOptions(resume=True))), world_size=num_ranks
    )
    output = " ".join(capfd.readouterr().err.split())
    assert "resuming after 4 steps" in output
    assert "4 of these were not verified before the run ended, and run again" in output
    logs = [
        [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in rows_of(tmp_path / name)
        ]
        for name in ("out", "undisturbed")
    ]
    assert logs[0] == logs[1]
    assert resumed["digest"] == undisturbed["digest"]
    refused = tmp_path / "out" / "steps-refused.jsonl"
    if refused.exists():  # a fault that shows in no row so far leaves nothing wrong behind
        assert "differs from its log" in output
        assert [json.loads(line)["step"] for line in refused.read_text().splitlines()][-1] == 3


def test_of_a_run_that_is_gone_on_with_twice_what_was_verified_once_is_not_run_again(
    inputs, tmp_path, capsys
):
    out = tmp_path / "out"
    assert train(inputs, out, "--digest-every", 5, "--checkpoint-every", 0, steps=4) == 0
    for steps in (5, 6):
        assert (
            zosim("run", "--out", out, "--resume", "--steps", steps, "--no-launch", "--no-tensorboard") == 0
        )
        assert "are run again" not in capsys.readouterr().err
    assert len(rows_of(out)) == 6


@pytest.mark.slow
def test_a_run_that_is_killed_again_while_it_runs_steps_again_keeps_its_log(inputs, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    more = ("--digest-every", 6, "--checkpoint-every", 0)
    assert train(inputs, whole, *more) == 0

    class Killed(BaseException):
        pass

    def step(session, batch, **given):
        if session.num_steps == ends[0]:
            raise Killed
        return real(session, batch, **given)

    real, ends = Session.begin_step, [5, 3, 1]
    with monkeypatch.context() as planted:
        planted.setattr(Session, "begin_step", step)
        while ends:
            with pytest.raises(Killed):
                train(inputs, out, *more, "--resume")
            ends.pop(0)
            assert len(rows_of(out)) == 5
    assert train(inputs, out, *more, "--resume") == 0
    assert not (out / "steps-refused.jsonl").exists()
    for name in ("metrics.jsonl", "digests.jsonl", "steps.jsonl"):
        rows = [
            [
                {
                    key: value
                    for key, value in json.loads(line).items()
                    if "second" not in key and "per_s" not in key
                }
                for line in (folder / name).read_text().splitlines()
            ]
            for folder in (out, whole)
        ]
        assert rows[0] == rows[1]
