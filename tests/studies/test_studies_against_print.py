"""The report against print: predictions from data sheets, splits and intervals."""

import numpy as np
import pytest

from studies.against_print.report import sheet_rows, sheets_section
from studies.against_print.splits import mean_rank_correlation
from studies.published.audit import AuditFinding
from studies.published.cells import cells_of, preset_machine
from studies.published.rows import PublishedRow, shipped_rows
from zosim.report import Table

CELLS, _, _ = cells_of([row for row in shipped_rows() if row["model"] == "OPT-1.3B" and row["table"] == "1"])


@pytest.fixture(scope="module")
def rows():
    return sheet_rows(CELLS, [])


@pytest.mark.slow
def test_data_sheets_know_nothing_of_rows(rows):
    machine = preset_machine(CELLS[0].case.preset, CELLS[0].case.plan.placement.devices)
    assert machine.profile.origin == "datasheet"
    assert not any("fitted" in constant.source for constant in machine.profile.constants)
    assert all(row.low < row.predicted < row.high for row in rows if row.low is not None)


@pytest.mark.slow
def test_cells_without_a_throughput_and_those_apart_are_left_out(rows):
    speeds = [cell for cell in CELLS if cell.row.kind == "throughput" and cell.value is not None]
    assert len(rows) == 2 * len(speeds)
    finding = AuditFinding("a rule", (speeds[0].row.place,), "its arithmetic")
    assert len(sheet_rows(CELLS, [finding])) == 2 * (len(speeds) - 1)


@pytest.mark.slow
def test_the_section_counts_cells_of_both_papers(rows):
    (table,) = (part for part in sheets_section(rows).elements if isinstance(part, Table))
    counts = {line[0]: int(line[1]) for line in table.rows if line[0].startswith("**")}
    assert counts["**ZO2 throughput**"] + counts["**DistZO2 throughput**"] == counts["**both**"]
    assert 2 * counts["**both**"] == len(rows)


def printed_row(table, values, **fields):
    """Return cells of one printed row, one per way in which DistZO2's tables use two or four GPUs, or none."""
    methods = (("MeZO", "1"), ("ZO2", "1"), ("ZO2+PertP", "2"), ("ZO2+DDP", "2"), ("ZO2+PertP+DDP", "4"))
    base = {
        "paper": "DistZO2", "table": table, "model": "OPT-1.3B", "gpu_type": "H20-96GB", "batch_size": "4",
        "seq_len": "2048", "precision": "fp16", "quantity": "throughput", "unit": "tokens/s", **fields,
    }  # fmt: skip
    return [
        PublishedRow({**base, "method": method, "gpus": gpus, "value": str(value), "cell": f"r1c{column}"})
        for column, ((method, gpus), value) in enumerate(zip(methods, values, strict=False))
    ]


def test_the_order_within_a_printed_row_is_compared_row_by_row():
    rows = printed_row("1", [100, 200, 300, 400]) + printed_row("3", [40, 30, 20, 10], batch_size="8")
    cells, _, _ = cells_of(rows)
    rising = np.array([1.0, 2, 3, 4, 1, 2, 3, 4])
    assert mean_rank_correlation(cells, rising, frozenset()) == pytest.approx(0)
    assert mean_rank_correlation(cells[:4], rising[:4], frozenset()) == pytest.approx(1)
    assert mean_rank_correlation(cells[4:], rising[4:], frozenset()) == pytest.approx(-1)


def test_what_print_does_not_tell_apart_is_held_against_nobody_unless_strictly():
    cells, _, _ = cells_of(printed_row("1", [100, 100, 300, 400, 500]))
    predicted = np.array([110.0, 90, 300, 400, 500])
    assert mean_rank_correlation(cells, predicted, frozenset()) == pytest.approx(1)
    assert mean_rank_correlation(cells, predicted, frozenset(), is_strict=True) < 0.99
    # Told apart in print and not in the prediction is a fault either way.
    cells, _, _ = cells_of(printed_row("1", [100, 200, 300, 400, 500]))
    assert mean_rank_correlation(cells, np.array([1.0, 1, 3, 4, 5]), frozenset()) < 0.99


def test_cells_set_apart_are_not_ranked_and_short_rows_neither():
    cells, _, _ = cells_of(printed_row("1", [100, 200, 300, 400, 50]))
    predicted = np.array([1.0, 2, 3, 4, 5])
    assert mean_rank_correlation(cells, predicted, frozenset()) < 0.2
    assert mean_rank_correlation(cells, predicted, frozenset({cells[4].row.place})) == pytest.approx(1)
    assert np.isnan(mean_rank_correlation(cells[:3], predicted[:3], frozenset()))
