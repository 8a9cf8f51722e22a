"""What goes wrong among ranks is caught and named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import distributed

from executors.ranks.launch import launch

pytestmark = pytest.mark.dist


def test_a_planted_bit_is_named_by_rank_and_group_in_every_mode():
    said = launch(distributed.plant_bits, world_size=3)
    expected = "after 4 steps replicas differ: rank 1 differs from the other 2 in block.1"
    assert said == dict.fromkeys(distributed.MODES, expected)


def test_ranks_that_begin_with_other_weights_are_named():
    said = launch(distributed.start_unlike, world_size=2)
    assert said == "ranks do not begin with the same base digest: rank 1 not with that of rank 0"


def test_who_is_waited_for_in_vain_is_named_and_memory_leaves_nothing():
    told = launch(distributed.wait_for_peer, world_size=2)
    said = "waited 1 s for block.1/offload of rank 1, last at rank 1 at work"
    assert told == {"said": said, "left": [], "given_up": [1]}


def test_a_plan_of_another_number_of_ranks_is_refused():
    assert launch(distributed.forget_the_plan, world_size=2) == "the plan has 1 ranks, but 2 were started"
