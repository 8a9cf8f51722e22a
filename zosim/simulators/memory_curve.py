"""Memory over time, from a program's buffers and the spans of its instructions.

Examples
--------
A slot of 64 bytes for the whole run, and a hidden state of 8 that is there from the first instruction that touches it to the
last:

>>> from zosim.program.contents import Named
>>> from zosim.program.instructions import Access, Buffer, Stream
>>> from zosim.program.operations import Load
>>> slot = Buffer("slot.0", Space.DEVICE, 64, "slots", "float32")
>>> hidden = Buffer("hidden", Space.DEVICE, 8, "activations", "float32", dynamic=True)
>>> left = (Access("hidden", Named("batch"), 0, 8),)
>>> step = (Instruction("work", Load(), Stream.COMPUTE, "load", "embed", writes=left),)
>>> span = Span(0, "step", 0, "work", Stream.COMPUTE, "load", "embed", start_s=1.0, end_s=3.0)
>>> for sample in memory_samples(Program("example", (slot, hidden), (), (), step), [span], num_steps=1):
...     print(sample.time_s, sample.role, sample.size_bytes)
1.0 activations 8
1.0 slots 64
3.0 activations 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from zosim.program import Program
from zosim.program.instructions import Instruction, Space
from zosim.program.operations import Allocate, Free
from zosim.program.step_graph import Place, StepGraph
from zosim.timeline import MemorySample, Span

WORKSPACE = "workspace"

Change = tuple[float, Space, str, int]


def memory_samples(
    program: Program, spans: Iterable[Span], num_steps: int, rank: int = 0
) -> list[MemorySample]:
    """Return how much each role takes of each space, from the spans of one rank.

    Parameters
    ----------
    program : Program
    spans : iterable of Span
        With their real times, of the rank alone.
    num_steps : int
        Steps of the run.

    Returns
    -------
    list of MemorySample
        In order of time.

    Notes
    -----
    A static buffer is there for the whole run. A dynamic one is taken when the first instruction of a step that
    touches it starts, and given back when the last one ends. One that the program allocates itself is taken when
    ``Allocate`` starts and given back when ``Free`` ends; it is there from the beginning if the run begins with
    contents in it. An instruction's workspace, on the device, lasts as long as the instruction.
    """
    graph = StepGraph(program, num_steps)
    listed = [
        (span, graph.instruction(Place(graph.position(span.part, span.step), span.instruction)))
        for span in spans
    ]
    begin_s = min((span.start_s for span, _ in listed), default=0.0)
    changes = list(_static(program, begin_s))
    changes += _dynamic(program, listed)
    changes += _allocated(program, listed)
    for span, instruction in listed:
        if instruction.work.workspace_bytes:
            size = instruction.work.workspace_bytes
            changes.append((span.start_s, Space.DEVICE, WORKSPACE, size))
            changes.append((span.end_s, Space.DEVICE, WORKSPACE, -size))
    return list(_accumulated(changes, rank))


def _static(program: Program, begin_s: float) -> Iterator[Change]:
    allocated = {item.op.buffer for _, item in program.instructions() if isinstance(item.op, Allocate)}
    filled = {access.buffer for access in program.initial}
    for buffer in program.buffers:
        if not buffer.dynamic and (buffer.name not in allocated or buffer.name in filled):
            yield begin_s, buffer.space, buffer.role, buffer.size_bytes


def _dynamic(program: Program, listed: list[tuple[Span, Instruction]]) -> Iterator[Change]:
    uses: dict[tuple[str, str, int], tuple[float, float]] = {}
    for span, instruction in listed:
        for name in {access.buffer for access in (*instruction.reads, *instruction.writes)}:
            if program.buffer(name).dynamic:
                key = name, span.part, span.step
                first_s, last_s = uses.get(key, (span.start_s, span.end_s))
                uses[key] = min(first_s, span.start_s), max(last_s, span.end_s)
    for (name, _, _), (first_s, last_s) in uses.items():
        buffer = program.buffer(name)
        yield first_s, buffer.space, buffer.role, buffer.size_bytes
        yield last_s, buffer.space, buffer.role, -buffer.size_bytes


def _allocated(program: Program, listed: list[tuple[Span, Instruction]]) -> Iterator[Change]:
    for span, instruction in listed:
        if isinstance(instruction.op, Allocate | Free):
            buffer, takes = program.buffer(instruction.op.buffer), isinstance(instruction.op, Allocate)
            size = buffer.size_bytes if takes else -buffer.size_bytes
            yield span.start_s if takes else span.end_s, buffer.space, buffer.role, size


def _accumulated(changes: list[Change], rank: int) -> Iterator[MemorySample]:
    at_once: dict[tuple[float, Space, str], int] = defaultdict(int)
    for time_s, space, role, size in changes:
        at_once[time_s, space, role] += size
    totals: dict[tuple[Space, str], int] = defaultdict(int)
    for (time_s, space, role), size in sorted(at_once.items(), key=lambda item: item[0]):
        if size:
            totals[space, role] += size
            yield MemorySample(rank, space, role, time_s, totals[space, role])
