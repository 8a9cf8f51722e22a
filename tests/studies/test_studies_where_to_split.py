"""The page on stages: its figures say what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proofs_checks.oracles.boundaries import straight_through
from studies.where_to_split.__main__ import USUAL
from studies.where_to_split.cases import forward_bytes, same_numbers, slopes


def test_inside_a_block_more_crosses_than_between():
    between = replace(USUAL, inside=False)
    for bits in (1, 4, 32):
        assert forward_bytes(replace(USUAL, activation_bits=bits)) > forward_bytes(between)


@pytest.mark.parametrize("place", [0.0, 0.25, 0.45])
@pytest.mark.parametrize("radius", [0.2, 0.5, 1.0])
def test_what_is_left_of_a_gradient_is_what_the_page_says(radius, place):
    num = 200_000
    mean, deviation = slopes(radius, place, stochastic=False, num_samples=num)
    assert mean == pytest.approx(straight_through(radius, place), abs=5 * deviation / num**0.5)
    mean, deviation = slopes(radius, place, stochastic=True, num_samples=num)
    assert mean == pytest.approx(1, abs=5 * deviation / num**0.5)


def test_the_same_numbers_add_the_other_stage_s_gradient():
    own, same = same_numbers()
    # g·u has a variance of about 4 and 10; five standard errors of 200,000 samples.
    assert own == pytest.approx(1, abs=0.05)
    assert same == pytest.approx(-1, abs=0.05)
