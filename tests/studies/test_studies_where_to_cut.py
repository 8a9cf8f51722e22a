"""The page on stages: its figures say what it says, and its exercise tells right from wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from proofs_checks.quantised_cut import straight_through
from studies.cli import STUDIES
from studies.exercises import function_in, tried
from studies.where_to_cut.__main__ import USUAL
from studies.where_to_cut.cases import forward_bytes, same_numbers, slopes
from studies.where_to_cut.exercise import FUNCTION, check

STUB = Path(__file__).parents[2] / "studies" / "where_to_cut" / "stub.py"


def points(crossing):
    return 2 * crossing.num_queries if crossing.difference == "central" else crossing.num_queries + 1


def right(crossing):
    bits = crossing.hidden * crossing.residual_bits
    bits += crossing.inner * crossing.activation_bits if crossing.inside else 0
    return points(crossing) * crossing.batch * crossing.seq * bits / 8


def without_residual(crossing):
    whole = right(crossing)
    return right(replace(crossing, residual_bits=0)) if crossing.inside else whole


def test_the_reference_solution_passes():
    verdict = check(right)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (without_residual, "add its product to"),
        (lambda c: right(c) / points(c), "how many does a step take"),
        (lambda c: right(replace(c, difference="central")), "all queries share"),
        (lambda c: 8 * right(c), "bits, or bytes"),
        (lambda c: 1.1 * right(c), "tokens times"),
        (lambda c: "3 MB", "a number"),
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
    found = next(item for item in STUDIES if item.name == "where_to_cut")
    assert found.has_exercise
    assert found.page is not None


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
