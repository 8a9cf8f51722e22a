"""``python -m studies.zo2``: every table of ZO2 with predictions beside what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUT = Path("docs/benchmarks/zo2")


def main(out: Annotated[Path, typer.Option(help="Folder of the report and its plots.")] = OUT) -> None:
    """Make the tables of ZO2 again, with predictions, errors, verdicts, plots and an audit."""
    from studies.printed import write

    print(f"report: {write('ZO2', out)}")


if __name__ == "__main__":
    typer.run(main)
