from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launched

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
