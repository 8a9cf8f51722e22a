"""Process groups of gloo that share what serves their sockets."""

from __future__ import annotations

import sys

import pytest
import torch

from executors.ranks.launch import launch
from tests.support import launched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")

_NUM_REPEATED = 3
"""Times that all groups are made once more, each with several groups; a thread of torch's may come or go meanwhile."""


def test_groups_share_the_thread_of_their_sockets():
    assert launch(launched.threads_of_more_groups, world_size=2) < _NUM_REPEATED


def test_without_options_of_torch_every_group_has_a_thread_of_its_own():
    own = torch.tensor([3.0])
    assert launch(launched.over_plain_groups, launched.gathered_once, own, world_size=2) == [3.0, 3.0]
    num_threads = launch(launched.over_plain_groups, launched.threads_of_more_groups, world_size=2)
    assert num_threads > 2 * _NUM_REPEATED
