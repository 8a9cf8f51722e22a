"""Stages in processes of their own: they end as one device does, go on and replay on one, and name who dies."""

from __future__ import annotations

import json

import pytest

from executors.ranks.launch import launch
from executors.runs.runlog import read_header
from tests.support import staged
from tests.support.command import zosim
from tests.support.runs import STEPS, digests_of, killed, numbers_of, shorten, stopped, train
from tests.support.staged import Case
from topology.errors import RunError
from zosim.plans import Plan
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

pytestmark = pytest.mark.dist

FOURS = {
    "four": Case(("block.0.mlp", "block.1", "block.2.mlp")),
    "two-with-shards": Case(("block.1.mlp",), mesh=(("data", 2),), codec="q4"),
    "two-of-quantized-with-points": Case(
        ("block.0",),
        mesh=(("perturb", 2),),
        axes=(("low_bits", (("weights", "int4"), ("sparsity", 0.5))),),
    ),
}
THREES = {"three": Case(("block.0", "block.1.mlp"), "llama", accumulate=2)}


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """A run of one rank, and the same on two stages."""
    folder = tmp_path_factory.mktemp("stages")
    evaluated = (
        f"--eval-data {inputs[1]} --eval-examples 2 --eval-every 4 --keep-best --checkpoint-every 6".split()
    )
    assert train(inputs, folder / "alone", *evaluated, "--no-launch", "--residency", "resident") == 0
    assert (
        train(inputs, folder / "pair", *evaluated, "--method", "sparq", "--split-points", "block.1.mlp") == 0
    )
    return folder


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("cases", [THREES, FOURS], ids=["three-ranks", "four-ranks"])
def test_processes_are_one_device(cases):
    num_ranks = 3 if cases is THREES else 4
    found = launch(staged.run_staged, cases, world_size=num_ranks)
    for name, case in cases.items():
        wanted = json.loads(json.dumps(staged.on_one_device(case)[:3]))
        assert [rank[:3] for rank in found[name]] == [wanted] * num_ranks
        num_boundaries, pipelines = len(case.split_points), num_ranks // (len(case.split_points) + 1)
        signs = 1 if ("perturb", 2) in case.mesh else 2
        assert found[name][0][3]["num_per_step"] == num_boundaries * pipelines * signs


def test_two_stages_leave_the_files_of_one_rank(runs):
    alone, pair = runs / "alone", runs / "pair"
    assert numbers_of(pair) == numbers_of(alone)
    assert digests_of(pair) == digests_of(alone)
    first, second = read_header(alone)["finished"], read_header(pair)["finished"]
    for name in ("digest", "evaluation", "best_evaluation", "last_loss"):
        assert first[name] == second[name]
    for name in ("model.safetensors", "best/model.safetensors"):
        assert (alone / name).read_bytes() == (pair / name).read_bytes()
    for checkpoint in (alone / "checkpoints").iterdir():
        assert checkpoint.read_bytes() == (pair / "checkpoints" / checkpoint.name).read_bytes()
    assert Plan.load(pair / "plan.json").split.split_points == ("block.1.mlp",)


def test_spans_have_the_bytes_that_were_sent(runs):
    programs, timeline = (
        ProgramSet.load(runs / "pair" / "program.json"),
        Timeline.load(runs / "pair" / "timeline.json"),
    )
    for rank in range(2):
        spans = {s.instruction for s in timeline.spans if s.rank == rank and s.phase == "step"}
        assert spans == {i.id for i in programs.program_of(rank).step}
    sent = read_header(runs / "pair")["finished"]["messages"]
    spans = [span for span in timeline.spans if span.label == "send"]
    assert sent["num_per_step"] * STEPS == len(spans)
    assert sent["bytes_per_step"] * STEPS == sum(span.size_bytes for span in spans)
    assert not any(span.size_bytes for span in timeline.spans if span.label != "send")
    # Headers, and at most 9 tokens of 4 sequences, 52 wide inside the block and 32 wide beside it.
    assert all(0 < span.size_bytes <= 8 + 2 * (40 + 3 * 8) + 4 * 9 * (52 + 32) * 4 for span in spans)


def test_one_rank_replays_stages(runs, inputs, tmp_path):
    assert zosim("replay", runs / "pair", "--model", inputs[0], "-o", tmp_path) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (runs / "alone/model.safetensors").read_bytes()


def test_a_killed_stage_is_named_and_one_rank_goes_on(runs, inputs, tmp_path):
    out = tmp_path / "out"
    output = killed(inputs, out, 1, "--mesh", "stage=2", "--residency", "resident")
    assert "rank 1 (stage 2 of 2, after split point block.0.mlp) died (SIGKILL), last at step[" in output
    shorten(out, STEPS)
    assert train(inputs, out, "--resume", "--no-launch", "--mesh", "data=1", "--steps", STEPS) == 0
    assert numbers_of(out) == numbers_of(runs / "alone")
    assert (out / "model.safetensors").read_bytes() == (runs / "alone/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_of_one_goes_on_on_stages(runs, inputs, tmp_path):
    out = tmp_path / "out"
    assert train(inputs, out, "--no-launch", "--residency", "resident", steps=5) == 0
    assert train(inputs, out, "--resume", "--mesh", "stage=2", "--steps", STEPS) == 0
    assert Plan.load(out / "plan.json").split.split_points == ("block.0.mlp",)
    assert numbers_of(out) == numbers_of(runs / "alone")
    assert (out / "model.safetensors").read_bytes() == (runs / "alone/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_stage_that_dies_while_it_sends_is_named():
    output = r"rank 0 \(stage 1 of 2, before split point block\.1\.mlp\) died \(SIGKILL\), last at step\["
    with pytest.raises(RunError, match=output):
        launch(staged.die_while_sending, world_size=2)


def test_codecs_need_leave_and_something_to_encode(inputs, tmp_path, capsys):
    requested = ("--method", "sparq", "--split-points", "block.1.mlp", "--codec", "q4")
    assert train(inputs, tmp_path / "out", *requested) == 2
    assert "codecs q4 are lossy" in capsys.readouterr().err
    assert train(inputs, tmp_path / "out", "--codec", "q4", "--allow-lossy") == 2
    assert "the plan has no split point" in capsys.readouterr().err
    in_place = ("--mesh", "stage=1", "--split-points", "block.1.mlp")
    assert train(inputs, tmp_path / "out", *in_place, "--codec", "q4") == 2
    assert "is lossy" in capsys.readouterr().err
    assert train(inputs, tmp_path / "out", *in_place) == 2
    assert "no activation is sent, and no codec is used" in capsys.readouterr().err
    assert train(inputs, tmp_path / "out", "--mesh", "stage=2", "--split-points", "block.7.mlp") == 2
    assert "block 7 does not exist" in capsys.readouterr().err
    for name in ("block.x.mlp", "block.1.attn", "inside block 1"):
        assert train(inputs, tmp_path / "out", "--mesh", "stage=2", "--split-points", name) == 2
        assert f"{name!r} is not the name of a split point" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_a_codec_changed_is_gone_on_with_by_the_same_alone(runs, inputs, tmp_path, capsys):
    out = tmp_path / "out"
    encoded = ("--method", "sparq", "--split-points", "block.1.mlp", "--codec", "q8", "--allow-lossy")
    assert train(inputs, out, *encoded, steps=3) == 0
    assert numbers_of(out) != numbers_of(runs / "alone")[:3]
    assert (
        train(inputs, out, "--resume", "--mesh", "data=1", "--no-launch", "--codec", "q4", "--allow-lossy")
        == 2
    )
    assert "was run with codec='q8'" in capsys.readouterr().err
    assert train(inputs, out, "--resume", "--mesh", "data=1", "--no-launch", "--steps", 5) == 0
    assert Plan.load(out / "plan.json").split.split_points == ("block.1.mlp",)
    assert train(inputs, out, "--resume", "--mesh", "stage=2", "--steps", STEPS) == 0
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_one_process_does_what_stages_do_with_the_same_codec(inputs, tmp_path):
    encoded = (
        "--split-points",
        "block.1.mlp",
        "--codec",
        "q4:stochastic",
        "--residual-codec",
        "q8",
        "--allow-lossy",
    )
    evaluated = ("--eval-data", inputs[1], "--eval-examples", 2, "--residency", "resident")
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    assert train(inputs, alone, *encoded, *evaluated, "--mesh", "stage=1", "--no-launch") == 0
    assert train(inputs, pair, *encoded, *evaluated) == 0
    assert Plan.load(alone / "plan.json").mesh.world_size == 1
    assert Plan.load(pair / "plan.json").mesh.stage == 2
    assert numbers_of(alone) == numbers_of(pair)
    assert digests_of(alone) == digests_of(pair)
    assert (alone / "model.safetensors").read_bytes() == (pair / "model.safetensors").read_bytes()
    first, second = read_header(alone)["finished"], read_header(pair)["finished"]
    assert first["evaluation"] == second["evaluation"]
    assert first["messages"] == second["messages"]


@pytest.mark.slow
def test_a_stage_that_stands_still_is_named_by_all_that_wait_for_it(inputs, tmp_path):
    """The third stage waits for the second, which waits for the first; only the first is named."""
    split_points = ("--split-points", "block.0.mlp,block.1", "--residency", "resident")
    wanted = ("waited {} s for rank 0 (stage 1 of 3, before split point block.0.mlp), last at ",)
    output = stopped(inputs, tmp_path, 0, *split_points, wanted=wanted)
    assert "for rank 1" not in output
    assert "for rank 2" not in output


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [("--lora-rank", 2, "--lora-targets", "q_proj,fc2"), ("--prefix", 2)])
def test_what_is_tuned_beside_the_base_is_written_whole(inputs, tmp_path, tuned):
    evaluated = f"--eval-data {inputs[1]} --eval-examples 2 --eval-task generation --eval-max-new-tokens 2 --keep-best".split()
    alone, trio = tmp_path / "alone", tmp_path / "trio"
    assert train(inputs, alone, *tuned, *evaluated, "--no-launch", "--residency", "resident") == 0
    assert train(inputs, trio, *tuned, *evaluated, "--mesh", "stage=3") == 0
    assert read_header(alone)["finished"]["evaluation"] == read_header(trio)["finished"]["evaluation"]
    written = sorted(path.relative_to(alone) for path in alone.rglob("*.safetensors"))
    assert len(written) == 3
    for path in written:
        assert (alone / path).read_bytes() == (trio / path).read_bytes()
