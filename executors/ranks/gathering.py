"""What every rank measured, put together: one timeline with the clocks of all ranks aligned."""

from __future__ import annotations

from dataclasses import replace

from pydantic import TypeAdapter

from executors.ranks.communicator import Communicator
from zosim.spans import Span
from zosim.timeline import Timeline

_ADAPTER: TypeAdapter[Timeline] = TypeAdapter(Timeline)


def gathered_timeline(communicator: Communicator, own: Timeline) -> Timeline:
    """Return the timelines of all ranks as one.

    Notes
    -----
    Hosts' clocks differ, and so do the moments at which ranks begin to count. The exchange of losses ends on all ranks at
    the same moment, give or take the latency of one message; the first one that was timed sets the clocks.
    """
    told = communicator.gathered_bytes(_ADAPTER.dump_json(own), "gathering timelines")
    timelines = [_ADAPTER.validate_json(text) for text in told]
    ends = [_first_meeting(timeline.spans) for timeline in timelines]
    latest = max(ends)
    spans = [
        span.shifted(latest - end)
        for timeline, end in zip(timelines, ends, strict=True)
        for span in timeline.spans
    ]
    begin = min((span.start_s for span in spans), default=0.0)
    memory = tuple(sample for timeline in timelines for sample in timeline.memory)
    return replace(own, spans=tuple(span.shifted(-begin) for span in spans), memory=memory)


def _first_meeting(spans: tuple[Span, ...]) -> float:
    """Return when the first exchange among all ranks ended."""
    return min((span.end_s for span in spans if span.label == "exchange"), default=0.0)
