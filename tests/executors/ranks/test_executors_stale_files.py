"""What killed processes left is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from executors.ranks.stale_files import held_directory, held_file, hold, remove_stale_files

MAKE = """
import signal, sys, tempfile
from pathlib import Path
from executors.ranks.stale_files import held_directory, held_file

tempfile.tempdir = sys.argv[1]
with held_directory("zosim-test-") as directory, held_file(Path(sys.argv[1]), "zosim-test-"):
    (directory / "within").touch()
    print("made", flush=True)
    signal.pause()
"""


def test_what_lives_is_kept_and_what_was_killed_is_removed(tmp_path):
    other = tmp_path / "another"
    other.touch()
    with subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        made = set(tmp_path.glob("zosim-test-*"))
        assert len(made) == 2
        remove_stale_files(tmp_path, "zosim-test-")
        assert set(tmp_path.glob("zosim-test-*")) == made
        owner.send_signal(signal.SIGKILL)
    remove_stale_files(tmp_path, "zosim-test-")
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to make another user's file")
def test_another_users_are_kept(tmp_path):
    path = tmp_path / "zosim-test-1"
    path.touch()
    os.chown(path, 65534, 65534)
    remove_stale_files(tmp_path, "zosim-test-")
    assert path.exists()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "kept"
    target.mkdir()
    (tmp_path / "zosim-test-1").symlink_to(target)
    remove_stale_files(tmp_path, "zosim-test-")
    assert target.exists()


def test_only_this_user_may_enter(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with held_directory("zosim-test-") as directory, held_file(tmp_path, "zosim-test-") as (path, _):
        assert (directory.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert list(tmp_path.iterdir()) == []


def test_what_was_removed_before_it_was_locked_is_not_held(tmp_path, monkeypatch):
    path = tmp_path / "zosim-test-1"
    path.touch()
    monkeypatch.setattr("fcntl.flock", lambda *_: path.unlink())
    with pytest.raises(FileNotFoundError):
        hold(path)
