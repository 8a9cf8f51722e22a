"""The report of the benchmark on shaped links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from costmodel.scoring import Score
from studies.prediction.report import versions
from studies.shaped.links import LinkFigures
from studies.shaped.network import FRAME_EFFICIENCY, rate_bits_per_s
from studies.shaped.predicting import ShapedRow
from studies.timed_cases import Groups, case_columns, describe_slowdown, grouped, scored, step_tables
from zosim.analysis.scoreboard import rows_table, score_table
from zosim.report import Bullets, Code, Element, Report, Table

GOAL = (0.10, 0.20)
"""Median and 90th percentile of the absolute relative errors of the step time."""

_DISTURBED = 0.2
"""Cores; the kernel's own work for the network is a part of it."""


@dataclass(frozen=True)
class LinkRow:
    """What a network was measured to be."""

    rate: str
    layout: str
    latency_s: float
    figures: LinkFigures


@dataclass(frozen=True)
class ShapedBenchmark:
    """Everything that a report says."""

    date: str
    commit: str
    machine: str
    message_s: float
    slowdown: float
    """While calibrating."""
    links: tuple[LinkRow, ...]
    rows: tuple[ShapedRow, ...]

    def write(self, folder: Path) -> Path:
        """Write the report and the JSON next to it, and return the report's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.date}-shaped-links.md"
        path.write_text(self.to_markdown(), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    def to_markdown(self) -> str:
        """Return the report."""
        return Report(
            f"Predicted against measured over slow links, on {self.machine}",
            *self._head(),
            self._figures(),
            self._links(),
            self._misses(),
            self._cases(),
        ).to_markdown()

    def _head(self) -> Iterator[Element]:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"{self.date}, commit `{self.commit}`. {listed}."
        yield Code("python -m studies.shaped.benchmark")
        yield f"""Hosts are network namespaces of one machine, joined by shaped veth pairs (docs/how-to/shape-links.md says how). A rank computes with
one thread. The profile is `zosim calibrate --threads 1`, run on two hosts at once. Links of the topology have the declared
rate without headers of frames ({FRAME_EFFICIENCY:.1%} is payload). Their latency is that of a small message, minus that of one within a host by the profile.

The simulated hosts share the machine's cores, as the real ones do. They have as many cores as ranks were measured to get at once, minus
what carrying bytes takes of them. These figures (the
table of links) are measured before the cases, with other messages and other work. Models have random weights.
Measured step times are medians on rank 0."""

    def _figures(self) -> Report:
        lists = grouped(self.rows, _GROUPS)
        met = Score.of(row.step for row in self.rows).meets(GOAL)
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.rows)
        return Report(
            "Figures",
            *step_tables(lists, GOAL),
            score_table(
                scored(lists, lambda row: row.on_measured_link),
                "cases",
                title="Step time, with the link as measured",
            ),
            f"Goal, at most {GOAL[0]:.0%} in the median and {GOAL[1]:.0%} at the 90th percentile: {'met' if met else '**missed**'}.",
            f"In {disturbed} of the {len(self.rows)} cases other processes used more than {_DISTURBED} of a processor: read "
            "those rows as disturbed, and the figures with them.",
            describe_slowdown(f"{self.slowdown:.2f}", self.rows),
        )

    def _links(self) -> Report:
        columns: dict[str, Callable[[LinkRow], str]] = {
            "rate": lambda link: link.rate,
            "hosts x ranks": lambda link: link.layout,
            "small message (µs)": lambda link: f"{link.figures.message_s * 1e6:.0f}",
            "latency in the topology (µs)": lambda link: f"{link.latency_s * 1e6:.0f}",
            "payload as declared (MB/s)": lambda link: (
                f"{rate_bits_per_s(link.rate) / 8 * FRAME_EFFICIENCY / 1e6:.1f}"
            ),
            "large all_gather (MB/s)": lambda link: f"{link.figures.bandwidth_bytes_per_s / 1e6:.1f}",
            "work lost to a MB (ms of a core)": lambda link: f"{link.figures.core_s_per_byte * 1e9:.2f}",
            "a gather's wait (ms)": lambda link: f"{link.figures.busy_latency_s * 1e3:.2f}",
            "cores' worth of work": lambda link: f"{link.figures.num_cores:.2f}",
        }
        text = (
            f"A small message within a host takes {self.message_s * 1e6:.0f} µs by the profile. The bandwidth is what each "
            "rank sent in a large `all_gather`, over the seconds: what the table above that has the link as measured "
            "puts in place of the declared rate. Ranks compute and exchange every 0.1 s, with and without gathers of 256 KiB. That shows "
            "what computing loses to the bytes. The wait is what such a gather takes beyond its bytes. "
            "The last column is the work that ranks do at once, in cores, if they exchange as often and send nothing."
        )
        return Report("Links", text, Table.of(self.links, columns, numeric=list(columns)[2:]))

    def _misses(self) -> Report:
        missed = [row for row in self.rows if abs(row.step.error or 0.0) > GOAL[1]]
        causes = {
            row.name: ", ".join(
                f"{name} {predicted * 1e3:.1f} for {measured * 1e3:.1f}"
                for name, predicted, measured in row.labels[:3]
            )
            for row in missed
        }
        return Report(
            "Misses",
            f"{len(missed)} of {len(self.rows)} cases are off by more than {GOAL[1]:.0%}.",
            Bullets(
                f"{row.rate}, {row.name}: {row.step.error:+.0%}. Busy ms of rank 0, predicted for measured: {causes[row.name]}."
                for row in sorted(missed, key=lambda row: -abs(row.step.error or 0.0))
            ),
        )

    def _cases(self) -> Report:
        columns: dict[str, Callable[[ShapedRow], str]] = {
            "rate": lambda row: row.rate,
            "hosts x ranks": lambda row: row.layout,
            "fastest (ms)": lambda row: f"{row.fastest_s * 1e3:.1f}",
            "steps": lambda row: f"{row.num_steps}",
            "others (cores)": lambda row: f"{row.foreign_cores:.2f}",
            "with the link as measured": lambda row: f"{row.on_measured_link.error:+.1%}",
            **case_columns(),
        }
        return Report("Cases, worst first", rows_table(self.rows, columns, row_of=lambda row: row.step))


def _is_of(strategy: str) -> Callable[[ShapedRow], bool]:
    """Return whether a row shares a step out by this strategy, its transfers not sliced."""
    return lambda row: row.strategy.split(",")[0] == strategy and "sliced" not in row.strategy


_GROUPS: Groups[ShapedRow] = {
    "all": lambda _row: True,
    "1 Gbit/s": lambda row: row.rate == "1gbit",
    "100 Mbit/s": lambda row: row.rate == "100mbit",
    **{strategy: _is_of(strategy) for strategy in ("ddp", "pertp", "2d", "stages")},
    "sliced": lambda row: "sliced" in row.strategy,
    "two ranks, a core each": lambda row: row.layout in ("2x1", "2x1s"),
    "four ranks on two cores": lambda row: row.layout not in ("2x1", "2x1s"),
    "undisturbed": lambda row: not row.is_disturbed,
}
