"""Process groups of gloo that share what serves their sockets."""

from __future__ import annotations

import sys

import launched
import pytest

from executors.ranks.launch import launch

_MOST_THREADS = 2
"""One that all groups share, and that of the default group, which torch makes."""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_groups_share_the_thread_of_their_sockets():
    world_size, num_threads = launch(launched.threads_of_sockets, world_size=2)
    assert world_size == 2
    assert 1 <= num_threads <= _MOST_THREADS
