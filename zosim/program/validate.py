"""Two rules that a program must keep, whoever wrote it.

1. *State.* Every operand has the contents that its reader requires, at the step and the perturbation required.
2. *Order.* Every two accesses to common bytes, of which one writes, are ordered: by their stream, or by a chain
   of dependencies.

With the second rule every read has one last writer, so the first is well defined. Each hazard that offloading
papers warn of breaks one of them: a block read before its upload (state, or order), a staging buffer overwritten while it
is being offloaded (order), an update that is never flushed (state, at the end), two signs that see different
perturbations (state). Also checked: names that exist, capacities, ids, and that no instruction waits for a later
one of its own step.

The rules are checked on an unrolled run, long enough that every dependency between neighbouring steps occurs
twice and the flush follows a step.

What several ranks do to each other is the business of :mod:`zosim.program.validate_set`.

A forward that reads a staging buffer while an upload may still write it, and the same with the two dependencies that make it safe: the
forward waits for the upload, and the next step's upload for the forward.

>>> from dataclasses import replace
>>> from zosim.program.contents import FrozenWeights
>>> from zosim.program.instructions import Buffer, Dependency, Space
>>> from zosim.program.operations import Copy
>>> home, staging = (Access(name, FrozenWeights("block.0"), None, 64) for name in ("host", "staging"))
>>> upload = Instruction("upload", Copy(), Stream.H2D, "upload", "block.0", reads=(home,), writes=(staging,))
>>> forward = Instruction("forward", Copy(), Stream.COMPUTE, "forward", "block.0", reads=(staging,))
>>> buffers = tuple(Buffer(name, Space.HOST, 64, "weights", "float32") for name in ("host", "staging"))
>>> try:
...     validate(Program("example", buffers, (home,), (), (upload, forward)))
... except Hazard as hazard:
...     print(*hazard.message.split(": "), sep=chr(10))
program example
nothing orders step[0]/forward and step[0]/upload on staging
the first reads it while it is being written by the second (block.0:frozen)
>>> ordered = (
...     replace(upload, after=(Dependency("forward", distance=1),)),
...     replace(forward, after=(Dependency("upload"),)),
... )
>>> validate(Program("example", buffers, (home,), (), ordered))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from topology.errors import Hazard, ProgramError
from zosim.program import ALIGNMENT_BYTES, Program
from zosim.program.contents import parameters_of
from zosim.program.instructions import Access, Instruction, Stream
from zosim.program.operations import Allocate, Collective, Free
from zosim.program.ranges import Ranges
from zosim.program.step_graph import Listed, StepGraph

NUM_UNROLLED_STEPS = 3


def validate(program: Program) -> None:
    """Refuse a program that could go wrong.

    Raises ProgramError if a name, a range or an id is wrong.
    Raises Hazard if one of the two rules is broken; the message names both instructions and the contents.
    """
    _check_operands(program)
    run = StepGraph(program, NUM_UNROLLED_STEPS)
    state = _State(run)
    for item in run.listed:
        state.run(item)
    state.check_final(NUM_UNROLLED_STEPS)


def _check_operands(program: Program) -> None:
    unit = program.alignment_bytes
    if unit < ALIGNMENT_BYTES or unit & (unit - 1):
        raise ProgramError(
            f"program {program.name}: alignment_bytes={unit} must be a power of two of at least "
            f"{ALIGNMENT_BYTES}",
            hint=f"leave it out; the default is {ALIGNMENT_BYTES}",
        )
    names = [buffer.name for buffer in program.buffers]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ProgramError(f"program {program.name} declares a buffer twice: {', '.join(twice)}")
    for access in (*program.initial, *program.final):
        _check_range(program, "initial or final contents", access)
    for phase, instruction in program.instructions():
        where = f"{phase}/{instruction.id}"
        for access in (*instruction.reads, *instruction.writes):
            _check_range(program, where, access)
        _check_groups(program, where, instruction)
        if isinstance(instruction.op, Allocate | Free):
            program.buffer(instruction.op.buffer)


def _check_groups(program: Program, where: str, instruction: Instruction) -> None:
    named = [edge.process_group for edge in instruction.after]
    named += [access.share for access in (*instruction.reads, *instruction.writes)]
    named += [instruction.op.process_group] if isinstance(instruction.op, Collective) else []
    for group in filter(None, named):
        if group not in program.process_groups:
            raise ProgramError(
                f"program {program.name}: {where} uses group {group!r}, but this rank is not in it",
                hint=f"its groups are {', '.join(program.process_groups) or 'none'}",
            )


def _check_range(program: Program, where: str, access: Access) -> None:
    buffer = program.buffer(access.buffer)
    if access.share and access.size_bytes % program.process_groups.get(access.share, 1):
        raise ProgramError(
            f"program {program.name}: {where} divides {access.size_bytes} bytes of {buffer.name} into "
            f"{program.process_groups[access.share]} shares, which leaves a remainder",
            hint="the size of a shared range must be divisible by the size of the group",
        )
    if access.offset_bytes < 0 or access.size_bytes < 0 or access.end_bytes > buffer.size_bytes:
        raise ProgramError(
            f"program {program.name}: {where} accesses bytes {access.offset_bytes}..{access.end_bytes} "
            f"of {buffer.name}, which has {buffer.size_bytes}",
            hint="enlarge the buffer, or correct the range",
        )
    if access.offset_bytes % program.alignment_bytes and parameters_of(access.what) is not None:
        raise ProgramError(
            f"program {program.name}: {where} has {access.what} at byte {access.offset_bytes} of "
            f"{buffer.name}, which is not a multiple of the program's alignment of "
            f"{program.alignment_bytes}",
            hint="parameters and perturbations must start at multiples of `alignment_bytes`",
        )


@dataclass
class _Held:
    """What bytes of a buffer hold, if anything, who wrote it (None: there at the start) and who read it last on each stream."""

    access: Access | None = None
    writer: Listed | None = None
    readers: dict[Stream, Listed] = field(default_factory=dict)

    def copy(self) -> _Held:
        """Return the same for a part of the bytes."""
        return _Held(self.access, self.writer, dict(self.readers))

    @property
    def touched_by(self) -> Iterator[Listed]:
        """Its writer, then its readers."""
        if self.writer is not None:
            yield self.writer
        yield from self.readers.values()


class _State:
    """What every buffer holds at each place of the unrolled run, in the order listed."""

    def __init__(self, run: StepGraph) -> None:
        self._program = program = run.program
        self._run = run
        self._held = {buffer.name: Ranges(_Held(), _Held.copy) for buffer in program.buffers}
        self._unallocated: set[str] = {
            instruction.op.buffer
            for _, instruction in program.instructions()
            if isinstance(instruction.op, Allocate)
        }
        for access in program.initial:
            if any(held.access for held in self._over(access)):
                raise ProgramError(
                    f"program {program.name}: two initial contents overlap in {access.buffer} at byte "
                    f"{access.offset_bytes}",
                    hint="give every byte one content",
                )
            self._put(access, _Held(access))

    def run(self, item: Listed) -> None:
        """Apply one instruction."""
        op = item.instruction.op
        if isinstance(op, Allocate):
            self._unallocated.discard(op.buffer)
        for access in item.instruction.reads:
            self._read(item, absolute(access, item.step))
        for access in item.instruction.writes:
            self._write(item, absolute(access, item.step))
        if isinstance(op, Free):
            self._unallocated.add(op.buffer)

    def check_final(self, step: int) -> None:
        """Compare what is held with what the program promises at its end."""
        for access in self._program.final:
            wanted = absolute(access, step)
            held = self._covering(wanted)
            if not self._satisfies(held.access, wanted):
                contents = "nothing" if held.access is None else _show(held.access, step)
                raise Hazard(
                    f"program {self._program.name}: after the flush {access.buffer} must hold "
                    f"{_show(wanted, step)}, but holds {contents}",
                    hint="apply every pending update, and offload every block, before the end",
                )

    def _read(self, item: Listed, wanted: Access) -> None:
        self._check_allocated(item, wanted)
        held = self._covering(wanted)
        if not self._satisfies(held.access, wanted):
            raise self._state_hazard(item, wanted, held)
        if held.writer is not None and not self._run.ordered(held.writer.index, item.index):
            raise self._order_hazard(item, held.writer, wanted, "reads it while it is being written by")
        for read in self._held[wanted.buffer].within(wanted.offset_bytes, wanted.end_bytes):
            read.readers[item.instruction.stream] = item

    def _write(self, item: Listed, left: Access) -> None:
        self._check_allocated(item, left)
        for held in self._over(left):
            self._check_conflicts(item, held, left)
        self._put(left, _Held(left, item))

    def _over(self, access: Access) -> list[_Held]:
        return self._held[access.buffer].over(access.offset_bytes, access.end_bytes)

    def _put(self, access: Access, held: _Held) -> None:
        self._held[access.buffer].put(access.offset_bytes, access.end_bytes, held)

    def _check_conflicts(self, item: Listed, held: _Held, left: Access) -> None:
        for other in held.touched_by:
            if other.index != item.index and not self._run.ordered(other.index, item.index):
                by_writer = other is held.writer
                verb = f"{'writes' if by_writer else 'overwrites'} it while it is {'written' if by_writer else 'read'} by"
                raise self._order_hazard(item, other, left, verb)

    def _check_allocated(self, item: Listed, access: Access) -> None:
        if access.buffer in self._unallocated:
            raise Hazard(
                f"program {self._program.name}: {name_of(item)} uses {access.buffer} before it is allocated",
                hint="order it after the buffer's allocate and before its free",
            )

    def _covering(self, wanted: Access) -> _Held:
        """Return what all of these bytes hold: nothing where they were not written together."""
        first, *others = self._over(wanted) or [_Held()]
        together = all(held.access is first.access and held.writer is first.writer for held in others)
        return first if together else _Held()

    def _satisfies(self, held: Access | None, wanted: Access) -> bool:
        """Whether what is held is what is wanted; of a shared buffer, other ranks see to the other shares."""
        if held is None:
            return False
        is_there = held.share in ("", wanted.share) or self._program.buffer(held.buffer).shared
        return is_there and same_contents(held, wanted)

    def _state_hazard(self, item: Listed, wanted: Access, held: _Held) -> Hazard:
        if held.access is None:
            contents, by = "nothing of the kind", ""
        else:
            contents = _show(held.access, item.step)
            by = f", left by {name_of(held.writer)}" if held.writer else ", there from the start"
        return Hazard(
            f"program {self._program.name}: {name_of(item)} needs {_show(wanted, item.step)} in "
            f"{wanted.buffer}, but finds {contents}{by}",
            hint="an instruction is missing, out of order, or uses another buffer",
        )

    def _order_hazard(self, item: Listed, other: Listed, access: Access, verb: str) -> Hazard:
        return Hazard(
            f"program {self._program.name}: nothing orders {name_of(item)} and {name_of(other)} on "
            f"{access.buffer}: the first {verb} the second ({_show(access, item.step)})",
            hint=f"make {item.instruction.id} wait for {other.instruction.id} (an entry in its `after`)",
        )


def same_contents(held: Access, wanted: Access) -> bool:
    """Whether two accesses speak of the same contents, whatever their ranges."""
    return (held.what, held.step) == (wanted.what, wanted.step)


def absolute(access: Access, step: int) -> Access:
    """Return `access` with its step counted from the beginning of the run."""
    return access.shifted(-step)


def _show(access: Access, step: int) -> str:
    return access.shifted(step).describe()


def name_of(item: Listed) -> str:
    """Return an instruction of a run in words."""
    return f"{item.phase}[{item.step}]/{item.instruction.id}"
