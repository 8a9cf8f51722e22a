"""A run is its base weights and its log: rebuilt from them bit for bit, under any residency."""

from __future__ import annotations

import json

import pytest

from executors.runs.runlog import read_header, write_header
from tests.support.command import loaded, saved_model, zosim
from tests.support.recorded import OFFLOADED, RESIDENT, options
from tests.support.reference_mezo import differing


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("residency", [(), RESIDENT, OFFLOADED])
@pytest.mark.parametrize("start", [(), ("--checkpoints",)])
def test_replay_rebuilds_every_bit(inputs, whole, tmp_path, residency, start, capsys):
    assert zosim("replay", whole, "--model", inputs[0], "-o", tmp_path, *residency, *start, "--json") == 0
    assert differing(loaded(tmp_path), loaded(whole)) == []
    reported = json.loads(capsys.readouterr().out)
    assert reported["digests_checked"] == (1 if start else 3)
    assert reported["digest"] == json.loads((whole / "run.json").read_text())["finished"]["digest"]


def test_drift_of_the_restore_is_part_of_a_replay(inputs, tmp_path):
    """With a rate of 0 and no decay, what moves is what +1, -2, +1 leaves behind: a replay has it, too."""
    out = tmp_path / "out"
    assert zosim(*options(inputs, out, *OFFLOADED, "--lr", 0, "--weight-decay", 0)) == 0
    assert len(differing(loaded(out), loaded(inputs[0]))) > 10
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert differing(loaded(out), loaded(tmp_path / "again")) == []


@pytest.mark.slow
def test_copies_leave_no_drift_and_are_replayed_as_such(inputs, tmp_path, capsys):
    out = tmp_path / "out"
    still = ("--lr", 0, "--weight-decay", 0, "--weights", "copies")
    assert zosim(*options(inputs, out, *OFFLOADED, *still)) == 0
    assert differing(loaded(out), loaded(inputs[0])) == []
    header = json.loads((out / "run.json").read_text())
    assert header["plan"]["weights"]["perturbation"] == "copies"
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again", *RESIDENT) == 0
    assert zosim(*options(inputs, out, "--resume", *still[:4], "--weights", "serial")) == 2
    assert "weights='copies'" in capsys.readouterr().err


def test_replay_refuses_another_base(inputs, whole, tmp_path, capsys):
    other = saved_model("opt", tmp_path / "other", seed=5)
    assert zosim("replay", whole, "--model", other, "-o", tmp_path / "o") == 2
    assert "is not the base of" in capsys.readouterr().err
    assert zosim("replay", whole, "--model", whole, "-o", tmp_path / "o") == 2
    assert "not the tuned ones" in capsys.readouterr().err
    llama = saved_model("llama", tmp_path)
    assert zosim("replay", whole, "--model", llama, "-o", tmp_path / "o") == 2
    assert " differs" in capsys.readouterr().err


def test_another_machine_is_told(inputs, run, tmp_path, capsys):
    write_header(run, read_header(run) | {"instruction_set": "AVX9", "torch": "1.0"})
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "o") == 0
    output = capsys.readouterr().err
    assert "instruction_set was AVX9" in output
    assert "torch was 1.0" in output
