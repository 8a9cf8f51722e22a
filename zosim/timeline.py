"""What happened when: the spans that a simulation predicts or a run measures, and the memory beside them.

Predicted and measured timelines are the same type, so that they can be compared line by line.

Steps overlap: the first copies of a step run while the last of the step before still does. A step's *period* is
therefore the difference between its end and the end of the step before, where a step ends with the last of its
instructions; periods add up to the length of the run. The first step's period reaches back to the beginning of
the run and contains the prologue. Neither it nor any other step before ``first_periodic_step`` counts as periodic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal

from pydantic import PositiveFloat, TypeAdapter

from topology.errors import TimelineError
from topology.renamed import with_present_names
from topology.validation import readable
from zosim.documents import Document, DocumentType, json_by_lines
from zosim.program.instructions import Phase, Space, Stream

TIMELINE_VERSION: Literal[1] = 1
RENAMED: Mapping[str, str] = {
    "first_steady_step": "first_periodic_step",
    "spans.part": "phase",
    "spans.limiter=coding": "codec",
    "spans.limiter=codes": "quantized",
    "memory.role=directions": "perturbations",
    "memory.role=staging": "transfer buffers",
    "memory.role=slots": "staging buffers",
    "spans.stream=draw": "sample",
    "spans.label=draw": "sample",
    "spans.limiter=draw": "sampling",
    "spans.limiter=shared_draw": "shared_sampling",
    "spans.limiter=sweep": "param_pass",
    "spans.limiter=quantising": "quantizing",
}
"""Fields and values that were renamed of a timeline (:mod:`topology.renamed`)."""

_STREAM_ORDER = {stream: number for number, stream in enumerate(Stream)}


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction's time."""

    rank: int
    phase: Phase  # `prologue`, `step` or `flush`
    step: int  # number of the step from 0; the prologue's is 0, the flush's is one past the last
    instruction: str
    stream: Stream
    label: str
    segment: str
    start_s: float
    end_s: float
    # What a prediction says that its duration is limited by, such as `dram`; empty where measured.
    limiter: str = ""
    size_bytes: int = 0  # what a message had on the wire, where that was measured

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    def shifted(self, seconds: float, steps: int = 0) -> Span:
        """Return the same span, later."""
        return replace(
            self, start_s=self.start_s + seconds, end_s=self.end_s + seconds, step=self.step + steps
        )


@dataclass(frozen=True, slots=True)
class MemorySample:
    """From a time on, a role takes so many bytes of a space."""

    rank: int
    space: Space
    role: str  # what it is for: `weights`, `staging buffers`, `perturbations`, `workspace` ...
    time_s: float
    size_bytes: int  # all that the role takes now, not the change


@dataclass(frozen=True, slots=True)
class Repeat:
    """Steps that happen again and again, of which a timeline lists only the first round."""

    first_step: int  # first step of the round that is listed
    num_steps: int  # steps in the round, usually 1
    num_rounds: int  # further rounds after the listed one that are left out
    period_s: float  # seconds by which each round is later than the one before

    @property
    def first_omitted_step(self) -> int:
        """First step that is not listed."""
        return self.first_step + self.num_steps

    @property
    def num_omitted_steps(self) -> int:
        """Steps that are not listed."""
        return self.num_steps * self.num_rounds

    @property
    def omitted_s(self) -> float:
        """Seconds that the omitted steps take."""
        return self.num_rounds * self.period_s


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a rank takes in a space, and what it consists of."""

    rank: int
    space: Space
    size_bytes: int
    time_s: float
    components: Mapping[str, int]


@dataclass(frozen=True)
class Timeline(Document):
    """Spans of a run, predicted or measured, with the memory beside them.

    Attributes
    ----------
    program : str
        Name of the program.
    source : str
        ``simulated`` or ``measured``.
    num_steps : int
        Steps of the run, listed or not.
    spans : tuple of Span
        Sorted by start, then rank, then stream in the order of :class:`Stream`, then end; instructions of
        equal keys keep the order in which they were given.
    memory : tuple of MemorySample
        Sorted by time; at equal times in the order given.
    first_periodic_step : int
        Steps before it are warm-up.
    version : int
        Version of the file's layout.
    repeat : Repeat, optional
        Steps left out because they equal earlier ones, shifted. Spans after them carry their real times.
    reference_s : float, optional
        What the reference of the machine's pace took before the first step that was measured
        (:func:`costmodel.rates.slowdown.slowdown_in`).
    tokens_per_step : float, optional
        Tokens of a measured step's batch on average, without its padding.

    Raises
    ------
    TimelineError
        If a span ends before it starts, a time is not finite, or a step lies outside the run.
    """

    program: str
    source: Literal["simulated", "measured"]
    num_steps: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()
    first_periodic_step: int = 1
    repeat: Repeat | None = None
    reference_s: PositiveFloat | None = None
    tokens_per_step: PositiveFloat | None = None
    version: Literal[1] = TIMELINE_VERSION

    document = DocumentType(
        "timeline",
        TIMELINE_VERSION,
        TIMELINE_VERSION,
        TimelineError,
        "`zosim simulate` and `zosim run` write one",
    )

    def __post_init__(self) -> None:
        for span in self.spans:
            _check_span(span, self.num_steps)
        in_order = sorted(self.spans, key=lambda s: (s.start_s, s.rank, _STREAM_ORDER[s.stream], s.end_s))
        object.__setattr__(self, "spans", tuple(in_order))
        object.__setattr__(self, "memory", tuple(sorted(self.memory, key=lambda sample: sample.time_s)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a span, in order."""
        return tuple(sorted({span.rank for span in self.spans}))

    @cached_property
    def begin_s(self) -> float:
        """Start of the first span."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """End of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end_s - self.begin_s

    @cached_property
    def listed_steps(self) -> tuple[int, ...]:
        """Steps whose spans are listed."""
        return tuple(sorted({span.step for span in self.spans if span.phase == "step"}))

    @cached_property
    def listed_step_ends_s(self) -> dict[int, float]:
        """End of each listed step: the last of its spans, over all ranks."""
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.phase == "step":
                ends[span.step] = max(ends.get(span.step, -math.inf), span.end_s)
        return ends

    def step_end_s(self, step: int) -> float:
        """Return the end of a step, listed or not.

        Raises
        ------
        TimelineError
            If the run has no such step.
        """
        rounds, listed = self._listed(step)
        try:
            shift_s = rounds * self.repeat.period_s if self.repeat else 0.0
            return self.listed_step_ends_s[listed] + shift_s
        except KeyError:
            message = f"timeline of {self.program} has no step {step}"
            raise TimelineError(message, hint=f"it has {self.num_steps} steps, counted from 0") from None

    def _listed(self, step: int) -> tuple[int, int]:
        """Return the round of an omitted step and the listed step that it equals; (0, step) if listed."""
        repeat = self.repeat
        if repeat is None or not 0 <= step - repeat.first_omitted_step < repeat.num_omitted_steps:
            return 0, step
        rounds, offset = divmod(step - repeat.first_step, repeat.num_steps)
        return rounds, repeat.first_step + offset

    @cached_property
    def periodic_steps(self) -> tuple[int, ...]:
        """Listed steps past the warm-up; the last listed one where there is none.

        Where steps were left out, the listed round that they repeat stands for all of them.
        """
        if self.repeat is not None:
            return tuple(range(self.repeat.first_step, self.repeat.first_omitted_step))
        return (
            tuple(step for step in self.listed_steps if step >= self.first_periodic_step)
            or self.listed_steps[-1:]
        )

    @cached_property
    def step_time_s(self) -> float:
        """Median period of the periodic steps; exact where the timeline says how they repeat.

        Raises
        ------
        TimelineError
            If no step is listed.
        """
        if self.repeat is not None:
            return self.repeat.period_s / self.repeat.num_steps
        if not self.periodic_steps:
            message = f"timeline of {self.program} holds no step"
            raise TimelineError(message, hint="simulate or run at least one step")
        return median(self._period_s(step) for step in self.periodic_steps)

    def _period_s(self, step: int) -> float:
        return self.step_end_s(step) - (self.step_end_s(step - 1) if step else self.begin_s)

    def periodic_spans(self, rank: int = 0) -> Iterator[Span]:
        """Yield the spans of a rank's periodic steps."""
        chosen = set(self.periodic_steps)
        for span in self.spans:
            if span.rank == rank and span.phase == "step" and span.step in chosen:
                yield span

    def busy(self, streams: Collection[Stream], rank: int = 0) -> float:
        """Return the share of the periodic steps' time in which any of the streams was busy.

        Parameters
        ----------
        streams : collection of Stream
            Streams to look at.
        rank : int
            Rank to look at.
        """
        chosen = [(span.start_s, span.end_s) for span in self.periodic_spans(rank) if span.stream in streams]
        busy_s, until_s = 0.0, float("-inf")
        for start_s, end_s in sorted(chosen):
            busy_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
        return busy_s / sum(self._period_s(step) for step in self.periodic_steps)

    def seconds_by_label(self, rank: int = 0) -> dict[str, float]:
        """Return the mean seconds per periodic step under each label, largest first.

        Streams overlap, so the values may add up to more than the step.

        Parameters
        ----------
        rank : int
            Rank to look at.
        """
        seconds: dict[str, float] = defaultdict(float)
        for span in self.periodic_spans(rank):
            seconds[span.label] += span.duration_s / len(self.periodic_steps)
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def memory_curve(self, space: Space, rank: int = 0) -> list[tuple[float, dict[str, int]]]:
        """Return the bytes of each role after every instant at which one changed.

        Changes at one instant count together: what is freed there is free for what is taken there.

        Parameters
        ----------
        space : Space
            Memory: the device's, the host's or the drive's.
        rank : int
            Rank to look at.
        """
        curve: list[tuple[float, dict[str, int]]] = []
        components: dict[str, int] = {}
        for sample in self.memory:
            if sample.rank != rank or sample.space != space:
                continue
            components = {**components, sample.role: sample.size_bytes}
            if curve and curve[-1][0] == sample.time_s:
                curve[-1] = (sample.time_s, components)
            else:
                curve.append((sample.time_s, components))
        return curve

    def peak_memory(self, space: Space, rank: int = 0) -> Peak:
        """Return the largest total of a space, with its components at the first instant that reaches it.

        Parameters
        ----------
        space : Space
            Memory: the device's, the host's or the drive's.
        rank : int
            Rank to look at.
        """
        curve = self.memory_curve(space, rank) or [(self.begin_s, {})]
        time_s, components = max(curve, key=lambda point: sum(point[1].values()))
        named = {role: size for role, size in sorted(components.items(), key=lambda phase: -phase[1]) if size}
        return Peak(rank, space, sum(named.values()), time_s, named)

    def expanded(self) -> Timeline:
        """Return the same timeline with every step listed (the memory beside omitted steps stays out)."""
        repeat = self.repeat
        if repeat is None:
            return self
        chosen = set(range(repeat.first_step, repeat.first_omitted_step))
        listed = [span for span in self.spans if span.phase == "step" and span.step in chosen]
        omitted = [
            span.shifted(number * repeat.period_s, number * repeat.num_steps)
            for number in range(1, repeat.num_rounds + 1)
            for span in listed
        ]
        return replace(
            self, spans=(*self.spans, *omitted), repeat=None, first_periodic_step=repeat.first_step
        )

    def to_json(self) -> str:
        """Return the timeline as JSON, one span and one memory sample to a line."""
        return json_by_lines(_ADAPTER.dump_python(self, mode="json"))

    @classmethod
    def from_data(cls, data: dict[str, Any], where: str) -> Timeline:
        """Return the timeline that :meth:`to_json` wrote.

        Parameters
        ----------
        data : dict
            Content of the JSON file.
        where : str
            Name of the source in messages.
        """
        with readable(f"timeline {where}", TimelineError):
            return _ADAPTER.validate_python(with_present_names(data, RENAMED))


_ADAPTER: TypeAdapter[Timeline] = TypeAdapter(Timeline)


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Return one timeline out of one per rank, of the same program and number of steps.

    Raises TimelineError if there is none, or they are of different runs.
    """
    identities = {(item.program, item.source, item.num_steps, item.repeat) for item in timelines}
    if len(identities) != 1:
        runs = "; ".join(
            f"{name} ({source}, {steps} steps)" for name, source, steps, _ in sorted(identities, key=repr)
        )
        message = f"cannot merge timelines of different runs: {runs or 'none given'}"
        raise TimelineError(message, hint="give one timeline per rank of the same run")
    return replace(
        timelines[0],
        spans=tuple(span for item in timelines for span in item.spans),
        memory=tuple(sample for item in timelines for sample in item.memory),
    )


def _check_span(span: Span, num_steps: int) -> None:
    if not (math.isfinite(span.start_s) and math.isfinite(span.end_s) and span.start_s <= span.end_s):
        message = (
            f"span {span.instruction!r} of step {span.step} starts at {span.start_s} s and ends at "
            f"{span.end_s} s"
        )
        raise TimelineError(message, hint="a span must end at or after its start, at finite times")
    if not 0 <= span.step <= num_steps or (span.phase == "step" and span.step == num_steps):
        message = f"span {span.instruction!r} belongs to step {span.step}, but the run has {num_steps} steps"
        raise TimelineError(
            message, hint="steps are numbered from 0; only the flush comes after the last step"
        )
