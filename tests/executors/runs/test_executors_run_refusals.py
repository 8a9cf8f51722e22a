"""``zosim run`` that cannot be, or went wrong: refused in words, and nothing harmed."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from executors.runs.settings import EvaluationSettings
from tests.support import command
from tests.support.command import loaded, rows_of, zosim
from tests.support.reference_mezo import differing
from topology.errors import RunError

STEPS, BATCH = 5, 3


train = partial(command.train, steps=STEPS, batch=BATCH, shuffle="off")


def test_a_narrower_transfer_format_needs_leave(inputs, tmp_path, capsys):
    model, data = inputs
    options = ["--residency", "offloaded", "--transfer-dtype", "bfloat16"]
    assert train(model, data, tmp_path / "out", *options) == 2
    assert "--allow-lossy" in capsys.readouterr().err
    assert train(model, data, tmp_path / "out", *options, "--allow-lossy") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--out"], None),
        (["--lora-rank", 2], "--lora-targets"),
        (["--eval-every", 2], "--eval-data"),
        (["--warmup", 5], "warmup_steps=5"),
        (["--method", "mezo", "--residency", "offloaded"], "leave --residency or --method out"),
        (["--residency", "offloaded", "--traversal", "full"], "--traversal full needs all blocks"),
        (["--objective", "nonsense"], "module:function"),
        (["--objective", "accuracy", "--loss-dtype", "fp64"], "--loss-dtype"),
        (["--accumulate", 2], "--accumulate so that it divides"),
        (["--device", "cuda:7"], "7"),
    ],
)
def test_what_cannot_be_is_refused_in_words(inputs, tmp_path, capsys, options, says):
    model, data = inputs
    assert train(model, data, tmp_path / "out", *options) == 2
    if says is not None:
        assert says in capsys.readouterr().err


def test_a_plan_for_adapters_is_not_run_on_the_whole_model(inputs, tmp_path, capsys):
    model, data = inputs
    adapters = ["--lora-rank", 2, "--lora-targets", "q_proj"]
    plan = tmp_path / "plan.json"
    assert zosim("plan", "--model", model, "--seq", 16, *adapters, "-o", plan) == 0
    assert train(model, data, tmp_path / "out", plan) == 2
    assert "the plan is for" in (output := " ".join(capsys.readouterr().err.split()))
    assert "--lora-rank and --lora-targets" in output
    assert train(model, data, tmp_path / "out", plan, "--batch", BATCH, *adapters) == 0


def test_missing_files_are_named(inputs, tmp_path, capsys):
    model, data = inputs
    assert train(tmp_path / "nowhere", data, tmp_path / "out") == 2
    assert "nowhere" in capsys.readouterr().err
    assert train(model, tmp_path / "nothing.jsonl", tmp_path / "out") == 2
    assert "nothing.jsonl" in capsys.readouterr().err


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("missing", ["--data", "--eval-data"])
def test_ranks_are_not_started_for_files_that_are_missing(inputs, tmp_path, capsys, monkeypatch, missing):
    def started(*_given, **_options):
        message = "ranks were started"
        raise AssertionError(message)

    monkeypatch.setattr("executors.ranks.launch.launch", started)
    model, data = inputs
    options = ("--mesh", "data=3", "--launch", missing, tmp_path / "nothing.jsonl")
    assert train(model, data, tmp_path / "out", *options) == 2
    assert f"the data file {tmp_path / 'nothing.jsonl'} does not exist" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="ranks were started"):
        train(model, data, tmp_path / "out", "--mesh", "data=3", "--launch")


def test_a_directory_with_a_run_is_not_written_over(inputs, tmp_path, capsys):
    model, data = inputs
    assert train(model, data, tmp_path / "out", "--residency", "resident") == 0
    before = (tmp_path / "out" / "steps.jsonl").read_bytes()
    assert train(model, data, tmp_path / "out", "--residency", "resident") == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "out" / "steps.jsonl").read_bytes() == before


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize(
    ("rate", "says"), [(0.1, "training diverged: the loss is"), (1e36, "the projected gradient is")]
)
@pytest.mark.parametrize("residency", ["resident", "offloaded"])
def test_a_ruined_run_stops_at_its_last_good_state(inputs, tmp_path, capsys, residency, rate, says):
    model, data = inputs
    out = tmp_path / "out"
    assert train(model, data, out, "--residency", residency, "--lr", rate, steps=200) == 2
    output = capsys.readouterr().err
    assert says in output
    assert "lower --lr" in output
    assert "holds the weights after" in output
    assert len(rows_of(out)) < 200
    kept = int(output.split("the weights after ")[1].split()[0])
    assert zosim("replay", out, "--model", model, "-o", tmp_path / "replayed", "--steps", kept) == 0
    assert differing(loaded(out), loaded(tmp_path / "replayed")) == []
    assert all(torch.isfinite(p).all() and p.abs().max() < 100 for p in loaded(out).parameters())


def incomplete(model, folder):
    """Copy a model without one of its weights."""
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "fc1.weight" in name)
    save_file({n: w for n, w in weights.items() if n != name}, folder / "model.safetensors", {"format": "pt"})


def cut_off(model, folder):
    """Copy the beginning of a model's weights."""
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])


def other_shape(model, folder):
    """Copy a model's weights beside the configuration of a wider one."""
    shutil.copy(model / "model.safetensors", folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ffn_dim": config["ffn_dim"] + 8}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (incomplete, "fc1.weight is missing"),
        (cut_off, "damaged or incomplete"),
        (other_shape, "has another shape"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(inputs, tmp_path, capsys, damage, says):
    model, data = inputs
    folder = tmp_path / "damaged"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    damage(model, folder)
    assert train(folder, data, tmp_path / "out", "--residency", "resident") == 2
    assert says in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused_in_words(inputs, tmp_path, capsys):
    model, data = inputs
    (tmp_path / "file").write_text("")
    for out, says in (
        ("file", "a file has that name"),
        ("file/out", "a file stands where a directory is needed"),
    ):
        assert train(model, data, tmp_path / out, "--residency", "resident") == 2
        assert says in capsys.readouterr().err


def test_a_directory_without_a_run_cannot_be_gone_on_with(tmp_path, capsys):
    assert zosim("run", "--out", tmp_path / "none", "--resume") == 2
    assert "holds no run to resume" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("num_examples", 0), ("num_examples", -1), ("every", -1)])
def test_an_evaluation_of_nothing_is_refused(field, value):
    with pytest.raises(RunError, match=rf"--eval-(examples|every) {value} must be at least 1"):
        EvaluationSettings(path="eval.jsonl", **{field: value})
