from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.devices.collectives import (
    COLLECTIVES,
    all_reduce_s,
    point_to_point_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)

LINK = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e6}


def test_values_worked_out_by_hand():
    assert point_to_point_s(5000, **LINK) == pytest.approx(0.006)
    assert ring_all_gather_s(4000, 4, **LINK) == pytest.approx(3 * (0.001 + 0.001))
    assert ring_all_reduce_s(4000, 4, **LINK) == pytest.approx(6 * (0.001 + 0.001))
    assert tree_all_reduce_s(4000, 4, **LINK) == pytest.approx(2 * (0.001 + 0.004))
    assert tree_all_reduce_s(4000, 5, **LINK) == pytest.approx(3 * (0.001 + 0.004))
    assert all_reduce_s(4000, 4, **LINK) == pytest.approx(0.010)
    assert all_reduce_s(4_000_000, 4, **LINK) == pytest.approx(6 * (0.001 + 1.0))


def test_measured_gloo_collectives_are_met():
    # Four hosts on a bridge at 1 Gbit/s (0.12 GB/s reached): 16 MB all_reduce 203 ms.
    bridge = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 0.12e9}
    assert ring_all_reduce_s(16e6, 4, **bridge) == pytest.approx(0.203, rel=0.03)


@given(st.integers(1, 64), st.floats(0, 1e9))
def test_every_rank_must_receive_what_it_lacks(num_ranks, size):
    # Bandwidth bounds: n-1 of n parts for a gather, twice that for a reduction.
    least = (num_ranks - 1) / num_ranks * size / 1e6
    assert ring_all_gather_s(size, num_ranks, **LINK) >= least * (1 - 1e-12)
    assert ring_all_reduce_s(size, num_ranks, **LINK) >= 2 * least * (1 - 1e-12)
    if num_ranks == 1:
        assert all_reduce_s(size, 1, **LINK) == 0


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_what_a_rank_receives_tells_the_whole(name, num_ranks):
    """Without a latency the closed form takes as long as the bytes that each rank receives of a buffer."""
    known = COLLECTIVES[name]
    received = known.by_messages(4000.0, num_ranks, latency_s=0.0, bandwidth_bytes_per_s=1.0)
    assert known.whole(received, num_ranks) == pytest.approx(4000.0)


@pytest.mark.parametrize(
    "wrong", [{"num_ranks": 0}, {"size_bytes": -1}, {"latency_s": -1.0}, {"bandwidth_bytes_per_s": 0.0}]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        ring_all_reduce_s(**{"size_bytes": 1, "num_ranks": 2, **LINK, **wrong})
