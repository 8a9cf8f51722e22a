"""``zosim run`` from the outside: what it writes is what a literal loop computes."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from executors.models.lora import attach_lora
from executors.runs.adapters import recorded_adapters
from executors.runs.runlog import read_header
from tests.support import command
from tests.support.command import batch_of, loaded, rows_of, saved_lines, saved_model, zosim
from tests.support.reference_mezo import LiteralMezo, differing
from zosim.plans import Plan
from zosim.program import Program
from zosim.timeline import Timeline

STEPS, BATCH = 5, 3
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.fixture
def inputs(tmp_path):
    lines = saved_lines(tmp_path / "data.jsonl")
    return saved_model("opt", tmp_path), tmp_path / "data.jsonl", lines


train = partial(command.train, steps=STEPS, batch=BATCH, shuffle="off")


def literal(model, lines, rows, rate_at, *, decay, steps=STEPS, fp64=False):
    """Run the literal loop with the logged seeds, and compare what every step found."""
    loss = None
    if fp64:

        def loss(batch):
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits.double()
            labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[
                :, 1:
            ]  # as transformers shifts
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100
            )

    loop = LiteralMezo(model, epsilon=1e-3, weight_decay=decay, loss=loss)
    for step in range(steps):
        row = rows[step]
        assert row["learning_rate"] == rate_at(step)
        ((plus, minus, g),) = loop.step(batch_of(lines, step, BATCH), [row["seed"]], row["learning_rate"])
        assert (row["step"], row["perturbation"]) == (step, 0)
        assert (row["loss_plus"], row["loss_minus"], row["projected_grad"]) == (plus, minus, g)


@pytest.mark.crossed(quick=6, slow=2)
@pytest.mark.parametrize("residency", ["resident", "offloaded"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("opt", "float32"), ("llama", "bfloat16"), ("opt-untied", "float64")]
)
def test_a_run_equals_the_literal_loop(tmp_path, name, dtype, residency):
    lines = saved_lines(tmp_path / "data.jsonl")
    model = saved_model(name, tmp_path)
    out = tmp_path / "out"
    fp64 = dtype == "float64"
    options = ["--dtype", dtype, "--residency", residency, "--lr", 1e-3, "--weight-decay", 0.1]
    options += ["--lr-schedule", "linear", *(["--loss-dtype", "fp64"] if fp64 else [])]
    assert train(model, tmp_path / "data.jsonl", out, *options) == 0
    reference = loaded(model, DTYPES[dtype])
    literal(reference, lines, rows_of(out), lambda t: 1e-3 * (1 - t / STEPS), decay=0.1, fp64=fp64)
    tuned = loaded(out, DTYPES[dtype])
    assert differing(reference, tuned) == []
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {DTYPES[dtype]}


def test_a_run_leaves_files_that_the_other_commands_read(inputs, tmp_path):
    model, data, _ = inputs
    out = tmp_path / "out"
    assert train(model, data, out, "--residency", "offloaded", "--eval-data", data, "--eval-every", 2) == 0
    plan, program = Plan.load(out / "plan.json"), Program.load(out / "program.json")
    assert (plan.batch, plan.seq, plan.residency.blocks, plan.schedule.update) == (
        3,
        9,
        "offloaded",
        "delayed",
    )
    timeline = Timeline.load(out / "timeline.json")
    assert timeline.num_steps == STEPS
    assert {s.instruction for s in timeline.spans if s.phase == "step"} == {i.id for i in program.step}
    header = read_header(out)
    assert header["epsilon"] == 1e-3
    assert header["finished"]["num_steps"] == STEPS
    assert header["run"]["data"]["shuffle"] is False
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(row["num_steps"], "accuracy" in row) for row in metrics if row["split"] == "eval"]
    assert evaluated == [(0, True), (2, True), (4, True), (5, True)]
    assert [row["num_steps"] for row in metrics if row["split"] == "train"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("num_steps", "knows"), [(20, True), pytest.param(19, False, marks=pytest.mark.slow)]
)
def test_runs_of_some_length_look_at_the_pace_first(inputs, tmp_path, num_steps, knows):
    model, data, _ = inputs
    assert train(model, data, tmp_path / "out", "--steps", num_steps) == 0
    reference_s = Timeline.load(tmp_path / "out" / "timeline.json").reference_s
    # A fifth of a millisecond where it was made; minutes of load lie within a factor of 50.
    assert 4e-6 < reference_s < 1e-2 if knows else reference_s is None


def test_evaluations_and_digests_change_no_bit(inputs, tmp_path):
    model, data, _ = inputs
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    options = ["--residency", "offloaded", "--lr", 1e-3]
    assert train(model, data, plain, *options) == 0
    more = f"--eval-data {data} --eval-examples 2 --eval-every 1 --digest-every 1 --checkpoint-every 2 --keep-best".split()
    assert train(model, data, watched, *options, *more) == 0
    assert differing(loaded(plain), loaded(watched)) == []
    assert [row["loss_plus"] for row in rows_of(plain)] == [row["loss_plus"] for row in rows_of(watched)]
    assert sorted(path.name for path in (watched / "checkpoints").iterdir()) == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]
    assert (watched / "best" / "model.safetensors").is_file()
    assert len((watched / "digests.jsonl").read_text().splitlines()) == STEPS


def test_adapters_alone_are_tuned_and_come_out_merged_and_apart(inputs, tmp_path):
    from costmodel.models.configs import LoRA

    model, data, lines = inputs
    out = tmp_path / "out"
    options = ["--lora-rank", 2, "--lora-targets", "q_proj,v_proj", "--lr", 1e-1, "--residency", "offloaded",
               "--lora-alpha", 6, "--seed", 5]  # fmt: skip
    assert train(model, data, out, *options) == 0
    reference = loaded(model)
    attach_lora(reference, LoRA(rank=2, target_modules=("q_proj", "v_proj"), alpha=6, seed=5))
    literal(reference, lines, rows_of(out), lambda _: 1e-1, decay=0.0)
    adapters = load_file(out / "adapter" / "adapter_model.safetensors")
    trained = {f"base_model.model.{n}": p for n, p in reference.named_parameters() if ".lora_" in n}
    assert adapters.keys() == trained.keys()
    assert all(torch.equal(adapters[name], trained[name]) for name in trained)
    (batch,) = [batch_of(lines, 0, BATCH)]
    with torch.no_grad():
        assert torch.allclose(loaded(out)(**batch).logits, reference(**batch).logits, atol=1e-5)


def test_adapters_of_a_log_without_seed_and_alpha_begin_as_they_did():
    lora = recorded_adapters({"lora": {"rank": 2, "target_modules": ["q_proj"]}})
    assert (lora.seed, lora.scale) == (0, 2.0)
    assert recorded_adapters({"prefix": {"num_tokens": 3}}).seed == 0


def test_options_override_a_plan_and_nothing_else_does(inputs, tmp_path):
    model, data, _ = inputs
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(model, data, first, "--rng", "counter", "--distribution", "rademacher", "--staging-buffers", 2,
                 "--residency", "offloaded") == 0  # fmt: skip
    assert zosim("run", first / "plan.json", "--model", model, "--data", data, "--steps", 2, "--eps", 1e-2,
                 "--no-launch", "--no-tensorboard", "--out", second) == 0  # fmt: skip
    before, after = Plan.load(first / "plan.json"), Plan.load(second / "plan.json")
    assert after.estimator == before.estimator.model_copy(update={"epsilon": 1e-2})
    assert (after.residency, after.batch) == (before.residency, 3)


def test_a_program_given_by_hand_is_what_runs(inputs, tmp_path):
    model, data, _ = inputs
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(model, data, first, "--residency", "resident") == 0
    program = Program.load(first / "program.json")
    edited = tmp_path / "edited.json"
    edited.write_text((first / "program.json").read_text().replace(program.name, "edited by hand"))
    assert train(model, data, second, "--residency", "resident", "--program", edited) == 0
    assert Timeline.load(second / "timeline.json").program == "edited by hand"
    assert differing(loaded(first), loaded(second)) == []


def test_the_planner_chooses_where_nothing_was_said(inputs, tmp_path):
    model, data, _ = inputs
    assert train(model, data, tmp_path / "out") == 0
    assert Plan.load(tmp_path / "out" / "plan.json").placement.devices == ("cpu0",)
    assert train(model, data, tmp_path / "other", "--method", "zo2") == 0
    assert Plan.load(tmp_path / "other" / "plan.json").residency.blocks == "offloaded"


def test_a_shipped_size_runs_with_random_weights_and_replays(inputs, tmp_path, monkeypatch):
    _, data, _ = inputs
    tiny = {"model_type": "opt", "vocab_size": 96, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}  # fmt: skip
    monkeypatch.setattr("costmodel.models.configs._shipped", lambda: {"opt-125m": tiny})
    out = tmp_path / "out"
    assert train("opt-125m", data, out, "--random-weights", "--residency", "offloaded") == 0
    assert zosim("replay", out, "--model", "opt-125m", "-o", tmp_path / "again") == 0
    assert differing(loaded(out), loaded(tmp_path / "again")) == []


def test_objectives_need_no_gradient(inputs, tmp_path):
    model, data, lines = inputs
    for objective in ("accuracy", "f1", "test_executors_run:share_of_even_answers"):
        out = tmp_path / objective.replace(":", "-")
        assert (
            train(model, data, out, "--objective", objective, "--eps", 0.1, "--residency", "offloaded") == 0
        )
        assert all(0 <= row["loss_plus"] <= 1 for row in rows_of(out))
    row = rows_of(tmp_path / "accuracy")[0]
    weights = loaded(model)
    loop = LiteralMezo(weights, epsilon=0.1)
    loop._perturb(row["seed"], 0, 1)
    batch = batch_of(lines, 0, BATCH)
    with torch.no_grad():
        predicted = weights(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits.argmax(-1)
    is_label = batch["labels"][:, 1:] != -100
    wrong = (predicted[:, :-1] != batch["labels"][:, 1:])[is_label]
    assert row["loss_plus"] == pytest.approx(wrong.double().mean().item(), abs=1e-12)


def share_of_even_answers(logits, batch):
    return float((logits.argmax(-1) % 2 == 0).double().mean())


def test_text_goes_through_a_template_and_moves(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    from executors.models.corpus import byte_tokenizer

    torch.manual_seed(0)
    config = OPTConfig(vocab_size=258, hidden_size=32, ffn_dim=64, word_embed_proj_dim=32, num_hidden_layers=2,
                       num_attention_heads=2, max_position_embeddings=64)  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    texts = [{"text": word, "label": i % 2} for i, word in enumerate(["good", "bad", "fine", "poor"])]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    out = tmp_path / "out"
    code = zosim(
        "run", "--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--template", "{text} is {label}",
        "--label-words", "0=A,1=B", "--steps", 3, "--batch", 2, "--seq", 20, "--residency", "resident", "--no-launch",
        "--eval-data", tmp_path / "data.jsonl", "--out", out,
    )  # fmt: skip
    assert code == 0
    assert (out / "tokenizer.json").is_file()
    if importlib.util.find_spec("tensorboard"):  # optional: logs for it are written where it is installed
        assert list((out / "tensorboard").iterdir())
    final = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["num_examples"] == 4
    assert 0 <= final["accuracy"] <= 1


def test_an_objective_may_lie_in_the_working_directory(inputs, tmp_path, capsys, monkeypatch):
    model, data, _ = inputs
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    (tmp_path / "own_objective.py").write_text(
        "def mean_logit(logits, batch):\n    return logits.double().mean()\n"
    )
    options = ("--residency", "resident", "--objective")
    assert train(model, data, tmp_path / "out", *options, "own_objective:mean_logit") == 0
    assert str(tmp_path) not in sys.path
    assert train(model, data, tmp_path / "no", *options, "no_objective:mean_logit") == 2
    assert "working directory" in capsys.readouterr().err


def test_a_run_says_what_nothing_watches(inputs, tmp_path, capsys):
    model, data, _ = inputs
    assert train(model, data, tmp_path / "watched", "--residency", "resident") == 0
    assert "checksums" not in capsys.readouterr().err
    assert train(model, data, tmp_path / "not", "--residency", "resident", "--no-checksums") == 0
    output = " ".join(capsys.readouterr().err.split())
    assert "weights have no checksums: a bit that flips in memory is detected by nothing" in output
