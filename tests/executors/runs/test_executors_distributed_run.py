"""``zosim run`` with several ranks: it ends as one rank does, goes on under any mesh, and names who fails."""

from __future__ import annotations

import re

import pytest

from executors.ranks.launch import launch
from executors.runs.learning_rate import LearningRate
from executors.runs.runlog import read_header
from executors.runs.settings import DataSettings, RunOptions, RunSettings
from tests.support import distributed
from tests.support.command import zosim
from tests.support.runs import STEPS, digests_of, killed, numbers_of, shorten, stopped, train
from zosim import __version__ as zosim_version
from zosim.plans import Plan
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pertp(inputs, tmp_path_factory):
    """A run of one rank, and the same on two, its blocks offloaded to one host copy."""
    folder = tmp_path_factory.mktemp("pertp")
    evaluated = (
        f"--eval-data {inputs[1]} --eval-examples 2 --eval-every 4 --keep-best --checkpoint-every 6".split()
    )
    assert train(inputs, folder / "alone", *evaluated, "--no-launch", "--residency", "resident") == 0
    assert train(inputs, folder / "pair", *evaluated, "--method", "pertp", "--transfers", "sliced") == 0
    return folder


def test_two_ranks_leave_the_files_of_one(pertp):
    alone, pair = pertp / "alone", pertp / "pair"
    assert numbers_of(pair) == numbers_of(alone)
    assert digests_of(pair) == digests_of(alone)
    first, second = read_header(alone), read_header(pair)
    for name in ("digest", "evaluation", "best_evaluation", "last_loss"):
        assert first["finished"][name] == second["finished"][name]
    for name in ("model.safetensors", "best/model.safetensors"):
        assert (alone / name).read_bytes() == (pair / name).read_bytes()
    plan = Plan.load(pair / "plan.json")
    assert (plan.mesh.describe(), plan.residency.transfers) == ("perturb=2", "sliced")
    programs, timeline = ProgramSet.load(pair / "program.json"), Timeline.load(pair / "timeline.json")
    for rank in range(2):
        spans = {s.instruction for s in timeline.spans if s.rank == rank and s.phase == "step"}
        assert spans == {i.id for i in programs.program_of(rank).step}


def test_a_run_of_several_is_replayed_by_one(pertp, inputs, tmp_path):
    assert zosim("replay", pertp / "pair", "--model", inputs[0], "-o", tmp_path) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (pertp / "alone/model.safetensors").read_bytes()


def test_a_killed_rank_is_named_and_the_run_goes_on_on_one(pertp, inputs, tmp_path):
    """Killed after some steps; resumed by one rank, it ends as if nothing had been."""
    out = tmp_path / "out"
    output = killed(inputs, out, 1, "--method", "pertp", "--residency", "resident")
    assert "rank 1 died (SIGKILL), last at step[" in output
    shorten(out, STEPS)
    assert train(inputs, out, "--resume", "--no-launch", "--mesh", "data=1", "--steps", STEPS) == 0
    assert numbers_of(out) == numbers_of(pertp / "alone")
    assert (out / "model.safetensors").read_bytes() == (pertp / "alone/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_of_one_goes_on_on_two(pertp, inputs, tmp_path):
    out = tmp_path / "out"
    assert train(inputs, out, "--no-launch", "--residency", "resident", "--checkpoint-every", 2, steps=5) == 0
    more = f"--resume --method pertp --residency offloaded --transfers shared --steps {STEPS}".split()
    assert train(inputs, out, *more) == 0
    assert numbers_of(out) == numbers_of(pertp / "alone")
    assert (out / "model.safetensors").read_bytes() == (pertp / "alone/model.safetensors").read_bytes()


@pytest.mark.slow
def test_shards_go_on_as_micro_batches_of_one_rank_and_back(inputs, tmp_path):
    """A batch stays cut into the parts that it had, so that losses stay what they would have been."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert train(inputs, alone, "--no-launch", "--accumulate", 2) == 0
    assert train(inputs, out, "--mesh", "data=2", steps=3) == 0
    assert train(inputs, out, "--resume", "--no-launch", "--mesh", "data=1", steps=5) == 0
    assert read_header(out)["run"]["accumulate"] == 2
    assert train(inputs, out, "--resume", "--no-launch", "--mesh", "data=1", "--accumulate", 4) == 2
    assert train(inputs, out, "--resume", "--mesh", "data=2") == 0
    assert read_header(out)["run"]["accumulate"] == 1
    assert numbers_of(out) == numbers_of(alone)
    assert (out / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named(inputs, tmp_path):
    more = ("--mesh", "data=2", "--transfers", "sliced", "--digest-every", 0)
    wanted = ("rank 0 stopped", "waited {} s for rank 1, last at ", "/all_gather")
    stopped(inputs, tmp_path, 1, *more, wanted=wanted)


@pytest.mark.slow
def test_a_late_joiner_needs_no_file_of_the_run(pertp, inputs, tmp_path):
    """It gets header and log over the wire, and replays what it missed; the checkpoint that it cannot see is left."""
    out = tmp_path / "out"
    assert (
        train(inputs, out, "--no-launch", "--residency", "offloaded", "--checkpoint-every", 2, steps=5) == 0
    )
    data = Plan.load(out / "plan.json").model_dump(mode="json")
    data |= {
        "mesh": {"perturb": 2},
        "placement": data["placement"] | {"devices": data["placement"]["devices"] * 2},
    }
    data["residency"]["transfers"] = "sliced"
    settings = RunSettings(
        plan=Plan.model_validate(data),
        data=DataSettings(path=str(inputs[1]), shuffle=True),
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=STEPS),
        run=RunOptions(model=str(inputs[0]), out=str(out), digest_every=3, resume=True, tensorboard=False),
    )
    launch(distributed.run_apart, settings, world_size=2)
    assert numbers_of(out) == numbers_of(pertp / "alone")
    assert digests_of(out) == digests_of(pertp / "alone")


def test_ranks_that_begin_unlike_are_refused_in_words(pertp, inputs, tmp_path):
    settings = RunSettings(
        plan=Plan.load(pertp / "pair" / "plan.json"),
        data=DataSettings(path=str(inputs[1])),
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=STEPS),
        run=RunOptions(model=str(inputs[0]), digest_every=0, out=str(tmp_path / "out")),
    )
    output = launch(distributed.run_unlike, settings, world_size=2)
    here = read_header(pertp / "pair")
    values = {
        "number of steps": (20, STEPS),
        "digest every": (5, 0),
        "num threads": (7, 1),
        "torch": ("2.99.0", here["torch"]),
        "instruction set": ("NONE", here["instruction_set"]),
        "zosim version": ("0.0", zosim_version),
    }
    assert list(output) == list(values)
    for name, (other, value) in values.items():
        assert re.fullmatch(
            rf"ranks must start with the same {name}, but rank 1.* and rank 0 differ "
            rf"\({re.escape(f'{other}, not {value}')}\)",
            output[name],
        )
    assert not (tmp_path / "out" / "steps.jsonl").exists()


@pytest.mark.slow
def test_a_run_that_diverges_leaves_its_last_good_weights(inputs, tmp_path, capsys):
    out = tmp_path / "out"
    more = ("--method", "pertp", "--transfers", "sliced", "--lr", "1e30")
    assert train(inputs, out, *more) == 2
    output = capsys.readouterr().err
    assert "the run stopped, and" in output
    assert (out / "model.safetensors").exists()


def test_a_plan_on_several_hosts_is_explained(pertp, inputs, tmp_path, capsys):
    data = Plan.load(pertp / "pair" / "plan.json").model_dump(mode="json")
    data["placement"]["hosts"] = ["a", "b"]
    Plan.model_validate(data).save(tmp_path / "plan.json")
    capsys.readouterr()
    assert train(inputs, tmp_path / "out", tmp_path / "plan.json") == 0
    reported = capsys.readouterr().out
    assert "ssh b " in reported
    assert "srun --nodes 2" in reported
    assert not (tmp_path / "out").exists()
