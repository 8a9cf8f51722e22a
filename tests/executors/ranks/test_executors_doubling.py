"""Small exchanges in few rounds bring what rings bring."""

from __future__ import annotations

import pytest

from executors.ranks.launch import launch
from tests.support import launched


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_rank_gets_every_part_in_order_in_few_rounds(world_size):
    """Every rank sends log2 n messages, rounded up, where a ring takes n - 1."""
    assert launch(launched.gathered_by_doubling, world_size=world_size) == [2] * world_size
