"""Small exchanges in few rounds bring what rings bring."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launched

from executors.ranks.launch import launch


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_rank_gets_every_part_in_order_in_few_rounds(world_size):
    """Every rank sends log2 n messages, rounded up, where a ring takes n - 1."""
    assert launch(launched.gathered_by_doubling, world_size=world_size) == [2] * world_size
