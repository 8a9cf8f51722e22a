"""A timeline as a Chrome trace, which Perfetto opens and Holistic Trace Analysis loads.

A rank is a process and a stream a thread. Dependencies between streams are flow arrows, memory is a counter per
space, and a step is an annotation ``ProfilerStep#n`` on the host's thread, from the end of the step before to its own.

Holistic Trace Analysis (HTA) reads what PyTorch's profiler writes, one file per rank: ``distributedInfo`` says which
rank, an activity on a device carries ``stream`` > 0 and a ``correlation`` that a launch on the host shares, its step is
the one that the launch lies in, and copies are known by names that begin with ``Memcpy``. Launches are therefore
written as well; nothing was measured or predicted about them.

.. [1] Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
.. [2] HTA 0.5, ``hta/common/trace_parser.py``, ``trace.py`` and ``trace_file.py``.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from topology.errors import TimelineError
from zosim.program import Program
from zosim.program.instructions import DISK_STREAMS, Space, Stream
from zosim.program.step_graph import RunNode, StepGraph
from zosim.timeline import Span, Timeline

HOST_THREAD = 0
# HTA takes streams above 0 for device streams.
STREAM_THREADS = {stream: number for number, stream in enumerate(Stream, start=1)}
# HTA stores row numbers in the integer type that the correlations fit in, so they must not be small.
FIRST_CORRELATION = 2**20
_COPY_NAMES = {
    Stream.H2D: "Memcpy HtoD",
    Stream.D2H: "Memcpy DtoH",
    **dict.fromkeys(sorted(DISK_STREAMS), "Memcpy HtoH"),
}
# Within the source of an arrow rather than at its end, where its slice is already closed.
_BEFORE_END_US = 0.001

Event = dict[str, Any]


def chrome_trace(
    timeline: Timeline, program: Program | None = None, rank: int | None = None
) -> dict[str, Any]:
    """Return the timeline as a Chrome trace, times in microseconds.

    - `timeline`: steps that it leaves out are left out here as well; an instant event says how many.
    - `program`: the program that it is of; without it there are no arrows.
    - `rank`: only this rank, as HTA wants it; all ranks in one trace unless given.

    Raises TimelineError if the timeline has no spans of the rank, or spans of another program.
    """
    ranks = timeline.ranks if rank is None else tuple(known for known in timeline.ranks if known == rank)
    if not ranks:
        message = f"timeline of {timeline.program} has no spans of rank {'any' if rank is None else rank}"
        raise TimelineError(message, hint=f"it has ranks {', '.join(map(str, timeline.ranks)) or 'none'}")
    events: list[Event] = []
    for number in ranks:
        events += _metadata(timeline, number)
        events += _steps(timeline, number)
        events += _spans(timeline, number)
        events += _memory(timeline, number)
        if program is not None:
            events += _arrows(timeline, program, number)
    return {
        "schemaVersion": 1,
        "traceName": f"{timeline.program} ({timeline.source})",
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "zosim", "rank": ranks[0], "world_size": len(timeline.ranks)},
        "deviceProperties": [{"id": number, "name": f"rank {number}"} for number in ranks],
        "traceEvents": events,
    }


def save_trace(
    timeline: Timeline, path: str | Path, program: Program | None = None, rank: int | None = None
) -> None:
    """Write :func:`chrome_trace` as JSON, compressed if the name ends in ``.gz``.

    Parameters
    ----------
    timeline : Timeline
        What to write.
    path : str or Path
        File; ``.json`` or ``.json.gz``.
    program : Program, optional
        Program of the timeline; without it there are no arrows.
    rank : int, optional
        Rank to write; all ranks unless given.

    Raises
    ------
    TimelineError
        As :func:`chrome_trace`, or if the file cannot be written.
    """
    text = json.dumps(chrome_trace(timeline, program, rank))
    try:
        if str(path).endswith(".gz"):
            Path(path).write_bytes(gzip.compress(text.encode()))
        else:
            Path(path).write_text(text)
    except OSError as error:
        message = f"cannot write the trace {str(path)!r}: {error.strerror}"
        raise TimelineError(message, hint="name a file in an existing folder") from error


def _us(seconds: float) -> float:
    """Return microseconds, rounded to picoseconds, which are below any clock."""
    return round(seconds * 1e6, 6)


def _metadata(timeline: Timeline, rank: int) -> Iterator[Event]:
    yield _named("process_name", rank, HOST_THREAD, {"name": f"rank {rank} ({timeline.source})"})
    yield _named("process_sort_index", rank, HOST_THREAD, {"sort_index": rank})
    threads = {HOST_THREAD: "steps"} | {number: stream.value for stream, number in STREAM_THREADS.items()}
    for number, name in threads.items():
        yield _named("thread_name", rank, number, {"name": name})
        yield _named("thread_sort_index", rank, number, {"sort_index": number})


def _named(name: str, rank: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _steps(timeline: Timeline, rank: int) -> Iterator[Event]:
    for step in timeline.listed_steps:
        start_s = timeline.step_end_s(step - 1) if step else timeline.begin_s
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step}",
            "pid": rank,
            "tid": HOST_THREAD,
            "ts": _us(start_s),
            "dur": _us(timeline.step_end_s(step) - start_s),
            "args": {},
        }
    repeat = timeline.repeat
    if repeat is not None and repeat.num_omitted_steps:
        yield {
            "ph": "i",
            "s": "p",
            "name": f"{repeat.num_omitted_steps} steps like step {repeat.first_step} left out",
            "pid": rank,
            "tid": HOST_THREAD,
            "ts": _us(timeline.step_end_s(repeat.first_omitted_step - 1)),
        }


def _spans(timeline: Timeline, rank: int) -> Iterator[Event]:
    spans = [span for span in timeline.spans if span.rank == rank]
    for correlation, span in enumerate(spans, start=FIRST_CORRELATION):
        is_copy = span.stream in _COPY_NAMES
        yield {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel",
            "pid": rank,
            "tid": HOST_THREAD,
            # HTA rounds starts up and ends down; a whole number stays an event of no length.
            "ts": math.floor(_us(span.start_s)),
            "dur": 0,
            "args": {"correlation": correlation},
        }
        yield {
            "ph": "X",
            "cat": "gpu_memcpy" if is_copy else "kernel",
            "name": _title(span),
            "pid": rank,
            "tid": STREAM_THREADS[span.stream],
            "ts": _us(span.start_s),
            "dur": _us(span.duration_s),
            "args": _args(span, correlation),
        }


def _title(span: Span) -> str:
    copy = _COPY_NAMES.get(span.stream)
    name = f"{span.label} {span.segment}".strip()
    return f"{copy} {name}" if copy else name


def _args(span: Span, correlation: int) -> dict[str, Any]:
    return {
        "device": span.rank,
        "stream": STREAM_THREADS[span.stream],
        "correlation": correlation,
        "instruction": span.instruction,
        "phase": span.phase,
        "step": span.step,
        "limiter": span.limiter,
    }


def _memory(timeline: Timeline, rank: int) -> Iterator[Event]:
    for space in Space:
        for time_s, parts in timeline.memory_curve(space, rank):
            yield {
                "ph": "C",
                "name": f"{space.value} memory (bytes)",
                "pid": rank,
                "tid": HOST_THREAD,
                "ts": _us(time_s),
                "args": parts,
            }


def _arrows(timeline: Timeline, program: Program, rank: int) -> Iterator[Event]:
    graph = StepGraph(program, timeline.num_steps)
    spans = {
        RunNode(graph.position(span.phase, span.step), span.instruction): span
        for span in timeline.spans
        if span.rank == rank
    }
    number = 0
    for node, target in spans.items():
        if not graph.has(node):
            message = f"program {program.name} has no {target.phase}/{target.instruction}"
            raise TimelineError(message, hint="give the program that the timeline belongs to")
        for before in graph.waits_for(node):
            source = spans.get(before)
            if source is not None and source.stream != target.stream:
                number += 1
                # Ids are global to a trace, ranks are not.
                common = {"cat": "dependency", "name": "after", "id": f"{rank}.{number}", "pid": rank}
                leaves_us = max(_us(source.start_s), _us(source.end_s) - _BEFORE_END_US)
                yield common | {"ph": "s", "tid": STREAM_THREADS[source.stream], "ts": leaves_us}
                enters_us = _us(target.start_s)
                yield common | {"ph": "f", "bp": "e", "tid": STREAM_THREADS[target.stream], "ts": enters_us}
