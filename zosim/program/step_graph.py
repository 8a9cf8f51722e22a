"""Who waits for whom in a run: the one graph that simulators, the closed form, the critical path and traces ask.

A run is a sequence of *positions*: 0 is the prologue, 1 the first step, one past the last step the flush. Its nodes are the
instructions of the phase at each position, and an edge reaches back by a number of positions: a stream runs in order, and an
instruction waits for what it is ``after``. Steps that reach back to steps alone are alike and share one table, so a run of ten thousand
steps costs no more than its first few.

Simulators on arrays ask by number, a thousand times for each rank: edges are ``(positions before, number in the phase)``. Whoever walks the
graph by name asks for the :class:`RunNode` of an instruction. Whoever asks what has finished when something starts lists a short run as a
whole (:attr:`StepGraph.listed`, :meth:`StepGraph.ordered`).

A load waits for the mean of the step before, the mean for the load. Each also follows itself on its stream:

>>> from zosim.program.instructions import Dependency
>>> from zosim.program.operations import Load
>>> load = Instruction("load", Load(), Stream.H2D, "load", "embed", after=(Dependency("mean", distance=1),))
>>> mean = Instruction("mean", Load(), Stream.COMPUTE, "scalar", "head", after=(Dependency("load"),))
>>> graph = StepGraph(Program("example", (), (), (), (load, mean)), num_steps=10_000)
>>> graph.before(5)
(((1, 0), (1, 1)), ((1, 1), (0, 0)))
>>> graph.after(5)
[[(0, 1), (1, 0)], [(1, 0), (1, 1)]]
>>> graph.predecessors(RunNode(10_000, "load"))
(RunNode(position=9999, instruction='load'), RunNode(position=9999, instruction='mean'))
>>> graph.predecessors(RunNode(1, "load"))
()

Of a run of two steps the same as a list, and which of its instructions have finished whenever another one starts:

>>> run = StepGraph(graph.program, num_steps=2)
>>> for item in run.listed:
...     print(item.index, item.step, item.instruction.id, item.after)
0 0 load ()
1 0 mean (0,)
2 1 load (1,)
3 1 mean (2,)
>>> run.ordered(1, 2), run.ordered(2, 1)
(True, False)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from topology.errors import ProgramError
from zosim.program import Program
from zosim.program.instructions import PHASES, Dependency, Instruction, Phase, Stream
from zosim.program.operations import Collective, Recv, Send

_STREAM_NUMBERS = {stream: number for number, stream in enumerate(Stream)}

Edge = tuple[int, int]
"""Positions before (or after), and the number of an instruction in its phase."""

PeerEdge = tuple[str, int, str]
"""A group, positions before, and the id of an instruction that runs on its other members."""


class RunNode(NamedTuple):
    """An instruction of a run: the position of its phase, and its id."""

    position: int
    instruction: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An instruction of a run that is listed as a whole."""

    index: int  # its place in the list
    phase: Phase
    # Number of the step, from 0. The prologue has that of the first step, the flush one past the last.
    step: int
    instruction: Instruction
    # Indices of this rank's instructions that it waits for, its predecessor on its stream not among them.
    after: tuple[int, ...]
    # Groups, with indices of the instructions that it waits for on their other members.
    after_peers: tuple[tuple[str, int], ...] = ()


class Rendezvous(NamedTuple):
    """Where an instruction meets those of other ranks, which start and end with it."""

    process_group: str
    # Of a message, the receiver's position in the group less the sender's; 0 for a collective, in which all meet.
    offset: int
    number: int  # how many such there are before it in its phase; ranks meet at those of equal numbers
    sends: bool = False  # whether this side sends

    @property
    def shared(self) -> tuple[str, int, int]:
        """What is the same for all who meet."""
        return self.process_group, self.offset, self.number


class Observer(NamedTuple):
    """An instruction that waits for one on the other members of a group."""

    process_group: str
    phase: Phase
    distance: int
    number: int


class Channel(NamedTuple):
    """One side of the collectives of a group, or of the messages that go one way in it."""

    process_group: str
    # Of messages, the receiver's position in the group less the sender's; 0 of collectives, in which all meet.
    offset: int = 0
    sends: bool = False  # whether this side sends

    @property
    def other_side(self) -> Channel:
        """What the others run meanwhile."""
        return self._replace(sends=bool(self.offset) and not self.sends)

    @property
    def peer_offset(self) -> int:
        """Place of who is met less one's own, 0 where all meet."""
        return self.offset if self.sends else -self.offset


def channel_of(instruction: Instruction) -> Channel | None:
    """Return with whom an instruction meets others, None if it meets nobody."""
    op = instruction.op
    if isinstance(op, Collective):
        return Channel(op.process_group)
    if isinstance(op, Send):
        return Channel(op.process_group, op.offset, sends=True)
    return Channel(op.process_group, -op.offset) if isinstance(op, Recv) else None


class StepGraph:
    """The order of a program's run.

    `host_takes_time`: whether the host's work before the first computation of a step is a node of its own, the last of the
    step's.

    Raises ProgramError if an id stands twice in a phase, or a dependency names no instruction.
    """

    def __init__(self, program: Program, num_steps: int, *, host_takes_time: bool = False) -> None:
        self.program = program
        self.num_steps = num_steps
        self.ids: dict[Phase, list[str]] = {
            phase: [item.id for item in getattr(program, phase)] for phase in PHASES
        }
        self.number = {
            phase: {name: number for number, name in enumerate(ids)} for phase, ids in self.ids.items()
        }
        self.host_opens = self.opener is not None and host_takes_time and num_steps > 0
        self._before: dict[int, tuple[tuple[Edge, ...], ...]] = {}
        self._peers: dict[int, tuple[tuple[PeerEdge, ...], ...]] = {}
        self._after: dict[int, list[list[Edge]]] = {}
        self._refuse_what_names_nothing()

    # -- positions ---------------------------------------------------------------------------------------------

    @cached_property
    def max_distance(self) -> int:
        """Largest iteration distance of any dependency, at least 1 for the stream's own order."""
        distances = (edge.distance for _, item in self.program.instructions() for edge in item.after)
        return max(distances, default=1) or 1

    def phase(self, position: int) -> Phase:
        """Phase that stands at a position."""
        if position == 0:
            return "prologue"
        return "step" if position <= self.num_steps else "flush"

    def step(self, position: int) -> int:
        """Step number under which a position's spans are reported."""
        return max(position - 1, 0)

    def position(self, phase: Phase, step: int) -> int:
        """Position of a phase; `step` counts only for steps."""
        return {"prologue": 0, "step": step + 1, "flush": self.num_steps + 1}[phase]

    def instructions(self, position: int) -> tuple[Instruction, ...]:
        """Instructions of the phase at a position, in order."""
        listed: tuple[Instruction, ...] = getattr(self.program, self.phase(position))
        return listed

    def num_nodes(self, position: int) -> int:
        """Return how many nodes there are at a position, the host's included."""
        phase = self.phase(position)
        return len(self.ids[phase]) + (phase == "step" and self.host_opens)

    # -- by number ---------------------------------------------------------------------------------------------

    @cached_property
    def opener(self) -> int | None:
        """The first computation of a step, which the host prepares."""
        return next((n for n, item in enumerate(self.program.step) if item.stream == Stream.COMPUTE), None)

    @property
    def host(self) -> int:
        """Number of the host's node of a step."""
        return len(self.ids["step"])

    def before(self, position: int) -> tuple[tuple[Edge, ...], ...]:
        """Return what each node at a position waits for on its own rank: its predecessor on its stream first."""
        key = self._alike(position)
        if key not in self._before:
            self._before[key] = tuple(self._nodes_before(key))
        return self._before[key]

    def peers(self, position: int) -> tuple[tuple[PeerEdge, ...], ...]:
        """Return what each node at a position waits for on the other members of groups."""
        key = self._alike(position)
        if key not in self._peers:
            self._peers[key] = tuple(self._peer_edges(key))
        return self._peers[key]

    def after(self, position: int) -> list[list[Edge]]:
        """Return who waits for each node at a position on its own rank, as positions later and number."""
        is_inside = position > self.max_distance and position + self._reach <= self.num_steps
        # Positions that the flush reaches back to are told apart by what it waits for there.
        key = -1 if is_inside and position not in self._flush_edges else position
        if key not in self._after:
            self._after[key] = self._nodes_after(position)
        return self._after[key]

    def follows(self, position: int, number: int) -> Edge | None:
        """Return the node just before this one on its stream, None for the first."""
        phase = self.phase(position)
        same_phase = self._before_on_stream[phase][number]
        if same_phase is not None:
            return 0, same_phase
        stream = self.instructions(position)[number].stream
        # A phase without instructions on the stream is passed over: behind the phase before there is the prologue.
        for there in (position - 1, 0):
            last = self._last_on_stream[self.phase(there)].get(stream) if 0 <= there < position else None
            if last is not None:
                return position - there, last
        return None

    def _alike(self, position: int) -> int:
        return self.max_distance + 1 if self.max_distance < position <= self.num_steps else position

    def _is_in_run(self, position: int, distance: int, instruction: str) -> bool:
        """Whether there is what a node waits for; the first step need not find "the step before" in the prologue."""
        there = position - distance
        return there > 0 or (
            there == 0 and (self.phase(position) != "step" or instruction in self.number["prologue"])
        )

    def _nodes_before(self, position: int) -> Iterator[tuple[Edge, ...]]:
        opens = self.host_opens and self.phase(position) == "step"
        for number, item in enumerate(self.instructions(position)):
            follows = (0, self.host) if opens and number == self.opener else self.follows(position, number)
            named = (
                (edge.distance, self.number[self.phase(position - edge.distance)][edge.instruction])
                for edge in item.after
                if not edge.process_group and self._is_in_run(position, edge.distance, edge.instruction)
            )
            yield tuple(dict.fromkeys((*(() if follows is None else (follows,)), *named)))
        if opens:
            assert self.opener is not None
            follows = self.follows(position, self.opener)
            yield () if follows is None else (follows,)

    def _peer_edges(self, position: int) -> Iterator[tuple[PeerEdge, ...]]:
        for item in self.instructions(position):
            edges = (
                (edge.process_group, edge.distance, edge.instruction)
                for edge in item.after
                if edge.process_group and self._is_in_run(position, edge.distance, edge.instruction)
            )
            yield tuple(dict.fromkeys(edges))
        if self.num_nodes(position) > len(self.instructions(position)):
            yield ()

    def _nodes_after(self, position: int) -> list[list[Edge]]:
        after: list[list[Edge]] = [[] for _ in range(self.num_nodes(position))]
        for later in range(position, min(position + self._reach, self.num_steps) + 1):
            for number, before in enumerate(self.before(later)):
                for distance, source in before:
                    if later - distance == position:
                        after[source].append((distance, number))
        for source, number in self._flush_edges.get(position, ()):
            after[source].append((self.num_steps + 1 - position, number))
        return after

    @cached_property
    def _before_on_stream(self) -> dict[Phase, list[int | None]]:
        before: dict[Phase, list[int | None]] = {phase: [] for phase in PHASES}
        for phase in PHASES:
            latest: dict[Stream, int] = {}
            for number, item in enumerate(getattr(self.program, phase)):
                before[phase].append(latest.get(item.stream))
                latest[item.stream] = number
        return before

    @cached_property
    def _last_on_stream(self) -> dict[Phase, dict[Stream, int]]:
        return {
            phase: {item.stream: n for n, item in enumerate(getattr(self.program, phase))} for phase in PHASES
        }

    @cached_property
    def _reach(self) -> int:
        """Most positions that any edge of a step reaches back."""
        positions = range(1, min(self.num_steps, self.max_distance + 1) + 1)
        edges = (edge for position in positions for before in self.before(position) for edge in before)
        return max((distance for distance, _ in edges), default=1)

    @cached_property
    def _flush_edges(self) -> dict[int, list[tuple[int, int]]]:
        """By position, (number there, number in the flush) of what the flush waits for."""
        last = self.num_steps + 1
        edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, before in enumerate(self.before(last)):
            for distance, source in before:
                edges[last - distance].append((source, number))
        return edges

    def chains(self, is_fixed: Sequence[bool]) -> list[list[int]]:
        """Return runs of a step's instructions of which each waits for the one before alone, and nobody else does.

        `is_fixed`: which instructions take the same time whatever else is running.
        """
        usual = self.max_distance + 1
        if usual > self.num_steps:
            return []
        before, peers = self.before(usual), self.peers(usual)
        count: dict[int, int] = defaultdict(int)
        for edges in before:
            for _, source in edges:
                count[source] += 1
        awaited = {source for position, edges in self._flush_edges.items() if position for source, _ in edges}
        awaited |= {self.number["step"][name] for name in self.observers if name in self.number["step"]}
        rendezvous = set(self.rendezvous_numbers["step"].values())
        awaited |= rendezvous | {self.host}
        links = {}
        for number, edges in enumerate(before[: self.host]):
            is_plain = number not in rendezvous and not peers[number] and is_fixed[number]
            if len(edges) == 1 and is_plain:
                distance, source = edges[0]
                if distance == 0 and count[source] == 1 and source not in awaited and is_fixed[source]:
                    links[source] = number
        chains = [[number] for number in links if number not in set(links.values())]
        for chain in chains:
            while chain[-1] in links:
                chain.append(links[chain[-1]])
        return chains

    # -- a whole run ---------------------------------------------------------------------------------------------

    @cached_property
    def listed(self) -> tuple[Listed, ...]:
        """The run as one list, in which what an instruction waits for is a number and not a name.

        Raises ProgramError if an instruction waits for one that is listed after it.
        """
        positions = range(self.num_steps + 2)
        first = [0, *accumulate(len(self.instructions(position)) for position in positions)]
        listed: list[Listed] = []
        for position in positions:
            begins = [(first[there], self.number[self.phase(there)]) for there in range(position, -1, -1)]
            for item in self.instructions(position):
                awaited = [
                    (
                        edge.process_group,
                        begins[edge.distance][0] + begins[edge.distance][1][edge.instruction],
                    )
                    for edge in item.after
                    if self._is_in_run(position, edge.distance, edge.instruction)
                ]
                own = tuple(index for process_group, index in awaited if not process_group)
                peers = tuple((process_group, index) for process_group, index in awaited if process_group)
                if any(index >= len(listed) for index in own):
                    raise self._waits_ahead(position, item)
                step = self.step(position)
                listed.append(Listed(len(listed), self.phase(position), step, item, own, peers))
        return tuple(listed)

    def ordered(self, earlier: int, later: int) -> bool:
        """Whether instruction `earlier` of the list has finished whenever `later` starts."""
        stream = _STREAM_NUMBERS[self.listed[earlier].instruction.stream]
        return self._clocks[later][stream] >= self._clocks[earlier][stream]

    def needed(self, item: Listed) -> list[int]:
        """Return the dependencies of a listed instruction that no other dependency and no stream implies."""
        implied_by = self._listed_before_on_stream[item.index]
        kept = sorted(set(item.after))
        for index in tuple(kept):
            others = [other for other in (*kept, implied_by) if other is not None and other != index]
            if index == implied_by or any(self.ordered(index, other) for other in others):
                kept.remove(index)
        return kept

    @cached_property
    def _listed_before_on_stream(self) -> list[int | None]:
        latest: dict[Stream, int] = {}
        before: list[int | None] = []
        for item in self.listed:
            before.append(latest.get(item.instruction.stream))
            latest[item.instruction.stream] = item.index
        return before

    @cached_property
    def _clocks(self) -> list[list[int]]:
        """Vector clocks with one component a stream: a stream runs in order, so how far each has certainly come says everything."""
        clocks: list[list[int]] = []
        for item, previous in zip(self.listed, self._listed_before_on_stream, strict=True):
            clock = [0] * len(_STREAM_NUMBERS)
            for index in (*item.after, *(() if previous is None else (previous,))):
                clock = list(map(max, clock, clocks[index]))
            stream = _STREAM_NUMBERS[item.instruction.stream]
            clock[stream] = 1 if previous is None else clocks[previous][stream] + 1
            clocks.append(clock)
        return clocks

    def _waits_ahead(self, position: int, item: Instruction) -> ProgramError:
        ids = self.ids[self.phase(position)]
        here = (edge.instruction for edge in item.after if edge.distance == 0 and not edge.process_group)
        ahead = next(name for name in here if ids.index(name) >= ids.index(item.id))
        return ProgramError(
            f"program {self.program.name}: {self.phase(position)}/{item.id} waits for {ahead}, which is listed after it",
            hint="list instructions in an order that respects their dependencies",
        )

    def _refuse_what_names_nothing(self) -> None:
        for phase, ids in self.ids.items():
            if len(self.number[phase]) < len(ids):
                twice = next(name for name in ids if ids.count(name) > 1)
                raise ProgramError(
                    f"program {self.program.name}: instruction {twice!r} is listed twice in {phase}"
                )
        # Deeper positions only repeat what these name.
        for position in (*range(min(self.num_steps, self.max_distance + 1) + 1), self.num_steps + 1):
            for item in self.instructions(position):
                for edge in item.after:
                    is_known = edge.instruction in self.number[self.phase(position - edge.distance)]
                    if not is_known and self._is_in_run(position, edge.distance, edge.instruction):
                        raise self._names_nothing(position, item, edge)

    def _names_nothing(self, position: int, item: Instruction, edge: Dependency) -> ProgramError:
        return ProgramError(
            f"program {self.program.name}: {self.phase(position)}/{item.id} waits for "
            f"{edge.instruction!r} (distance {edge.distance}), which does not exist",
            hint="name an instruction of the same phase, or of the previous step with distance 1",
        )

    # -- other ranks -------------------------------------------------------------------------------------------

    @cached_property
    def observers(self) -> dict[str, list[Observer]]:
        """By the id of a peer's instruction, who waits for it."""
        observers: dict[str, dict[Observer, None]] = defaultdict(dict)
        for phase in PHASES:
            for number, item in enumerate(getattr(self.program, phase)):
                for edge in item.after:
                    if edge.process_group:
                        observers[edge.instruction][
                            Observer(edge.process_group, phase, edge.distance, number)
                        ] = None
        return {instruction: list(listed) for instruction, listed in observers.items()}

    @cached_property
    def rendezvous_of(self) -> dict[Phase, list[Rendezvous | None]]:
        """Per phase, where each node meets those of other ranks; the host's meets nobody."""
        rendezvous_numbers: dict[Phase, list[Rendezvous | None]] = {phase: [] for phase in PHASES}
        for phase in PHASES:
            counts: dict[Channel, int] = defaultdict(int)
            for item in getattr(self.program, phase):
                channel = channel_of(item)
                if channel is None:
                    rendezvous_numbers[phase].append(None)
                    continue
                rendezvous_numbers[phase].append(
                    Rendezvous(channel.process_group, channel.offset, counts[channel], channel.sends)
                )
                counts[channel] += 1
        rendezvous_numbers["step"].append(None)
        return rendezvous_numbers

    @cached_property
    def rendezvous_numbers(self) -> dict[Phase, dict[Rendezvous, int]]:
        """Per phase, the instruction of each collective or message."""
        return {
            phase: {rendezvous: number for number, rendezvous in enumerate(met) if rendezvous is not None}
            for phase, met in self.rendezvous_of.items()
        }

    # -- by name -----------------------------------------------------------------------------------------------

    def has(self, node: RunNode) -> bool:
        """Whether the run has an instruction at a node."""
        in_run = 0 <= node.position <= self.num_steps + 1
        return in_run and node.instruction in self.number[self.phase(node.position)]

    def instruction(self, node: RunNode) -> Instruction:
        """Return the instruction at a node."""
        return self.instructions(node.position)[self._number_of(node)]

    def rendezvous(self, node: RunNode) -> Rendezvous | None:
        """Return where an instruction meets those of other ranks, None if it is neither collective nor message."""
        return self.rendezvous_of[self.phase(node.position)][self._number_of(node)]

    def opens_step(self, node: RunNode) -> bool:
        """Whether a node is the first computation of a step, which the host prepares."""
        return self.phase(node.position) == "step" and self._number_of(node) == self.opener

    def predecessors(self, node: RunNode) -> tuple[RunNode, ...]:
        """All of this rank that must finish before an instruction starts: its stream's predecessor first."""
        number = self._number_of(node)
        edges = self.before(node.position)[number]
        if self.host_opens and self.opens_step(node):
            edges = (*self.before(node.position)[self.host], *edges[1:])
        return tuple(self._node(node.position, edge) for edge in edges)

    def waits_for(self, node: RunNode) -> tuple[RunNode, ...]:
        """Nodes of this rank named by the instruction's ``after``, those before the run left out."""
        return tuple(there for process_group, there in self.awaited(node) if not process_group)

    def awaited(self, node: RunNode) -> list[tuple[str, RunNode]]:
        """Nodes named by the instruction's ``after``, each with the group whose other members it is on, "" for this rank.

        Those before the run are left out.
        """
        return [
            (edge.process_group, RunNode(node.position - edge.distance, edge.instruction))
            for edge in self.instruction(node).after
            if self._is_in_run(node.position, edge.distance, edge.instruction)
        ]

    def _number_of(self, node: RunNode) -> int:
        return self.number[self.phase(node.position)][node.instruction]

    def _node(self, position: int, edge: Edge) -> RunNode:
        there = position - edge[0]
        return RunNode(there, self.ids[self.phase(there)][edge[1]])
