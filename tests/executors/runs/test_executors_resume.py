"""A run goes on where it was interrupted, on any placement, as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil

import psutil
import pytest

from executors.runs.history import read_history
from executors.runs.jsonlines import JsonLines, read_lines
from executors.runs.records import DivergenceWatch
from executors.runs.runlog import RunLog, read_header, write_header
from tests.support.command import loaded, saved_lines, zosim
from tests.support.forked import Command
from tests.support.recorded import OFFLOADED, RESIDENT, STEPS, options, same, truncate
from tests.support.reference_mezo import differing
from tests.support.waiting import wait_until
from topology.errors import RunError


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize(
    ("num_rows", "torn", "more"),
    [
        (0, b"", OFFLOADED),
        (0, b'{"step": 0, "que', RESIDENT),
        (1, b"", RESIDENT),
        (5, b'{"step": 5, "perturbation": 0, "seed": 7', OFFLOADED),
        (7, b"", ()),
        (11, b"{", RESIDENT),
        (12, b"", ()),
    ],
)
def test_resumed_anywhere_it_ends_as_if_nothing_had_happened(inputs, whole, run, num_rows, torn, more):
    truncate(run, num_rows, torn=torn)
    assert zosim(*options(inputs, run, *more, "--resume")) == 0
    assert same(run, whole)
    assert len(read_lines(run / "digests.jsonl")) == 3
    trained = [
        line.row["num_steps"] for line in read_lines(run / "metrics.jsonl") if line.row["split"] == "train"
    ]
    assert trained == list(range(1, STEPS + 1))


def test_a_run_whose_header_has_its_settings_twice_goes_on(inputs, whole, run, capsys):
    """As earlier versions wrote it, in names that a field had then."""
    truncate(run, 7)
    header = read_header(run)
    header["run"]["identity"] = {"data_sha256": header["run"].pop("data_sha256"), "num_queries": 1}
    write_header(run, header)
    assert zosim(*options(inputs, run, "--resume", "--eps", 2e-3)) == 2
    assert "epsilon=0.001, but this command says 0.002" in capsys.readouterr().err
    assert zosim(*options(inputs, run, "--resume")) == 0
    assert same(run, whole)


@pytest.mark.crossed(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [3, 5, 8])
def test_a_run_that_rounds_in_transfer_is_resumed_without_rounding_once_more(inputs, tmp_path, num_rows):
    lossy = (*OFFLOADED, "--update", "delayed", "--transfer-dtype", "bfloat16", "--allow-lossy")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert zosim(*options(inputs, whole, *lossy, "--checkpoint-every", 4)) == 0
    shutil.copytree(whole, run)
    truncate(run, num_rows)
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(run, whole)
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert differing(loaded(tmp_path / "again"), loaded(whole)) == []


def test_a_resumed_run_needs_no_option_again(run, whole):
    truncate(run, 6)
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(run, whole)


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged_under_a_constant_rate(inputs, run, tmp_path):
    assert (
        zosim("run", "--out", run, "--resume", "--steps", STEPS + 3, "--no-launch", "--no-tensorboard") == 0
    )
    longer = tmp_path / "longer"
    assert zosim(*options(inputs, longer, *RESIDENT, "--steps", STEPS + 3)) == 0
    assert same(run, longer)


def test_stale_files_of_a_dead_writer_are_removed(inputs, run, whole):
    truncate(run, 5)
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
    truncate(run, 6)
    before = (run / "steps.jsonl").read_bytes()
    assert zosim(*options(inputs, run, "--resume", *more)) == 2
    assert named in capsys.readouterr().err.replace("\n", " ")
    assert (run / "steps.jsonl").read_bytes() == before


def test_resuming_on_other_data_is_refused(inputs, run, tmp_path, capsys):
    truncate(run, 6)
    saved_lines(tmp_path / "other.jsonl", seed=9)
    assert zosim(*options(inputs, run, "--resume", "--data", tmp_path / "other.jsonl")) == 2
    assert "data_sha256" in capsys.readouterr().err


ON_DRIVE = ("--residency", "nvme")


def kill_at(inputs, out, size, *more):
    """Start a run, and kill it once its log has `size` bytes."""
    log = out / "steps.jsonl"
    with Command(*options(inputs, out, *more)) as process:
        wait_until(
            lambda: not process.is_running or (log.exists() and log.stat().st_size >= size),
            "the log",
            nap_s=0.0005,
        )
        process.kill()


@pytest.mark.crossed(quick=2)
@pytest.mark.dist
@pytest.mark.parametrize(("first", "second"), [(ON_DRIVE, RESIDENT), (RESIDENT, OFFLOADED)])
def test_killed_at_a_random_instant_and_resumed_elsewhere(inputs, whole, tmp_path, first, second):
    chosen = random.Random(os.urandom(8))
    size = chosen.randrange((whole / "steps.jsonl").stat().st_size)
    out = tmp_path / "out"
    kill_at(inputs, out, size, *first, "--checkpoint-every", 3)
    assert not (out / "model.safetensors").exists() or size > 0
    assert not list(out.glob("zosim-blocks-*"))
    assert zosim(*options(inputs, out, *second, "--resume")) == 0, f"killed at {size} bytes"
    assert same(out, whole), f"killed at {size} bytes"


def has_open(process, path):
    return str(path) in [file.path for file in process.open_files()]


@pytest.mark.dist
def test_a_killed_launcher_takes_its_rank_along(inputs, whole, tmp_path):
    out = tmp_path / "out"
    log = out / "steps.jsonl"
    arguments = [a for a in options(inputs, out, *OFFLOADED, "--steps", 100_000) if a != "--no-launch"]
    with Command(*arguments) as process:
        wait_until(lambda: log.exists() and log.stat().st_size, "a step")
        (rank,) = (p for p in psutil.Process(process.pid).children(recursive=True) if has_open(p, log))
        process.kill()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the end of an orphan")
    history = read_history(out)
    assert zosim(*options(inputs, out, *RESIDENT, "--resume", "--steps", history.num_steps + 1)) == 0


def test_two_writers_of_one_log_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("executors.files.LOCK_WAIT_S", 0.1)
    with RunLog(tmp_path, {}), pytest.raises(RunError, match=rf"another process \({os.getpid()}\)"):
        RunLog(tmp_path)


@pytest.mark.parametrize("length", range(24))
def test_lines_count_once_their_newline_is_there(tmp_path, length):
    whole = b'{"a": 1}\n{"b": 22}\n'
    (tmp_path / "log").write_bytes(whole[:length])
    lines = read_lines(tmp_path / "log")
    assert [line.row for line in lines] == [{"a": 1}, {"b": 22}][: whole[:length].count(b"\n")]
    with JsonLines(tmp_path / "log", keep_bytes=lines[-1].end if lines else 0) as file:
        file.append([{"c": 3}])
    assert [line.row for line in read_lines(tmp_path / "log")] == [*(line.row for line in lines), {"c": 3}]


def test_divergence_is_told_by_levels_and_not_by_single_batches():
    watch = DivergenceWatch()
    losses = [3.0] * 15 + [50.0] + [2.9] * 15
    assert not any(watch.diverges(i + 1, loss) for i, loss in enumerate(losses))
    good = watch.best_step
    reported = [watch.diverges(len(losses) + i + 1, 40.0) for i in range(7)]
    assert reported.index(True) == 4
    assert (watch.best_step, watch.last_good(99)) == (good, good)
    early = DivergenceWatch()
    assert [early.diverges(i + 1, loss) for i, loss in enumerate([3.0, 40, 40, 40, 40])] == [False] * 4 + [
        True
    ]
    assert early.last_good(5) == 0
    # Losses that are no numbers were found at the weights after the last step: it is what ruined them.
    mean_tokens = DivergenceWatch()
    assert not any(mean_tokens.diverges(i + 1, 3.0) for i in range(4))
    assert (mean_tokens.last_good(4), DivergenceWatch().last_good(0)) == (3, 0)
