"""Runs whose disk, directory, clock or names are not as they should be: said in words, nothing overwritten or lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executors.files import LOCK_NAME, locked, write_atomically
from executors.runs.session import Session
from tests.support.command import rows_of, zosim
from tests.support.forked import Command
from tests.support.recorded import options, same
from topology.errors import refusal_of_machine

QUERIES = ("--num-perturbations", 8)
"""Rows of a step that do not all go to one page of a disk's memory."""


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Return the run of some options, made once."""
    made = {}

    def run(*more):
        if more not in made:
            made[more] = tmp_path_factory.mktemp("whole") / "out"
            assert zosim(*options(inputs, made[more], *more)) == 0
        return made[more]

    return run


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "zosim-test", str(disk)]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(mounted, check=False, capture_output=True).returncode
    ):
        pytest.skip("needs a disk of its own, which root can mount on Linux")
    yield disk
    subprocess.run(["umount", disk], check=True)


def before_step(monkeypatch, number, action):
    """Do something before a run's step `number`."""
    real = Session.begin_step

    def step(self, *given, **more):
        if self.num_steps == number:
            action()
        return real(self, *given, **more)

    monkeypatch.setattr(Session, "begin_step", step)


def fill(disk):
    """Fill a disk."""
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
    assert shutil.disk_usage(disk).free == 0


@pytest.mark.slow
@pytest.mark.crossed(slow=2)
@pytest.mark.parametrize(
    ("more", "named"),
    [
        (QUERIES, "steps.jsonl"),
        (("--checkpoint-every", 5), "step-00000005.safetensors"),
        ((), "timeline.json"),
    ],
    ids=["log", "checkpoint", "end"],
)
def test_a_run_on_a_full_disk_goes_on_once_there_is_room(
    inputs, undisturbed, small_disk, monkeypatch, capsys, more, named
):
    out = small_disk / "out"
    with monkeypatch.context() as planted:
        before_step(planted, 4, lambda: fill(small_disk))
        assert zosim(*options(inputs, out, *more)) == 2
    output = capsys.readouterr().err
    assert f"{named}: No space left on device" in output.replace("\n", "")
    assert "free some space there" in output
    (small_disk / "ballast").unlink()
    assert zosim(*options(inputs, out, *more, "--resume")) == 0
    assert same(out, undisturbed(*more))
    assert not list(out.rglob("*.partial"))


def test_weights_that_no_longer_fit_are_written_once_there_is_room(
    inputs, undisturbed, small_disk, monkeypatch, capsys
):
    out, wanted = small_disk / "out", "executors.runs.run.copy_tokenizer"
    with monkeypatch.context() as planted:
        planted.setattr("executors.runs.run.save_tuned", lambda *_, **__: fill(small_disk))
        planted.setattr(wanted, lambda *_: write_atomically(out / "model.safetensors", "x" * 9999))
        assert zosim(*options(inputs, out)) == 2
    assert "model.safetensors: No space left on device" in capsys.readouterr().err.replace("\n", "")
    assert not (out / "model.safetensors").exists()
    (small_disk / "ballast").unlink()
    assert zosim(*options(inputs, out, "--resume")) == 0
    assert same(out, undisturbed())


def test_a_file_over_the_limit_of_files_is_said_in_words(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_atomically(tmp_path / "plan.json", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    refusal = refusal_of_machine(caught.value)
    assert refusal.message == f"{tmp_path / 'plan.json'}: File too large"
    assert "ulimit -f" in refusal.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "out"])
def test_a_disk_that_may_not_be_written_is_said_in_words(inputs, small_disk, capsys, name):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert zosim(*options(inputs, small_disk / name)) == 2
    output = capsys.readouterr().err
    assert "Read-only file system" in output
    assert str(small_disk) in output


def test_a_directory_that_is_not_ones_own_is_said_in_words(inputs, tmp_path, capsys):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    assert zosim(*options(inputs, tmp_path / "out")) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("number", [3, 11])
def test_a_run_whose_directory_is_removed_ends_at_once(inputs, tmp_path, monkeypatch, capsys, number):
    out = tmp_path / "out"
    before_step(monkeypatch, number, lambda: shutil.rmtree(out))
    assert zosim(*options(inputs, out)) == 2
    assert "was removed, moved or replaced" in capsys.readouterr().err
    assert not out.exists()


def test_weights_are_not_written_beside_a_log_that_is_gone(inputs, tmp_path, monkeypatch, capsys):
    """After the last step, when nothing is appended any more."""
    out = tmp_path / "out"
    real = Session.timeline
    monkeypatch.setattr(
        Session, "timeline", lambda session: (shutil.rmtree(out), out.mkdir(), real(session))[-1]
    )
    assert zosim(*options(inputs, out)) == 2
    assert "was removed, moved or replaced" in capsys.readouterr().err
    assert not (out / "model.safetensors").exists()


def test_a_run_whose_directory_is_moved_goes_on_from_there(
    inputs, undisturbed, tmp_path, monkeypatch, capsys
):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    with monkeypatch.context() as planted:
        before_step(planted, 5, lambda: out.rename(elsewhere))
        assert zosim(*options(inputs, out)) == 2
    assert "was removed, moved or replaced" in capsys.readouterr().err
    assert len(rows_of(elsewhere)) == 5
    assert zosim("run", "--out", elsewhere, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(elsewhere, undisturbed())


@pytest.mark.slow
def test_a_run_that_is_copied_goes_on_as_the_one_it_was_copied_from(
    inputs, undisturbed, tmp_path, monkeypatch
):
    out, copied = tmp_path / "out", tmp_path / "copied"
    before_step(monkeypatch, 6, lambda: shutil.copytree(out, copied))
    assert zosim(*options(inputs, out)) == 0
    monkeypatch.undo()
    assert zosim("run", "--out", copied, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(copied, undisturbed())
    assert same(out, undisturbed())


def test_a_directory_that_another_process_writes_is_left_alone(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("executors.files.LOCK_WAIT_S", 0.1)
    out = tmp_path / "out"
    with locked(out):
        assert zosim(*options(inputs, out)) == 2
    assert f"another process ({os.getpid()}) is writing to {out}" in capsys.readouterr().err.replace("\n", "")
    assert [path.name for path in out.iterdir()] == [LOCK_NAME]


def test_a_run_that_still_runs_is_not_gone_on_with(inputs, undisturbed, tmp_path, monkeypatch, capsys):
    """What a second process read before the first ended would be cut off the log."""
    out, codes = tmp_path / "out", []
    monkeypatch.setattr("executors.files.LOCK_WAIT_S", 0.1)
    before_step(monkeypatch, 5, lambda: codes.append(zosim(*options(inputs, out, "--resume"))))
    assert zosim(*options(inputs, out)) == 0
    assert codes == [2]
    assert "is writing to" in capsys.readouterr().err
    assert same(out, undisturbed())


@pytest.mark.dist
def test_of_two_runs_that_begin_at_once_in_one_directory_one_is_refused(inputs, undisturbed, tmp_path):
    words = options(inputs, tmp_path / "out")
    with Command(*words) as first, Command(*words) as second:
        output = [run.end() for run in (first, second)]
    codes = first.exit_code, second.exit_code
    assert sorted(codes) == [0, 2], output
    refused = output[0] if codes[0] else output[1]
    assert "is writing to" in refused or "already holds a run" in refused
    assert same(tmp_path / "out", undisturbed())


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_model_is_not_overwritten(inputs, tmp_path, capsys, more):
    out = Path(shutil.copytree(inputs[0], tmp_path / "model"))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert zosim(*options((out, inputs[1]), out, *more)) == 2
    assert f"{out} holds a model" in capsys.readouterr().err.replace("\n", "")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_clock_that_jumps_back_changes_nothing(inputs, undisturbed, tmp_path, monkeypatch):
    jumps = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    monkeypatch.setattr(time, "gmtime", lambda seconds=None, real=time.gmtime: real(next(jumps)))
    out = tmp_path / "out"
    assert zosim(*options(inputs, out)) == 0
    assert same(out, undisturbed())
    assert all(row["seconds"] > 0 for row in rows_of(out))


def test_nothing_that_waits_or_measures_reads_the_clock_on_the_wall():
    """It jumps; what a user is told about when something happened may be read from it."""
    root = Path(__file__).parents[3]
    sources = [path for name in ("executors", "zosim", "topology") for path in (root / name).rglob("*.py")]
    assert len(sources) > 100
    readers = [
        path for path in sources if "time.time()" in path.read_text() or "datetime.now" in path.read_text()
    ]
    assert readers == []


@pytest.fixture
def strange(tmp_path):
    """A folder whose name is not UTF-8, where the file system has such names."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    try:
        folder.mkdir()
    except (OSError, UnicodeError):
        pytest.skip("this file system has names in UTF-8 alone")
    return folder


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("which", ["out", "data", "model"])
def test_names_that_are_not_utf_8_are_refused_and_a_link_serves(
    inputs, undisturbed, strange, tmp_path, capsys, which
):
    model, data, out = *inputs, tmp_path / "out"
    link = tmp_path / "link"
    if which == "out":
        out = strange / "out"
    elif which == "data":
        data = Path(shutil.copy(data, strange / "data.jsonl"))
    else:
        model = Path(shutil.copytree(model, strange / "opt"))
    assert zosim(*options((model, data), out)) == 2
    output = capsys.readouterr().err
    assert r"\xff\xfe" in output
    assert "is not UTF-8" in output
    assert not out.exists()
    link.symlink_to(strange)
    model, data, out = (link / p.name if strange in p.parents else p for p in (model, data, out))
    assert zosim(*options((model, data), out)) == 0
    assert same(out, undisturbed())
    if which == "out":
        assert (strange / "out" / "run.json").exists()


def test_links_lead_to_the_run_that_they_name(inputs, undisturbed, tmp_path, monkeypatch, capsys):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert zosim(*options(inputs, link)) == 0
    assert link.is_symlink()
    assert same(real, undisturbed())
    assert zosim(*options(inputs, real)) == 2
    assert "already holds a run" in capsys.readouterr().err
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert zosim(*options(inputs, tmp_path / "dangling")) == 2
    assert "dangling: File exists" in capsys.readouterr().err.replace("\n", "")
