"""Write a report of how predictions stand beside measurements that others published.

``python -m studies.validation ROWS.csv --hardware DIR --out DIR`` predicts every row as ``zosim validate`` does, and writes
``report.md`` with a table per group and one per source, and a plot of predicted over measured for each group. Rows are not
shipped: whoever has measurements brings them. ``--left-out`` judges the constants that were chosen beside measurements
(:mod:`studies.validation.left_out`) by sources and machines that had no say in them, and writes ``left_out.md``; it predicts
rows some hundred times over.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from costmodel.scoring import Row, Score, scores
from studies.plots import picture
from studies.validation.left_out import CHOSEN, HeldOut, all_left_out, held_out, machine_of, source_of
from topology.errors import MachineError
from zosim.analysis.scoreboard import score_table
from zosim.applications.validation.measured_machines import MeasuredMachines
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import MeasuredRow, joined, read_rows
from zosim.console import stderr, stdout
from zosim.report import Report, Table


def report(rows: Sequence[Row]) -> Report:
    """Return the tables: by group, and by source within each group."""
    by_source = scores(
        sorted(rows, key=lambda row: (row.group, row.provenance)),
        key=lambda row: f"{row.group}, {row.provenance}",
    )
    return Report(
        "Predictions beside published measurements",
        "Errors are predicted over measured less one; inside counts measurements within the predicted interval.",
        _by_group(rows),
        Report("By source", score_table([s for s in by_source if s.errors], "group, source")),
    )


def _by_group(rows: Sequence[Row]) -> Table:
    return score_table([*(score for score in scores(rows) if score.errors), Score.of(rows, "all")])


def left_out_report(rows: Sequence[MeasuredRow], measured_machines: MeasuredMachines) -> Report:
    """Return what becomes of predictions where a source, and where a machine, had no say in any constant."""
    counted = [row for row in rows if row.is_counted and row.measured is not None]
    axes = {"source": source_of, "machine": machine_of}
    judged: list[list[HeldOut]] = [[] for _ in axes]
    for chosen in CHOSEN:
        stderr.print(chosen.name, markup=False)
        for entries, more in zip(
            judged, held_out(counted, measured_machines, chosen, list(axes.values())), strict=True
        ):
            entries.extend(more)
    return Report(
        "Constants without the measurements that they were chosen beside",
        "Each is fitted to all rows but those of one source or machine; neutral is the value that one would take without "
        "measurements, and what is fitted where nobody else has measured.",
        *(
            Report(
                f"Without the {what}'s own rows",
                _held_out_table(what, items),
                "All constants at once, group by group:",
                _by_group(all_left_out(counted, measured_machines, items, axis)),
            )
            for (what, axis), items in zip(axes.items(), judged, strict=True)
        ),
    )


def _held_out_table(what: str, items: Iterable[HeldOut]) -> Table:
    head = (
        "constant",
        f"{what} left out",
        "rows",
        "others",
        "factor",
        "shipped %",
        "refitted %",
        "neutral %",
        "neutral is",
    )
    lines = [
        (
            item.chosen.name,
            item.left_out,
            item.num_rows,
            item.num_others,
            f"{item.factor:.2f}",
            *_errors(item),
        )
        for item in items
    ]
    return Table(head, lines, numeric=head[2:-1])


def _errors(item: HeldOut) -> tuple[str, ...]:
    errors = (item.shipped, item.refitted, item.neutral)
    return (*(f"{100 * error:.1f}" for error in errors), item.chosen.without)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw predicted over measured of every row, a column of dots for each group, coloured by source."""
    dots: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.is_counted and row.error is not None:
            dots[row.group][row.provenance].append(1 + row.error)
    with picture(path, dpi=120, figsize=(10, 0.35 * len(dots) + 1.5)) as (_, axes):
        for place, (_, by_source) in enumerate(dots.items()):
            for number, ratios in enumerate(by_source.values()):
                shift = 0.6 * (number + 0.5) / len(by_source) - 0.3
                axes.plot(ratios, [place + shift] * len(ratios), "o", markersize=3, alpha=0.6)
            middle = statistics.median(ratio for ratios in by_source.values() for ratio in ratios)
            axes.plot([middle], [place], "k|", markersize=14)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yticks(range(len(dots)), list(dots))
        axes.invert_yaxis()
        axes.set_xlabel("predicted / measured; a bar at the median")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m studies.validation", description=__doc__)
    parser.add_argument("rows", type=Path, help="measurements, a row each")
    parser.add_argument("--hardware", type=Path, help="folder of topology files; by default that of the rows")
    parser.add_argument("--out", type=Path, default=Path("validation"), help="folder of the report")
    parser.add_argument("--left-out", action="store_true", help="judge constants by who had no say in them")
    options = parser.parse_args(arguments)
    measured_machines = MeasuredMachines(options.hardware or options.rows.parent)
    rows = read_rows(options.rows)
    judged = [joined(row, outcome(row, measured_machines)) for row in rows]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.left_out:
            # All machines were met above.
            made = left_out_report(rows, measured_machines)
            (options.out / "left_out.md").write_text(made.to_markdown(), encoding="utf-8")
        else:
            made = report(judged)
            plot(judged, options.out / "errors.png")
            text = made.to_markdown() + "\n![Predicted over measured, by group](errors.png)\n"
            (options.out / "report.md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"cannot write {options.out}: {error.strerror}", hint="choose another --out"
        ) from error
    stdout.print(made)


if __name__ == "__main__":
    main()
