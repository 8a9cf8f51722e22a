"""``python -m studies.sparq``: SparQ's tables with predictions beside what is printed, and its timelines with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUT = Path("docs/benchmarks/sparq")


def main(out: Annotated[Path, typer.Option(help="Folder of the report and its picture.")] = OUT) -> None:
    """Make the tables of SparQ again, with predictions, errors, verdicts, arithmetic, and Fig. 3 as predicted steps."""
    from studies.published.rows import shipped_rows
    from studies.published.sparq import PAPER, printed_volumes
    from studies.sparq import timelines
    from studies.sparq.tables import held_out, written
    from zosim.report import Picture, Report

    out.mkdir(parents=True, exist_ok=True)
    steps = list(timelines.steps())
    picture = timelines.draw(steps, out)
    report = written(
        Report(
            "Fig. 3 with numbers",
            timelines.HEAD,
            timelines.table(steps),
            timelines.compared(steps),
            Picture("One step of each method", picture.name),
        )
    )
    path = out / "tables.md"
    path.write_text(report.to_markdown(), encoding="utf-8")
    print(held_out(printed_volumes(shipped_rows(PAPER))).to_markdown())
    print(f"report: {path}")


if __name__ == "__main__":
    typer.run(main)
