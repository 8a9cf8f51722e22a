"""A timeline as compressed columns of integers: of 100,000 spans about a megabyte."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from topology.units import format_bytes
from zosim.analysis.pictures import colour_of
from zosim.planning.predict import PlannedRun
from zosim.program import Program
from zosim.program.instructions import Instruction, Phase, Stream
from zosim.timeline import Span, Timeline

_STREAMS = list(Stream)
# A start is written as ticks since the start before, a duration as ticks: both in 32 bits, so that a tick is longer in a long run.
_MOST_TICKS = 2**31
_SHORTEST_TICK_S = 1e-9
_DARK_TEXT = ("#e69f00", "#f0e442", "#a6d8f5", "#56b4e9", "#cccccc", "#b3b3b3", "#cc79a7")
_BLOCK = "block."


def timeline_columns(timeline: Timeline, planned: PlannedRun, label: str) -> dict[str, Any]:
    """Return a timeline as the page's script reads it.

    - `planned`: of the same programs: they say what an instruction waits for.
    - `label`: what the rows of this timeline are called, such as ``predicted``.

    Returns
    -------
    dict
        `start_gaps`, `durations`, `rows`, `instructions` and `steps` are columns with an element for each span, in the timeline's order:
        little-endian integers, compressed by zlib, in base 64. Times are in ticks of `tick_s` from `begin_s`, which is relative to the
        beginning of the first periodic step, so that timelines of one program lie above each other.
    """
    spans = timeline.spans
    rows = sorted(
        {(span.rank, span.stream) for span in spans}, key=lambda row: (row[0], _STREAMS.index(row[1]))
    )
    row_of = {row: number for number, row in enumerate(rows)}
    roles = planned.programs.roles
    keys = {(roles[span.rank], span.phase, span.instruction): span for span in reversed(spans)}
    number_of = {key: number for number, key in enumerate(keys)}
    tick_s = max(timeline.makespan_s / _MOST_TICKS, _SHORTEST_TICK_S)
    starts = np.array([span.start_s for span in spans]) - timeline.begin_s
    ticks = np.round(starts / tick_s).astype(np.int64)
    durations = np.round(np.array([span.duration_s for span in spans]) / tick_s)
    several = len({rank for rank, _ in rows}) > 1
    return {
        "label": label,
        "begin_s": timeline.begin_s - aligned_at_s(timeline),
        "tick_s": tick_s,
        "row_names": [f"rank {rank} {stream}" if several else str(stream) for rank, stream in rows],
        "row_ranks": [rank for rank, _ in rows],
        "start_gaps": _packed(np.diff(ticks, prepend=0), "<u4"),
        "durations": _packed(durations, "<u4"),
        "rows": _packed([row_of[span.rank, span.stream] for span in spans], "<u2"),
        "instructions": _packed(
            [number_of[roles[span.rank], span.phase, span.instruction] for span in spans], "<u4"
        ),
        "steps": _packed([span.step for span in spans], "<u4"),
        "instruction_table": _instructions(keys, planned.programs.programs),
    }


def aligned_at_s(timeline: Timeline) -> float:
    """Return when the first periodic step begins: where timelines of one program are laid above each other."""
    first = timeline.periodic_steps[0]
    return timeline.step_end_s(first - 1) if first else timeline.begin_s


def _instructions(
    keys: dict[tuple[int, Phase, str], Span], programs: Sequence[Program]
) -> list[dict[str, Any]]:
    colours = colour_of(sorted({span.label for span in keys.values()}))
    known = {
        (role, phase, instruction.id): instruction
        for role, program in enumerate(programs)
        for phase, instruction in program.instructions()
    }
    return [
        {
            "id": span.instruction,
            "role": key[0],
            "label": span.label,
            "segment": span.segment,
            "short": span.segment.removeprefix(_BLOCK),
            "limiter": span.limiter,
            "work": _work(known[key]) if key in known else "",
            "after": [
                (wait.instruction, wait.distance) for wait in (known[key].after if key in known else ())
            ],
            "colour": colours[span.label],
            "dark_text": colours[span.label] in _DARK_TEXT,
        }
        for key, span in keys.items()
    ]


def _work(instruction: Instruction) -> str:
    """Return what an instruction does, of each kind that it does any of."""
    work = instruction.work
    counts = [(work.flops, "FLOPs"), (work.num_normals, "normals"), (work.num_kernels, "kernels")]
    sizes = sum(access.size_bytes for access in (*instruction.reads, *instruction.writes))
    texts = [f"{number:,.4g} {what}" for number, what in counts if number]
    return ", ".join([*texts, *([f"{format_bytes(sizes)} read or written"] if sizes else [])])


def _packed(values: Any, dtype: DTypeLike) -> str:
    return base64.b64encode(zlib.compress(np.asarray(values).astype(dtype).tobytes(), 9)).decode("ascii")
