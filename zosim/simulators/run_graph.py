"""Who waits for whom in a run of several ranks: their step graphs, joined where ranks meet and where one waits for its peers.

A simulator that runs ranks as processes asks by rank and node. The closed form asks by number, as of one rank's
:class:`~zosim.program.step_graph.StepGraph`: nodes at a position are the instructions of all ranks, those that start and end together one
node, and edges are ``(positions before, number)``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property
from graphlib import CycleError

from topology.errors import ProgramError
from zosim.program.instructions import PHASES, Phase
from zosim.program.step_graph import Edge, RunNode, StepGraph
from zosim.simulators.maxplus import Node, in_order
from zosim.simulators.world import World

Member = tuple[int, int]
"""A rank, and the number of one of its nodes."""


class RunGraph:
    """The order of a run of all ranks of a world.

    Raises ProgramError if a dependency names no instruction.

    - `graphs`: Of each rank; ranks of one template share theirs. The host's work before a step is a node where it takes time.
    """

    def __init__(self, world: World, num_steps: int) -> None:
        self.world = world
        self.num_steps = num_steps
        of_template = [
            StepGraph(template.program, num_steps, host_takes_time=template.step_s > 0)
            for template in world.templates
        ]
        self.graphs = [of_template[number] for number in world.template_of]
        self.max_distance = max(graph.max_distance for graph in self.graphs)
        self._nodes: dict[int, list[Node]] = {}
        self._edges_of: dict[int, list[tuple[Edge, ...]]] = {}

    # -- by number ---------------------------------------------------------------------------------------------

    def nodes(self, position: int) -> list[Node]:
        """Return the nodes at a position with their edges, each after those of its position that it waits for.

        Raises ProgramError if instructions wait for each other in a circle.
        """
        key = self._alike(position)
        if key not in self._nodes:
            self._nodes[key] = self._in_order(key)
        return self._nodes[key]

    def edges(self, position: int) -> list[tuple[Edge, ...]]:
        """Return what each node at a position waits for, by number."""
        key = self._alike(position)
        if key not in self._edges_of:
            self._edges_of[key] = [
                tuple(dict.fromkeys(edge for member in members for edge in self._edges(member, key)))
                for members in self.members[self.graphs[0].phase(key)]
            ]
        return self._edges_of[key]

    def _alike(self, position: int) -> int:
        # Steps that reach back to steps alone are alike.
        return self.max_distance + 1 if self.max_distance < position <= self.num_steps else position

    @cached_property
    def members(self) -> dict[Phase, list[tuple[Member, ...]]]:
        """By phase, who each node is: more than one where instructions of several ranks start and end together."""
        return {phase: self._joined(phase) for phase in PHASES}

    @cached_property
    def _number(self) -> dict[Phase, dict[Member, int]]:
        return {
            phase: {member: number for number, members in enumerate(nodes) for member in members}
            for phase, nodes in self.members.items()
        }

    def _joined(self, phase: Phase) -> list[tuple[Member, ...]]:
        together: dict[Hashable, list[Member]] = {}
        for rank, graph in enumerate(self.graphs):
            num_nodes = len(graph.ids[phase]) + (phase == "step" and graph.host_opens)
            for number in range(num_nodes):
                rendezvous = graph.rendezvous_of[phase][number]
                key = (rank, number) if rendezvous is None else self.world.participants(rank, rendezvous)[1]
                together.setdefault(key, []).append((rank, number))
        return [tuple(members) for members in together.values()]

    def _in_order(self, position: int) -> list[Node]:
        phase = self.graphs[0].phase(position)
        try:
            return in_order(self.edges(position))
        except CycleError as error:
            circle = " waits for ".join(
                self.name(rank, RunNode(position, self.graphs[rank].ids[phase][number]))
                for rank, number in (self.members[phase][node][0] for node in reversed(error.args[1]))
            )
            message = f"deadlock in program {self.graphs[0].program.name}: {circle}"
            raise ProgramError(
                message, hint="remove one of these dependencies, or reorder a stream"
            ) from None

    def _edges(self, member: Member, position: int) -> Iterator[Edge]:
        rank, number = member
        graph = self.graphs[rank]
        for distance, before in graph.before(position)[number]:
            yield distance, self._number[graph.phase(position - distance)][rank, before]
        for group, distance, instruction in graph.peers(position)[number]:
            there = RunNode(position - distance, instruction)
            for peer in self._peers_with(rank, group, there):
                phase = graph.phase(there.position)
                yield distance, self._number[phase][peer, self.graphs[peer].number[phase][instruction]]

    # -- by name -----------------------------------------------------------------------------------------------

    def awaited(self, rank: int, node: RunNode) -> Iterator[tuple[int, RunNode]]:
        """Yield what an instruction waits for besides its stream, on its own rank and on its peers."""
        for group, there in self.graphs[rank].awaited(node):
            for peer in self._peers_with(rank, group, there) if group else (rank,):
                yield peer, there

    def participants(self, rank: int, node: RunNode) -> tuple[tuple[int, ...], Hashable]:
        """Return who meets at an instruction, and what tells this rendezvous from others at its position."""
        rendezvous = self.graphs[rank].rendezvous(node)
        assert rendezvous is not None
        return self.world.participants(rank, rendezvous)

    def name(self, rank: int, node: RunNode) -> str:
        """Return how an instruction is called in messages."""
        name = f"{self.graphs[rank].phase(node.position)}/{node.instruction}"
        return name if self.world.size == 1 else f"{name} of rank {self.world.numbers[rank]}"

    def _peers_with(self, rank: int, group: str, node: RunNode) -> Iterator[int]:
        # A dependency on a group waits for the instruction of that name on each of its members that has it.
        return (peer for peer in self.world.process_groups[group].peers(rank) if self.graphs[peer].has(node))
