"""Cells that claims quote from tables that ship as rows are the rows' cells: neither was typed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from proofs_checks import printed_tables
from studies.published.rows import shipped_rows

QUOTED: dict[Callable[[], Mapping[str, Any]], tuple[str, ...]] = {
    printed_tables.sparq_first_order: ("SparQ 2",),
    printed_tables.sparq_memory: ("SparQ 2",),
    printed_tables.sparq_communication: ("SparQ 2",),
    printed_tables.sparq_bits: ("SparQ 1",),
    printed_tables.quzo_tasks_memory: ("QuZO 14",),
    printed_tables.zo2_main: ("ZO2 1",),
    printed_tables.zo2_left_out: ("ZO2 3",),
    printed_tables.zo2_compressed: ("ZO2 5",),
    printed_tables.zo2_settings: ("ZO2 6", "ZO2 7"),
    printed_tables.distzo2_main: ("DistZO2 1",),
    printed_tables.distzo2_pairs_of_methods: ("DistZO2 3",),
    printed_tables.distzo2_gap: ("DistZO2 5",),
}


def quoted_cells(table: Callable[[], Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield each number of a table with the words of its row."""
    for words, cells in table().items():
        for cell in cells:
            yield words, float(cell)


def printed_cells(tables: tuple[str, ...], words: str) -> set[float]:
    """Return what the tables print of the model that a row's words name."""
    return {
        row.value
        for row in shipped_rows()
        if f"{row['paper']} {row['table']}" in tables and row.value is not None
        if row["model"].replace(" ", "-").lower() in words.replace(" ", "-").lower()
    }


@pytest.mark.parametrize("table", QUOTED, ids=lambda table: table.__name__)
def test_quoted_cells_are_printed_ones(table):
    cells = list(quoted_cells(table))
    assert len(cells) > 5
    for words, cell in cells:
        assert cell in printed_cells(QUOTED[table], words), f"{table.__name__}, {words}: {cell}"
