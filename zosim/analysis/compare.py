"""Predicted against measured, line by line, under the names that instructions carry in the program.

Only periodic steps are compared. What one line contributes to the error of the step is the difference of the seconds
that it takes on the two critical paths: paths tile the step, so contributions add up to the whole error, which
differences of durations do not where streams overlap. (A path has the mean of the steps that it spans, a step time is
a median; where measured steps scatter, the sum differs by as much as these two do.)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from costmodel.scoring import relative_error
from topology.errors import TimelineError
from topology.units import format_count
from zosim.analysis.critical_path import CriticalPath, PathSegment, bottleneck, step_path
from zosim.program import Program
from zosim.program.instructions import Space
from zosim.report import Report, Reportable, Table, frame
from zosim.timeline import Span, Timeline

_MS = 1e3
_NOT_CALIBRATED = "predicted from data-sheet figures; after `zosim calibrate` on this machine, `zosim compare` uses measured rates"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One label or one instruction, per step."""

    name: str
    # predicted_s, measured_s: medians over the periodic steps of its seconds per step; None where the timeline does not have it.
    predicted_s: float | None
    measured_s: float | None
    # Its seconds on the predicted critical path less those on the measured one, per step.
    contribution_s: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if either is missing or nothing was measured."""
        return relative_error(self.predicted_s, self.measured_s)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Peak memory of one space."""

    space: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if nothing was measured."""
        return relative_error(self.predicted_bytes, self.measured_bytes)


@dataclass(frozen=True, slots=True)
class AtSlowdown:
    """What is predicted at the pace at which a machine was found before it ran."""

    # By which part of its time work takes longer than the profile says; negative where it takes less.
    slower: float
    step_s: float

    @property
    def description(self) -> str:
        """Name of the line that shows it."""
        than = "slower" if self.slower >= 0 else "faster"
        return f"  on a core found {abs(self.slower):.0%} {than} than calibrated"


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Reportable):
    """A predicted and a measured timeline of one program, joined.

    Attributes
    ----------
    program : str
        Name of the program.
    rank : int
        Rank that is compared.
    num_steps : int
        Number of periodic steps measured.
    predicted_step_s, measured_step_s : float
        Seconds per step: medians over the periodic steps.
    predicted_bottleneck, measured_bottleneck : str
        What limits the step, in words.
    labels, instructions : tuple of ComparedLine
        Largest contribution to the step's error first.
    memory : tuple of MemoryLine
        Peak memory of each space.
    planned_tokens, measured_tokens : float, optional
        Tokens per step: those that the plan allows, and those that batches had, without padding.
    at_slowdown : AtSlowdown, optional
        Where the run measured the machine's pace, and the profile knows its own.
    is_calibrated : bool
        Whether the prediction rests on measured rates, and not on data sheets.
    """

    heading = "Predicted and measured"

    program: str
    rank: int
    num_steps: int
    predicted_step_s: float
    measured_step_s: float
    predicted_bottleneck: str
    measured_bottleneck: str
    labels: tuple[ComparedLine, ...]
    instructions: tuple[ComparedLine, ...]
    memory: tuple[MemoryLine, ...]
    planned_tokens: float | None = None
    measured_tokens: float | None = None
    at_slowdown: AtSlowdown | None = None
    is_calibrated: bool = True

    @property
    def step_error(self) -> float | None:
        """Predicted step time over the measured one, less 1."""
        return relative_error(self.predicted_step_s, self.measured_step_s)

    def to_json(self) -> str:
        """Return everything as JSON, errors included."""
        data = asdict(self)
        for key in ("labels", "instructions", "memory"):
            for row, line in zip(data[key], getattr(self, key), strict=True):
                row["error"] = line.error
        return json.dumps(data | {"step_error": self.step_error}, indent=2)

    def __repr__(self) -> str:
        predicted, measured = (
            f"{_ms(seconds)} ms" for seconds in (self.predicted_step_s, self.measured_step_s)
        )
        return f"Comparison({self.program}: {predicted} predicted, {measured} measured, {_percent(self.step_error)})"

    def _repr_html_(self) -> str:
        from zosim.analysis.pictures import bars_svg, with_picture

        rows = {line.name: (line.predicted_s or 0.0, line.measured_s or 0.0) for line in self.labels}
        return with_picture(self.view(), bars_svg(rows, ("predicted", "measured")))

    def to_pandas(self) -> Any:
        """Return labels and instructions as a pandas frame, with seconds per step and errors."""
        lines = [("label", line) for line in self.labels] + [
            ("instruction", line) for line in self.instructions
        ]
        return frame({"of": of, **asdict(line), "error": line.error} for of, line in lines)

    def view(self) -> Report:
        """Return the comparison as people read it: the step, and what its error is made of."""
        columns: dict[str, Callable[[ComparedLine], str]] = {
            "label": lambda line: line.name,
            "predicted": lambda line: _ms(line.predicted_s),
            "measured": lambda line: _ms(line.measured_s),
            "error": lambda line: _percent(line.error),
            "of the step's error": lambda line: f"{line.contribution_s * _MS:+.3f}",
        }
        lines = Table.of(self.labels, columns, title="per label, ms per step")
        return Report("", self.summary_table(), lines, "" if self.is_calibrated else _NOT_CALIBRATED)

    def summary_table(self) -> Table:
        """Return step time, bottleneck and peak memory as a table."""
        step = (_ms(self.predicted_step_s), _ms(self.measured_step_s), _percent(self.step_error))
        rows = [("step time (ms)", *step)]
        if self.at_slowdown is not None:
            error = relative_error(self.at_slowdown.step_s, self.measured_step_s)
            rows.append((self.at_slowdown.description, _ms(self.at_slowdown.step_s), "", _percent(error)))
        if self.planned_tokens is not None and self.measured_tokens is not None:
            planned, measured = self.planned_tokens, self.measured_tokens
            rows.append(
                (
                    "tokens per step",
                    format_count(planned),
                    format_count(measured),
                    _percent(relative_error(planned, measured)),
                )
            )
        for line in self.memory:
            sizes = f"{line.predicted_bytes / _MIB:.1f}", f"{line.measured_bytes / _MIB:.1f}"
            rows.append((f"peak {line.space} memory (MiB)", *sizes, _percent(line.error)))
        rows.append(("bottleneck", self.predicted_bottleneck, self.measured_bottleneck, ""))
        title = f"{self.program}, rank {self.rank}: median of {self.num_steps} periodic steps"
        columns = ("", "predicted", "measured", "error")
        return Table(columns, rows, title=title, numeric=columns[1:])


def compare(
    predicted: Timeline,
    measured: Timeline,
    program: Program,
    rank: int = 0,
    at_slowdown: AtSlowdown | None = None,
    planned_tokens: float | None = None,
    *,
    is_calibrated: bool = True,
) -> Comparison:
    """Return the two timelines of one rank, joined under the program's names.

    - `planned_tokens`: Tokens of a step's batch as it is planned.
    - `is_calibrated`: Whether the prediction rests on measured rates.

    Raises TimelineError if the timelines are of different programs, or one has no steps of the rank.
    """
    if predicted.program != measured.program:
        message = (
            f"the prediction is of program {predicted.program}, the measurement of program {measured.program}"
        )
        raise TimelineError(message, hint="compare a run with the simulation of its own program")
    paths = step_path(predicted, program, rank), step_path(measured, program, rank)
    return Comparison(
        program=predicted.program,
        rank=rank,
        num_steps=len(measured.periodic_steps),
        predicted_step_s=predicted.step_time_s,
        measured_step_s=measured.step_time_s,
        predicted_bottleneck=bottleneck(paths[0]).description,
        measured_bottleneck=bottleneck(paths[1]).description,
        labels=_lines(predicted, measured, paths, rank, lambda item: item.label),
        instructions=_lines(predicted, measured, paths, rank, instruction_of),
        memory=tuple(_memory_lines(predicted, measured, rank)),
        planned_tokens=planned_tokens,
        measured_tokens=measured.tokens_per_step,
        at_slowdown=at_slowdown,
        is_calibrated=is_calibrated,
    )


def _memory_lines(predicted: Timeline, measured: Timeline, rank: int) -> Iterator[MemoryLine]:
    """Yield the peaks of device and host, and of a disk that is used."""
    for space in Space:
        sizes = [timeline.peak_memory(space, rank).size_bytes for timeline in (predicted, measured)]
        if space != Space.DISK or any(sizes):
            yield MemoryLine(space.value, *sizes)


def slowest_rank(timeline: Timeline) -> int:
    """Return the rank that ends the last periodic step last.

    Raises TimelineError if the timeline has no step.
    """
    last = timeline.periodic_steps[-1:]
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.phase == "step" and span.step in last:
            ends[span.rank] = max(span.end_s, ends.get(span.rank, span.end_s))
    if not ends:
        message = f"timeline of {timeline.program} holds no step"
        raise TimelineError(message, hint="simulate or run at least one step")
    return max(ends, key=lambda rank: (ends[rank], -rank))


def instruction_of(item: Span | PathSegment) -> str:
    """Return the instruction, or the name of a gap that lies before it."""
    if isinstance(item, PathSegment) and item.is_gap:
        return f"{item.label} before {item.instruction}"
    return item.instruction


Key = Callable[[Span | PathSegment], str]


def _lines(
    predicted: Timeline, measured: Timeline, paths: tuple[CriticalPath, CriticalPath], rank: int, key: Key
) -> tuple[ComparedLine, ...]:
    medians = [median_seconds(timeline, rank, key) for timeline in (predicted, measured)]
    on_path = [path_seconds(path, key) for path in paths]
    names = dict.fromkeys([*medians[0], *medians[1], *on_path[0], *on_path[1]])
    lines = [
        ComparedLine(
            name,
            medians[0].get(name),
            medians[1].get(name),
            on_path[0].get(name, 0.0) - on_path[1].get(name, 0.0),
        )
        for name in names
    ]
    return tuple(sorted(lines, key=lambda line: (-abs(line.contribution_s), line.name)))


def median_seconds(timeline: Timeline, rank: int, key: Key) -> dict[str, float]:
    """Return the median over periodic steps of the seconds per step under each name."""
    by_step: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.periodic_spans(rank):
        by_step[key(span)][span.step] += span.duration_s
    return {
        name: median(seconds.get(step, 0.0) for step in timeline.periodic_steps)
        for name, seconds in by_step.items()
    }


def path_seconds(path: CriticalPath, key: Key) -> dict[str, float]:
    """Return the seconds per step that a critical path spends under each name."""
    seconds: dict[str, float] = defaultdict(float)
    for item in path.segments:
        seconds[key(item)] += item.duration_s / max(path.num_steps, 1)
    return seconds


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * _MS:.3f}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
