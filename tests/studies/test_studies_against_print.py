"""The report against print: predictions from data sheets, splits and intervals."""

import pytest

from costmodel.published import shipped_rows
from studies.against_print.sheets import sheet_outcomes, sheets_section
from zosim.published.audit import Finding
from zosim.published.cells import cells_of, preset_machine

CELLS, _, _ = cells_of([row for row in shipped_rows() if row["model"] == "OPT-1.3B" and row["table"] == "1"])


@pytest.fixture(scope="module")
def outcomes():
    return sheet_outcomes(CELLS, [])


def test_data_sheets_know_nothing_of_rows(outcomes):
    machine = preset_machine(CELLS[0].case.preset, CELLS[0].case.plan.placement.devices)
    assert machine.profile.origin == "datasheet"
    assert not any("fitted" in constant.source for constant in machine.profile.constants)
    assert all(item.low < item.predicted < item.high for item in outcomes)


def test_cells_without_a_throughput_and_those_apart_are_left_out(outcomes):
    speeds = [cell for cell in CELLS if cell.row.kind == "throughput" and cell.value is not None]
    assert len(outcomes) == len(speeds)
    finding = Finding("a rule", (speeds[0].row.place,), "its arithmetic")
    assert len(sheet_outcomes(CELLS, [finding])) == len(speeds) - 1


def test_the_section_counts_cells_of_both_papers(outcomes):
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in sheets_section(outcomes).splitlines()
        if line.startswith("| **")
    }
    assert (
        int(rows["**ZO2 throughput**"]) + int(rows["**DistZO2 throughput**"])
        == int(rows["**both**"])
        == len(outcomes)
    )
