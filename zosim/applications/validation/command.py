"""``zosim validate``: rows of measurements, each with what is predicted for it, and how far predictions are off."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import REQUIRED, Forecast, columns_of, read_rows
from zosim.applications.validation.scoring import Score, scores, total
from zosim.applications.validation.site import Sites
from zosim.applications.validation.tables import write_table
from zosim.console import emit, progress, stderr
from zosim.documents import check_writable
from zosim.options import Json, ProfileFile
from zosim.report import Bullets, Report, Table

_COLUMNS = ("group", "rows", "blank", "median %", "p90 %", "signed %", "inside", "high/low")


def validate(
    rows_file: Annotated[
        Path, typer.Argument(metavar="ROWS.csv", help="Measurements, a row each.", show_default=False)
    ],
    hardware: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of the topology files that rows name; by default that of the rows.",
        ),
    ] = None,
    profile: ProfileFile = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the rows with predictions here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict measurements that somebody made, and say how far predictions are off, group by group."""
    check_writable(output)
    rows = read_rows(rows_file)
    sites = Sites(hardware or rows_file.parent, profile)
    with progress() as bar:
        task = bar.add_task("predicting", total=len(rows))
        outcomes = []
        for row in rows:
            outcomes.append((row, outcome(row, sites)))
            bar.advance(task)
    by_group = scores(outcomes)
    if output is not None:
        write_table(output, rows, [columns_of(said) for _, said in outcomes], REQUIRED)
        stderr.print(f"wrote {output}", markup=False, soft_wrap=True)
    reasons = Counter(said for _, said in outcomes if isinstance(said, str))
    num_predicted = sum(isinstance(said, Forecast) for _, said in outcomes)
    data = {
        "rows": len(rows),
        "predicted": num_predicted,
        "groups": [_data(score) for score in by_group],
        "mean_of_medians": _mean(score.median for score in by_group if score.errors),
        "mean_of_p90": _mean(score.p90 for score in by_group if score.errors),
        "not_predicted": dict(reasons.most_common()),
    }
    emit(data, json=as_json, text=_view(by_group, len(rows), num_predicted, reasons))


def _data(score: Score) -> dict[str, Any]:
    known: dict[str, Any] = {"group": score.name, "rows": score.num_rows, "blank": score.num_blank}
    if score.errors:
        known |= {
            "median": score.median,
            "p90": score.p90,
            "signed": score.signed,
            "coverage": score.coverage,
            "width": score.width,
        }
    return known


def _view(by_group: Sequence[Score], num_rows: int, num_predicted: int, reasons: Counter[str]) -> Report:
    said = f"{num_predicted} of {num_rows} rows predicted"
    why = Bullets(f"{count} not predicted: {reason}" for reason, count in reasons.most_common(10))
    scored = [score for score in by_group if score.errors]
    if not scored:
        return Report("", f"{said}; none of them is measured", why)
    lines = [_cells(score) for score in (*by_group, total(by_group))]
    mean = (
        f"mean over groups: median {100 * (_mean(s.median for s in scored) or 0):.1f} %, "
        f"90th percentile {100 * (_mean(s.p90 for s in scored) or 0):.1f} %"
    )
    return Report("", Table(_COLUMNS, lines, numeric=_COLUMNS[1:]), f"{said}; {mean}", why)


def _cells(score: Score) -> tuple[str, ...]:
    counts = (score.name, str(score.num_rows), str(score.num_blank))
    if not score.errors:
        return (*counts, *("",) * (len(_COLUMNS) - len(counts)))
    errors = (f"{100 * score.median:.1f}", f"{100 * score.p90:.1f}", f"{100 * score.signed:+.1f}")
    return (*counts, *errors, f"{100 * score.coverage:.0f} %", f"{score.width:.2f}")


def _mean(numbers: Iterable[float]) -> float | None:
    known = list(numbers)
    return statistics.fmean(known) if known else None
