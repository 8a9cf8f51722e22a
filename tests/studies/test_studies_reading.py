"""The page on reading predictions: its claims."""

from __future__ import annotations

import pytest

from studies.reading_predictions.cases import on_cpu, rows_of, run_on
from zosim.analysis.compare import compare


def test_a_machine_as_its_profile_says_differs_by_noise_alone():
    rows = rows_of(on_cpu("opt-10m"), "sampling", 1.0)
    assert all(abs(row.measured_s / row.predicted_s - 1) < 0.05 for row in rows)
    for row in rows:
        assert sum(row.terms.values()) == pytest.approx(row.predicted_s)


@pytest.mark.parametrize("term", ["sampling", "matmul"])
def test_a_wrong_constant_shows_under_the_labels_that_depend_on_it(term):
    planned = on_cpu("opt-10m", seq=256)
    found = compare(planned.timeline, run_on(planned, term, 3.0), planned.program)
    worst = found.labels[0]
    assert worst.name == {"sampling": "sample", "matmul": "forward"}[term]
    others = [line for line in found.labels if line.name not in (worst.name, "forward")]
    assert all(abs(line.error or 0.0) < 0.01 for line in others if line.name in ("update", "perturb"))
    total = sum(line.contribution_s for line in found.labels)
    assert total == pytest.approx(found.predicted_step_s - found.measured_step_s, rel=1e-6)
