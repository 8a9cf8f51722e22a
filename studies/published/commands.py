"""``zosim predict``, and the half of ``zosim calibrate`` that reads rows instead of measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from studies.published.dispatch import answers_of_all
from studies.published.fitted_profile import PublishedProfile, calibrate_on, load_published_profile
from studies.published.rows import read_rows, shipped_rows, write_rows
from zosim.console import emit, progress, stderr
from zosim.documents import check_writable
from zosim.report import Report, Table

SHIPPED = "shipped"


def predict(
    cases: Annotated[
        Path,
        typer.Argument(
            help="CSV file of cells of the ZO2, DistZO2, SparQ, QuZO and ZOinfer tables; the column `value` "
            "may be empty."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write the rows with predictions to.", rich_help_panel="Output"
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile fitted to rows, from `zosim calibrate --rows`.",
            show_default="fitted to all built-in rows",
            rich_help_panel="Hardware",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Predict cells of published tables, each with a 90 % interval and its bottleneck."""
    check_writable(output)
    rows = read_rows(cases)
    fitted = load_published_profile(profile)
    with progress() as bar:
        task = bar.add_task("predicting", total=None)
        reported = answers_of_all(rows, fitted, on_cell=lambda: bar.advance(task))
    write_rows(output, rows, [answer.columns() for answer in reported])
    num_predicted = sum(answer.predicted is not None for answer in reported)
    stderr.print(f"wrote {output}", markup=False, soft_wrap=True)
    data = {"rows": len(rows), "predicted": num_predicted, "output": str(output)}
    emit(data, json=as_json, text=f"{num_predicted} of {len(rows)} rows predicted")


def calibrate_rows(rows: str, output: Path | None, *, as_json: bool) -> None:
    """Fit the constants that published rows may decide, and print them.

    - `rows`: a CSV file, or ``"shipped"``.
    - `output`: where to write the profile.
    """
    fitted = calibrate_on(shipped_rows() if rows == SHIPPED else read_rows(rows))
    if output is not None:
        fitted.save(output)
        stderr.print(f"wrote {output}", markup=False, soft_wrap=True)
    emit(fitted, json=as_json, text=_view(fitted))


def _view(profile: PublishedProfile) -> Report:
    views: list[Table] = []
    for fit in profile.fits:
        rows = [
            (c.name, f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", c.unit, c.identified_by)
            for c in fit.constants
        ]
        title = f"{fit.paper}, {fit.domain}: {len(rows)} constants from {fit.num_cells} cells"
        views.append(Table((title, "value", "interval", "unit", "identified by"), rows))
    views += _counted_views(profile)
    return Report("", *views)


def _counted_views(profile: PublishedProfile) -> list[Table]:
    """Return the constants of SparQ's and QuZO's tables, of SparQ's without the effects of single runs."""
    views: list[Table] = []
    volumes, peaks = (profile.sparq.volumes, profile.sparq.peaks) if profile.sparq else (None, None)
    for what, fit in (
        ("SparQ, volumes", volumes),
        ("SparQ, memory", peaks),
        ("QuZO, memory", profile.quzo),
        ("ZOinfer, speed-ups", profile.zoinfer),
    ):
        if fit is not None:
            rows = [
                (c.name, f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", c.unit, c.meaning)
                for c in fit.constants
            ]
            title = f"{what}: {len(rows)} constants from {fit.num_cells} cells"
            views.append(Table((title, "value", "interval", "unit", "meaning"), rows))
    return views
