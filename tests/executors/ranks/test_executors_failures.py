"""What keeps a rank from going on, told by the launcher: what a user can mend in words, our mistakes with a traceback."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import psutil
import pytest

from executors import load_model, plan_of_model
from executors.files import write_atomically
from executors.ranks.launch import launch
from executors.runs.learning_rate import LearningRate
from executors.runs.run import Run
from executors.runs.runlog import RunLog
from executors.runs.settings import DataSettings, RunOptions, RunSettings
from tests.support.command import saved_lines, saved_model
from topology.errors import RunError
from zosim.config import merge


def refused_by_the_disk() -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def mistaken() -> None:
    """Fail as a bug in zosim does."""
    message = "a bug in zosim"
    raise LookupError(message)


def test_a_full_disk_is_no_mistake_of_ours(capfd):
    with pytest.raises(RunError, match=r"^No space left on device") as caught:
        launch(refused_by_the_disk)
    assert "free some space" in caught.value.hint
    assert "Traceback" not in capfd.readouterr().err


def test_a_mistake_of_ours_keeps_its_traceback(capfd):
    with pytest.raises(RunError, match=r"^the run failed: LookupError: a bug in zosim") as caught:
        launch(mistaken)
    assert "memory" not in caught.value.hint
    assert "Traceback" in capfd.readouterr().err


class FullDisk:
    """A file on a full disk."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def flush(self):
        """Refuse, as buffered bytes reach a full disk here."""
        refused_by_the_disk()


def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomically(path, "old")
    real = type(path).open
    monkeypatch.setattr(type(path), "open", lambda self, *mode: FullDisk(real(self, *mode)))
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "old"


def test_a_resume_that_fails_lets_go_of_the_log(tmp_path, monkeypatch):
    """In one process, while somebody still looks at the error."""
    monkeypatch.setattr("executors.files.LOCK_WAIT_S", 0.0)
    saved_lines(tmp_path / "data.jsonl")
    model = saved_model("opt", tmp_path)
    settings = RunSettings(
        plan=plan_of_model(load_model(model), batch=2, seq=9),
        data=DataSettings(path=str(tmp_path / "data.jsonl"), shuffle=False),
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=2),
        run=RunOptions(model=str(model), out=str(tmp_path / "out")),
    )
    Run(settings).run()
    settings = replace(
        settings,
        learning_rate=LearningRate(learning_rate=1e-3, num_steps=4),
        run=merge(settings.run, RunOptions(resume=True)),
    )

    def fail(*_given):
        message = "it cannot be replayed"
        raise RunError(message)

    with monkeypatch.context() as planted:
        planted.setattr("executors.runs.run.advance", fail)
        with pytest.raises(RunError, match="it cannot be replayed") as caught:
            Run(settings).run()
    assert Run(settings).run()["num_steps"] == 4
    assert caught.value is not None


def test_a_log_that_is_refused_leaves_no_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr("executors.files.LOCK_WAIT_S", 0.0)
    with RunLog(tmp_path, {}):
        before = psutil.Process().num_fds()
        with pytest.raises(RunError, match="another process"):
            RunLog(tmp_path)
        assert psutil.Process().num_fds() == before
