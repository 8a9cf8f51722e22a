"""``zosim validate``: rows of measurements, each with what is predicted for it, and how far predictions are off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from costmodel.scoring import Score, mean_over_groups, scores
from zosim.analysis.scoreboard import score_data, score_table
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import (
    FITS,
    REQUIRED,
    Verdicts,
    columns_of,
    joined,
    read_rows,
    write_table,
)
from zosim.console import emit, progress, stderr
from zosim.documents import check_writable
from zosim.options import Json, ProfileFile
from zosim.report import Bullets, Report


def validate(
    rows_file: Annotated[
        Path,
        typer.Argument(metavar="ROWS.csv", help="CSV file of measurements, one per row.", show_default=False),
    ],
    hardware: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of the topology files that rows name.",
            show_default="the folder of the CSV file",
        ),
    ] = None,
    profile: ProfileFile = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the rows with predictions to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the measurements of a CSV file, and report the errors of each group of rows."""
    check_writable(output)
    rows = read_rows(rows_file)
    measured_machines = MeasuredMachines(hardware or rows_file.parent, profile)
    with progress() as bar:
        task = bar.add_task("predicting", total=len(rows))
        outcomes = []
        for row in rows:
            outcomes.append((row, outcome(row, measured_machines)))
            bar.advance(task)
    judged = [joined(row, forecast) for row, forecast in outcomes if row["kind"] != FITS]
    verdicts = Verdicts.of(outcomes)
    by_group = scores(judged)
    if output is not None:
        write_table(output, rows, [columns_of(forecast) for _, forecast in outcomes], REQUIRED)
        stderr.print(f"wrote {output}", soft_wrap=True)
    reasons = Counter(forecast for _, forecast in outcomes if isinstance(forecast, str))
    num_predicted, mean = len(rows) - reasons.total(), mean_over_groups(by_group)
    data = {
        "rows": len(rows),
        "predicted": num_predicted,
        "groups": [score_data(score) for score in by_group],
        "mean_of_medians": None if mean is None else mean[0],
        "mean_of_p90": None if mean is None else mean[1],
        "fits": verdicts.to_data(),
        "not_predicted": dict(reasons.most_common()),
    }
    counted = f"{num_predicted} of {len(rows)} rows predicted"
    why = Bullets(f"{count} not predicted: {reason}" for reason, count in reasons.most_common(10))
    fitting = [str(verdicts)] if verdicts.num else []
    if mean is None:
        none = [] if verdicts.num else [f"{counted}; none of them is measured"]
        emit(data, json=as_json, text=Report("", *none, *fitting, why))
        return
    shown = score_table([*by_group, Score.of(judged, "all")])
    summary = (
        f"{counted}; mean over groups: median {100 * mean[0]:.1f} %, 90th percentile {100 * mean[1]:.1f} %"
    )
    emit(data, json=as_json, text=Report("", shown, summary, *fitting, why))
