"""Claims about printed tables as rows: what expressions say, and what a row that is malformed is told."""

from __future__ import annotations

import copy
import re

import pytest
import yaml

from proofs_checks.claims import try_fault
from proofs_checks.outcomes import Context
from proofs_checks.pages import THEORY, Page, pages
from proofs_checks.planting import Fault
from proofs_checks.printed.cells import PrintedError, printed_rows, printed_table, table_rows
from proofs_checks.printed.expressions import FORMS, Figures, judged
from proofs_checks.printed.rows import checks_of, wrong_cell
from proofs_checks.registry import CLAIMS

ROWS = ("OPT-1.3B, RTE", "OPT-1.3B, WIC", "OPT-13B, RTE")
COLUMNS = {
    "a": Figures.rounded(["15", "6", "2.50"], ROWS),
    "b": Figures.rounded(["6", "3", "1.0"], ROWS),
    "other": Figures.rounded(["1", "2"], ("x", "y")),
}


def so(expression):
    return [outcome.passed for outcome in judged(expression, COLUMNS).values()]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a > b", [True, True, True]),
        ("a / b == 2.8", [True, False, False]),  # 15/6 is at most 15.5/5.5 = 2.82, 6/3 at most 6.5/2.5
        ("a / b != 2.8", [False, True, True]),
        ("a / b == 2", [True, True, True]),
        ("(a / b)['OPT-13B, RTE'] == 2.40", [True]),
        ("(a / b)['OPT-13B, RTE'] == 2.30", [False]),
        ("a['OPT-1.3B, RTE'] == 15", [True]),
        ("a['OPT-1.3B, RTE'] == 16", [False]),  # from 15.5 on; the ranges touch
        ("max(a) == 15.0", [True]),
        ("1 < b < a", [True, True, False]),
        ("a >= b >= 1", [True, True, True]),
        ("(a > b)['*, RTE']", [True, True]),
        ("but(a > 2 * b, 'OPT-1.3B, WIC')", [True, True]),
        ("a['OPT-1.3B, RTE', 'OPT-13B, RTE'] > 2 * b['*, RTE']", [True, True]),
        ("count(a > 2 * b) == 2", [True]),
        ("count(a > 2 * b) == 3", [False]),
        ("mean(a - b) > 4.4", [True]),
        ("mean(a, b)['OPT-1.3B, WIC'] == 4.5", [True]),
        ("sum(b) == 10.0", [True]),
        ("min(a, b) == b", [True, True, True]),
        ("abs(b - a) >= 1.5", [True, True, True]),
        ("-b < 0", [True, True, True]),
        ("least(a / b) > 2", [True, False, True]),  # 14.5/6.5, 5.5/3.5, 2.495/1.05
        ("most(a / b)['OPT-1.3B, WIC'] <= 2.6", [True]),
        ("most(a / b)['OPT-1.3B, WIC'] <= 2.59", [False]),
        ("least(b - a)['OPT-1.3B, WIC'] == -4.0", [True]),
        ("cut(a / b, 0) == 2", [True, True, True]),
        ("falling(a)", [True, True]),
        ("falling(b - a)", [False, False]),
        ("whole(a / 10)", [False, False, False]),
        ("whole(a * 2)", [True, True, True]),
    ],
)
def test_expressions_say_what_they_are_documented_to(expression, expected):
    assert so(expression) == expected


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("a >", "is not an expression"),
        ("a + b", "`a + b` is not a comparison"),
        ("a > c", "unknown column 'c'"),
        ("a > other", "its columns have different rows"),
        ("max(a, other) > 1", "its columns have different rows"),
        ("a - other > 1", "its columns have different rows"),
        ("floor(a) > b", "`floor` does not take 1 argument"),
        ("abs(a, b) > b", "`abs` does not take 2 arguments"),
        ("a ** 2 > b", "`a ** 2` is not a number"),
        ("a.size > 0", "`a.size` is not a number"),
        ("__import__('os') > 0", "`__import__` does not take 1 argument"),
        ("[a for a in b] > 0", "is not a number"),
        ("a is b", "uses an unknown comparison"),
        ("a > 'much'", "`'much'` is not a number"),
        ("a > True", "`True` is not a number"),
        ("(a > b)['OPT-66B']", "unknown row 'OPT-66B'"),
        ("a[0] > 1", "`0` must be the name of a row in quotes"),
        ("max(max(a)) > 1", "`max(a)` has no rows"),
        ("falling(max(a))", "it must compare something"),
        ("falling(a['OPT-1.3B, *'])['OPT-13B, RTE']", "unknown row 'OPT-13B, RTE'"),
        ("but(a > b, '*')", "it excludes every row"),
        ("but(a, '*') > b", "it excludes every row"),
        ("a / (b - b) > 1", "the divisor may be 0"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_text(expression, what):
    with pytest.raises(PrintedError) as caught:
        so(expression)
    assert what in caught.value.message
    assert expression in caught.value.message


def test_a_table_is_read_by_columns_and_rows_that_lack_one_are_left_out():
    cells = printed_table(
        {
            "mezo": {"table": "ZO2 1", "quantity": "memory", "method": "MeZO", "precision": "fp32"},
            "zo2": {"table": "ZO2 1", "quantity": "memory", "method": "ZO2", "precision": "fp32"},
        }
    )
    assert list(cells) == ["OPT-1.3B", "OPT-2.7B", "OPT-13B"]  # MeZO runs out of memory behind
    assert cells["OPT-13B"]["zo2"]["value"] == "10736"


def test_tables_that_nobody_predicts_are_no_cells_to_predict():
    assert table_rows("QuZO 21")
    assert not any(row["table"] == "21" for row in printed_rows())


@pytest.fixture
def entry():
    """The entry of a claim about a table, to be changed."""
    named = (entry for page in pages() for entry in page.entries)
    return copy.deepcopy(next(entry for entry in named if entry["name"] == "sparq-memory-is-not-threefold"))


def put(entry, value, *path):
    *before, last = path
    for each in before:
        entry = entry[each]
    entry[last] = value


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("cells", 0, "table"), "SparQ 9", "unknown printed table 'SparQ 9'"),
        (("cells", 0, "task"), "RTE", "selects by 'task', but SparQ 2 has no such field"),
        (("cells", 0, "dataset"), "SST-3", "column fo matches no cell of SparQ 2"),
        (("cells", 0, "columns", "fo"), "FO", "method 'FO'"),
        (("cells", 0, "columns", "fo"), 3, "column fo must be a method or a mapping of fields, not 3"),
        (
            ("cells", 0, "columns", "fo"),
            {"method": "FO-SGD", "read": "colour"},
            "'colour' of column fo: '' is not a number",
        ),
        (("cells", 0, "columns"), {}, "an entry of cells must have a table and columns"),
        (("cells", 0, "row"), "{size}", "row '{size}' must name fields"),
        (("cells", 0, "row"), "all", "row 'all' gives the name 'all' to two cells of column fo"),
        (("cells", 0, "quantity"), "act", "no cell"),
        (("checks", 0, "role"), "counter", "unknown role 'counter'"),
        (("checks", 0, "role"), ["printed"], "unknown role \"['printed']\""),
        (("checks", 0, "asserts"), "fo > sparq", "asserts must be a list of comparisons, not 'fo > sparq'"),
        (("checks", 0, "asserts"), [], "asserts must be a list of comparisons, not []"),
        (("checks", 0, "asserts", 0), 3, "`3` is not a comparison"),
        (
            ("checks", 0, "rule"),
            "yes",
            "a check must have the keys role, title, asserts and may have faults, not",
        ),
        (("checks", 0, "asserts", 0), "fo / spark < 3", "unknown column 'spark'"),
        (("checks", 0, "faults", 0, "column"), "spark", "unknown column 'spark'"),
        (("checks", 0, "faults", 0, "column"), ["fo"], "unknown column"),
        (("checks", 0, "faults", 0, "row"), "OPT-66B", "unknown row 'OPT-66B'"),
        (("checks", 0, "faults", 0, "value"), 15, "'a larger first-order run' changes nothing"),
        (
            ("checks", 0, "faults", 0),
            {"name": "a fault"},
            "a fault must have the keys name, column, row, value, not",
        ),
    ],
)
def test_a_malformed_row_is_refused_with_page_claim_and_value(entry, path, value, what):
    put(entry, value, *path)
    with pytest.raises(ValueError, match=r"sparq/page\.md: sparq-memory-is-not-threefold: ") as caught:
        list(Page("sparq/page.md", "", (entry,)).claims({}))
    assert what in str(caught.value)


def test_a_column_that_two_selections_name_is_refused(entry):
    entry["cells"].append(entry["cells"][0])
    with pytest.raises(PrintedError, match="column names must differ: fo, sparq, fo, sparq"):
        checks_of(entry)


def test_a_wrong_cell_is_seen_while_it_is_planted_and_by_the_check(entry):
    (check,) = checks_of(entry)
    fault = check.faults[0]
    assert isinstance(fault, Fault)
    values = [row["value"] for row in table_rows("SparQ 2")]
    with fault.apply():
        changed = [row["value"] for row in table_rows("SparQ 2")]
    assert [pair for pair in zip(values, changed, strict=True) if pair[0] != pair[1]] == [("15", "25")]
    assert [row["value"] for row in table_rows("SparQ 2")] == values
    assert try_fault(check, fault, Context()).verdict == "caught"
    near = wrong_cell("as much as 2.92 times", table_rows("SparQ 2")[1], "2.9")
    assert try_fault(check, near, Context()).verdict == "survived"


@pytest.mark.parametrize(("value", "written"), [(12, "12"), (12.5, "12.5"), ("12.50", "12.50")])
def test_a_wrong_value_is_written_as_its_cell_is(entry, value, written):
    entry["checks"][0]["faults"] = [{"name": "wrong", "column": "fo", "row": "OPT-1.3B", "value": value}]
    (check,) = checks_of(entry)
    assert check.faults[0].name == f"wrong (SparQ 2, r4c1: {written} for 15)"


def test_a_wrong_value_keeps_the_places_of_its_cell():
    claim = next(claim for claim in CLAIMS if claim.name == "zoinfer-factorized-runs-keep-up")
    assert "0.570 for 0.590" in claim.faults[-1].name


def test_the_example_of_the_documentation_is_the_claim_and_every_form_is_documented(entry):
    text = (THEORY.resolve().parent / "reference" / "claims.md").read_text(encoding="utf-8")
    section = text.partition("## A claim about a printed table\n")[2].partition("\n## ")[0]
    (output,) = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    for key in ("name", "where", "hypotheses", "breaks", "verdict", "checks"):
        assert output[key] == entry[key], key
    assert output["cells"] == [{"row": "{model}", **cells} for cells in entry["cells"]]
    for form in FORMS:
        assert set(re.findall(r"\w+(?=\()", form)) <= set(re.findall(r"\w+(?=\()", section)), form


def test_bounds_that_no_row_comes_near_show_nothing(entry):
    entry["checks"][0] |= {"role": "printed", "asserts": ["fo / sparq <= 100"]}
    (check,) = checks_of(entry)
    outcome = check.run(Context())
    assert not outcome.passed
    assert "too far above" in outcome.measured
