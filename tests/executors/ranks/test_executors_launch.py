from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from executors.ranks.launch import launch
from executors.ranks.rank_info import (
    LastReport,
    Progress,
    RankInfo,
    leave,
    progress_of_this_rank,
)
from tests.support import launched
from tests.support.waiting import HANG_S
from topology.errors import RunError

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_ranks")
def test_ranks_find_each_other():
    assert launch(launched.add_ranks, 10, world_size=2) == 21


def test_a_refusal_is_told_in_its_own_words():
    with pytest.raises(RunError, match=r"^this plan cannot be") as caught:
        launch(launched.refuse)
    assert caught.value.hint == "make another"


def test_a_rank_stops_where_a_package_ignores_something():
    with pytest.raises(RunError, match="ignores an argument: `past_key_values` is ignored"):
        launch(launched.be_ignored)


def test_a_killed_rank_is_named_with_its_last_instruction():
    with pytest.raises(
        RunError, match=r"^the run died \(SIGKILL\), last at step\[3\]/block\.1/forward\[q0\+\]"
    ):
        launch(launched.die)


def test_of_several_ranks_the_one_that_refuses_is_named():
    with pytest.raises(RunError, match=r"^rank 0 stopped: this plan cannot be"):
        launch(launched.refuse, world_size=2)


@pytest.mark.parametrize("end", [launched.end_by_sigterm, launched.exit_by_sigterm])
def test_a_rank_that_is_asked_to_end_is_no_mistake_and_no_want_of_memory(end, capfd):
    with pytest.raises(RunError, match=r"^the run died \(SIGTERM\)") as caught:
        launch(end)
    assert "the process received SIGTERM" in caught.value.hint
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_that_leaves_without_a_word_is_said_to_have_left_no_traceback():
    with pytest.raises(RunError, match=r"^the run ended with exit code 7") as caught:
        launch(launched.leave_silently)
    assert "traceback" not in caught.value.hint


FULL = """
import resource, tempfile
from executors.ranks.launch import launch
from executors.ranks.rank_info import RankInfo
from topology.errors import MachineError, RunError

tempfile.gettempdir()  # which writes a file to see that it can
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for world_size in (1, 2):
    try:
        launch(RankInfo.here, world_size=world_size)
    except RunError as error:
        print(error.message, error.hint)
tempfile.tempdir = None
try:
    launch(RankInfo.here)
except MachineError as error:
    print(error.message)
"""


def test_ranks_whose_temporary_files_have_no_room_say_so(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FULL], env=environment, capture_output=True, text=True, check=True
    )
    one, several, none = done.stdout.splitlines()
    assert one.startswith(str(tmp_path))
    assert "pid-0: File too large" in one
    assert "ulimit -f" in one
    assert re.match(r"rank [01] stopped: ", several)
    assert none.startswith("No usable temporary directory found in")
    assert done.stderr == ""


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("instant", launched.JOINING)
def test_a_rank_that_stands_still_while_ranks_join_is_named(instant):
    with pytest.raises(RunError, match="rank 0 could not join the others of 2 ranks: waited 2 s for rank 1"):
        launch(launched.stop_while_ranks_join, instant, world_size=2)


@pytest.mark.slow
def test_a_rank_that_stands_still_at_the_end_is_named():
    with pytest.raises(RunError, match="ending together: waited 20 s for rank 1"):
        launch(launched.stop_at_the_end, world_size=2)


def test_training_notes_its_instructions():
    with pytest.raises(RunError, match=r"^the run died \(SIGKILL\), last at step\[1\]/block\.1/forward"):
        launch(launched.die_in_training)


def test_what_an_instruction_could_not_do_names_it_once():
    with pytest.raises(RunError, match=r"^step\[0\]/decode on stream compute: it is damaged$"):
        launch(launched.fail_in_an_instruction)


@pytest.mark.parametrize("function", [RankInfo.here, launched.refuse, launched.die])
def test_a_launch_leaves_nothing_behind(function, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.suppress(RunError):
        launch(function)
    assert list(tmp_path.iterdir()) == []


def test_the_last_rank_of_torchrun_takes_the_directory_along(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert progress_of_this_rank() is not None
    leave()
    assert [path.name for path in tmp_path.rglob("progress-*")] == ["progress-0"]
    monkeypatch.setenv("RANK", "0")
    leave()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_launcher_is_gone_ends(tmp_path):
    """One that it started in its last moment, before the kernel was asked to end both together."""
    command = (
        "from executors.ranks.launch import RankInfo, _rank; "
        f"_rank(RankInfo(0, 0, 1), {str(tmp_path)!r}, 1, None, print, ('orphan',))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


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
    assert Progress.read(tmp_path / "line") == LastReport("", "short")
    progress.stage("stage 1 of 2, before split point block.0")
    assert Progress.read(tmp_path / "line").of(0) == "rank 0 (stage 1 of 2, before split point block.0)"
    assert Progress.read(tmp_path / "nothing") == LastReport()


LAUNCH = """
import sys
from executors.ranks.launch import launch
from tests.support import launched
from tests.support.waiting import HANG_S

if __name__ == "__main__":
    launch(launched.say_and_wait, sys.argv[1], world_size=2)
"""


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("stopped", [False, True], ids=["all running", "one stopped"])
def test_ranks_end_with_their_launcher(number, stopped, tmp_path, monkeypatch):
    """And what a launcher leaves that is killed goes with the next launch."""
    (temporary := tmp_path / "temporary").mkdir()
    (script := tmp_path / "script.py").write_text(LAUNCH)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script, tmp_path], env=environment, stderr=subprocess.DEVNULL
    ) as launcher:
        while len(ranks := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
            assert launcher.poll() is None
            time.sleep(0.02)
        if stopped:
            os.kill(ranks[1], signal.SIGSTOP)
        launcher.send_signal(number)
    expected = {signal.SIGKILL: -9, signal.SIGINT: -2}
    assert launcher.returncode == expected.get(number, 128 + number)
    psutil.wait_procs([psutil.Process(rank) for rank in ranks if psutil.pid_exists(rank)], timeout=60)
    assert not any(psutil.pid_exists(rank) for rank in ranks)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if number == signal.SIGKILL:
        assert list(temporary.iterdir()) != []
        launch(RankInfo.here)
    assert list(temporary.iterdir()) == []


def test_a_script_without_a_guard_is_not_run_again_by_its_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom executors import launch\nprint('begins')\nprint(launch(os.getcwd, world_size=2))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["begins", str(tmp_path)]
