"""The page on several ranks: its figures say what it says, and its exercise tells right from wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.cli import STUDIES
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
from studies.distzo2_ranks.exercise import FUNCTION, check
from studies.exercises import function_in, tried

STUB = Path(__file__).parents[2] / "studies" / "distzo2_ranks" / "stub.py"


def right(made, transfers):
    sharing = made.num_gpus if made.one_root else 1
    whole = sharing * made.block_bytes / made.host_bytes_per_s
    up = whole / made.num_gpus if transfers == "sliced" else whole
    down = whole if transfers == "private" else whole / made.num_gpus
    share = made.block_bytes / made.num_gpus
    exchange = (made.num_gpus - 1) * share / made.peer_bytes_per_s if transfers == "sliced" else 0.0
    return max(up, down, exchange, made.compute_s)


def as_equation_3(made, transfers):
    if transfers != "sliced":
        return right(made, transfers)
    share = made.block_bytes / made.num_gpus
    sum_s = share / made.host_bytes_per_s + (made.num_gpus - 1) * share / made.peer_bytes_per_s
    return max(sum_s, made.compute_s)


def blind_to_the_root(made, transfers):
    share = 1 / made.num_gpus if transfers == "sliced" else 1.0
    if not made.one_root:
        return right(made, transfers)
    return max(share * made.block_bytes / made.host_bytes_per_s, made.compute_s)


def test_the_reference_solution_passes():
    verdict = check(right)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (as_equation_3, "equation 3"),
        (blind_to_the_root, "use the root at once"),
        (lambda made, transfers: made.compute_s, "busy for longer"),
        (lambda made, transfers: 10 * right(made, transfers), "busiest sets the pace"),
        (lambda made, transfers: "3 s", "a number"),
    ],
)
def test_a_wrong_solution_is_refused_with_advice(wrong, advice):
    verdict = check(wrong)
    assert not verdict.passed
    assert advice in verdict.message


def test_the_stub_does_not_pass_and_says_so():
    verdict = tried(check, function_in(STUB, FUNCTION))
    assert not verdict.passed
    assert "NotImplementedError" in verdict.message


def test_the_study_is_listed_with_its_page_and_exercise():
    found = next(item for item in STUDIES if item.name == "distzo2_ranks")
    assert found.has_exercise
    assert found.page is not None


def test_one_root_halves_the_gain_of_a_second_gpu():
    alone = offloaded(apart(), 1).step_time_s
    assert offloaded(apart(), 2).step_time_s == pytest.approx(alone, rel=0.02)
    # Uploads limit; they share one root.
    assert 1.6 * alone < offloaded(behind_one_root(), 2).step_time_s <= 2.0 * alone


def test_slicing_over_the_root_that_it_should_spare_loses():
    seconds = {way: offloaded(behind_one_root(), 2, transfers=way).step_time_s for way in TRANSFERS}
    assert seconds["sliced"] > seconds["shared"]


def test_slicing_loses_below_the_bound_of_the_page():
    n = 4
    for peers in (0.5, 1.0):
        made = board(n, 5.0, peers)
        loses = block_seconds(made, "sliced") > block_seconds(made, "private")
        assert loses == (peers < (n - 1) / n)


def test_draws_grow_with_the_directions_whatever_the_ranks():
    draws = {
        words: dict(perturbed(*words).prediction.seconds_by_label)["draw"]
        for words in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))
    }
    assert draws[1, 2] == pytest.approx(draws[1, 1], rel=1e-6)
    assert draws[2, 4] == pytest.approx(draws[2, 2], rel=1e-6)
    assert draws[4, 4] == pytest.approx(2 * draws[2, 4], rel=0.01)
    # One direction alone is still there where the head's turn ends, and need not be drawn again for the update.
    assert 2 * draws[1, 1] < draws[2, 2] < 3 * draws[1, 1]


def test_pairs_on_two_shards_have_a_square_that_grows_as_epsilon_shrinks():
    one, two = squares()
    # E|g·z|² = (d + 2)|c|² for normals; four standard errors of 20,000 samples are about a tenth.
    assert one == pytest.approx(10, rel=0.1)
    assert squares(epsilon=1e-2)[1] == pytest.approx(two / 100, rel=0.05)
