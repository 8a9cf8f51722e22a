"""The report of the benchmark on shaped links."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from studies.prediction.predicting import PACE_CHANGED
from studies.prediction.report import versions
from studies.shaped.links import LinkFigures
from studies.shaped.network import FRAME_EFFICIENCY, rate_bits_per_s
from studies.shaped.predicting import ShapedRow

GOAL = (0.10, 0.20)
"""Median and 90th percentile of the absolute relative errors of the step time."""

_DISTURBED = 0.2
"""Cores; the kernel's own work for the network is a part of it."""


@dataclass(frozen=True)
class Link:
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
    links: tuple[Link, ...]
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
        return (
            f"{self._head()}\n\n{self._figures()}\n\n{self._links()}\n\n{self._misses()}\n\n{self._cases()}"
            + "\n"
        )

    def _head(self) -> str:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        return f"""# Predicted against measured over slow links, on {self.machine}

{self.date}, commit `{self.commit}`. {listed}.

    python -m studies.shaped.benchmark

Hosts are network namespaces of one machine, joined by shaped veth pairs ([how](../shaped-links.md)); a rank computes with
one thread. The profile is `zosim calibrate --threads 1`, run on two hosts at once. The topology has links of the declared
rate, less frames' headers ({FRAME_EFFICIENCY:.1%} is payload), and the latency of a small message, less what the profile
says that one within a host takes. The simulated hosts share the machine's cores, as the real ones do: as many cores' worth
of work as the ranks were measured to do at once, less what carrying bytes over the link takes of them. These figures (the
table of links) are measured before the cases, with messages and work that are no case's. Models have random weights.
Measured step times are medians on rank 0."""

    def _figures(self) -> str:
        lines = [
            "## Figures\n",
            (
                "| cases | number | median error | 90th percentile | median signed | inside the interval | median, with the "
                "link as measured | 90th percentile | median, at the pace before each case | 90th percentile |"
            ),
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        groups: Sequence[tuple[str, Callable[[ShapedRow], bool]]] = (
            ("all", lambda _row: True),
            ("1 Gbit/s", lambda row: row.rate == "1gbit"),
            ("100 Mbit/s", lambda row: row.rate == "100mbit"),
            *((way, _is_of(way)) for way in ("ddp", "pertp", "2d", "stages")),
            ("sliced", lambda row: "sliced" in row.strategy),
            ("two ranks, a core each", lambda row: row.layout in ("2x1", "2x1s")),
            ("four ranks on two cores", lambda row: row.layout not in ("2x1", "2x1s")),
            ("undisturbed", lambda row: not row.is_disturbed),
        )
        for name, belongs in groups:
            chosen = [row for row in self.rows if belongs(row)]
            if not chosen:
                continue
            middle, high, signed = figures_of([row.error for row in chosen])
            link_middle, link_high, _ = figures_of([row.measured_link_error for row in chosen])
            paced_middle, paced_high, _ = figures_of([row.paced_error for row in chosen])
            covered = sum(row.is_covered for row in chosen)
            lines.append(
                f"| {name} | {len(chosen)} | {middle:.1%} | {high:.1%} | {signed:+.1%} | {covered} of {len(chosen)} "
                f"| {link_middle:.1%} | {link_high:.1%} | {paced_middle:.1%} | {paced_high:.1%} |"
            )
        middle, high, _ = figures_of([row.error for row in self.rows])
        verdict = "met" if middle <= GOAL[0] and high <= GOAL[1] else "**missed**"
        lines.append(
            f"\nGoal, at most {GOAL[0]:.0%} in the median and {GOAL[1]:.0%} at the 90th percentile: {verdict}."
        )
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.rows)
        lines.append(
            f"In {disturbed} of the {len(self.rows)} cases other processes used more than {_DISTURBED} of a processor: read "
            "those rows as disturbed, and the figures with them."
        )
        lines.append(
            "Pace is what a reference computation takes over what it takes when no stranger shares the core's hardware: "
            f"{self.pace:.2f} while calibrating, {median(row.pace_before for row in self.rows):.2f} in the median before cases. "
            f"Undisturbed are cases after which it differed by at most {PACE_CHANGED:.0%} from that before them."
        )
        return "\n".join(lines)

    def _links(self) -> str:
        lines = [
            "## Links\n",
            (
                f"A small message within a host takes {self.message_s * 1e6:.0f} µs by the profile. The bandwidth is what each "
                "rank sent in a large `all_gather`, over the seconds: what the last two columns above put in place of the "
                "declared rate. What computing loses to the bytes is measured with ranks that compute and meet every 0.1 s, with "
                "and without gathers of 256 KiB beside it; the wait is what such a gather then takes beyond its bytes. "
                "The last column is the work that ranks do at once, in cores, where they meet as often and send nothing.\n"
            ),
            (
                "| rate | hosts x ranks | small message (µs) | latency in the topology (µs) | payload as declared (MB/s) | "
                "large all_gather (MB/s) | work lost to a MB (ms of a core) | a gather's wait (ms) | cores' worth of work |"
            ),
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for link in self.links:
            declared, found = rate_bits_per_s(link.rate) / 8 * FRAME_EFFICIENCY, link.figures
            lines.append(
                f"| {link.rate} | {link.layout} | {found.message_s * 1e6:.0f} | {link.latency_s * 1e6:.0f} | "
                f"{declared / 1e6:.1f} | {found.bandwidth_bytes_per_s / 1e6:.1f} | {found.core_s_per_byte * 1e9:.2f} | "
                f"{found.busy_latency_s * 1e3:.2f} | {found.num_cores:.2f} |"
            )
        return "\n".join(lines)

    def _misses(self) -> str:
        missed = [row for row in _worst_first(self.rows) if abs(row.error) > GOAL[1]]
        lines = [f"## Misses\n\n{len(missed)} of {len(self.rows)} cases are off by more than {GOAL[1]:.0%}."]
        for row in missed:
            parts = ", ".join(
                f"{name} {predicted * 1e3:.1f} for {measured * 1e3:.1f}"
                for name, predicted, measured in row.labels[:3]
            )
            lines.append(
                f"- {row.rate}, {row.name}: {row.error:+.0%}. Busy ms of rank 0, predicted for measured: {parts}."
            )
        return "\n".join(lines)

    def _cases(self) -> str:
        lines = [
            "## Cases, worst first\n",
            (
                "| rate | hosts x ranks | case | predicted (ms) | interval | measured (ms) | fastest | steps | others (cores) | pace before | after | error | with the "
                "link as measured | at that pace |"
            ),
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {row.rate} | {row.layout} | {row.name} | {row.predicted_s * 1e3:.1f} | {row.low_s * 1e3:.1f}–"
            f"{row.high_s * 1e3:.1f} | {row.measured_s * 1e3:.1f} | {row.fastest_s * 1e3:.1f} | {row.num_steps} | {row.foreign_cores:.2f} | "
            f"{row.pace_before:.2f} | {row.pace_after:.2f} | {row.error:+.1%} | {row.measured_link_error:+.1%} | "
            f"{row.paced_error:+.1%} |"
            for row in _worst_first(self.rows)
        ]
        return "\n".join(lines)


def _is_of(way: str) -> Callable[[ShapedRow], bool]:
    """Return whether a row shares a step out in this way, its transfers not sliced."""
    return lambda row: row.strategy.split(",")[0] == way and "sliced" not in row.strategy


def figures_of(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return median and 90th percentile of the sizes of errors, and the signed median."""
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.percentile(sizes, 90)), float(np.median(errors))


def _worst_first(rows: Sequence[ShapedRow]) -> list[ShapedRow]:
    return sorted(rows, key=lambda row: -abs(row.error))
