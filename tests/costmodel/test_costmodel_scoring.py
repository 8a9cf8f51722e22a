"""Rows of predicted against measured, and their scores."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.scoring import Row, Score, coverage_band, mean_over_groups, scores

POSITIVE = st.floats(1e-9, 1e9)


def row(predicted: float | None, measured: float | None = 2.0, **fields) -> Row:
    return Row("a case", "step_s", measured, predicted, **{"group": "products"} | fields)


def test_errors_are_counted_by_group_with_their_sign_and_coverage():
    rows = [row(1, low=0.5, high=2.5), row(3, low=2.5, high=4), row(2.2, low=2, high=3), row(None)]
    (score,) = scores([*rows, row(1, None), row(9, flag="doubtful")])
    assert (score.num_rows, score.num_blank, score.num_inside) == (4, 1, 2)
    assert score.median == pytest.approx(0.5)
    assert score.signed == pytest.approx(0.1)
    assert score.coverage == pytest.approx(2 / 3)
    assert score.width == pytest.approx(1.6)


def test_groups_stand_in_the_order_of_their_first_rows_and_count_once():
    rows = [row(4, group="b"), row(2, group="a"), row(2.2, group="a"), row(None, group="c")]
    by_group = scores(rows)
    assert [score.name for score in by_group] == ["b", "a", "c"]
    assert mean_over_groups(by_group) == pytest.approx(((1 + 0.05) / 2, (1 + 0.09) / 2))
    assert mean_over_groups(by_group[2:]) is None
    assert Score.of(rows, "all").median == pytest.approx(0.1)


def test_a_goal_is_of_the_median_and_the_90th_percentile():
    score = Score.of_errors([0.01, -0.02, 0.3])
    assert score.meets((0.02, 0.25))
    assert not score.meets((0.019, 0.25))
    assert not score.meets((0.02, 0.24))


def test_what_has_no_interval_is_inside_of_none():
    score = Score.of([row(2.0), row(2.0, low=1.0, high=3.0)])
    assert (score.num_inside, score.widths) == (1, (3.0,))
    assert row(1.0, 0.0).error is None


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30))
def test_a_score_is_what_numpy_says_of_the_errors(pairs):
    score = Score.of(row(predicted, measured) for predicted, measured in pairs)
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    assert score.median == np.median(np.abs(errors)) == statistics.median(map(abs, errors))
    assert score.p90 == np.percentile(np.abs(errors), 90)
    assert score.signed == np.median(errors)


def test_coverage_is_judged_by_how_many_cases_there_are():
    low, high = coverage_band(60)
    assert 0.8 < low < 0.9 < high < 1  # all of sixty intervals of 90 % hold: they are too wide
    low, high = coverage_band(5)
    assert low < 0.9 < high == 1
    assert coverage_band(10)[0] <= 0.9 <= coverage_band(10)[1]
