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

from studies.plots import picture
from studies.validation.left_out import CHOSEN, HeldOut, all_left_out, held_out, machine_of, source_of
from topology.errors import MachineError
from zosim.applications.validation.predicting import outcome
from zosim.applications.validation.rows import Forecast, MeasuredRow, read_rows
from zosim.applications.validation.scoring import Outcome, Score, scores, total
from zosim.applications.validation.site import Sites
from zosim.console import stderr, stdout
from zosim.report import Report, Table

_HEAD = ("rows", "blank", "median %", "p90 %", "signed %", "inside %", "high/low")


def report(outcomes: Sequence[Outcome]) -> Report:
    """Return the tables: by group, and by source within each group."""
    by_group = scores(outcomes)
    return Report(
        "Predictions beside published measurements",
        "Errors are predicted over measured less one; inside counts measurements within the predicted interval.",
        _table("group", [*by_group, total(by_group)]),
        Report("By source", _table("group, source", _by_source(outcomes))),
    )


def _by_source(outcomes: Iterable[Outcome]) -> list[Score]:
    apart: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for row, said in outcomes:
        apart[row.group, row["source"]].append((row, said))
    return [
        Score(f"{group}, {source}", *_counts(score))
        for (group, source), members in sorted(apart.items())
        for score in scores(members)
    ]


def _counts(score: Score) -> tuple[int, int, tuple[float, ...], int, tuple[float, ...]]:
    return score.num_rows, score.num_blank, score.errors, score.num_inside, score.widths


def _table(what: str, by_name: Iterable[Score]) -> Table:
    lines = [
        (score.name, score.num_rows, score.num_blank, *_figures(score)) for score in by_name if score.errors
    ]
    return Table((what, *_HEAD), lines, numeric=_HEAD)


def _figures(score: Score) -> tuple[str, ...]:
    shares = (score.median, score.p90, score.signed, score.coverage)
    return (*(f"{100 * share:.1f}" for share in shares), f"{score.width:.2f}")


def left_out_report(rows: Sequence[MeasuredRow], sites: Sites) -> Report:
    """Return what becomes of predictions where a source, and where a machine, had no say in any constant."""
    counted = [row for row in rows if row.is_counted and row.measured is not None]
    axes = {"source": source_of, "machine": machine_of}
    judged: list[list[HeldOut]] = [[] for _ in axes]
    for chosen in CHOSEN:
        stderr.print(chosen.name, markup=False)
        for entries, more in zip(judged, held_out(counted, sites, chosen, list(axes.values())), strict=True):
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
                _table(
                    "group",
                    [*(by_group := scores(all_left_out(counted, sites, items, axis))), total(by_group)],
                ),
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


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw predicted over measured of every row, a column of dots for each group, coloured by source."""
    dots: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, said in outcomes:
        if row.is_counted and row.measured is not None and isinstance(said, Forecast):
            dots[row.group][row["source"]].append(said.predicted / row.measured)
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
    sites = Sites(options.hardware or options.rows.parent)
    rows = read_rows(options.rows)
    outcomes: list[Outcome] = [(row, outcome(row, sites)) for row in rows]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.left_out:
            # All machines were met above.
            made = left_out_report(rows, sites)
            (options.out / "left_out.md").write_text(made.to_markdown(), encoding="utf-8")
        else:
            made = report(outcomes)
            plot(outcomes, options.out / "errors.png")
            text = made.to_markdown() + "\n![Predicted over measured, by group](errors.png)\n"
            (options.out / "report.md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot write {options.out}: {error.strerror}") from error
    stdout.print(made)


if __name__ == "__main__":
    main()
