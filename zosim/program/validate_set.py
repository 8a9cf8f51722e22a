"""What the programs of several ranks must keep together, beside the rules that each keeps by itself.

1. *Messages.* The members of a group run the same collectives, of the same sizes, in one order; what one rank sends
   another receives, in the order sent.
2. *Progress.* No two ranks wait for each other for ever.
3. *Shared memory.* Every two accesses of different ranks to common bytes of a shared buffer, of which one writes,
   are ordered, and whoever reads more than its share finds the others' shares at the version that it needs.
4. *End.* All ranks leave the same versions of what they have in common.

Ranks are judged in pairs of roles, one pair standing for all pairs of ranks that are alike. A circle of waiting among
three or more unlike roles, of which no two wait for each other, is left to the simulator, which stops at it.
"""

from __future__ import annotations

from collections.abc import Sequence

from topology.errors import Hazard, ProgramError
from zosim.program import Program
from zosim.program.contents import Contents, name_and_state, parameters_of
from zosim.program.instructions import Access, Instruction
from zosim.program.operations import Recv, Send
from zosim.program.program_set import ProgramSet
from zosim.program.rendezvous import Joint, Pair, Side, Touch, pairs
from zosim.program.step_graph import Channel, channel_of
from zosim.program.validate import name_of, same_contents, validate


def validate_set(programs: ProgramSet) -> None:
    """Refuse programs of which one could go wrong, alone or beside the others.

    Raises ProgramError if a program is invalid, or names what other ranks do not have.
    Raises Hazard if one of the rules is broken; the message names the instructions and the ranks.
    """
    for program in programs.programs:
        validate(program)
    _refuse_messages_to_nobody(programs)
    sides = [Side(program) for program in programs.programs]
    for side in sides:
        side.refuse_unordered_collectives()
    for pair in pairs(programs):
        _check(sides[pair.roles[0]], sides[pair.roles[1]], pair)


def _refuse_messages_to_nobody(programs: ProgramSet) -> None:
    for program in programs.programs:
        for phase, item in program.instructions():
            if isinstance(item.op, Send | Recv) and not item.op.offset:
                message = f"program {program.name}: {phase}/{item.id} sends a message to its own rank"
                raise ProgramError(message, hint="use an offset other than 0")
    channels = [
        {channel_of(item): item for _, item in program.instructions()} for program in programs.programs
    ]
    for rank, role in enumerate(programs.roles):
        for channel, item in channels[role].items():
            if channel is None:
                continue
            members = programs.members(channel.process_group, rank)
            if not 0 <= members.index(rank) + channel.peer_offset < len(members):
                raise ProgramError(
                    f"{item.id} of rank {rank} {'sends to' if channel.sends else 'receives from'} a member of "
                    f"{channel.process_group} that does not exist",
                    hint="the first and the last rank of a group have one neighbour",
                )


def _check(first: Side, second: Side, pair: Pair) -> None:
    for group in sorted(pair.offsets):
        _refuse_unlike_collectives(first, second, group, pair)
    for sender, receiver, flipped in ((first, second, False), (second, first, True)):
        _refuse_unlike_messages(sender, receiver, pair, flipped=flipped)
    joint = Joint((first, second), pair)
    joint.run()
    if "host" in pair.offsets:
        for mine, other, flipped in ((first, second, False), (second, first, True)):
            _refuse_shared_hazards(mine, other, joint, flipped=flipped, pair=pair)
    left, right = _versions(first.program), _versions(second.program)
    if any(left[what] != right[what] for what in set(left) & set(right)):
        raise Hazard(
            f"the programs of ranks {pair.ranks[0]} and {pair.ranks[1]} end with different contents "
            "after the flush",
            hint="every rank must end with the same version of every parameter",
        )


def _versions(program: Program) -> dict[Contents, tuple[Contents, int | None]]:
    """Return what a program promises, in which state and as of which step."""
    return {parameters_of(access.what) or access.what: (access.what, access.step) for access in program.final}


def _refuse_unlike_messages(sender: Side, receiver: Side, pair: Pair, *, flipped: bool) -> None:
    """Raise unless all that `sender` sends to `receiver` is received as it is sent."""
    source, target = reversed(pair.ranks) if flipped else pair.ranks
    channels = {*sender.exchanges, *(channel.other_side for channel in receiver.exchanges)}
    for channel in sorted(channel for channel in channels if channel.sends):
        if not pair.is_shared_by(1 if flipped else 0, channel):
            continue
        sent, received = sender.exchanges.get(channel, []), receiver.exchanges.get(channel.other_side, [])
        for one, other in zip(sent, received, strict=False):
            if _message(one.instruction.reads) != _message(other.instruction.writes):
                raise Hazard(
                    f"{name_of(one)} on rank {source} sends {_describe(one.instruction.reads)}, but "
                    f"{name_of(other)} on rank {target} receives it as {_describe(other.instruction.writes)}",
                    hint="messages between two ranks are received in the order in which they are sent",
                )
        if len(sent) != len(received):
            raise Hazard(
                f"rank {source} sends {len(sent)} messages to rank {target}, which receives {len(received)}",
                hint="every message needs one send and one receive",
            )


def _message(accesses: Sequence[Access]) -> list[tuple[Contents, int | None, int]]:
    return [(access.what, access.step, access.size_bytes) for access in accesses]


def _describe(accesses: Sequence[Access]) -> str:
    return ", ".join(f"{access.describe()} of up to {access.size_bytes} bytes" for access in accesses)


def _refuse_unlike_collectives(first: Side, second: Side, group: str, pair: Pair) -> None:
    mine, others = first.exchanges.get(Channel(group), []), second.exchanges.get(Channel(group), [])
    for one, other in zip(mine, others, strict=False):
        if _signature(one.instruction) != _signature(other.instruction):
            raise Hazard(
                f"collectives of {group} do not match: rank {pair.ranks[0]} runs {name_of(one)} ({_sizes(one.instruction)}), "
                f"rank {pair.ranks[1]} runs {name_of(other)} ({_sizes(other.instruction)})",
                hint="all members of a group must run the same collectives, with the same sizes, in the same "
                "order",
            )
    if len(mine) != len(others):
        alone = (mine or others)[min(len(mine), len(others))] if mine and others else (mine or others)[0]
        raise Hazard(
            f"rank {pair.ranks[0]} runs {len(mine)} collectives of {group}, but rank {pair.ranks[1]} "
            f"runs {len(others)}: {name_of(alone)} has no counterpart",
            hint="all members of a group must run the same collectives",
        )


def _signature(instruction: Instruction) -> tuple[object, ...]:
    reads = tuple(
        (name_and_state(access.what)[0], access.size_bytes, access.share) for access in instruction.reads
    )
    return instruction.op, reads, tuple(access.size_bytes for access in instruction.writes)


def _sizes(instruction: Instruction) -> str:
    return f"{instruction.op.type} of {sum(access.size_bytes for access in instruction.reads)} bytes"


def _refuse_shared_hazards(mine: Side, other: Side, joint: Joint, *, flipped: bool, pair: Pair) -> None:
    """Raise if what `mine` does to shared memory is not safe beside what `other` does."""
    here, there = (1, 0) if flipped else (0, 1)
    for buffer, touches in mine.shared_accesses.items():
        others = other.shared_accesses.get(buffer, [])
        for touch in touches:
            earlier = []
            for theirs in filter(touch.conflicts, others):
                if joint.ordered((there, theirs.item.index), (here, touch.item.index)):
                    earlier.append(theirs)
                elif not joint.ordered((here, touch.item.index), (there, theirs.item.index)):
                    raise Hazard(
                        f"{name_of(touch.item)} on rank {pair.ranks[here]} and {name_of(theirs.item)} on rank "
                        f"{pair.ranks[there]} both access {buffer}, which they share, but are not ordered",
                        hint="make one wait for the other (an entry in its `after` with a group)",
                    )
            _refuse_stale(touch, earlier, pair.ranks[here], pair.ranks[there])


def _refuse_stale(touch: Touch, earlier: Sequence[Touch], rank: int, other: int) -> None:
    """Raise if a read of more than a share finds another rank's share at another version."""
    writes = [theirs for theirs in earlier if theirs.writes]
    if touch.writes or not writes or same_contents(writes[-1].access, touch.access):
        return
    step = touch.item.step
    raise Hazard(
        f"{name_of(touch.item)} on rank {rank} needs {touch.access.shifted(step).describe()} of "
        f"{touch.access.buffer}, but the share of rank {other} holds "
        f"{writes[-1].access.shifted(step).describe()}, written by {name_of(writes[-1].item)}",
        hint="wait for the peers to write that version, and let their next write wait for this read",
    )
