"""Hazards: the edges that lowering derives, and what the validator refuses, against both rules taken byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from costmodel.work import Work
from topology.errors import Hazard, ProgramError
from zosim.lowering.hazards import connect, without_implied
from zosim.program import Program
from zosim.program.contents import Named
from zosim.program.instructions import Access, Buffer, Instruction, Space, Stream
from zosim.program.operations import Scalar
from zosim.program.ranges import Ranges
from zosim.program.step_graph import Listed, StepGraph
from zosim.program.validate import NUM_UNROLLED_STEPS, validate

SIZE = 6
BUFFERS = tuple(Buffer(name, Space.DEVICE, SIZE, "scalars", "float64") for name in ("a", "b"))
STREAMS = (Stream.COMPUTE, Stream.H2D, Stream.D2H)


def access(buffer: str, begin: int, end: int, what: str = "x:y", step: int | None = None) -> Access:
    return Access(buffer, Named(what), step, end - begin, begin)


@st.composite
def accesses(draw: st.DrawFn, *, whole: bool) -> Access:
    begin = 0 if whole else draw(st.integers(0, SIZE - 1))
    end = SIZE if whole else draw(st.integers(begin + 1, SIZE))
    return access(draw(st.sampled_from("ab")), begin, end)


@st.composite
def steps(draw: st.DrawFn) -> list[Instruction]:
    """Instructions that touch whole buffers or any parts of them, one of them on the compute stream."""
    whole = draw(st.booleans())
    listed = []
    for number in range(draw(st.integers(2, 7))):
        stream = Stream.COMPUTE if number == 0 else draw(st.sampled_from(STREAMS))
        reads = tuple(draw(st.lists(accesses(whole=whole), max_size=2)))
        # One byte was always written together.
        reads = reads if whole else tuple(replace(read, size_bytes=1) for read in reads)
        writes = tuple(draw(st.lists(accesses(whole=whole), max_size=2)))
        op = Scalar("mean_loss")
        listed.append(Instruction(f"i{number}", op, stream, "", "", reads=reads, writes=writes, work=Work()))
    return listed


def program_of(step: Sequence[Instruction]) -> Program:
    initial = tuple(access(buffer.name, 0, SIZE) for buffer in BUFFERS)
    return Program("drawn", BUFFERS, initial, (), tuple(step))


def conflicts(placed: Sequence[Listed]) -> Iterator[tuple[Listed, Listed]]:
    """Yield every two instructions that touch a common byte which one of them writes: each with each."""
    for later in placed:
        for earlier in placed[: later.index]:
            one, other = earlier.instruction, later.instruction
            pairs = [(a, b) for a in one.writes for b in (*other.reads, *other.writes)]
            pairs += [(a, b) for a in one.reads for b in other.writes]
            if any(a.overlaps(b) for a, b in pairs):
                yield earlier, later


@given(steps())
def test_every_conflict_is_ordered_and_no_edge_is_spare(step: list[Instruction]) -> None:
    connected, _ = connect(step, (), overlap=True)
    program = without_implied(program_of(connected))
    run = StepGraph(program, num_steps=3)
    assert all(run.ordered(one.index, other.index) for one, other in conflicts(run.listed))
    validate(program)
    for number, item in enumerate(program.step):
        is_first_of_stream = item.stream not in {other.stream for other in program.step[:number]}
        for edge in item.after:
            if edge.distance == 1 and is_first_of_stream:
                continue  # The host issues one step after the other.
            others = tuple(other for other in item.after if other is not edge)
            removed = replace(
                program,
                step=(*program.step[:number], replace(item, after=others), *program.step[number + 1 :]),
            )
            loose = StepGraph(removed, num_steps=3)
            assert not all(loose.ordered(one.index, other.index) for one, other in conflicts(loose.listed))


def first_hazard(program: Program) -> tuple[str, int, str] | None:
    """Return the first instruction that breaks a rule as part, step and id; every byte is remembered by itself."""
    run = StepGraph(program, NUM_UNROLLED_STEPS)
    # What a byte holds, with the number of the write that put it there.
    held = {(a.buffer, n): (a.what, 0) for a in program.initial for n in range(a.offset_bytes, a.end_bytes)}
    touched: dict[tuple[str, int], list[tuple[Listed, bool]]] = {place: [] for place in held}
    num_writes = 0
    for item in run.listed:
        for accesses, writes in ((item.instruction.reads, False), (item.instruction.writes, True)):
            for one in accesses:
                places = [(one.buffer, n) for n in range(one.offset_bytes, one.end_bytes)]
                contents = {held[place] for place in places}
                is_there = writes or (len(contents) == 1 and {what for what, _ in contents} == {one.what})
                loose = any(
                    other is not item and (writes or wrote) and not run.ordered(other.index, item.index)
                    for place in places
                    for other, wrote in touched[place]
                )
                if loose or not is_there:
                    return item.phase, item.step, item.instruction.id
                num_writes += writes
                for place in places:
                    touched[place].append((item, writes))
                    if writes:
                        held[place] = one.what, num_writes
    return None


@settings(max_examples=100)
@given(steps(), st.data())
def test_the_validator_refuses_what_breaks_a_rule_for_some_byte(
    step: list[Instruction], data: st.DataObject
) -> None:
    connected, _ = connect(step, (), overlap=True)
    listed = list(connected)
    if data.draw(st.booleans(), "cuts an edge"):
        number = data.draw(st.integers(0, len(listed) - 1))
        listed[number] = replace(listed[number], after=listed[number].after[1:])
    if data.draw(st.booleans(), "writes something else"):
        number = data.draw(st.integers(0, len(listed) - 1))
        other = tuple(replace(one, what=Named("other:thing")) for one in listed[number].writes)
        listed[number] = replace(listed[number], writes=other)
    program = program_of(listed)
    broken = first_hazard(program)
    event("refused" if broken else "accepted")
    if broken is None:
        validate(program)
        return
    part, number, name = broken
    with pytest.raises(Hazard) as caught:
        validate(program)
    assert f"{part}[{number}]/{name}" in str(caught.value)


def test_two_initial_contents_in_one_place_are_refused() -> None:
    program = replace(program_of(()), initial=(access("a", 0, 4), access("a", 3, 6)))
    with pytest.raises(ProgramError, match="two initial contents overlap in a at byte 3"):
        validate(program)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())))
def test_ranges_are_what_their_bytes_are(touched: list[tuple[int, int, bool]]) -> None:
    ranges: Ranges[list[int]] = Ranges([], list.copy)
    literal: list[list[int]] = [[] for _ in range(10)]
    for number, (begin, end, puts) in enumerate(touched):
        if puts:
            ranges.put(begin, end, [number])
            literal[begin:end] = [[number] for _ in literal[begin:end]]
        else:
            for value in ranges.within(begin, end):
                value.append(number)
            for byte in literal[begin:end]:
                byte.append(number)
        assert [ranges.over(at, at + 1) for at in range(10)] == [[byte] for byte in literal]
        assert [value for value, _ in groupby(ranges.over(0, 8))] == [
            value for value, _ in groupby(literal[:8])
        ]
