"""Dependencies, derived from what instructions touch.

Lowering lists instructions in an order that would be right on a single stream. Whatever two of them conflict and
stand on different streams gets an edge; the rest may overlap. The validator checks the outcome without knowing
how it was made.

An upload into a staging buffer, on a stream of its own, and a forward that reads the staging buffer. The forward waits for the upload; and the
upload of the next step, which overwrites the staging buffer, for the forward of this one:

>>> from zosim.program.contents import FrozenWeights
>>> from zosim.program.instructions import Access
>>> from zosim.program.operations import Copy, Forward
>>> from zosim.eval_points import BASE
>>> staging = (Access("staging.0", FrozenWeights("block.0"), None, 64),)
>>> listed = [
...     Instruction("upload", Copy(), Stream.H2D, "upload", "block.0", writes=staging),
...     Instruction("forward", Forward("block.0", BASE), Stream.COMPUTE, "forward", "block.0", reads=staging),
... ]
>>> for item in connected_by_conflicts(listed, listed):
...     print(item.id, [(edge.instruction, edge.distance) for edge in item.after])
upload [('forward', 1)]
forward [('upload', 0)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from zosim.program import Program
from zosim.program.instructions import Dependency, Instruction, Stream
from zosim.program.ranges import Ranges
from zosim.program.step_graph import StepGraph


class _Event(NamedTuple):
    """An instruction in one of two consecutive phases: 0 the earlier, 1 the later."""

    phase: int
    order: int
    instruction: Instruction


# Stream, whether it writes, and the group by whose shares it touches the range.
_Latest = dict[tuple[Stream, bool, str], _Event]


class _Touched:
    """Of every byte of every buffer, the latest events that touched it.

    What a stream did earlier is ordered before; so is whatever touched a byte before it was written last.
    """

    def __init__(self, before: Iterable[Instruction]) -> None:
        self._latest: dict[str, Ranges[_Latest]] = defaultdict(lambda: Ranges({}, dict.copy))
        for order, instruction in enumerate(before):
            self.add(_Event(0, order, instruction))

    def add(self, event: _Event) -> None:
        """Take in an event that comes after all others."""
        stream = event.instruction.stream
        for access in event.instruction.reads:
            for latest in self._latest[access.buffer].within(access.offset_bytes, access.end_bytes):
                latest[stream, False, access.share] = event
        for access in event.instruction.writes:
            written = {(stream, True, access.share): event}
            # A write ends the history of its bytes: whoever comes next need only wait for the write.
            self._latest[access.buffer].put(access.offset_bytes, access.end_bytes, written)

    def conflicts(self, instruction: Instruction, *, of_peers: bool = False) -> Iterator[_Event]:
        """Yield the events of which one of the two writes what the other touches.

        Where the events are those of other ranks, two shares by one group are never of the same bytes.
        """
        for accesses, writes in ((instruction.reads, False), (instruction.writes, True)):
            for access in accesses:
                for latest in self._latest[access.buffer].over(access.offset_bytes, access.end_bytes):
                    for (_, wrote, share), event in latest.items():
                        # Two reads of one byte are no conflict.
                        are_apart = of_peers and share and share == access.share
                        if (writes or wrote) and not are_apart:
                            yield event


def connect(
    step: Sequence[Instruction],
    flush: Sequence[Instruction],
    *,
    overlap: bool,
    shared: frozenset[str] = frozenset(),
    group: str = "",
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Return `step` and `flush` with the dependencies that their accesses need.

    - `overlap`: off, every instruction waits for the one listed before it.
    - `shared`: buffers that the ranks of a host have in common.
    - `group`: the ranks among whom these are shared out.

    The host reads a step's scalars before it issues the next step. So every stream's first instruction of a step waits for
    the last compute instruction of the step before.
    """
    # The step is connected behind itself: what holds there holds between any two steps.
    derive = connected_by_conflicts if overlap else _chained
    connected_step = _with_peers(_begin_after(derive(step, step), step), step, shared, group)
    return connected_step, _with_peers(derive(step, flush), step, shared, group) if flush else ()


def without_implied(program: Program) -> Program:
    """Return `program` with only the dependencies that are needed: removing any of them changes the order.

    A dependency is judged where it occurs in full, in the second step and in the flush.
    """
    # In the first step there is nothing for edges across steps to wait for.
    run = StepGraph(program, num_steps=2)
    kept: dict[tuple[str, str], tuple[Dependency, ...]] = {}
    for item in run.listed:
        if item.step >= 1:
            needed = {run.listed[index].instruction.id for index in run.needed(item)}
            after = tuple(
                edge for edge in item.instruction.after if edge.process_group or edge.instruction in needed
            )
            kept[item.phase, item.instruction.id] = after
    return replace(
        program,
        step=tuple(_behind(item, kept["step", item.id]) for item in program.step),
        flush=tuple(_behind(item, kept["flush", item.id]) for item in program.flush),
    )


def _behind(item: Instruction, after: tuple[Dependency, ...]) -> Instruction:
    # Not by `replace`, which takes four times as long: a planner connects tens of thousands.
    return Instruction(
        item.id, item.op, item.stream, item.label, item.segment, after, item.reads, item.writes, item.work
    )


def connected_by_conflicts(
    before: Sequence[Instruction], phase: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    """Return `phase`, which runs after `before`, with one edge per conflict that streams do not order."""
    edges = _conflicting(before, phase)
    return tuple(map(_behind, phase, edges))


def _conflicting(
    before: Iterable[Instruction], phase: Iterable[Instruction], *, of_peers: bool = False
) -> Iterator[tuple[Dependency, ...]]:
    """Yield for each instruction of `phase` what it conflicts with: on other streams of its rank, or on its peers."""
    touched = _Touched(before)
    for order, instruction in enumerate(phase):
        conflicts = touched.conflicts(instruction, of_peers=of_peers)
        yield _edges(None if of_peers else instruction.stream, conflicts)
        touched.add(_Event(1, order, instruction))


def _edges(stream: Stream | None, conflicts: Iterable[_Event]) -> tuple[Dependency, ...]:
    """Keep the latest conflict of every stream but `stream`; the earlier ones are ordered before it."""
    latest: dict[Stream, _Event] = {}
    for event in conflicts:
        other = event.instruction.stream
        if other != stream and (other not in latest or latest[other][:2] < event[:2]):
            latest[other] = event
    in_order = sorted(latest.values(), key=lambda event: event[:2])
    return tuple(Dependency(event.instruction.id, 1 - event.phase) for event in in_order)


def _with_peers(
    phase: tuple[Instruction, ...], before: Sequence[Instruction], shared: frozenset[str], group: str
) -> tuple[Instruction, ...]:
    """Return `phase`, which runs after `before`, with what each waits for on the other ranks of its host.

    All run the same instructions, so whatever one of them would conflict with on its own rank, it conflicts with on
    the others; except that two shares are never of the same bytes.
    """
    if not shared:
        return phase
    touching = list(_touching(phase, shared))
    edges_of = {
        item.id: tuple(Dependency(edge.instruction, edge.distance, group) for edge in edges)
        for item, edges in zip(
            touching, _conflicting(_touching(before, shared), touching, of_peers=True), strict=True
        )
    }
    return tuple(
        _behind(item, (*item.after, *edges_of[item.id])) if edges_of.get(item.id) else item for item in phase
    )


def _touching(listed: Iterable[Instruction], shared: frozenset[str]) -> Iterator[Instruction]:
    """Yield the instructions that touch shared buffers, with their accesses to these alone."""
    for item in listed:
        reads = [access for access in item.reads if access.buffer in shared]
        writes = [access for access in item.writes if access.buffer in shared]
        if reads or writes:
            # A rank's own buffers have the same names on its peers, and are other memory.
            yield replace(item, reads=tuple(reads), writes=tuple(writes))


def _chained(before: Sequence[Instruction], phase: Sequence[Instruction]) -> tuple[Instruction, ...]:
    connected = []
    # The listed order would be right on a single stream, so it is the chain.
    previous = Dependency(before[-1].id, 1)
    for instruction in phase:
        connected.append(replace(instruction, after=(previous,)))
        previous = Dependency(instruction.id)
    return tuple(connected)


def _begin_after(
    instructions: tuple[Instruction, ...], step: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    last = [instruction.id for instruction in step if instruction.stream is Stream.COMPUTE][-1]
    edge = Dependency(last, 1)
    # Compute follows itself without an edge, since a stream runs in order.
    started: set[Stream] = {Stream.COMPUTE}
    begun = []
    for instruction in instructions:
        is_first = instruction.stream not in started
        started.add(instruction.stream)
        waits = is_first and edge not in instruction.after
        begun.append(replace(instruction, after=(*instruction.after, edge)) if waits else instruction)
    return tuple(begun)
