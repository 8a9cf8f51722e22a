"""``python -m studies.quzo``: QuZO's tables with predictions beside what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUT = Path("docs/benchmarks/quzo")


def main(out: Annotated[Path, typer.Option(help="Folder of the report.")] = OUT) -> None:
    """Make the tables of QuZO again, with predictions, errors, verdicts and an audit."""
    from studies.quzo.tables import written

    out.mkdir(parents=True, exist_ok=True)
    path = out / "tables.md"
    path.write_text(written().to_markdown(), encoding="utf-8")
    print(f"report: {path}")


if __name__ == "__main__":
    typer.run(main)
