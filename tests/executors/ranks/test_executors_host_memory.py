from __future__ import annotations

import pytest

from executors.ranks.host_memory import awaited, memory_file
from tests.support.distributed import DDP, OFFLOADED, SHARED, SLICED, plan_for
from topology.errors import DoesNotFit
from zosim.lowering import lower


def test_a_file_takes_its_room_at_once(tmp_path):
    with memory_file(1 << 20, [tmp_path]) as path:
        assert path.stat().st_blocks * 512 >= path.stat().st_size == 1 << 20
        assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room_the_sizes_are_told(tmp_path):
    output = rf"share 1024 PiB, but {tmp_path} has [\d.]+ [GT]iB"
    with pytest.raises(DoesNotFit, match=output) as caught, memory_file(1 << 60, [tmp_path]):
        pass
    assert "--transfers private" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_peers_are_awaited_only_where_whole_blocks_are_read_by_all():
    named = {name: awaited(lower(plan_for({"mesh": DDP, **axes}))) for name, axes in MODES.items()}
    assert named["sliced"] == named["private"] == []
    assert {name.partition("/")[2].partition(":")[0] for name in named["shared"]} == {"upload", "offload"}


MODES = {"private": OFFLOADED, "shared": SHARED, "sliced": SLICED}
