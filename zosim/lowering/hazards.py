"""Dependencies, derived from what instructions touch.

Lowering lists instructions in an order that would be right on a single stream. Whatever two of them conflict and
stand on different streams gets an edge; the rest may overlap. The validator checks the outcome without knowing
how it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zosim.instructions import Access, Dependency, Instruction, Stream
from zosim.order import HappensBefore
from zosim.program import Program


@dataclass(frozen=True)
class _Event:
    """An instruction in one of two consecutive parts: 0 the earlier, 1 the later."""

    part: int
    order: int
    instruction: Instruction


@dataclass(frozen=True)
class _Touch:
    access: Access
    event: _Event
    writes: bool


def connect(
    step: Sequence[Instruction],
    flush: Sequence[Instruction],
    *,
    overlap: bool,
    shared: frozenset[str] = frozenset(),
    group: str = "",
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Return `step` and `flush` with the dependencies that their accesses need.

    Parameters
    ----------
    overlap : bool
        Off, every instruction waits for the one listed before it.
    shared : frozenset of str
        Buffers that the ranks of a host have in common.
    group : str
        The ranks among whom these are shared out.

    Notes
    -----
    The host reads a step's scalars before it issues the next step, so every stream's first instruction of a
    step waits for the last compute instruction of the step before.
    """
    derive = _from_hazards if overlap else _chained
    connected_step = _with_peers(_begin_after(derive(step, step), step), step, shared, group)
    return connected_step, _with_peers(derive(step, flush), step, shared, group) if flush else ()


def without_implied(program: Program) -> Program:
    """Return `program` with only the dependencies that are needed: cutting any of them changes the order.

    A dependency is judged where it occurs in full, in the second step and in the flush.
    """
    placed = program.unroll(2)
    order = HappensBefore(program.name, placed)
    kept: dict[tuple[str, str], tuple[Dependency, ...]] = {}
    for item in placed:
        if item.step >= 1:
            needed = {placed[index].instruction.id for index in order.needed(item)}
            after = tuple(edge for edge in item.instruction.after if edge.group or edge.instruction in needed)
            kept[item.part, item.instruction.id] = after
    return replace(
        program,
        step=tuple(replace(i, after=kept["step", i.id]) for i in program.step),
        flush=tuple(replace(i, after=kept["flush", i.id]) for i in program.flush),
    )


def _from_hazards(before: Sequence[Instruction], part: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return `part`, which runs after `before`, with one edge per conflict that streams do not order."""
    touched: dict[str, list[_Touch]] = {}
    for order, instruction in enumerate(before):
        _touch(touched, _Event(0, order, instruction))
    connected = []
    for order, instruction in enumerate(part):
        event = _Event(1, order, instruction)
        conflicts = list(_conflicts(touched, event))
        _touch(touched, event)
        connected.append(replace(instruction, after=_edges(instruction.stream, conflicts)))
    return tuple(connected)


def _conflicts(touched: dict[str, list[_Touch]], event: _Event) -> Iterable[_Event]:
    for access in event.instruction.reads:
        yield from (t.event for t in touched.get(access.buffer, ()) if t.writes and t.access.overlaps(access))
    for access in event.instruction.writes:
        yield from (t.event for t in touched.get(access.buffer, ()) if t.access.overlaps(access))


def _touch(touched: dict[str, list[_Touch]], event: _Event) -> None:
    instruction = event.instruction
    for access in instruction.reads:
        touched.setdefault(access.buffer, []).append(_Touch(access, event, writes=False))
    for access in instruction.writes:
        # Whatever lies inside a write is ordered before it, so later accesses need to wait for the write alone.
        kept = [t for t in touched.get(access.buffer, ()) if not _inside(t.access, access)]
        touched[access.buffer] = [*kept, _Touch(access, event, writes=True)]


def _inside(inner: Access, outer: Access) -> bool:
    return outer.offset_bytes <= inner.offset_bytes and inner.end_bytes <= outer.end_bytes


def _edges(stream: Stream | None, conflicts: Iterable[_Event]) -> tuple[Dependency, ...]:
    """Keep the latest conflict of every stream but `stream`; the earlier ones are ordered before it."""
    latest: dict[Stream, _Event] = {}
    for event in conflicts:
        other = event.instruction.stream
        if other != stream:
            known = latest.get(other)
            if known is None or (known.part, known.order) < (event.part, event.order):
                latest[other] = event
    return tuple(
        Dependency(event.instruction.id, 1 - event.part)
        for event in sorted(latest.values(), key=lambda event: (event.part, event.order))
    )


def _with_peers(
    part: tuple[Instruction, ...], before: Sequence[Instruction], shared: frozenset[str], group: str
) -> tuple[Instruction, ...]:
    """Return `part`, which runs after `before`, with what each waits for on the other ranks of its host.

    All run the same instructions, so whatever one of them would conflict with on its own rank, it conflicts with on
    the others; except that two shares are never of the same bytes.
    """
    if not shared:
        return part
    touched: dict[str, list[_Touch]] = {}
    for order, instruction in enumerate(before):
        _touch(touched, _Event(0, order, _only(instruction, shared)))
    connected = []
    for order, instruction in enumerate(part):
        event = _Event(1, order, _only(instruction, shared))
        edges = _edges(None, _peer_conflicts(touched, event))
        _touch(touched, event)
        connected.append(
            replace(instruction, after=(*instruction.after, *(replace(edge, group=group) for edge in edges)))
        )
    return tuple(connected)


def _only(instruction: Instruction, shared: frozenset[str]) -> Instruction:
    """Return an instruction with its accesses to shared buffers alone."""
    reads = tuple(access for access in instruction.reads if access.buffer in shared)
    return replace(
        instruction, reads=reads, writes=tuple(a for a in instruction.writes if a.buffer in shared)
    )


def _peer_conflicts(touched: dict[str, list[_Touch]], event: _Event) -> Iterable[_Event]:
    for access, writes in (
        *((access, False) for access in event.instruction.reads),
        *((access, True) for access in event.instruction.writes),
    ):
        for touch in touched.get(access.buffer, ()):
            are_apart = bool(access.share) and access.share == touch.access.share
            if (writes or touch.writes) and touch.access.overlaps(access) and not are_apart:
                yield touch.event


def _chained(before: Sequence[Instruction], part: Sequence[Instruction]) -> tuple[Instruction, ...]:
    connected = []
    previous = Dependency(before[-1].id, 1)
    for instruction in part:
        connected.append(replace(instruction, after=(previous,)))
        previous = Dependency(instruction.id)
    return tuple(connected)


def _begin_after(
    instructions: tuple[Instruction, ...], step: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    last = [instruction.id for instruction in step if instruction.stream is Stream.COMPUTE][-1]
    edge = Dependency(last, 1)
    started: set[Stream] = {Stream.COMPUTE}
    begun = []
    for instruction in instructions:
        is_first = instruction.stream not in started
        started.add(instruction.stream)
        waits = is_first and edge not in instruction.after
        begun.append(replace(instruction, after=(*instruction.after, edge)) if waits else instruction)
    return tuple(begun)
