"""The graph of a step of which one block stands for many, and how long such a step takes at least.

Nodes and edges are as in :class:`~zosim.program.step_graph.StepGraph`, but a position is one block: blocks that are alike share a table of
edges, and what only repeats itself is left out (:class:`~zosim.simulators.maxplus.MaxPlus`). So the bound of a step of a hundred blocks
costs what a few cost.

Examples
--------
Two streams and four blocks: each upload takes 1 s, each forward 2 s. With two staging buffers uploads run beside forwards, and a step
takes the first upload and four forwards; with one staging buffer nothing overlaps.

>>> from zosim.program.instructions import Dependency
>>> from zosim.program.operations import Load
>>> up = Instruction("up", Load(), Stream.H2D, "upload", "block.0")
>>> go = Instruction("go", Load(), Stream.COMPUTE, "forward", "block.0", after=(Dependency("up"),))
>>> blocks = Execution(0, 4, (up, go), in_buffer=(0, 1))
>>> [
...     period_s([StageStep(BlockGraph([blocks], num_staging_buffers), [(1.0, 2.0)], step_s=0.0)])
...     for num_staging_buffers in (2, 1)
... ]
[9.0, 12.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from zosim.program.instructions import Dependency, Instruction, Stream
from zosim.program.operations import Decode, Recv, Send
from zosim.program.step_graph import Edge
from zosim.simulators.maxplus import MaxPlus, Node

# The first fills staging buffers and streams; the others are as long as all that follow.
_NUM_STEPS = 3
# Stages that copy blocks come to repeat themselves later; where they do not, the least of their last shifts counts.
_MOST_STEPS = 12
# Shifts that differ by less, relative, are rounding.
_SAME = 1e-12
MOVES = frozenset({"upload", "offload", "gather", "widen", "narrow", "allocate", "free"})
"""Labels of what only blocks have that do not stay on the device."""
REACH = 2
"""Executions back up to which instructions wait for others than of their streams and staging buffers: what is written ahead takes turns in two buffers."""
# At a step's first position there is a node for each stream, behind them this one.
_EXCHANGE = len(Stream)


@dataclass(frozen=True)
class Execution:
    """Neighbouring instructions of one segment; those of a block stand for `count` blocks, one after the other.

    Attributes
    ----------
    block : int or None
        The first of the blocks.
    count : int
    instructions : tuple of Instruction
        Each after others of these alone.
    in_buffer : tuple of int
        Which of them work in a staging buffer.
    behind : mapping of int to tuple of Edge
        What some of them wait for in the executions before, up to :data:`REACH` of them, apart from streams and staging buffers.
    """

    block: int | None
    count: int
    instructions: tuple[Instruction, ...]
    in_buffer: tuple[int, ...]
    behind: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)


class BlockGraph:
    """Who waits for whom in a step.

    The first position of a step has a node for each stream, where it waits for the host. It also has one for the exchange of
    losses and one for each message, which end when peers say. An instruction that other ranks take part in is two nodes: the
    second, with the instruction's own number, ends when they have arrived, too.

    Parameters
    ----------
    executions : sequence of Execution
    num_staging_buffers : int
    offloaded : callable, optional
        Returns the number of a block among those that do not stay on the device, None if it stays. Every block then has a table; by
        default none stays, and those that are alike share one.

    Attributes
    ----------
    opening : list of Node
        The streams' nodes at the first position.
    tables : list of list of list of Node
        Of each execution: the nodes of its first blocks, the last of which are those of all that follow, or of every block.
    sends, receipts : list of (int, int)
        Position in the step and number of each message.
    exchange : (int, int) or None
        Execution and number of the instruction in which losses are exchanged.
    end : (int, int)
        Position in the step and number of the last computation.
    """

    def __init__(
        self,
        executions: Sequence[Execution],
        num_staging_buffers: int,
        offloaded: Callable[[int], int | None] | None = None,
    ) -> None:
        self.executions = executions
        self.num_staging_buffers = num_staging_buffers
        self._offloaded = offloaded
        # What blocks gather on one host is no exchange of losses.
        exchanges = (
            (index, number)
            for index, execution in enumerate(executions)
            for number, item in enumerate(execution.instructions)
            if item.label == "exchange"
        )
        self.exchange = next(exchanges, None)
        self.sends: list[Edge] = []
        self.receipts: list[Edge] = []
        # Messages are decoded in the order in which they come.
        self._received = iter(self.receipts)
        # The last on each stream, and the last on each stream in each staging buffer.
        self._last: dict[Stream, Edge] = {stream: (0, number) for number, stream in enumerate(Stream)}
        self._in_buffer: dict[int | None, dict[Stream, Edge]] = {}
        self._first_in_buffer: list[tuple[list[Edge], int, int | None]] = []
        self.tables: list[list[list[Node]]] = []
        position = 1
        for index, execution in enumerate(executions):
            self.tables.append(list(self._tables(index, execution, position)))
            position += execution.count
        # Losses are read when compute has ended: every stream of the next step waits for that.
        self.end = self._last[Stream.COMPUTE]
        self.opening: list[Node] = [
            (number, _edges(position, {self._last[stream], self.end})) for number, stream in enumerate(Stream)
        ]
        # And the first in a staging buffer for the last that the step before left there.
        for edges, entered, staging_buffer in self._first_in_buffer:
            edges.extend(_edges(position + entered, self._in_buffer[staging_buffer].values()))

    def _inside(self, index: int, position: int, *, stays: bool = False) -> dict[int, list[Edge]]:
        """Return the nodes of an execution, of a block that stays where it does, and what they wait for in it and of messages."""
        nodes: dict[int, list[Edge]] = {}
        numbers: dict[str, int] = {}
        on_stream: dict[Stream, int] = {}
        for number, item in enumerate(self.executions[index].instructions):
            if stays and item.label in MOVES:
                continue
            edges = [
                (0, numbers[before.instruction]) for before in item.after if before.instruction in numbers
            ]
            edges += self.executions[index].behind.get(number, ())
            if item.stream in on_stream:
                edges.append((0, on_stream[item.stream]))
            numbers[item.id] = on_stream[item.stream] = number
            peer = _EXCHANGE if (index, number) == self.exchange else None
            if isinstance(item.op, Send):
                self.sends.append((position, number))
            elif isinstance(item.op, Recv):
                self.receipts.append((position, number))
                peer = _EXCHANGE + len(self.receipts)
            elif isinstance(item.op, Decode):
                edges += _edges(position, [next(self._received)])
            if peer is not None:
                nodes[~number] = edges
                edges = [(0, ~number), (position, peer)]
            nodes[number] = edges
        return nodes

    def _tables(self, index: int, execution: Execution, begin: int) -> Iterator[list[Node]]:
        """Yield the nodes of an execution's first blocks with all edges, the last of which are those of all that follow."""
        items, count = execution.instructions, execution.count
        is_mixed = execution.block is not None and self._offloaded is not None
        moving = _Nodes(items, self._inside(index, begin), execution.in_buffer)
        staying = _Nodes(items, self._inside(index, begin, stays=True), ()) if is_mixed else moving
        # Behind the first in each staging buffer all are alike; the last in each are what others come behind.
        few = count if is_mixed else min(self.num_staging_buffers + 1, count)
        for block in chain(range(few), range(max(few, count - self.num_staging_buffers), count)):
            position = begin + block
            # Blocks that move take turns in the staging buffers, as lowering has it.
            number = None if execution.block is None else execution.block + block
            if is_mixed:
                assert self._offloaded is not None
                assert number is not None
                number = self._offloaded(number)
            nodes = staying if number is None else moving
            staging_buffer = None if number is None else number % self.num_staging_buffers
            if block < few:
                own = dict(nodes.edges)
                for stream, first in nodes.first.items():
                    own[first] = own[first] + _edges(position, [self._last[stream]])
                if nodes.entry is not None:
                    # A staging buffer is free when all that worked in it for another block has ended.
                    own[nodes.entry] = own[nodes.entry] + _edges(
                        position, self._in_buffer.get(staging_buffer, {}).values()
                    )
                    if staging_buffer not in self._in_buffer:
                        self._first_in_buffer.append((own[nodes.entry], position, staging_buffer))
                yield list(own.items())
            self._last |= {stream: (position, last) for stream, last in nodes.last.items()}
            if nodes.entry is not None:
                self._in_buffer[staging_buffer] = {
                    stream: (position, last) for stream, last in nodes.in_buffer.items()
                }


class _Nodes:
    """The nodes of a block, and where its streams and its staging buffer begin and end.

    Parameters
    ----------
    items : sequence of Instruction
    edges : dict of int to list of Edge
        What each node waits for in the execution.
    in_buffer : sequence of int
        Which of them work in a staging buffer.
    """

    def __init__(
        self, items: Sequence[Instruction], edges: dict[int, list[Edge]], in_buffer: Sequence[int]
    ) -> None:
        self.edges = edges
        # Of two nodes of an instruction the first waits.
        heads = {number: ~number if ~number in edges else number for number in edges if number >= 0}
        self.first = {items[number].stream: heads[number] for number in reversed(heads)}
        self.last = {items[number].stream: number for number in heads}
        self.in_buffer = {items[number].stream: number for number in in_buffer}
        self.entry = heads[in_buffer[0]] if in_buffer else None


def written_out(graph: BlockGraph) -> tuple[tuple[Instruction, ...], dict[str, str]]:
    """Return a step with the instructions of every block, and by their ids those of the instructions that they repeat.

    What they read and write is as of those. The graph has a table for each block.
    """
    blocks = [
        (execution, table)
        for execution, tables in zip(graph.executions, graph.tables, strict=True)
        for table in tables
    ]
    length = len(blocks) + 1
    stream_of = [[item.stream for item in execution.instructions] for execution, _ in blocks]
    end = _id(*graph.end)
    step: list[Instruction] = []
    like: dict[str, str] = {}
    # A stream that has waited for something on another need not wait for what came before that.
    reached: dict[tuple[Stream, Stream], tuple[int, int]] = {}
    for position, (execution, table) in enumerate(blocks, 1):
        edges_of = dict(table)
        for number, edges in table:
            if number < 0:
                continue  # the first of two nodes has its edges
            item = execution.instructions[number]
            after: list[Dependency] = []
            for distance, source in edges_of.get(~number, edges):
                there = position - distance
                if there == 0:  # the step's beginning
                    if source < _EXCHANGE and item.stream is not Stream.COMPUTE:
                        after.append(Dependency(end, 1))
                    continue
                stream = stream_of[there - 1 if there > 0 else there + length - 1][source]
                streams = item.stream, stream
                if stream is not item.stream and (there, source) > reached.get(streams, (-length, -1)):
                    reached[streams] = there, source
                    before = int(there < 0)
                    after.append(Dependency(_id(there + before * length, source), before))
            own = _id(position, number)
            like[own] = item.id
            step.append(replace(item, id=own, after=tuple(after)))
    return tuple(step), like


def _id(position: int, number: int) -> str:
    return f"{position}.{number}"


def _edges(position: int, edges: Iterable[Edge]) -> list[Edge]:
    return [(position - there, number) for there, number in edges]


Seconds = Sequence[Sequence[float]]
"""Of the instructions of each execution."""


class StageStep(NamedTuple):
    """A rank of a pipeline: its graph, the seconds of its instructions, and the host's own of a step."""

    graph: BlockGraph
    seconds: Seconds
    step_s: float


def period_s(stages: Sequence[StageStep]) -> float:
    """Return the seconds from the end of one step to that of the next, of the stage that ends last."""
    runs = [_Run(*stage) for stage in stages]
    ends: list[list[float]] = []
    shifts: list[float] = []
    for step in range(_MOST_STEPS):
        came: list[float] = []
        sent: list[float] = []
        # Messages go to later stages; where losses are exchanged, all wait for the last.
        for run in runs:
            came.append(run.until_exchange(sent))
            sent = run.sent_s
        ends.append([run.after_exchange(max(came)) for run in runs])
        shifts = [last - before for before, last in zip(*ends[-2:], strict=True)] if step else []
        # Stages that end as much later as each other go on so.
        if step >= _NUM_STEPS - 1 and max(shifts) - min(shifts) <= _SAME * max(shifts):
            break
    return min(shifts)


def chained_s(stage: StageStep) -> float:
    """Return the period of a step of which every instruction waits for the one before.

    What is listed behind the last computation, and before the first of the next step, runs while the host prepares that.
    """
    pairs = zip(stage.graph.executions, stage.seconds, strict=True)
    listed = [
        (item.stream, alone_s, execution.count)
        for execution, own in pairs
        for item, alone_s in zip(execution.instructions, own, strict=True)
    ]
    compute = [number for number, (stream, _, _) in enumerate(listed) if stream is Stream.COMPUTE]
    # Of blocks that are alike the first one begins a step, and the last one ends it.
    between = [alone_s for _, alone_s, _ in (*listed[: compute[0]], *listed[compute[-1] + 1 :])]
    whole_s = sum(alone_s * count for _, alone_s, count in listed)
    return max(stage.step_s, sum(between)) + whole_s - sum(between)


class _Run:
    """A stage's run, step by step."""

    def __init__(self, graph: BlockGraph, seconds: Seconds, step_s: float) -> None:
        self.sent_s: list[float] = []
        self._graph = graph
        self._step_s = step_s
        self._run: MaxPlus[float] = MaxPlus(0.0, max)
        self._begin = 0
        self._repeated = []
        for execution, tables, own in zip(graph.executions, graph.tables, seconds, strict=True):
            pairs = {number for table in tables for number, _ in table if number < 0}
            # Of two nodes of an instruction the first takes its time.
            listed = [
                (table, [own[~n] if n < 0 else 0.0 if ~n in pairs else own[n] for n, _ in table])
                for table in tables
            ]
            self._repeated.append((execution.count, listed))

    def until_exchange(self, arrivals: Sequence[float]) -> float:
        """Run a step until losses are exchanged, and return when the stage has come to that."""
        graph, run, self._begin = self._graph, self._run, len(self._run.ends)
        # Those of no pipeline are taken to find every message there.
        came = [*arrivals, *[0.0] * (len(graph.receipts) - len(arrivals))]
        outside: list[Node] = [(_EXCHANGE + k, ()) for k in range(1 + len(came))]
        hosts = [self._step_s if stream == Stream.COMPUTE else 0.0 for stream in Stream]
        run.advance([*graph.opening, *outside], [*hosts, 0.0, *came])
        self._execute(self._repeated if graph.exchange is None else self._repeated[: graph.exchange[0] + 1])
        self.sent_s = [run.ends[self._begin + later][number] for later, number in graph.sends]
        return 0.0 if graph.exchange is None else run.ends[-1][~graph.exchange[1]]

    def after_exchange(self, exchange_s: float) -> float:
        """Run the rest of the step, and return when its last computation ends."""
        run, exchange = self._run, self._graph.exchange
        if exchange is not None:
            # The execution in which losses are exchanged, once more, now that it is known when they are.
            run.ends[self._begin][_EXCHANGE] = exchange_s
            del run.starts[-1], run.ends[-1]
            self._execute(self._repeated[exchange[0] :])
        position, number = self._graph.end
        return run.ends[self._begin + position][number]

    def _execute(self, repeated: Iterable[tuple[int, list[tuple[list[Node], list[float]]]]]) -> None:
        """Run executions as often as they stand for, leaving out what only repeats."""
        run, num_staging_buffers = self._run, self._graph.num_staging_buffers
        period = max(REACH, num_staging_buffers)
        for count, tables in repeated:
            block = 0
            while block < count:
                run.advance(*tables[min(block, len(tables) - 1)])
                block += 1
                if len(tables) > num_staging_buffers + 1:
                    continue  # each block has its own
                rounds = (count - block) // period
                if rounds and block >= 2 * period and block % period == 0:
                    shifts = run.shifts(period)
                    # All of this round is as much later as the round before: so it goes on.
                    if max(shifts) - min(shifts) <= _SAME * max(shifts):
                        run.repeat(period, rounds, max(shifts))
                        block += rounds * period
