"""The page on reading predictions: its claims, its exercise, the usual wrong solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.exercises import function_in, tried
from studies.reading_predictions.cases import TERMS, on_cpu, rows_of, run_on
from studies.reading_predictions.exercise import check
from zosim.analysis.compare import compare

STUB = Path(__file__).parents[2] / "studies" / "reading_predictions" / "stub.py"


def fit(rows, term):
    """Factor of one cause that explains the rows best, and what it leaves unexplained."""
    parts = [row.terms.get(term, 0.0) / row.predicted_s for row in rows]
    excess = [row.measured_s / row.predicted_s - 1 for row in rows]
    squares = sum(part * part for part in parts)
    slope = sum(p * e for p, e in zip(parts, excess, strict=True)) / squares if squares else 0.0
    left = sum((e - slope * p) ** 2 for p, e in zip(parts, excess, strict=True))
    return left, 1 + slope


def right(rows):
    best = min(TERMS, key=lambda term: fit(rows, term)[0])
    return best, fit(rows, best)[1]


def largest_term_of_the_worst_row(rows):
    row = max(rows, key=lambda row: abs(row.measured_s - row.predicted_s))
    term = max((t for t in row.terms if t in TERMS), key=lambda t: row.terms[t])
    return term, row.measured_s / row.predicted_s


def ratio_of_steps(rows):
    return right(rows)[0], sum(r.measured_s for r in rows) / sum(r.predicted_s for r in rows)


def upside_down(rows):
    term, factor = right(rows)
    return term, 1 / factor


def test_the_reference_solution_passes():
    verdict = check(right)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (largest_term_of_the_worst_row, "it is"),
        (ratio_of_steps, "ratio of whole steps"),
        (upside_down, "upside down"),
        (lambda rows: ("matmul", 2.0), "it is not matmul"),
        (lambda rows: (right(rows)[0], 1.3), "take off what else"),
        (lambda rows: ("memory", 2.0), "is none of"),
        (lambda rows: "draw", "a cause and a factor"),
    ],
)
def test_a_wrong_solution_is_refused_with_advice(wrong, advice):
    verdict = check(wrong)
    assert not verdict.passed
    assert advice in verdict.message


def test_the_stub_does_not_pass_and_says_so():
    assert tried(check, function_in(STUB, "diagnose")).message == "it raised NotImplementedError: write it"


def test_a_machine_as_its_profile_says_differs_by_noise_alone():
    rows = rows_of(on_cpu("opt-10m"), "draw", 1.0)
    assert all(abs(row.measured_s / row.predicted_s - 1) < 0.05 for row in rows)
    for row in rows:
        assert sum(row.terms.values()) == pytest.approx(row.predicted_s)


@pytest.mark.parametrize("term", ["draw", "matmul"])
def test_a_wrong_constant_shows_under_the_labels_that_depend_on_it(term):
    subject = on_cpu("opt-10m", seq=256)
    found = compare(subject.timeline, run_on(subject, term, 3.0), subject.program)
    worst = found.labels[0]
    assert worst.name == {"draw": "draw", "matmul": "forward"}[term]
    others = [line for line in found.labels if line.name not in (worst.name, "forward")]
    assert all(abs(line.error or 0.0) < 0.01 for line in others if line.name in ("update", "perturb"))
    total = sum(line.contribution_s for line in found.labels)
    assert total == pytest.approx(found.predicted_step_s - found.measured_step_s, rel=1e-6)
