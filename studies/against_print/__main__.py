"""``python -m studies.against_print``: held-out errors of the predictions and of three baselines, as a report."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

OUT = Path("docs/benchmarks")


def main(out: Annotated[Path, typer.Option(help="Folder of the report.")] = OUT) -> None:
    """Hold predictions against print, rows kept back by setting, and write the report (minutes)."""
    from studies.against_print.report import written

    path = out / f"{datetime.datetime.now(tz=datetime.UTC).date()}-against-print.md"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(written(), encoding="utf-8")
    print(f"report: {path}")


if __name__ == "__main__":
    typer.run(main)
