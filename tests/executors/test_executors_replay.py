"""A run is its base weights and its log: killed at any instant, resumed anywhere, rebuilt bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command import rows_of, saved_lines, saved_model, zosim
from reference_mezo import differing
from safetensors.torch import load_file, save_file
from test_executors_run import loaded

from executors.runs.history import read_history
from executors.runs.jsonlines import JsonLines, read_lines
from executors.runs.runlog import read_header, write_header
from executors.runs.watch import DivergenceWatch
from topology.errors import RunError
from zosim.lowering import lower_all
from zosim.plan import Plan
from zosim.program_set import ProgramSet

STEPS, BATCH = 12, 3
OFFLOADED = ("--residency", "offloaded")
RESIDENT = ("--residency", "resident")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    saved_lines(folder / "data.jsonl")
    return saved_model("opt", folder), folder / "data.jsonl"


def options(inputs, out, *more):
    model, data = inputs
    return [
        "run", "--model", model, "--data", data, "--steps", STEPS, "--batch", BATCH, "--no-launch",
        "--no-tensorboard", "--lr", 1e-3, "--weight-decay", 0.1, "--digest-every", 4, "--out", out, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert zosim(*options(inputs, out, *OFFLOADED, "--checkpoint-every", 5)) == 0
    return out


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it, to be harmed."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def cut(run, num_rows, *, torn=b""):
    """Leave the run as a process leaves it that died after `num_rows` steps."""
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join(lines[:num_rows]) + torn)
    kept = [line for line in read_lines(run / "digests.jsonl") if line.row["num_steps"] <= num_rows]
    (run / "digests.jsonl").write_text("".join(json.dumps(line.row) + "\n" for line in kept))
    for path in (run / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step-")) > num_rows:
            path.unlink()
    for name in ("model.safetensors", "timeline.json"):
        (run / name).unlink()
    header = read_header(run)
    header.pop("finished")
    write_header(run, header)


def same(run, whole):
    """Whether two runs logged the same numbers and ended with the same bits."""
    drop = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(d)] for d in (run, whole)]
    return drop[0] == drop[1] and differing(loaded(run), loaded(whole)) == []


# -- replay ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", [(), RESIDENT, OFFLOADED])
@pytest.mark.parametrize("start", [(), ("--checkpoints",)])
def test_replay_rebuilds_every_bit(inputs, whole, tmp_path, residency, start, capsys):
    assert zosim("replay", whole, "--model", inputs[0], "-o", tmp_path, *residency, *start, "--json") == 0
    assert differing(loaded(tmp_path), loaded(whole)) == []
    told = json.loads(capsys.readouterr().out)
    assert told["digests_checked"] == (1 if start else 3)
    assert told["digest"] == json.loads((whole / "run.json").read_text())["finished"]["digest"]


@pytest.mark.parametrize(
    "more",
    [
        ("--rng", "counter", "--direction", "rademacher", "--queries", 2),
        ("--difference", "forward", "--order", "execution"),
        ("--dtype", "bfloat16"),
        ("--transfer-dtype", "float16", "--allow-lossy", "--eval-every", 3),
        ("--lora-rank", 2, "--lora-targets", "q_proj"),
        ("--weights", "copies", "--draw-ahead", "--queries", 2),
    ],
    ids=["counter", "forward", "bfloat16", "lossy", "lora", "copies"],
)
def test_replay_knows_every_kind_of_run(inputs, tmp_path, more):
    evaluated = ("--eval-data", inputs[1]) if "--eval-every" in more else ()
    assert zosim(*options(inputs, tmp_path / "run", *OFFLOADED, *more, *evaluated)) == 0
    assert zosim("replay", tmp_path / "run", "--model", inputs[0], "-o", tmp_path / "again") == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "again"))
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_drift_of_the_restore_is_part_of_a_replay(inputs, tmp_path):
    """With a rate of 0 and no decay, what moves is what +1, -2, +1 leaves behind: a replay has it, too."""
    out = tmp_path / "out"
    assert zosim(*options(inputs, out, *OFFLOADED, "--lr", 0, "--weight-decay", 0)) == 0
    assert len(differing(loaded(out), loaded(inputs[0]))) > 10
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert differing(loaded(out), loaded(tmp_path / "again")) == []


def test_copies_leave_no_drift_and_are_replayed_as_such(inputs, tmp_path, capsys):
    out = tmp_path / "out"
    still = ("--lr", 0, "--weight-decay", 0, "--weights", "copies")
    assert zosim(*options(inputs, out, *OFFLOADED, *still)) == 0
    assert differing(loaded(out), loaded(inputs[0])) == []
    header = json.loads((out / "run.json").read_text())
    assert (header["plan"]["runtime"]["weights"], header["run"]["identity"]["weights"]) == (
        "copies",
        "copies",
    )
    assert zosim("replay", out, "--model", inputs[0], "-o", tmp_path / "again", *RESIDENT) == 0
    assert zosim(*options(inputs, out, "--resume", *still[:4], "--weights", "serial")) == 2
    assert "weights='copies'" in capsys.readouterr().err


def test_replay_refuses_another_base(inputs, whole, tmp_path, capsys):
    other = saved_model("opt", tmp_path / "other", seed=5)
    assert zosim("replay", whole, "--model", other, "-o", tmp_path / "o") == 2
    assert "does not hold the base weights" in capsys.readouterr().err
    assert zosim("replay", whole, "--model", whole, "-o", tmp_path / "o") == 2
    assert "tuned weights are not the base" in capsys.readouterr().err
    llama = saved_model("llama", tmp_path)
    assert zosim("replay", whole, "--model", llama, "-o", tmp_path / "o") == 2
    assert "differ in" in capsys.readouterr().err


def test_another_machine_is_told(inputs, run, tmp_path, capsys):
    write_header(run, read_header(run) | {"instruction_set": "AVX9", "torch": "1.0"})
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "o") == 0
    said = capsys.readouterr().err
    assert "instruction_set was AVX9" in said
    assert "torch was 1.0" in said


# -- resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "torn", "more"),
    [
        (0, b"", OFFLOADED),
        (0, b'{"step": 0, "que', RESIDENT),
        (1, b"", RESIDENT),
        (5, b'{"step": 5, "query": 0, "seed": 7', OFFLOADED),
        (7, b"", ()),
        (11, b"{", RESIDENT),
        (12, b"", ()),
    ],
)
def test_resumed_anywhere_it_ends_as_if_nothing_had_happened(inputs, whole, run, num_rows, torn, more):
    cut(run, num_rows, torn=torn)
    assert zosim(*options(inputs, run, *more, "--resume")) == 0
    assert same(run, whole)
    assert len(read_lines(run / "digests.jsonl")) == 3
    trained = [
        line.row["num_steps"] for line in read_lines(run / "metrics.jsonl") if line.row["split"] == "train"
    ]
    assert trained == list(range(1, STEPS + 1))


@pytest.mark.parametrize("num_rows", [3, 5, 8])
def test_a_run_that_rounds_in_transfer_is_resumed_without_rounding_once_more(inputs, tmp_path, num_rows):
    lossy = (*OFFLOADED, "--update", "delayed", "--transfer-dtype", "bfloat16", "--allow-lossy")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert zosim(*options(inputs, whole, *lossy, "--checkpoint-every", 4)) == 0
    shutil.copytree(whole, run)
    cut(run, num_rows)
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(run, whole)
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert differing(loaded(tmp_path / "again"), loaded(whole)) == []


def test_a_resumed_run_needs_no_option_again(run, whole):
    cut(run, 6)
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(run, whole)


def test_a_finished_run_can_be_prolonged_under_a_constant_rate(inputs, run, tmp_path):
    assert (
        zosim("run", "--out", run, "--resume", "--steps", STEPS + 3, "--no-launch", "--no-tensorboard") == 0
    )
    longer = tmp_path / "longer"
    assert zosim(*options(inputs, longer, *RESIDENT, "--steps", STEPS + 3)) == 0
    assert same(run, longer)


def test_leftovers_of_a_dead_writer_are_removed(inputs, run, whole):
    cut(run, 5)
    (run / "prefix" / "initial").mkdir(parents=True)
    for folder in (run, run / "checkpoints", run / "prefix" / "initial"):
        (folder / ".model.safetensors.99999.partial").write_bytes(b"half")
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert not list(run.rglob("*.partial"))
    assert same(run, whole)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--lr", 2e-3), "lr=0.001"),
        (("--weight-decay", 0.2), "weight_decay=0.1"),
        (("--seed", 1), "seed=0"),
        (("--eps", 1e-2), "epsilon=0.001"),
        (("--dtype", "bfloat16"), "dtype='float32'"),
        (("--lr-schedule", "linear"), "lr_schedule='constant'"),
        (("--shuffle", "off"), "shuffle=True"),
        (("--attention", "eager"), "attention='sdpa'"),
        (("--rng", "counter"), "rng='mezo'"),
    ],
)
def test_resuming_with_other_mathematics_is_refused(inputs, run, capsys, more, named):
    cut(run, 6)
    before = (run / "steps.jsonl").read_bytes()
    assert zosim(*options(inputs, run, "--resume", *more)) == 2
    assert named in capsys.readouterr().err.replace("\n", " ")
    assert (run / "steps.jsonl").read_bytes() == before


def test_resuming_on_other_data_is_refused(inputs, run, tmp_path, capsys):
    cut(run, 6)
    saved_lines(tmp_path / "other.jsonl", seed=9)
    assert zosim(*options(inputs, run, "--resume", "--data", tmp_path / "other.jsonl")) == 2
    assert "data_sha256" in capsys.readouterr().err


# -- planted corruption ----------------------------------------------------------------------------------------


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
    (run / "run.json").write_text(text.replace('"compute": "float32"', '"compute": "float33"', 1))


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
        (plant_seed, "line 5 is damaged or another run's: seed"),
        (plant_rate, "line 5 is damaged or another run's: learning_rate"),
        (plant_nan, "line 5 is damaged: a number is missing or not finite"),
        (plant_garbage, "line 5 is damaged"),
        (plant_gap, "line 5 is of step 5, query 0, where step 4"),
        (plant_truncation, "steps.jsonl is truncated"),
        (plant_header, "run.json is damaged"),
        (plant_foreign_header, "run.json is damaged: it lacks"),
        (plant_setting, "run.json is damaged: it does not have the digest"),
        (plant_format, "run.json is damaged: it does not have the digest"),
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


@pytest.mark.parametrize("left", ["of another placement", "spoilt", "none"])
def test_programs_that_the_header_does_not_speak_of_are_made_again(inputs, run, whole, tmp_path, left):
    cut(run, 5)
    program = run / "program.json"
    if left == "of another placement":
        other = Plan.load(run / "plan.json").model_dump(mode="json")
        other["runtime"]["update"] = "immediate" if other["runtime"]["update"] == "delayed" else "delayed"
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
    cut(run, 5)
    header = read_header(run)
    header["run"]["edited_program"] = True
    write_header(run, header)
    (run / "program.json").write_text((run / "program.json").read_text() + " ")
    assert zosim("run", "--out", run, "--resume") == 2
    assert "edited by hand" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "says"), [("num_steps", "line 2 is damaged"), ("loss", "is damaged in the eval")]
)
def test_damaged_metrics_are_refused_by_name_and_not_needed(inputs, run, whole, capsys, key, says):
    cut(run, 5)
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


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_bits, "do not have the digest"),
        (damage_length, "is damaged"),
        (damage_origin, "other base weights"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(inputs, run, whole, capsys, damage, says):
    cut(run, 11)
    damage(run / "checkpoints" / "step-00000010.safetensors")
    assert zosim(*options(inputs, run, "--resume")) == 0
    said = capsys.readouterr().err.replace("\n", " ")
    assert says in said
    assert "from the checkpoint of 5" in said
    assert same(run, whole)


def test_a_checkpoint_of_another_run_is_refused(inputs, run, whole, tmp_path, capsys):
    other = tmp_path / "other"
    assert zosim(*options(inputs, other, *OFFLOADED, "--seed", 9, "--checkpoint-every", 5)) == 0
    cut(run, 10)
    shutil.copy(other / "checkpoints" / "step-00000010.safetensors", run / "checkpoints")
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert "other steps led to it" in capsys.readouterr().err
    assert same(run, whole)


# -- real deaths -----------------------------------------------------------------------------------------------


def spawn(arguments):
    command = [sys.executable, "-m", "zosim", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_at(inputs, out, size, *more):
    """Start a run, and kill it once its log has `size` bytes."""
    process = spawn(options(inputs, out, *more))
    log, give_up = out / "steps.jsonl", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < give_up:
        if log.exists() and log.stat().st_size >= size:
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.dist
@pytest.mark.parametrize(("first", "second"), [(OFFLOADED, RESIDENT), (RESIDENT, OFFLOADED)])
def test_killed_at_a_random_instant_and_resumed_elsewhere(inputs, whole, tmp_path, first, second):
    chosen = random.Random(os.urandom(8))
    size = chosen.randrange((whole / "steps.jsonl").stat().st_size)
    out = tmp_path / "out"
    kill_at(inputs, out, size, *first, "--checkpoint-every", 3)
    assert not (out / "model.safetensors").exists() or size > 0
    assert zosim(*options(inputs, out, *second, "--resume")) == 0, f"killed at {size} bytes"
    assert same(out, whole), f"killed at {size} bytes"


@pytest.mark.dist
def test_a_killed_launcher_takes_its_rank_along(inputs, whole, tmp_path):
    out = tmp_path / "out"
    arguments = [a for a in options(inputs, out, *OFFLOADED, "--steps", 5000) if a != "--no-launch"]
    process = spawn(arguments)
    give_up = time.monotonic() + 60
    while not (out / "steps.jsonl").exists() or not (out / "steps.jsonl").stat().st_size:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    process.kill()
    process.communicate()
    time.sleep(0.3)
    size = (out / "steps.jsonl").stat().st_size
    time.sleep(0.3)
    assert (out / "steps.jsonl").stat().st_size == size, "an orphan goes on writing"
    history = read_history(out)
    assert zosim(*options(inputs, out, *RESIDENT, "--resume", "--steps", history.num_steps + 1)) == 0


# -- parts -----------------------------------------------------------------------------------------------------


def test_two_writers_of_one_log_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("executors.runs.jsonlines.LOCK_WAIT_S", 0.1)
    with JsonLines(tmp_path / "log"), pytest.raises(RunError, match="another process"):
        JsonLines(tmp_path / "log")


@pytest.mark.parametrize("length", range(24))
def test_lines_count_once_their_newline_is_there(tmp_path, length):
    whole = b'{"a": 1}\n{"b": 22}\n'
    (tmp_path / "log").write_bytes(whole[:length])
    lines = read_lines(tmp_path / "log")
    assert [line.row for line in lines] == [{"a": 1}, {"b": 22}][: whole[:length].count(b"\n")]
    with JsonLines(tmp_path / "log", keep_bytes=lines[-1].end if lines else 0) as file:
        file.append([{"c": 3}])
    assert [line.row for line in read_lines(tmp_path / "log")] == [*(line.row for line in lines), {"c": 3}]


def test_a_watch_heeds_levels_and_not_single_batches():
    watch = DivergenceWatch()
    losses = [3.0] * 15 + [50.0] + [2.9] * 15
    assert not any(watch.diverges(i + 1, loss) for i, loss in enumerate(losses))
    good = watch.best_step
    told = [watch.diverges(len(losses) + i + 1, 40.0) for i in range(7)]
    assert told.index(True) == 4
    assert (watch.best_step, watch.last_good(99)) == (good, good)
    early = DivergenceWatch()
    assert [early.diverges(i + 1, loss) for i, loss in enumerate([3.0, 40, 40, 40, 40])] == [False] * 4 + [
        True
    ]
    assert early.last_good(5) == 0
    # Losses that are no numbers were found at the weights after the last step: it is what ruined them.
    steady = DivergenceWatch()
    assert not any(steady.diverges(i + 1, 3.0) for i in range(4))
    assert (steady.last_good(4), DivergenceWatch().last_good(0)) == (3, 0)
