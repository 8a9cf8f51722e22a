from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launched

from executors.ranks import launch as ranks_launch
from executors.ranks.launch import Progress, RankInfo, launch
from topology.errors import RunError

pytestmark = pytest.mark.dist


def test_ranks_find_each_other():
    assert launch(launched.add_ranks, 10, world_size=2) == 21


def test_a_refusal_is_told_in_its_own_words():
    with pytest.raises(RunError, match="rank 0 stopped: this plan cannot be") as caught:
        launch(launched.refuse)
    assert caught.value.hint == "make another"


def test_a_killed_rank_is_named_with_its_last_instruction():
    with pytest.raises(
        RunError, match=r"rank 0 died \(SIGKILL\), last at step\[3\]/block\.1/forward\[q0\+\]"
    ):
        launch(launched.die)


def test_training_notes_its_instructions():
    with pytest.raises(RunError, match=r"rank 0 died \(SIGKILL\), last at step\[1\]/block\.1/forward"):
        launch(launched.die_in_training)


def test_inside_torchrun_nothing_is_started(monkeypatch):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert launch(RankInfo.here) == RankInfo(1, 1, 4)


def test_progress_keeps_the_latest_line(tmp_path):
    progress = Progress(tmp_path / "line")
    progress.note("a long line " * 100)
    progress.note("short")
    assert Progress.read(tmp_path / "line") == "short"
    assert Progress.read(tmp_path / "nothing") == ""


KILLED = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
from executors.ranks import launch

with launch._own_semaphores():
    made = multiprocessing.get_context("spawn").Semaphore()
    print(made._semlock.name, flush=True)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores are files on Linux")
def test_semaphores_of_a_killed_launcher_are_removed_by_the_next():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = ranks_launch._SEMAPHORES / f"sem.{done.stdout.strip().removeprefix('/')}"
    assert left.exists()
    ranks_launch._remove_leftovers()
    assert not left.exists()
