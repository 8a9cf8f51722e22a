"""Two or three of: a plan's prediction, another's, a run's measurement. Where they differ, down to links and instructions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from topology.units import format_bytes, format_seconds
from zosim.analysis.compare import Key, instruction_of, median_seconds, path_seconds, slowest_rank
from zosim.analysis.critical_path import CriticalPath, bottleneck, step_path
from zosim.planning.predict import PlannedRun, link_bytes
from zosim.program.instructions import Space
from zosim.report import Report, Reportable, Table
from zosim.timeline import Timeline

_NUM_INSTRUCTIONS = 10


@dataclass(frozen=True)
class ComparedSide:
    """One prediction or measurement."""

    name: str
    planned: PlannedRun
    measured: Timeline | None = None  # none for a prediction
    rank: int | None = None  # rank whose critical path counts; by default the last to end its steps

    @cached_property
    def timeline(self) -> Timeline:
        """What happened, or is predicted to."""
        if self.measured is not None:
            return self.measured
        return self.planned.timeline if self.rank is None else self.planned.timeline_of(self.rank)

    @cached_property
    def slowest(self) -> int:
        """The rank that is looked at."""
        return slowest_rank(self.timeline) if self.rank is None else self.rank

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of a periodic step."""
        return self.planned.step_time_s if self.measured is None else self.measured.step_time_s

    @cached_property
    def path(self) -> CriticalPath:
        """Critical path of the rank."""
        return step_path(self.timeline, self.planned.programs.program_of(self.slowest), self.slowest)

    @cached_property
    def bottleneck(self) -> str:
        """What the path mostly consists of."""
        limit = bottleneck(self.path)
        return f"{limit.description}, {limit.share:.0%}"

    @cached_property
    def link_bytes(self) -> Mapping[str, float]:
        """Bytes of a step over each link and in each memory; those of a run are of the programs that it ran."""
        return link_bytes(self.planned)

    @cached_property
    def memory_bytes(self) -> Mapping[str, int]:
        """Peak memory of every rank on its device, and of its share of the host."""
        devices = self.planned.plan.placement.devices
        sizes = {
            f"rank {rank} on {devices[rank]}, {space.value}": self.timeline.peak_memory(
                space, rank
            ).size_bytes
            for rank in self.timeline.ranks
            for space in Space
        }
        return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True)
class DifferenceRow:
    """A quantity on all sides."""

    name: str
    values: tuple[float | None, ...]  # one for each side; None where it has no such thing
    # Of seconds: what it has on the critical path of each side, less on that of the last.
    contributions: tuple[float, ...] = ()


@dataclass(frozen=True, repr=False)
class Differences(Reportable):
    """Sides, and in what they differ. The last one is what the others are held against."""

    heading = "Differences"

    sides: tuple[ComparedSide, ...]

    @cached_property
    def links(self) -> tuple[DifferenceRow, ...]:
        """Bytes of a step over links and in memories, the largest difference first."""
        return self._rows([side.link_bytes for side in self.sides])

    @cached_property
    def memory(self) -> tuple[DifferenceRow, ...]:
        """Peak memory of ranks."""
        return self._rows([side.memory_bytes for side in self.sides])

    @cached_property
    def labels(self) -> tuple[DifferenceRow, ...]:
        """Seconds of a step by label, with what explains the difference of the steps, the largest first."""
        return self._seconds(lambda item: item.label)

    @cached_property
    def instructions(self) -> tuple[DifferenceRow, ...]:
        """The same by instruction: whose cost was wrong."""
        return self._seconds(instruction_of)

    def _rows(self, sides: Sequence[Mapping[str, float]]) -> tuple[DifferenceRow, ...]:
        names = dict.fromkeys(name for values in sides for name in values)
        rows = [DifferenceRow(name, tuple(values.get(name) for values in sides)) for name in names]

        def spread(row: DifferenceRow) -> float:
            known = [value or 0.0 for value in row.values]
            return max(known) - min(known)

        return tuple(sorted(rows, key=lambda row: -spread(row)))

    def _seconds(self, key: Key) -> tuple[DifferenceRow, ...]:
        medians = [median_seconds(side.timeline, side.slowest, key) for side in self.sides]
        paths = [path_seconds(side.path, key) for side in self.sides]
        names = dict.fromkeys(name for known in (*medians, *paths) for name in known)
        rows = [
            DifferenceRow(
                name,
                tuple(known.get(name) for known in medians),
                tuple(path.get(name, 0.0) - paths[-1].get(name, 0.0) for path in paths[:-1]),
            )
            for name in names
        ]
        return tuple(sorted(rows, key=lambda row: (-max(map(abs, row.contributions)), row.name)))

    def __repr__(self) -> str:
        times = ", ".join(f"{side.name} {format_seconds(side.step_time_s)}" for side in self.sides)
        return f"Differences({times})"

    @property
    def runs(self) -> Mapping[str, PlannedRun]:
        """Plans of the predicted sides, by name."""
        return {side.name: side.planned for side in self.sides if side.measured is None}

    def view(self) -> Report:
        """Return what differs: the step, links, memory, labels and instructions."""
        sides, last = self.sides, self.sides[-1]
        names = [side.name for side in sides]
        summary = Table(
            ("", *names),
            [
                ("plan", *(side.planned.plan.describe() for side in sides)),
                ("step time", *(format_seconds(side.step_time_s, 4) for side in sides)),
                (f"over {last.name}", *(f"{side.step_time_s / last.step_time_s - 1:+.1%}" for side in sides)),
                ("bottleneck", *(side.bottleneck for side in sides)),
            ],
            numeric=names,
        )
        return Report(
            "",
            summary,
            self._table("bytes per step", self.links, format_bytes),
            self._table("peak memory", self.memory, format_bytes),
            self._table("seconds per step by label", self.labels, format_seconds),
            self._table(
                "instructions that differ most", self.instructions[:_NUM_INSTRUCTIONS], format_seconds
            ),
        )

    def _table(self, title: str, rows: Iterable[DifferenceRow], shown: Callable[[float], str]) -> Table:
        names = [side.name for side in self.sides]
        rows = list(rows)
        has_contributions = any(row.contributions for row in rows)
        explained = [f"of {name}'s difference" for name in names[:-1]] if has_contributions else []
        cells = [
            (
                row.name,
                *("-" if value is None else shown(value) for value in row.values),
                *(f"{'+' if seconds > 0 else ''}{format_seconds(seconds)}" for seconds in row.contributions),
            )
            for row in rows
        ]
        return Table(("", *names, *explained), cells, title=title, numeric=(*names, *explained))

    def to_json(self) -> str:
        """Return everything as JSON, in SI units."""
        names = [side.name for side in self.sides]

        def data(rows: Iterable[DifferenceRow]) -> list[dict[str, Any]]:
            return [
                {"name": row.name, "values": dict(zip(names, row.values, strict=True))}
                | (
                    {"contributions_s": dict(zip(names[:-1], row.contributions, strict=True))}
                    if row.contributions
                    else {}
                )
                for row in rows
            ]

        return json.dumps(
            {
                "sides": [
                    {"name": side.name, "step_time_s": side.step_time_s, "rank": side.slowest}
                    for side in self.sides
                ],
                "link_bytes": data(self.links),
                "memory_bytes": data(self.memory),
                "labels": data(self.labels),
                "instructions": data(self.instructions),
            },
            indent=2,
        )
