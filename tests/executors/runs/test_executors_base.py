"""The base of a run is more than its weights: what they are run with, and how lines become tokens."""

from __future__ import annotations

import json

import pytest

from executors.models.corpus import byte_tokenizer
from executors.runs.base import refuse_other_base
from executors.runs.runlog import read_header, write_header
from tests.support.command import rows_of, saved_lines, saved_model, train, zosim
from topology.errors import RunError


def begun(model, data, out, *more):
    assert train(model, data, out, *more, steps=2, batch=2, lr=1e-3, residency="resident") == 0
    return out


def resume(out):
    return zosim("run", "--out", out, "--resume", "--steps", 3, "--no-launch", "--no-tensorboard")


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def run(tmp_path):
    saved_lines(tmp_path / "data.jsonl")
    model = saved_model("opt", tmp_path)
    more = ("--distribution", "lozo", "--tune", "linears")  # of which `zosim adapter` makes one
    return model, begun(model, tmp_path / "data.jsonl", tmp_path / "out", *more)


def reported(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("field", "was", "is_now"),
    [
        ("activation_function", "'relu'", "gelu"),
        ("pad_token_id", "0", 1),
    ],
)
def test_another_configuration_of_the_same_weights_is_refused_by_name(
    run, tmp_path, capsys, field, was, is_now
):
    model, out = run
    change(model / "config.json", **{field: is_now})
    for command in (
        ("run", "--out", out, "--resume", "--steps", 3, "--no-launch", "--no-tensorboard"),
        ("replay", out, "--model", model, "-o", tmp_path / "again"),
        ("adapter", out, "--model", model, "-o", tmp_path / "adapter"),
    ):
        assert zosim(*command) == 2
        assert f"config {field} was {was}, and is {is_now!r}" in reported(capsys)
    assert len(rows_of(out)) == 2


def test_what_decides_nothing_may_change(run, capsys):
    model, out = run
    change(
        model / "config.json", transformers_version="4.0", architectures=["OPTForCausalLM"], use_cache=False
    )
    assert resume(out) == 0
    assert "not compared" not in reported(capsys)


def test_a_record_of_an_earlier_version_is_gone_on_with_and_completed(run, tmp_path, capsys):
    model, out = run
    header = read_header(out)
    header.pop("base")
    write_header(out, header)
    assert zosim("replay", out, "--model", model, "-o", tmp_path / "again") == 0
    assert "without the configuration and the tokenizer of the base: they are not compared" in reported(
        capsys
    )
    assert resume(out) == 0
    assert "they are not compared" in reported(capsys)
    change(model / "config.json", activation_function="gelu")
    assert zosim("replay", out, "--model", model, "-o", tmp_path / "again") == 2
    assert "activation_function" in reported(capsys)


def test_another_tokenizer_is_refused_where_lines_are_text(tmp_path, capsys):
    model = saved_model("opt", tmp_path, vocab_size=258)
    byte_tokenizer().save_pretrained(model)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "some"}) + "\n")
    saved_lines(tmp_path / "tokens.jsonl")
    text = begun(model, tmp_path / "text.jsonl", tmp_path / "text", "--template", "{text}")
    tokens = begun(model, tmp_path / "tokens.jsonl", tmp_path / "tokens")
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    assert resume(text) == 2
    assert "is not the base of" in (output := reported(capsys))
    assert "tokenizer tokenizer.json was" in output
    assert resume(tokens) == 0


def test_another_version_of_the_library_may_have_fields_of_its_own():
    recorded = {"base": {"config": {"a": 1, "gone": 2}, "transformers": "5.0"}}
    refuse_other_base(recorded, {"config": {"a": 1, "new": 3}, "transformers": "5.1"}, "model", "run")
    with pytest.raises(RunError, match="config a was 1, and is 2"):
        refuse_other_base(recorded, {"config": {"a": 2}, "transformers": "5.1"}, "model", "run")
    with pytest.raises(RunError, match="config gone was 2, and is not there"):
        refuse_other_base(recorded, {"config": {"a": 1}, "transformers": "5.0"}, "model", "run")


def test_a_record_of_a_base_that_is_none_is_refused_with_its_run():
    with pytest.raises(RunError, match=r"runs/first is damaged: it records 4\.5 as its base"):
        refuse_other_base({"base": 4.5}, {"config": {}}, "model", "runs/first")
