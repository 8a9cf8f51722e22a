"""Runs that maximise a reward of generated text: what is asked at each point, what fails and loses nothing, what is planned for it."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from executors.datasets.generation import Generation
from executors.datasets.rewards import objective_of_text
from executors.models.model import TextObjective
from executors.runs.session import Session
from tests.support.command import rows_of, saved_lines, saved_model, zosim
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import PlanError
from zosim.lowering import lower
from zosim.program.contents import ParamGroupWeights
from zosim.program.operations import Forward
from zosim.program.validate import validate

NEW, EPSILON = 3, 0.3
FULL_PASS = {"schedule": {"traversal": "full"}, "forward": {"num_new_tokens": NEW}}
BEGINS = (4, 2, 6)


def fondness(_prompts, texts):
    """Reward unlike texts unlike, whatever they are."""
    return [sum((place + 1) * token for place, token in enumerate(text)) / 97 for text in texts]


def batch_of(number):
    """A batch whose rows are asked for different tokens."""
    batch = batches(number + 1)[number]
    for row, begin in enumerate(BEGINS):
        batch["labels"][row, :begin] = -100
    return batch


def cost_by_transformers(model):
    """Less the mean reward of what transformers itself generates."""

    def cost(batch):
        texts = []
        for row, begin in enumerate(BEGINS):
            prompt = batch["input_ids"][row : row + 1, :begin]
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=2, pad_token_id=0
            )  # fmt: skip
            text = made[0, begin:].tolist()
            texts.append(text[: text.index(2)] if 2 in text else text)
        return torch.tensor(-math.fsum(fondness(None, texts)) / len(texts), dtype=torch.float64)

    return cost


@pytest.mark.parametrize(
    ("name", "weights", "difference"),
    [("opt", "serial", "central"), ("llama", "copies", "central"), ("gpt2", "serial", "forward")],
)
def test_each_point_is_rewarded_for_what_the_model_there_says(name, weights, difference):
    model = model_of(name, torch.float64, num_hidden_layers=2)
    literal = copy.deepcopy(model)
    plan = plan_of(
        model,
        dtype="float64",
        **FULL_PASS,
        weights={"perturbation": weights},
        estimator={"epsilon": EPSILON, "difference": difference},
    )
    objective = objective_of_text(fondness, Generation(list, (2,), NEW, 32), None)
    loop = LiteralMezo(
        literal, epsilon=EPSILON, loss=cost_by_transformers(literal), central=difference == "central", weights=weights
    )  # fmt: skip
    with Session(plan, model, learning_rate=1e-3, seed=4, objective=objective) as session:
        for step in range(2):
            record = session.step(batch_of(step))
            ((plus, other, gradient),) = loop.step(batch_of(step), record.seeds, 1e-3)
            others = record.losses_minus or (record.loss_base,)
            assert (record.losses_plus, others) == ((plus,), (other,))
            assert record.projected_gradients == (gradient,)
            assert plus != other
        session.flush()
        assert differing(session.model, literal) == []


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("estimate", [{}, {"difference": "forward"}, {"num_perturbations": 2}])
def test_text_beside_qvalues_is_of_the_whole_model_at_its_point(estimate):
    """At the head every layer adds its perturbation: the loss of the whole model, called once more, is that of the blocks in turn."""
    losses, low_bits = [], {"low_bits": {"weights": "int8"}}
    for axes in (
        low_bits,
        low_bits | FULL_PASS | {"perturbations": {"kept": True}},
    ):
        model = model_of("opt", num_hidden_layers=2)
        plan = plan_of(model, **axes, estimator={"epsilon": EPSILON, **estimate})
        whole = TextObjective(lambda model, _logits, batch: model(**batch).loss.item())
        objective = whole if plan.forward.num_new_tokens else None
        with Session(plan, model, learning_rate=1e-4, seed=4, objective=objective) as session:
            record = session.step(batch_of(0))
            losses.append([*record.losses_plus, *(record.losses_minus or (record.loss_base,))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # float32, batches laid out otherwise
    assert max(losses[0]) > 1.05 * min(losses[0])


# -- what is planned ---------------------------------------------------------------------------------------------


def test_the_head_reads_all_weights_at_its_point_and_takes_a_forward_for_every_further_token():
    model = model_of("opt")
    works = {}
    for count in (1, 2, 5):
        plan = plan_of(model, schedule={"traversal": "full"}, forward={"num_new_tokens": count})
        program = lower(plan)
        validate(program)
        heads = [i for i in program.step if isinstance(i.op, Forward) and i.op.segment == "head"]
        assert [head.op.num_new_tokens for head in heads] == [count] * 2
        for head in heads:
            read = {
                a.what.param_group
                for a in head.reads
                if isinstance(a.what, ParamGroupWeights) and a.what.eval_point == head.op.eval_point
            }
            assert read == {group.name for group in plan.model.param_groups}
        works[count] = heads[0].work
    plain = lower(plan_of(model, schedule={"traversal": "full"}))
    once = sum(i.work.flops for i in plain.step if isinstance(i.op, Forward)) / 2
    assert works[1].flops == next(
        i.work.flops for i in plain.step if i.segment == "head" and isinstance(i.op, Forward)
    )
    per_token = works[2].flops - works[1].flops
    assert once < per_token < 1.2 * once  # a token longer than the batch
    assert 4 * per_token < works[5].flops - works[1].flops < 4 * 1.3 * per_token


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ({"schedule": {"traversal": "blockwise"}}, "schedule.traversal=blockwise"),
        ({"schedule": {"traversal": "full"}, "weights": {"perturbation": "adapters"}}, "adapters"),
        (
            {"schedule": {"traversal": "full"}, "forward": {"num_new_tokens": 2, "loss_chunk_tokens": 4}},
            "chunks",
        ),
        ({"residency": {"blocks": "offloaded"}}, "would cross the bus 4 times a step"),
        ({**FULL_PASS, "low_bits": {"weights": "int8"}}, "discards a perturbation"),
    ],
    ids=["blockwise", "adapters", "chunks", "offloaded", "forgotten"],
)
def test_what_generates_no_text_is_refused(axes, complaint):
    with pytest.raises(PlanError, match=complaint):
        plan_of(model_of("opt"), **{"forward": {"num_new_tokens": 2}, **axes})


# -- runs --------------------------------------------------------------------------------------------------------

REWARD = """
from pathlib import Path

def fond(prompts, texts):
    calls = Path("calls")
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    broken = Path("broken")
    if broken.exists() and count >= int(broken.read_text()):
        return [float("nan")] * len(texts)
    return [sum((place + 1) * token for place, token in enumerate(text)) / 97 for text in texts]

def other(prompts, texts):
    return [0.0] * len(texts)

asked_here = []

def tiring(prompts, texts):
    # No numbers from the third step on, in whichever process.
    asked_here.append(len(prompts))
    return [float("nan") if len(asked_here) > 4 else 1.0 * len(text) for text in texts]

def lengthy(prompts, texts):
    return [(len(prompt) + sum(text)) / 97 for prompt, text in zip(prompts, texts)]
"""


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a resumed run does not look in the working directory
    (tmp_path / "rewarding_of_runs.py").write_text(REWARD)
    saved_lines(tmp_path / "data.jsonl")
    return saved_model("opt", tmp_path, num_hidden_layers=1), tmp_path / "data.jsonl"


def run(inputs, out, steps, *more, reward="rewarding_of_runs:fond", launched=False):
    model, data = inputs
    command = [
        "run", "--model", model, "--data", data, "--steps", steps, "--batch", 3, "--no-tensorboard",
        "--lr", 1e-3, "--eps", EPSILON, "--out", out, "--reward", reward, "--max-new-tokens", NEW, *more,
    ]  # fmt: skip
    return zosim(*command, *(() if launched else ("--no-launch",)))


def test_a_reward_that_fails_loses_nothing_and_a_replay_needs_none(inputs, tmp_path, capsys):
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    assert run(inputs, whole, 4) == 0
    (tmp_path / "calls").unlink()
    (tmp_path / "broken").write_text("6")  # the second point of the third step
    assert run(inputs, interrupted, 4) != 0
    reported = " ".join(capsys.readouterr().err.split())
    assert "reward rewarding_of_runs:fond gave nan for text 0" in reported
    assert "Traceback" not in reported
    assert len(rows_of(interrupted)) == 2
    (tmp_path / "broken").unlink()
    assert run(inputs, interrupted, 4, "--resume", reward="rewarding_of_runs:other") != 0
    assert "was run with reward='rewarding_of_runs:fond'" in " ".join(capsys.readouterr().err.split())
    # Code is named again; what else was recorded is not asked for.
    named = ("--reward", "rewarding_of_runs:fond")
    assert zosim("run", "--out", interrupted, "--resume", "--no-launch", "--steps", 4, *named) == 0
    losses = [
        [(row["loss_plus"], row["loss_minus"]) for row in rows_of(folder)] for folder in (whole, interrupted)
    ]
    assert losses[0] == losses[1]
    assert any(plus != minus for plus, minus in losses[0])
    (tmp_path / "rewarding_of_runs.py").unlink()
    assert zosim("replay", whole, "--model", inputs[0], "-o", tmp_path / "again") == 0
    for folder in (interrupted, tmp_path / "again"):
        assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert json.loads((whole / "plan.json").read_text())["schedule"]["traversal"] == "full"


@pytest.mark.crossed(slow=2)
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("mesh", ["data=2", "perturb=2"])
@pytest.mark.parametrize("low_bits", [False, True], ids=["numbers", "quantized"])
def test_ranks_are_rewarded_for_their_own_texts(inputs, tmp_path, mesh, low_bits):
    """Parts of a batch by turns or side by side, gone on with by as many ranks or by one, and replayed: the same bits."""
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    more = ("--weight-format", "int8", "--keep-perturbations", "--allow-lossy") if low_bits else ()
    more = ("--batch", 4, "--residency", "resident", "--threads", 1, *more)
    parts = 2 if mesh == "data=2" else 1
    by = {"reward": "rewarding_of_runs:lengthy"}
    assert run(inputs, alone, 4, *more, "--accumulate", parts, **by) == 0
    assert run(inputs, ranks, 2, *more, "--mesh", mesh, launched=True, **by) == 0
    named = ("--resume", "--reward", by["reward"])
    one, two = (*named, "--no-launch", "--mesh", "data=1"), (*named, "--mesh", mesh)
    assert zosim("run", "--out", ranks, *one, "--steps", 3) == 0
    assert zosim("run", "--out", ranks, *two, "--steps", 4) == 0
    losses = [[(row["loss_plus"], row["loss_minus"]) for row in rows_of(folder)] for folder in (alone, ranks)]
    assert losses[0] == losses[1]
    assert any(plus != minus for plus, minus in losses[0])
    assert zosim("replay", ranks, "--model", inputs[0], "-o", tmp_path / "again") == 0
    for folder in (ranks, tmp_path / "again"):
        assert (folder / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.dist
def test_a_reward_that_fails_a_rank_ends_all_in_its_words(inputs, tmp_path, capfd):
    out = tmp_path / "out"
    more = ("--batch", 4, "--residency", "resident", "--threads", 1, "--mesh", "data=2", "--timeout", 60)
    assert run(inputs, out, 6, *more, reward="rewarding_of_runs:tiring", launched=True) != 0
    reported = " ".join(capfd.readouterr().err.split())
    assert "reward rewarding_of_runs:tiring gave nan for text" in reported
    assert "Traceback" not in reported
    assert 0 < len(rows_of(out)) < 6


def test_what_a_reward_does_not_go_with_is_refused(inputs, tmp_path, capsys):
    refused = {
        ("--objective", "accuracy"): "excludes --objective",
        ("--reward-timeout", "0"): "must be above 0",
        ("--residency", "offloaded"): "--residency resident",
        ("--weight-format", "int8", "--residency", "resident"): "--keep-perturbations",
        (
            "--mesh",
            "stage=2",
            "--split-points",
            "block.0.mlp",
            "--residency",
            "resident",
        ): "the first of which would wait",
    }
    for more, complaint in refused.items():
        assert run(inputs, tmp_path / "out", 1, *more) != 0
        assert complaint in " ".join(capsys.readouterr().err.split())
    assert run(inputs, tmp_path / "out", 1, reward="rewarding_of_runs:none") != 0
    assert "cannot import" in capsys.readouterr().err
    model, data = inputs
    assert zosim("run", "--model", model, "--data", data, "--steps", 1, "--out", tmp_path / "out", "--no-launch", "--max-new-tokens", 2) != 0  # fmt: skip
    assert "add --reward" in " ".join(capsys.readouterr().err.split())
