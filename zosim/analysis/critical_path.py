"""Why a run takes as long as it does: the chain of instructions of which each had to wait for the one before.

The walk goes backwards from a last instruction. What an instruction waited for longest is the predecessor, on its
stream or among its dependencies, that ended last; what lies between that end and its own start is a gap that no
instruction fills, called ``dispatch``. Segments touch each other, so they add up to the time that they explain.

For a step the walk is split where it comes back to an instruction that it has already passed, some steps later:
what lies between the two is the *critical circuit*, which repeats as long as steps do. Fill and drain of the
pipeline, which happen once a run and not once a step, are not in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from topology.errors import TimelineError
from zosim.program import Program
from zosim.program.instructions import DISK_STREAMS, Stream
from zosim.program.step_graph import RunNode, StepGraph
from zosim.timeline import Repeat, Span, Timeline

DISPATCH = "dispatch"
WAIT = "wait"
# Ends that differ by less than rounding are the same instant.
_SAME_INSTANT = 1e-12
# A periodic step has as many steps before it as a walk wants.
_ENDLESS = 10**9


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A stretch of the critical path."""

    start_s: float
    end_s: float
    # The instruction's label; `dispatch` for a gap before it although all that it waits for was done, `wait` for a gap whose cause lies
    # outside of the spans.
    label: str
    instruction: str  # instruction that runs, or that the gap stands before
    step: int
    stream: Stream
    segment: str
    limiter: str

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def is_gap(self) -> bool:
        """Whether no instruction runs."""
        return self.label in (DISPATCH, WAIT)


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Segments, in order of time, that tile an interval without hole or overlap."""

    rank: int
    segments: tuple[PathSegment, ...]
    num_steps: int  # steps that the interval spans

    def __post_init__(self) -> None:
        touching = all(a.end_s == b.start_s for a, b in pairwise(self.segments))
        total_s = math.fsum(segment.duration_s for segment in self.segments)
        scale = max(abs(self.duration_s), abs(self.end_s))
        assert touching, "segments of a critical path leave a hole"
        assert abs(total_s - self.duration_s) <= _SAME_INSTANT * scale, "segments do not add up"

    @property
    def begin_s(self) -> float:
        """Start of the interval."""
        return self.segments[0].start_s if self.segments else 0.0

    @property
    def end_s(self) -> float:
        """End of the interval."""
        return self.segments[-1].end_s if self.segments else 0.0

    @property
    def duration_s(self) -> float:
        """Length of the interval in seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What a critical path mostly consists of."""

    description: str  # such as `upload over pcie` or `forward (matmul)`
    label: str
    limiter: str
    share: float  # part of the path's time, 0 to 1
    seconds_per_step: float


_COPIES = frozenset({Stream.H2D, Stream.D2H}) | DISK_STREAMS


def bottleneck(path: CriticalPath) -> Bottleneck:
    """Return the label and limiter that take the largest part of a critical path.

    Raises TimelineError if the path is empty or takes no time.
    """
    return bottlenecks(path)[0]


def bottlenecks(path: CriticalPath) -> tuple[Bottleneck, ...]:
    """Return the labels and limiters of a critical path, those that take the largest parts first.

    Raises TimelineError if the path is empty or takes no time.
    """
    if not path.duration_s > 0:
        message = f"the critical path of rank {path.rank} takes {path.duration_s} s, so it has no bottleneck"
        raise TimelineError(message, hint="use a timeline with at least one step that takes time")
    groups: dict[tuple[str, str, bool], float] = defaultdict(float)
    for item in path.segments:
        groups[item.label, item.limiter, item.stream in _COPIES] += item.duration_s
    return tuple(
        Bottleneck(
            description=_describe(label, limiter, is_copy),
            label=label,
            limiter=limiter,
            share=seconds / path.duration_s,
            seconds_per_step=seconds / max(path.num_steps, 1),
        )
        for (label, limiter, is_copy), seconds in sorted(groups.items(), key=lambda item: -item[1])
    )


def _describe(label: str, limiter: str, is_copy: bool) -> str:
    if label == WAIT:
        return "wait for other ranks"
    if not limiter or limiter == label:
        return label
    limited_by = limiter.replace("_", " ")
    return f"{label} over {limited_by}" if is_copy else f"{label} ({limited_by})"


def step_path(timeline: Timeline, program: Program, rank: int = 0) -> CriticalPath:
    """Return the critical circuit of a rank's periodic steps.

    Where the timeline says how steps repeat, the circuit takes exactly as long as the steps that it spans.
    Otherwise it is the longest stretch between two visits of the walk to one instruction; its length is the
    time between the ends of that instruction in the two steps. A timeline too short for either gives the
    periodic steps' walk, clipped to them.

    Raises TimelineError if the rank has no spans, or spans of another program.
    """
    if timeline.repeat is not None:
        return _circuit(timeline, timeline.repeat, program, rank)
    return _longest_recurrence(timeline, program, rank)


Lookup = Callable[[RunNode], Span | None]


def _circuit(timeline: Timeline, repeat: Repeat, program: Program, rank: int) -> CriticalPath:
    """Follow the periodic steps backwards for ever, as they repeat, until the walk closes."""
    graph = StepGraph(program, 2 * _ENDLESS)
    lookup = _periodic_lookup(timeline, repeat, rank)
    start = _latest(_spans_by_node(timeline, graph, rank), timeline, rank, repeat.first_omitted_step - 1)
    walked: list[tuple[RunNode, Span, float]] = []
    seen: dict[tuple[str, int], int] = {}
    # Far enough from the beginning that no walk reaches it.
    lifted = start._replace(position=start.position + _ENDLESS // repeat.num_steps * repeat.num_steps)
    for node, span, before_s in _walk(lookup, graph, lifted):
        key = node.instruction, node.position % repeat.num_steps
        if key in seen:
            circuit = walked[seen[key] :]
            begin_s, end_s = span.end_s, circuit[0][1].end_s
            return CriticalPath(rank, _tiles(circuit, begin_s, end_s), circuit[0][0].position - node.position)
        seen[key] = len(walked)
        walked.append((node, span, before_s))
    # No dependency and no stream reaches back into the step before: impossible, a stream follows itself.
    raise AssertionError("a periodic step has a beginning")


def _longest_recurrence(timeline: Timeline, program: Program, rank: int) -> CriticalPath:
    graph = StepGraph(program, timeline.num_steps)
    periodic = set(timeline.periodic_steps)
    spans = _spans_by_node(timeline, graph, rank)
    inside = {node: span for node, span in spans.items() if span.phase == "step" and span.step in periodic}
    if not inside:
        message = f"timeline of {timeline.program} holds no step of rank {rank}"
        raise TimelineError(message, hint="simulate or run at least one step")
    last_step = max(periodic)
    walked = list(_walk(inside.get, graph, _latest(spans, timeline, rank, last_step)))
    first: dict[str, int] = {}
    best, best_run = 0, (0, 0)
    for number, (node, _, _) in enumerate(walked):
        upper = first.setdefault(node.instruction, number)
        distance = walked[upper][0].position - node.position
        if distance > best:
            best, best_run = distance, (upper, number)
    if not best:
        first_step = min(periodic)
        begin_s = timeline.step_end_s(first_step - 1) if first_step else timeline.begin_s
        return CriticalPath(rank, _tiles(walked, begin_s, walked[0][1].end_s), len(periodic))
    upper, lower = best_run
    return CriticalPath(
        rank, _tiles(walked[upper:lower], walked[lower][1].end_s, walked[upper][1].end_s), best
    )


def _walk(lookup: Lookup, graph: StepGraph, start: RunNode) -> Iterator[tuple[RunNode, Span, float]]:
    """Yield nodes backwards along the path, with the end of what each waited for longest (-inf for none)."""
    node: RunNode | None = start
    while node is not None:
        span = lookup(node)
        assert span is not None, f"{node} is on the path but has no span"
        known = [(item, before) for item in graph.predecessors(node) if (before := lookup(item)) is not None]
        before_s = max((before.end_s for _, before in known), default=-math.inf)
        yield node, span, before_s
        # Among equals the first: the stream's own predecessor.
        tolerance_s = _SAME_INSTANT * abs(before_s)
        node = next((item for item, before in known if before.end_s >= before_s - tolerance_s), None)


def _tiles(
    walked: list[tuple[RunNode, Span, float]], begin_s: float, end_s: float
) -> tuple[PathSegment, ...]:
    """Turn a backward walk into segments that tile [begin_s, end_s], earliest first."""
    segments: list[PathSegment] = []
    cursor_s = end_s

    def add(start_s: float, span: Span, label: str, limiter: str) -> None:
        nonlocal cursor_s
        if start_s < cursor_s:
            segments.append(
                PathSegment(
                    start_s, cursor_s, label, span.instruction, span.step, span.stream, span.segment, limiter
                )
            )
            cursor_s = start_s

    for number, (_, span, before_s) in enumerate(walked):
        is_last = number == len(walked) - 1
        # What starts before its predecessor has ended (two clocks) counts from that end.
        until_s = max(begin_s, begin_s if is_last else before_s)
        start_s = max(span.start_s, until_s)
        if start_s - until_s <= _SAME_INSTANT * abs(start_s):
            start_s = until_s
        add(start_s, span, span.label, span.limiter)
        # What meets other ranks waits for them; anything else for the host.
        waits_for_peers = span.stream in (Stream.LINK, Stream.RECV)
        add(until_s, span, DISPATCH if math.isfinite(before_s) and not waits_for_peers else WAIT, "")
    return tuple(reversed(segments))


def _periodic_lookup(timeline: Timeline, repeat: Repeat, rank: int) -> Lookup:
    listed = {(span.step, span.instruction): span for span in timeline.periodic_spans(rank)}

    def lookup(node: RunNode) -> Span | None:
        rounds, offset = divmod(node.position - 1 - repeat.first_step, repeat.num_steps)
        # Times are taken relative to a far position, where doubles still tell picoseconds apart.
        rounds -= _ENDLESS // repeat.num_steps
        span = listed.get((repeat.first_step + offset, node.instruction))
        return None if span is None else span.shifted(rounds * repeat.period_s, rounds * repeat.num_steps)

    return lookup


def _spans_by_node(timeline: Timeline, graph: StepGraph, rank: int) -> dict[RunNode, Span]:
    spans = {
        RunNode(graph.position(span.phase, span.step), span.instruction): span
        for span in timeline.spans
        if span.rank == rank
    }
    if not spans:
        message = f"timeline of {timeline.program} has no spans of rank {rank}"
        raise TimelineError(message, hint=f"it has ranks {', '.join(map(str, timeline.ranks)) or 'none'}")
    for node, span in spans.items():
        if not graph.has(node):
            message = f"the timeline has a span of {span.phase}/{span.instruction}, which program "
            message += f"{graph.program.name} does not have"
            raise TimelineError(message, hint="give the program that the timeline belongs to")
    return spans


def _latest(spans: dict[RunNode, Span], timeline: Timeline, rank: int, step: int | None = None) -> RunNode:
    """Return the node that ends last, in the run or in one of its steps."""
    chosen = [
        item for item in spans.items() if step is None or (item[1].phase == "step" and item[1].step == step)
    ]
    if not chosen:
        message = f"timeline of {timeline.program} has no spans of rank {rank} in step {step}"
        raise TimelineError(message, hint="every rank needs spans in every step")
    return max(chosen, key=lambda item: item[1].end_s)[0]
