"""``zosim sweep``: a file of configurations planned, on many cores and machines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.control import Control
from rich.segment import ControlType

from zosim.applications.sweep.sweeping import SweepProgress
from zosim.applications.sweep.sweeping import sweep as sweep_of
from zosim.console import emit, stderr
from zosim.options import Json

_REPORT_EVERY_S = 10.0


def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            help="Configurations: a CSV file with one per row and options of `zosim plan` as columns, or a "
            "YAML or JSON file with a list of values per option, of which all products are planned.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="SQLite file of the results; rows that it has are not planned again.",
            show_default="FILE with the suffix .sqlite",
            rich_help_panel="Output",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of worker processes.",
            show_default="the number of cores",
            rich_help_panel="Run",
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            help="Part of the configurations to plan, such as 2/8 for the second of eight; give each its own "
            "--output.",
            rich_help_panel="Run",
        ),
    ] = "1/1",
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            help="Results of another shard to add first; repeat for more. Rows that clash are refused.",
            rich_help_panel="Run",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV file to write all rows to, in the order of their keys.", rich_help_panel="Output"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan every configuration of a file, and keep the results in a database.

    The same command continues where it was interrupted or killed. A configuration that fails is a row with its error.
    """
    outcome = sweep_of(
        file,
        output,
        workers=workers,
        shard=shard,
        merge=merge or (),
        table=table,
        on_progress=_Reporter(),
    )
    stderr.print(f"wrote {outcome.output}", soft_wrap=True)
    emit(outcome.to_data(), json=as_json, text=outcome.view())


class _Reporter:
    """Says how far a sweep is: in a terminal in a line that is written over, elsewhere in a line every ten seconds."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + (0.0 if stderr.is_terminal else _REPORT_EVERY_S)

    def __call__(self, progress: SweepProgress) -> None:
        is_last = progress.num_done == progress.num_total
        if time.monotonic() < self._due_s and not (is_last and stderr.is_terminal):
            return
        self._due_s = time.monotonic() + (0.2 if stderr.is_terminal else _REPORT_EVERY_S)
        if stderr.is_terminal:
            stderr.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        stderr.print(str(progress), end="" if stderr.is_terminal and not is_last else "\n", soft_wrap=True)
