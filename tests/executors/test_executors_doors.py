"""Run directories that a stranger hands over: no code of theirs runs, and nothing outside them is written."""

from __future__ import annotations

import json
import os
import sys

import pytest

from executors.ranks.launch import launch
from executors.runs.inputs import tokenizer_for
from executors.runs.runlog import read_header, write_header
from tests.support.command import rows_of, saved_lines, saved_model, zosim

EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\ndef loss(logits, batch):\n    return logits.double().mean()\n"


@pytest.fixture
def inputs(tmp_path):
    saved_lines(tmp_path / "data.jsonl")
    return saved_model("opt", tmp_path, num_hidden_layers=1), tmp_path / "data.jsonl"


def begun(inputs, out, *more, steps=2):
    model, data = inputs
    words = ["run", "--model", model, "--data", data, "--steps", steps, "--batch", 3, "--lr", 1e-3, "--no-tensorboard",
             "--no-launch", "--residency", "resident", "--out", out, *more]  # fmt: skip
    assert zosim(*words) == 0
    return out


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A directory with modules that tell when they are run, in which the user stands."""
    directory, marker = tmp_path / "strangers", tmp_path / "ran"
    directory.mkdir()
    for name in ("evil_of_a_stranger", "multiprocessing", "resource", "tokenizers"):
        (directory / f"{name}.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(directory))])
    monkeypatch.chdir(directory)
    yield directory, marker
    assert not marker.exists(), "code of the stranger's ran"
    sys.modules.pop("evil_of_a_stranger", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "evil_of_a_stranger:loss"),
        ("reward", "evil_of_a_stranger:loss"),
        ("reward", "http://127.0.0.1:1/"),
    ],
)
def test_what_a_record_names_is_not_run(inputs, strangers, capsys, name, value):
    out, _ = strangers
    begun(inputs, out)
    header = read_header(out)
    header["run"][name] = header["run"]["identity"][name] = value
    write_header(out, header)
    capsys.readouterr()
    assert zosim("run", "--out", ".", "--resume", "--steps", 3, "--no-launch", "--no-tensorboard") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{name}={value!r}" in told
    assert f"--{name} {value}" in told
    assert len(rows_of(out)) == 2


def test_named_again_it_is_imported_but_not_from_where_the_user_stands(
    inputs, strangers, tmp_path, capsys, monkeypatch
):
    out, _ = strangers
    begun(inputs, out)
    header = read_header(out)
    header["run"]["objective"] = header["run"]["identity"]["objective"] = "evil_of_a_stranger:loss"
    write_header(out, header)
    again = ("run", "--out", ".", "--resume", "--steps", 3, "--no-launch", "--no-tensorboard")
    assert zosim(*again, "--objective", "evil_of_a_stranger:loss") == 2
    assert "not in the working directory" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "evil_of_a_stranger.py").write_text(
        "def loss(logits, batch):\n    return logits.mean()\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own")])
    assert zosim(*again, "--objective", "evil_of_a_stranger:loss") == 0
    assert len(rows_of(out)) == 3


def test_other_commands_import_nothing_that_a_record_names(inputs, strangers, tmp_path):
    out, _ = strangers
    begun(inputs, out)
    header = read_header(out)
    for section in (header["run"], header["run"]["identity"]):
        section |= {"objective": "evil_of_a_stranger:loss", "reward": "evil_of_a_stranger:loss"}
    write_header(out, header)
    assert zosim("replay", ".", "--model", inputs[0], "-o", tmp_path / "again") == 0
    zosim("compare", ".")
    zosim("evidence", ".", "-o", tmp_path / "evidence.json")


@pytest.mark.dist
@pytest.mark.usefixtures("fresh_ranks", "strangers")
def test_ranks_begin_without_the_working_directory():
    assert launch(os.getpid, world_size=2) != os.getpid()


def test_a_tokenizer_is_tried_without_the_working_directory(strangers, tmp_path):
    from executors.models.corpus import byte_tokenizer

    model = saved_model("opt", tmp_path)
    byte_tokenizer().save_pretrained(model)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    assert tokenizer_for(str(model), str(tmp_path / "lines.jsonl")) is not None
