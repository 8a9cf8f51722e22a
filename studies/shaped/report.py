"""The report of the benchmark on shaped links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from studies.prediction.predicting import PACE_CHANGED
from studies.prediction.report import versions
from studies.shaped.links import LinkFigures
from studies.shaped.network import FRAME_EFFICIENCY, rate_bits_per_s
from studies.shaped.predicting import ShapedRow
from zosim.report import Bullets, Code, Part, Report, Table

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
    pace: float
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

    def _head(self) -> Iterator[Part]:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"{self.date}, commit `{self.commit}`. {listed}."
        yield Code("python -m studies.shaped.benchmark")
        yield f"""Hosts are network namespaces of one machine, joined by shaped veth pairs (docs/shaped-links.md says how); a rank computes with
one thread. The profile is `zosim calibrate --threads 1`, run on two hosts at once. The topology has links of the declared
rate, less frames' headers ({FRAME_EFFICIENCY:.1%} is payload), and the latency of a small message, less what the profile
says that one within a host takes. The simulated hosts share the machine's cores, as the real ones do: as many cores' worth
of work as the ranks were measured to do at once, less what carrying bytes over the link takes of them. These figures (the
table of links) are measured before the cases, with messages and work that are no case's. Models have random weights.
Measured step times are medians on rank 0."""

    def _figures(self) -> Report:
        groups: Sequence[tuple[str, Callable[[ShapedRow], bool]]] = (
            ("all", lambda _row: True),
            ("1 Gbit/s", lambda row: row.rate == "1gbit"),
            ("100 Mbit/s", lambda row: row.rate == "100mbit"),
            *((strategy, _is_of(strategy)) for strategy in ("ddp", "pertp", "2d", "stages")),
            ("sliced", lambda row: "sliced" in row.strategy),
            ("two ranks, a core each", lambda row: row.layout in ("2x1", "2x1s")),
            ("four ranks on two cores", lambda row: row.layout not in ("2x1", "2x1s")),
            ("undisturbed", lambda row: not row.is_disturbed),
        )
        lines = []
        for name, belongs in groups:
            chosen = [row for row in self.rows if belongs(row)]
            if not chosen:
                continue
            middle, high, signed = figures_of([row.error for row in chosen])
            link_middle, link_high, _ = figures_of([row.measured_link_error for row in chosen])
            paced_middle, paced_high, _ = figures_of([row.paced_error for row in chosen])
            covered = sum(row.is_covered for row in chosen)
            errors = (f"{middle:.1%}", f"{high:.1%}", f"{signed:+.1%}", f"{covered} of {len(chosen)}")
            others = (f"{size:.1%}" for size in (link_middle, link_high, paced_middle, paced_high))
            lines.append((name, f"{len(chosen)}", *errors, *others))
        middle, high, _ = figures_of([row.error for row in self.rows])
        verdict = "met" if middle <= GOAL[0] and high <= GOAL[1] else "**missed**"
        goal = (
            f"Goal, at most {GOAL[0]:.0%} in the median and {GOAL[1]:.0%} at the 90th percentile: {verdict}."
        )
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.rows)
        disturbance = (
            f"In {disturbed} of the {len(self.rows)} cases other processes used more than {_DISTURBED} of a processor: read "
            "those rows as disturbed, and the figures with them."
        )
        pace = (
            "Pace is what a reference computation takes over what it takes when no stranger shares the core's hardware: "
            f"{self.pace:.2f} while calibrating, {median(row.pace_before for row in self.rows):.2f} in the median before cases. "
            f"Undisturbed are cases after which it differed by at most {PACE_CHANGED:.0%} from that before them."
        )
        columns = (
            "cases",
            "number",
            "median error",
            "90th percentile",
            "median signed",
            "inside the interval",
            "median, with the link as measured",
            "90th percentile of these",
            "median, at the pace before each case",
            "90th percentile at that pace",
        )
        return Report("Figures", Table(columns, lines, numeric=columns[1:]), goal, disturbance, pace)

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
        words = (
            f"A small message within a host takes {self.message_s * 1e6:.0f} µs by the profile. The bandwidth is what each "
            "rank sent in a large `all_gather`, over the seconds: what the two columns above that have the link as measured "
            "put in place of the declared rate. What computing loses to the bytes is measured with ranks that compute and meet "
            "every 0.1 s, with and without gathers of 256 KiB beside it; the wait is what such a gather then takes beyond its "
            "bytes. The last column is the work that ranks do at once, in cores, where they meet as often and send nothing."
        )
        return Report("Links", words, Table.of(self.links, columns, numeric=list(columns)[2:]))

    def _misses(self) -> Report:
        missed = [row for row in _worst_first(self.rows) if abs(row.error) > GOAL[1]]
        causes = [
            ", ".join(
                f"{name} {predicted * 1e3:.1f} for {measured * 1e3:.1f}"
                for name, predicted, measured in row.labels[:3]
            )
            for row in missed
        ]
        return Report(
            "Misses",
            f"{len(missed)} of {len(self.rows)} cases are off by more than {GOAL[1]:.0%}.",
            Bullets(
                f"{row.rate}, {row.name}: {row.error:+.0%}. Busy ms of rank 0, predicted for measured: {cause}."
                for row, cause in zip(missed, causes, strict=True)
            ),
        )

    def _cases(self) -> Report:
        columns: dict[str, Callable[[ShapedRow], str]] = {
            "rate": lambda row: row.rate,
            "hosts x ranks": lambda row: row.layout,
            "case": lambda row: row.name,
            "predicted (ms)": lambda row: f"{row.predicted_s * 1e3:.1f}",
            "interval": lambda row: f"{row.low_s * 1e3:.1f}–{row.high_s * 1e3:.1f}",
            "measured (ms)": lambda row: f"{row.measured_s * 1e3:.1f}",
            "fastest": lambda row: f"{row.fastest_s * 1e3:.1f}",
            "steps": lambda row: f"{row.num_steps}",
            "others (cores)": lambda row: f"{row.foreign_cores:.2f}",
            "pace before": lambda row: f"{row.pace_before:.2f}",
            "after": lambda row: f"{row.pace_after:.2f}",
            "error": lambda row: f"{row.error:+.1%}",
            "with the link as measured": lambda row: f"{row.measured_link_error:+.1%}",
            "at that pace": lambda row: f"{row.paced_error:+.1%}",
        }
        return Report(
            "Cases, worst first", Table.of(_worst_first(self.rows), columns, numeric=list(columns)[3:])
        )


def _is_of(strategy: str) -> Callable[[ShapedRow], bool]:
    """Return whether a row shares a step out by this strategy, its transfers not sliced."""
    return lambda row: row.strategy.split(",")[0] == strategy and "sliced" not in row.strategy


def figures_of(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return median and 90th percentile of the sizes of errors, and the signed median."""
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.percentile(sizes, 90)), float(np.median(errors))


def _worst_first(rows: Sequence[ShapedRow]) -> list[ShapedRow]:
    return sorted(rows, key=lambda row: -abs(row.error))
