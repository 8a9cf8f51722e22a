from __future__ import annotations

import os
import subprocess
import sys

import pytest

from executors.ranks.host_memory import awaited, made_in_memory, remove_leftovers
from tests.support.distributed import DDP, OFFLOADED, SHARED, SLICED, plan_for
from topology.errors import DoesNotFit
from zosim.lowering import lower


def test_a_file_takes_its_room_at_once(tmp_path):
    path = made_in_memory(1 << 20, [tmp_path])
    assert path.stat().st_blocks * 512 >= path.stat().st_size == 1 << 20
    assert path.name.startswith(f"zosim-host-{os.getpid()}-")


def test_where_there_is_no_room_the_sizes_are_told(tmp_path):
    with pytest.raises(DoesNotFit, match=rf"share 1024 PiB, but {tmp_path} has [\d.]+ [GT]iB") as caught:
        made_in_memory(1 << 60, [tmp_path])
    assert "--transfers private" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_only_the_leftovers_of_the_dead_are_removed(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for owner in (dead, os.getpid()):
        (tmp_path / f"zosim-host-{owner}-abc").touch()
    remove_leftovers([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == [f"zosim-host-{os.getpid()}-abc"]


def test_peers_are_awaited_only_where_whole_blocks_are_read_by_all():
    named = {name: awaited(lower(plan_for({"mesh": DDP, **axes}))) for name, axes in MODES.items()}
    assert named["sliced"] == named["private"] == []
    assert {name.partition("/")[2].partition(":")[0] for name in named["shared"]} == {"upload", "offload"}


MODES = {"private": OFFLOADED, "shared": SHARED, "sliced": SLICED}
