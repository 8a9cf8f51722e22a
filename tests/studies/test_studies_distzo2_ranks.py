"""The page on several ranks: its figures say what it says."""

from __future__ import annotations

import pytest

from studies.distzo2_ranks.cases import (
    TRANSFERS,
    apart,
    behind_one_root,
    block_seconds,
    board,
    offloaded,
    perturbed,
    squares,
)


def test_one_root_halves_the_gain_of_a_second_gpu():
    alone = offloaded(apart(), 1).step_time_s
    assert offloaded(apart(), 2).step_time_s == pytest.approx(alone, rel=0.02)
    # Uploads limit; they share one root.
    assert 1.6 * alone < offloaded(behind_one_root(), 2).step_time_s <= 2.0 * alone


def test_slicing_over_the_root_that_it_should_spare_loses():
    seconds = {way: offloaded(behind_one_root(), 2, transfers=way).step_time_s for way in TRANSFERS}
    assert seconds["sliced"] > seconds["shared"]


@pytest.mark.slow
def test_slicing_loses_below_the_bound_of_the_page():
    n = 4
    for peers in (0.5, 1.0):
        made = board(n, 5.0, peers)
        loses = block_seconds(made, "sliced") > block_seconds(made, "private")
        assert loses == (peers < (n - 1) / n)


@pytest.mark.slow
def test_draws_grow_with_the_perturbations_whatever_the_ranks():
    samples = {
        words: dict(perturbed(*words).prediction.seconds_by_label)["sample"]
        for words in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))
    }
    assert samples[1, 2] == pytest.approx(samples[1, 1], rel=1e-6)
    assert samples[2, 4] == pytest.approx(samples[2, 2], rel=1e-6)
    assert samples[4, 4] == pytest.approx(2 * samples[2, 4], rel=0.01)
    # One perturbation alone is still there where the head's turn ends, and need not be drawn again for the update.
    assert 2 * samples[1, 1] < samples[2, 2] < 3 * samples[1, 1]


def test_pairs_on_two_shards_have_a_square_that_grows_as_epsilon_shrinks():
    one, two = squares()
    # E|g·z|² = (d + 2)|c|² for normals; four standard errors of 20,000 samples are about a tenth.
    assert one == pytest.approx(10, rel=0.1)
    assert squares(epsilon=1e-2)[1] == pytest.approx(two / 100, rel=0.05)
