"""Damaged files of a run are refused by name, and left where the log is enough."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from executors.runs.runlog import read_header, write_header
from tests.support.command import rows_of, zosim
from tests.support.recorded import OFFLOADED, options, same, truncate
from zosim.lowering import lower_all
from zosim.plans import Plan
from zosim.program.program_set import ProgramSet


def edit_row(run, number, **changes):
    rows = rows_of(run)
    rows[number] |= changes
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plant_digit(run):
    edit_row(run, 4, projected_grad=rows_of(run)[4]["projected_grad"] * 1.5)


def plant_loss(run):
    edit_row(run, 4, loss_minus=rows_of(run)[4]["loss_minus"] + 1e-3)


def plant_seed(run):
    edit_row(run, 4, seed=rows_of(run)[4]["seed"] + 1)


def plant_rate(run):
    edit_row(run, 4, learning_rate=2e-3)


def plant_nan(run):
    edit_row(run, 4, loss_plus=float("nan"))


def plant_no_time(run):
    edit_row(run, 4, seconds=0.0)


def plant_garbage(run):
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join([*lines[:4], b"\x00" * 40 + b"\n", *lines[5:]]))


def plant_gap(run):
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join([*lines[:4], *lines[5:]]))


def plant_truncation(run):
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join(lines[:4]))


def plant_header(run):
    (run / "run.json").write_text((run / "run.json").read_text()[:200])


def plant_foreign_header(run):
    (run / "run.json").write_text('{"version": 2, "epsilon": 1}')


def plant_setting(run):
    text = (run / "run.json").read_text()
    wrong = text.replace('"weight_decay": 0.1', '"weight_decay": 0.7', 1)
    assert wrong != text
    (run / "run.json").write_text(wrong)


def plant_format(run):
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"dtype": "float32"', '"dtype": "float33"', 1))


def plant_last_digit(run):
    """Change a loss by less than its format tells apart, so that the projected gradient still follows from it."""
    edit_row(run, 4, loss_plus=rows_of(run)[4]["loss_plus"] + 1e-12)


def plant_digest(run):
    text = (run / "digests.jsonl").read_text()
    digest = json.loads(text.splitlines()[0])["digest"]
    (run / "digests.jsonl").write_text(text.replace(digest, "0" * len(digest)))


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (plant_digit, "line 5 is damaged: projected_grad"),
        (plant_loss, "line 5 is damaged: projected_grad"),
        (plant_seed, "line 5 is damaged or belongs to another run: seed"),
        (plant_rate, "line 5 is damaged or belongs to another run: learning_rate"),
        (plant_no_time, "line 5 is damaged: a step has seconds=0.0"),
        (plant_nan, "line 5 is damaged: it holds NaN"),
        (plant_garbage, "line 5 is damaged"),
        (plant_gap, "line 5 is of step 5, perturbation 0, where step 4"),
        (plant_truncation, "steps.jsonl is truncated"),
        (plant_header, "run.json is damaged"),
        (plant_foreign_header, "run.json is damaged: it lacks"),
        (plant_setting, "run.json is damaged: its digest does not match"),
        (plant_format, "run.json is damaged: its digest does not match"),
        (plant_last_digit, "line 5 is damaged: projected_grad"),
        (plant_digest, "after 4 steps the parameters have digest"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "resume"])
def test_corruption_is_refused_by_name(inputs, run, tmp_path, capsys, plant, says, command):
    plant(run)
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.unlink()
    if command == "replay":
        code = zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "o")
    else:
        code = zosim(*options(inputs, run, "--resume"))
    assert code == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("left", ["of another placement", "spoilt", "none"])
def test_programs_that_the_header_does_not_speak_of_are_made_again(inputs, run, whole, tmp_path, left):
    truncate(run, 5)
    program = run / "program.json"
    if left == "of another placement":
        other = Plan.load(run / "plan.json").model_dump(mode="json")
        other["schedule"]["update"] = "immediate" if other["schedule"]["update"] == "delayed" else "delayed"
        lower_all(Plan.model_validate(other)).save(program)
    elif left == "spoilt":
        program.write_text(program.read_text().replace('"scale": -2', '"scale": -4'))
    else:
        program.unlink()
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "o", "--steps", 4) == 0
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert same(run, whole)
    assert ProgramSet.load(program) == ProgramSet.load(whole / "program.json")


def test_spoilt_programs_that_were_edited_by_hand_are_refused(inputs, run, capsys):
    truncate(run, 5)
    header = read_header(run)
    header["run"]["edited_program"] = True
    write_header(run, header)
    (run / "program.json").write_text((run / "program.json").read_text() + " ")
    assert zosim("run", "--out", run, "--resume") == 2
    assert "used an edited program" in capsys.readouterr().err


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(
    ("key", "says"), [("num_steps", "line 2 is damaged"), ("loss", "is damaged in the eval")]
)
def test_damaged_metrics_are_refused_by_name_and_not_needed(inputs, run, whole, capsys, key, says):
    truncate(run, 5)
    rows = [{"num_steps": 1, "split": "train"}, {"num_steps": 1, "split": "eval", "loss": 1.0}]
    rows += [{"num_steps": 3, "split": "eval", "loss": 2.0}]
    del rows[1][key]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    harmed = shutil.copytree(run, run.parent / "harmed")
    assert zosim(*options(inputs, harmed, "--resume")) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
    (run / "metrics.jsonl").unlink()
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert same(run, whole)


def damage_bits(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def damage_length(path):
    path.write_bytes(path.read_bytes()[:-50])


def damage_origin(path):
    tensors = load_file(path)
    save_file(tensors, path, metadata={"num_steps": "10", "base_digest": "another"})


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_bits, "do not match its digest"),
        (damage_length, "is damaged"),
        (damage_origin, "other base weights"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(inputs, run, whole, capsys, damage, says):
    truncate(run, 11)
    damage(run / "checkpoints" / "step-00000010.safetensors")
    assert zosim(*options(inputs, run, "--resume")) == 0
    output = capsys.readouterr().err.replace("\n", " ")
    assert says in output
    assert "from the checkpoint of 5" in output
    assert same(run, whole)


def test_a_checkpoint_of_another_run_is_refused(inputs, run, whole, tmp_path, capsys):
    other = tmp_path / "other"
    assert zosim(*options(inputs, other, *OFFLOADED, "--seed", 9, "--checkpoint-every", 5)) == 0
    truncate(run, 10)
    shutil.copy(other / "checkpoints" / "step-00000010.safetensors", run / "checkpoints")
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert "with other steps before it" in capsys.readouterr().err
    assert same(run, whole)
