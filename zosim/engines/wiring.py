"""Who follows whom in a run, by number instead of by name, for ranks of one kind.

Every instruction has as many *needs* at a position of the run (see :mod:`zosim.places`) as other instructions must
finish before it; an instruction that finishes takes one need off each of its *followers*. Steps far from both ends of
the run look alike and share one table. The order itself is that of :class:`zosim.places.Order`, which every engine and the
validator ask by name; an engine on arrays asks by number, a thousand times for each rank.

Examples
--------
The load and the mean of :mod:`zosim.order`, numbers 0 and 1, in a run of ten steps. Each of both needs two: the load the mean
of the position before, and the load before on its stream; the mean this position's load, and the mean before. Followers are
the same pairs seen from the other end.

>>> from zosim.instructions import Dependency, Instruction, Stream
>>> from zosim.operations import Load
>>> from zosim.program import Program
>>> load = Instruction("load", Load(), Stream.H2D, "load", "embed", after=(Dependency("mean", distance=1),))
>>> mean = Instruction("mean", Load(), Stream.COMPUTE, "scalar", "head", after=(Dependency("load"),))
>>> program = Program("example", (), (), (), (load, mean))
>>> wiring = Wiring(Template(program, {}, (), step_s=0.0), num_steps=10)
>>> wiring.needs(5).own
(((1, 1), (1, 0)), ((0, 0), (1, 1)))
>>> wiring.followers(5)
[[(0, 1), (1, 0)], [(1, 0), (1, 1)]]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zosim.engines.world import Template
from zosim.instructions import PARTS, Part
from zosim.places import Meeting, Order, Place

# A follower: positions later, and its number in its part.
Follower = tuple[int, int]
# A watcher of a peer's instruction: group, its part, positions later, its number there.
Watcher = tuple[str, Part, int, int]


@dataclass(frozen=True)
class Needs:
    """What the instructions at one position wait for.

    Attributes
    ----------
    own : tuple of tuple of (int, int)
        Of the same rank: positions before, and the number there.
    peers : tuple of tuple of (str, int, str)
        Of the other members of a group: the group, positions before, and the id there.
    """

    own: tuple[tuple[tuple[int, int], ...], ...]
    peers: tuple[tuple[tuple[str, int, str], ...], ...]


class Wiring:
    """The order of one template's run of `num_steps` steps.

    Host time before a step's first computation is an instruction of its own, the last of the step's list.
    """

    def __init__(self, template: Template, num_steps: int) -> None:
        self.order = Order(template.program, num_steps)
        self.num_steps = num_steps
        self.ids: dict[Part, list[str]] = {
            part: [item.id for item in getattr(template.program, part)] for part in PARTS
        }
        self.number = {part: {name: number for number, name in enumerate(self.ids[part])} for part in PARTS}
        places = [Place(1, name) for name in self.ids["step"]] if template.step_s > 0 and num_steps else []
        self.opener = next((n for n, place in enumerate(places) if self.order.opens_step(place)), None)
        self._needs: dict[int, Needs] = {}
        self._followers: dict[int, list[list[Follower]]] = {}

    @property
    def host(self) -> int:
        """Number of the host's own part of a step."""
        return len(self.ids["step"])

    def num_instructions(self, position: int) -> int:
        """Return how many there are at a position, the host's own part included."""
        part = self.order.part(position)
        return len(self.ids[part]) + (part == "step" and self.opener is not None)

    def needs(self, position: int) -> Needs:
        """Return what the instructions at a position wait for."""
        key = position
        if self.order.max_distance < position <= self.num_steps:
            key = self.order.max_distance + 1
        if key not in self._needs:
            self._needs[key] = self._needs_at(key)
        return self._needs[key]

    def _needs_at(self, position: int) -> Needs:
        part = self.order.part(position)
        own, peers = [], []
        for number, name in enumerate(self.ids[part]):
            place = Place(position, name)
            awaited = self.order.awaited(place)
            before = [self._numbered(position, item) for group, item in awaited if not group]
            follows = self.order.follows(place)
            if part == "step" and number == self.opener:
                before.append((0, self.host))
            elif follows is not None:
                before.append(self._numbered(position, follows))
            own.append(tuple(dict.fromkeys(before)))
            peers.append(
                tuple(
                    dict.fromkeys(
                        (group, position - item.position, item.instruction)
                        for group, item in awaited
                        if group
                    )
                )
            )
        if part == "step" and self.opener is not None:
            follows = self.order.follows(Place(position, self.ids[part][self.opener]))
            own.append(() if follows is None else (self._numbered(position, follows),))
            peers.append(())
        return Needs(tuple(own), tuple(peers))

    def _numbered(self, position: int, place: Place) -> tuple[int, int]:
        return position - place.position, self.number[self.order.part(place.position)][place.instruction]

    @cached_property
    def _reach(self) -> int:
        """Most positions that any need of a step reaches back."""
        listed = [
            self.needs(position)
            for position in range(1, min(self.num_steps, self.order.max_distance + 1) + 1)
        ]
        return max((d for needs in listed for before in needs.own for d, _ in before), default=1)

    def followers(self, position: int) -> list[list[Follower]]:
        """Return, for every instruction at a position, who waits for it on its own rank."""
        is_inside = position > self.order.max_distance and position + self._reach <= self.num_steps
        # Positions that the flush reaches back to are told apart by what it needs there.
        key = -1 if is_inside and position not in self._flush_needs else position
        if key not in self._followers:
            self._followers[key] = self._followers_at(position)
        return self._followers[key]

    @cached_property
    def _flush_needs(self) -> dict[int, list[tuple[int, int]]]:
        """By position, (number there, number in the flush) of what the flush waits for."""
        last = self.num_steps + 1
        needs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, before in enumerate(self.needs(last).own):
            for distance, source in before:
                needs[last - distance].append((source, number))
        return needs

    def _followers_at(self, position: int) -> list[list[Follower]]:
        followers_of: list[list[Follower]] = [[] for _ in range(self.num_instructions(position))]
        for later in range(position, min(position + self._reach, self.num_steps) + 1):
            for number, before in enumerate(self.needs(later).own):
                for distance, source in before:
                    if later - distance == position:
                        followers_of[source].append((distance, number))
        for source, number in self._flush_needs.get(position, ()):
            followers_of[source].append((self.num_steps + 1 - position, number))
        return followers_of

    def chains(self, is_fixed: Sequence[bool]) -> list[list[int]]:
        """Return runs of a step's instructions of which each waits for the one before alone, and nobody else does.

        Parameters
        ----------
        is_fixed : sequence of bool
            Which instructions take the same time whatever else is running.
        """
        usual = self.order.max_distance + 1
        if usual > self.num_steps:
            return []
        needs = self.needs(usual)
        count: dict[int, int] = defaultdict(int)
        for before in needs.own:
            for _, source in before:
                count[source] += 1
        awaited = {
            source for position in self._flush_needs if position for source, _ in self._flush_needs[position]
        }
        awaited |= {self.number["step"][name] for name in self.watchers if name in self.number["step"]}
        meeting = set(self.meetings["step"].values())
        awaited |= meeting | {self.host}
        links = {}
        for number, before in enumerate(needs.own[: self.host]):
            is_plain = number not in meeting and not needs.peers[number] and is_fixed[number]
            if len(before) == 1 and is_plain:
                distance, source = before[0]
                if distance == 0 and count[source] == 1 and source not in awaited and is_fixed[source]:
                    links[source] = number
        chains = [[number] for number in links if number not in set(links.values())]
        for chain in chains:
            while chain[-1] in links:
                chain.append(links[chain[-1]])
        return chains

    @cached_property
    def watchers(self) -> dict[str, list[Watcher]]:
        """By the id of a peer's instruction, who waits for it."""
        by_instruction: dict[str, list[Watcher]] = defaultdict(list)
        for part in PARTS:
            for number, item in enumerate(getattr(self.order.program, part)):
                for edge in item.after:
                    watcher = edge.group, part, edge.distance, number
                    if edge.group and watcher not in by_instruction[edge.instruction]:
                        by_instruction[edge.instruction].append(watcher)
        return by_instruction

    @cached_property
    def meeting_of(self) -> dict[Part, list[Meeting | None]]:
        """Per part, where each instruction meets those of other ranks; the host's own part of a step meets nobody."""
        meetings = {part: [self.order.meeting_at(part, name) for name in self.ids[part]] for part in PARTS}
        meetings["step"].append(None)
        return meetings

    @cached_property
    def meetings(self) -> dict[Part, dict[Meeting, int]]:
        """Per part, the instruction of each collective or message."""
        return {
            part: {meeting: number for number, meeting in enumerate(met) if meeting is not None}
            for part, met in self.meeting_of.items()
        }
