"""Tables of rows and scores."""

from __future__ import annotations

import pytest

from costmodel.scoring import Row, Score
from zosim.analysis.scoreboard import SCORE_COLUMNS, rows_table, score_data, score_table


@pytest.mark.parametrize(
    ("what", "measured", "headings", "shown"),
    [
        ("step_s", 0.0123, "(ms)", "12.3"),
        ("seconds", 0.0123, "(seconds)", "0.0123"),
        ("device_bytes", 3 << 19, "(MiB)", "1.50"),
        ("tokens_per_s", 12345.678, "(tokens/s)", "1.235e+04"),
        ("num_steps_per_hour", 12.5, "(steps/hour)", "12.5"),
        ("sent_gb", 1.25, "(gb)", "1.25"),
    ],
)
def test_a_number_is_shown_in_the_unit_of_its_quantity(what, measured, headings, shown):
    table = rows_table([Row("a", what, measured, 2 * measured)])
    assert table.columns[1] == f"predicted {headings}"
    assert table.rows[0][3:] == (shown, "+100.0%")


def test_the_largest_errors_come_first_and_gaps_are_empty():
    table = rows_table(
        [Row("good", "step_s", 1.0, 1.01), Row("none", "step_s", 1.0), Row("bad", "step_s", 1.0, 0.5)]
    )
    assert [row[0] for row in table.rows] == ["bad", "good", "none"]
    assert table.rows[-1] == ("none", "", "", "1000.0", "")
    assert rows_table([]).rows == []


def test_goals_and_further_columns_stand_behind_the_score():
    scores = [
        Score.of_errors([0.01, -0.03], "ours"),
        Score.of_errors([0.5], "theirs"),
        Score("none", 2, 2, ()),
    ]
    table = score_table(scores, goals={"ours": (0.02, 0.03)}, more={"rank": {"theirs": "0.9"}}, digits=2)
    assert table.columns == ("group", *SCORE_COLUMNS, "goal", "met", "rank")
    assert [row[-3:] for row in table.rows] == [("2 / 3", "yes", ""), ("", "", "0.9"), ("", "", "")]
    assert table.rows[0][:6] == ("ours", "2", "0", "2.00", "2.80", "-1.00")
    assert table.rows[2][1:4] == ("2", "2", "")


def test_data_has_what_is_known():
    assert score_data(Score("none", 2, 2, ())) == {"group": "none", "rows": 2, "blank": 2}
    whole = score_data(Score.of([Row("a", "step_s", 1.0, 1.5, 0.5, 2.0)], "all"))
    assert whole == {
        "group": "all", "rows": 1, "blank": 0, "median": 0.5, "p90": 0.5, "signed": 0.5, "coverage": 1.0, "width": 4.0,
    }  # fmt: skip
