"""The event simulator for many ranks: what happens to many of them at one instant is handled in one go.

The same rules as :mod:`zosim.simulators.simulate`, instruction by instruction and rank by rank, on arrays instead of processes:
an event is the end of one instruction on all ranks of a template on which it ends at that instant. Ranks in step with
each other cost as much as one, and ranks that drift apart are still simulated each for itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from topology.errors import ProgramError
from zosim.program.instructions import PHASES, Phase, Stream
from zosim.program.step_graph import Rendezvous, StepGraph
from zosim.simulators.assembly import MAX_UNLIKE_STEPS, run_simulator, without_garbage_collection
from zosim.simulators.few_ranks import FewRanks
from zosim.simulators.flows import STREAM_NUMBER, Counts, Floats, FlowTable, Ints
from zosim.simulators.periodic import PeriodDetector, shortened_steps
from zosim.simulators.sharing import SAME_INSTANT
from zosim.simulators.world import ProcessGroup, World
from zosim.timeline import Repeat, Span, Timeline

# Up to here numbers are faster than arrays.
_FEW_RANKS = 16


def simulate_many(
    world: World, *, num_steps: int | None = None, ranks: Collection[int] | None = None
) -> Timeline:
    """Return the predicted timeline of a world of many ranks.

    Raises ProgramError as for :func:`~zosim.simulators.simulate.simulate`.

    - `num_steps`: As for :func:`~zosim.simulators.simulate.simulate`.
    - `ranks`: Positions in the world of those whose spans are listed; all unless given.
    """
    listed = sorted(range(world.size) if ranks is None else ranks)
    return run_simulator(world, lambda steps: Lockstep(world, steps, listed), num_steps)


def periodic_step_s(world: World) -> float:
    """Return the seconds per step once steps repeat, without listing anything.

    Raises ProgramError as for :func:`~zosim.simulators.simulate.simulate`.
    """
    with without_garbage_collection():
        if world.size <= _FEW_RANKS and not world.fifo:
            cycle = FewRanks(world, MAX_UNLIKE_STEPS).cycle()
        else:
            run = Lockstep(world, MAX_UNLIKE_STEPS, ())
            run.run_to_end()
            cycle = run.cycle
    return simulate_many(world).step_time_s if cycle is None else cycle.period_s / cycle.num_steps


@dataclass
class Times:
    """Of the instructions at one position of a run: arrays of shape (num_instructions, num_ranks)."""

    start_s: Floats
    end_s: Floats
    num_pending: Counts  # how many others each instruction still waits for


class RankClass:
    """The ranks of one template, and what the simulator keeps of them.

    - `ranks`: shape (num_ranks,); Their positions in the world.
    - `first`: Where they begin in the simulator's order of all ranks.
    - `streams`, `seconds`, `classes`: By phase, for each instruction in order: number of its stream, its seconds alone, and
      the class of activities that it shares resources with (-1 where nothing limits it). The last of a step is the host's own
      part.
    - `times`: By position, of those that have begun and not yet ended.
    - `chains`: By the first of a chain of instructions that nothing else can hold up: the chain, and when each of it starts
      and the last one ends, as columns.
    """

    def __init__(
        self, world: World, number: int, ranks: Ints, first: int, table: FlowTable, num_steps: int
    ) -> None:
        template = world.templates[number]
        self.ranks = ranks
        self.first = first
        self.template = template
        self.graph = StepGraph(template.program, num_steps, host_takes_time=template.step_s > 0)
        own = [dict(zip(template.resources, world.resources[rank], strict=True)) for rank in ranks]
        self.streams: dict[Phase, list[int]] = {}
        self.seconds: dict[Phase, list[float]] = {}
        self.classes: dict[Phase, list[int]] = {}
        for phase in PHASES:
            listed = getattr(template.program, phase)
            activities = [template.activities[phase, item.id] for item in listed]
            self.streams[phase] = [STREAM_NUMBER[item.stream] for item in listed]
            self.seconds[phase] = [activity.seconds for activity in activities]
            self.classes[phase] = [table.class_of(activity, own, first) for activity in activities]
        self.streams["step"].append(STREAM_NUMBER[Stream.COMPUTE])
        self.seconds["step"].append(template.step_s)
        self.classes["step"].append(-1)
        self.times: dict[int, Times] = {}
        self.chains: dict[int, tuple[Ints, Floats]] = {}
        for chain in self.graph.chains([number < 0 for number in self.classes["step"]]):
            offsets = np.concatenate([[0.0], np.cumsum([self.seconds["step"][item] for item in chain])])
            self.chains[chain[0]] = np.array(chain)[:, None], offsets[:, None]

    def __len__(self) -> int:
        return len(self.ranks)


class Participants:
    """Who meets in a group's collectives, or in messages of one offset, over the ranks in the simulator's order.

    - `of`: Number of each rank's participants, where it receives (or takes part in a collective) and where it sends.
    - `sizes`: Of each set of participants.
    """

    def __init__(self, group: ProcessGroup, offset: int, ranks: Ints) -> None:
        if not offset:
            subgroup = np.array([group.subgroup_of[rank] for rank in ranks], dtype=np.intp)
            self.of = {False: subgroup}
            self.sizes = np.bincount(subgroup, minlength=len(group.subgroups))
            return
        # A message is numbered like its sender, one from nobody after all of these.
        position = {int(rank): number for number, rank in enumerate(ranks)}
        senders = [group.at_offset(int(rank), -offset) for rank in ranks]
        receiving = [
            len(ranks) + number if sender is None else position[sender]
            for number, sender in enumerate(senders)
        ]
        self.of = {False: np.array(receiving, dtype=np.intp), True: np.arange(len(ranks), dtype=np.intp)}
        self.sizes = np.bincount(np.concatenate(list(self.of.values())), minlength=2 * len(ranks))


class Peers:
    """A group as arrays over the ranks in the simulator's order."""

    def __init__(self, group: ProcessGroup, ranks: Ints) -> None:
        everybody = Participants(group, 0, ranks)
        self.subgroup, self.sizes = everybody.of[False], everybody.sizes
        self.is_doubled = np.array([rank in group.doubled for rank in ranks], dtype=bool)
        # How many finish before a rank may go on, its own included or not.
        self.awaited = self.sizes[self.subgroup] - ~self.is_doubled
        self.waits = self.awaited > 0


# One instruction at one position, on some ranks of a class.
_Batch = tuple[RankClass, int, int]


class Lockstep:
    """One simulation of a fixed number of steps.

    - `listed`: Positions in the world of the ranks whose spans are wanted.

    - `num_events`: Instructions that have ended.
    - `cycle`, `shortened`: As of :class:`~zosim.simulators.assembly.SimulatorRun`.
    """

    def __init__(self, world: World, num_steps: int, listed: Collection[int]) -> None:
        self.world = world
        self.num_steps = num_steps
        self.num_events = 0
        self.cycle: Repeat | None = None
        self.shortened: int | None = None
        # Ranks of one template lie side by side, so that a class is a slice of every array.
        by_template = np.argsort(world.template_of, kind="stable")
        self.table = FlowTable(world, by_template)
        self._order = by_template
        self._rank_classes: list[RankClass] = []
        for number in range(len(world.templates)):
            ranks = np.flatnonzero(np.array(world.template_of) == number)
            first = sum(len(rank_class) for rank_class in self._rank_classes)
            self._rank_classes.append(RankClass(world, number, ranks, first, self.table, num_steps))
        self._peers = {name: Peers(group, by_template) for name, group in world.process_groups.items()}
        self._listed = set(listed)
        self._batches: list[_Batch] = []
        self._ready: list[tuple[RankClass, int, int, Ints]] = []
        self._participants: dict[tuple[str, int], Participants] = {}
        self._met: dict[tuple[tuple[str, int, int], int, str], Ints] = {}
        self._watched: dict[tuple[str, int, str], tuple[Ints, Ints, Ints]] = {}
        # Hardly any instruction is waited for by peers, so the others need not look for watchers.
        self._is_observed = {name for rank_class in self._rank_classes for name in rank_class.graph.observers}
        self._unfinished: dict[int, int] = {}
        self._depth = max(rank_class.graph.max_distance for rank_class in self._rank_classes)
        self._detector = PeriodDetector(self._depth)
        self._entered = 0
        self._num_others = 0
        self._others_until_s = 0.0
        self._spans: dict[int, list[Span]] = defaultdict(list)

    def run_to_end(self) -> None:
        """Run to the end, or until the rest is known.

        Raises ProgramError if instructions wait for each other in a circle.
        """
        # Prologue, first step and flush may begin at once; later steps are opened when something waits for them.
        for position in sorted({0, 1, self.num_steps + 1}):
            self._open(position)
        now_s = 0.0
        while self.shortened is None:
            self._start_ready(now_s)
            if not self.table.is_settled:
                self.table.settle(now_s)
            now_s = float(self.table.end_s.min())
            if math.isinf(now_s):
                break
            # Ends that differ by rounding alone are one instant.
            rows = self.table.take_ended(now_s + SAME_INSTANT * now_s)
            for (rank_class, position, number), cols in self._grouped(rows):
                rendezvous = rank_class.graph.rendezvous_of[rank_class.graph.phase(position)][number]
                if rendezvous is None:
                    self._end(rank_class, position, number, cols, now_s)
                else:  # wait for the others' flows
                    for other, there, who in self._arrive(rank_class, position, rendezvous, cols, "end"):
                        self._end(other, position, there, who, now_s)
        if self.shortened is None and any(self._unfinished.values()):
            # The other simulator words what goes in a circle.
            from zosim.simulators.simulate import simulate_world

            simulate_world(self.world, num_steps=min(self.num_steps, self._depth + 1))
            message = f"deadlock in program {self.world.program(0).name}"
            raise ProgramError(message, hint="look for instructions that wait for each other")
        for position in sorted(self._unfinished):
            self._close(position)

    def spans(self) -> dict[int, list[Span]]:
        """Return the spans of the listed ranks, by position in the world."""
        return {rank: self._spans[rank] for rank in sorted(self._listed)}

    # -- starting ----------------------------------------------------------------------------------------------

    def _open(self, position: int) -> None:
        """Set up the needs of all instructions at a position; those without any are ready."""
        if position in self._unfinished or not 0 <= position <= self.num_steps + 1:
            return
        self._unfinished[position] = 0
        for rank_class in self._rank_classes:
            count = rank_class.graph.num_nodes(position)
            shape = count, len(rank_class)
            # All instructions count down what they wait for, and start at 0.
            left = np.empty(shape, dtype=np.int16)
            left[:] = np.array([len(before) for before in rank_class.graph.before(position)], dtype=np.int16)[
                :, None
            ]
            for number, awaited in enumerate(rank_class.graph.peers(position)):
                for group, _, _ in awaited:
                    left[number] += self._peers[group].waits[
                        rank_class.first : rank_class.first + len(rank_class)
                    ]
            rank_class.times[position] = Times(np.zeros(shape), np.zeros(shape), left)
            self._unfinished[position] += count * len(rank_class)
            for free in np.flatnonzero((left == 0).any(axis=1)).tolist():
                self._ready.append((rank_class, position, free, np.flatnonzero(left[free] == 0)))

    def _start_ready(self, now_s: float) -> None:
        while self._ready:
            ready, self._ready = self._ready, []
            for rank_class, position, number, cols in ready:
                rendezvous = rank_class.graph.rendezvous_of[rank_class.graph.phase(position)][number]
                if rendezvous is None:
                    self._start(rank_class, position, number, cols, now_s)
                else:
                    for other, there, who in self._arrive(rank_class, position, rendezvous, cols, "start"):
                        self._start(other, position, there, who, now_s)

    def _start(self, rank_class: RankClass, position: int, number: int, cols: Ints, now_s: float) -> None:
        phase, times = rank_class.graph.phase(position), rank_class.times[position]
        seconds = rank_class.seconds[phase][number]
        if phase == "step" and number in rank_class.chains:
            chain, offsets = rank_class.chains[number]
            # A chain that nothing can hold up is one event: its inner starts and ends are sums.
            times.start_s[chain, cols] = now_s + offsets[:-1]
            times.end_s[chain, cols] = now_s + offsets[1:]
            seconds = float(offsets[-1, 0])
        else:
            times.start_s[number, cols] = now_s
        rows = rank_class.streams[phase][number] * self.table.num_ranks + rank_class.first + cols
        self._batches.append((rank_class, position, number))
        self.table.start(rows, rank_class.classes[phase][number], seconds, len(self._batches) - 1, now_s)
        if phase == "step":
            self._entered = max(self._entered, position - 1)
        else:
            self._num_others += len(cols)
            self._others_until_s = math.inf

    def _arrive(
        self, rank_class: RankClass, position: int, rendezvous: Rendezvous, cols: Ints, phase: str
    ) -> Iterator[tuple[RankClass, int, Ints]]:
        """Take in ranks that have come to a collective or message, and yield all participants that are complete."""
        channel = rendezvous.process_group, rendezvous.offset
        if channel not in self._participants:
            self._participants[channel] = Participants(
                self.world.process_groups[rendezvous.process_group], rendezvous.offset, self._order
            )
        participants, key = self._participants[channel], (rendezvous.shared, position, phase)
        if key not in self._met:
            self._met[key] = np.zeros(len(participants.sizes), dtype=np.intp)
        # Participants may come at several instants and from several classes.
        there = self._met[key]
        arrived = np.bincount(
            participants.of[rendezvous.sends][rank_class.first + cols], minlength=len(there)
        )
        complete = (there + arrived == participants.sizes) & (arrived > 0)
        there += arrived
        if not complete.any():
            return
        at_phase = rank_class.graph.phase(position)
        for other in self._rank_classes:
            for sends, indices in participants.of.items():
                own = other.graph.rendezvous_numbers[at_phase].get(rendezvous._replace(sends=sends))
                if own is not None:
                    who = np.flatnonzero(complete[indices[other.first : other.first + len(other)]])
                    if who.size:
                        yield other, own, who

    # -- ending ------------------------------------------------------------------------------------------------

    def _grouped(self, rows: Ints) -> Iterator[tuple[_Batch, Ints]]:
        """Yield the instructions that rows belong to, with their ranks' positions in their class."""
        ranks = rows % self.table.num_ranks
        batches = self.table.batch[rows]
        first, last = self._batches[batches[0]], batches[-1]
        if batches[0] == last and (len(rows) == 1 or (batches == last).all()):
            yield first, ranks - first[0].first
            return
        # Rows of one instruction together, in the order of ranks.
        order = batches.argsort(kind="stable")
        batches, ranks = batches[order], ranks[order]
        ends = [0, *((batches[1:] != batches[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        for begin, end in pairwise(ends):
            batch = self._batches[batches[begin]]
            yield batch, ranks[begin:end] - batch[0].first

    def _end(self, rank_class: RankClass, position: int, number: int, cols: Ints, now_s: float) -> None:
        phase, num_ended = rank_class.graph.phase(position), len(cols)
        if phase == "step" and number in rank_class.chains:
            chain, _ = rank_class.chains[number]
            number, num_ended = int(chain[-1, 0]), len(chain) * len(cols)
        self.num_events += num_ended
        times = rank_class.times[position]
        # Within a chain a start is a sum of its own, which may round above the instant of the end.
        times.end_s[number, cols] = np.maximum(times.start_s[number, cols], now_s)
        if phase != "step":
            self._num_others -= len(cols)
            self._others_until_s = math.inf if self._num_others else now_s
        for distance, successor in rank_class.graph.after(position)[number]:
            self._take_need(rank_class, position + distance, successor, cols)
        if (
            number < len(rank_class.graph.ids[phase])
            and rank_class.graph.ids[phase][number] in self._is_observed
        ):
            self._notify_peers(rank_class, position, rank_class.graph.ids[phase][number], cols)
        self._unfinished[position] -= num_ended
        if phase == "step" and self._unfinished[position] == 0:
            self._step_completed(position)

    def _take_need(self, rank_class: RankClass, position: int, number: int, cols: Ints) -> None:
        if position not in self._unfinished:
            self._open(position)
        left = rank_class.times[position].num_pending[number]
        # Without an index where all ranks are in step, which is the usual case.
        if len(cols) == len(rank_class):
            left -= 1
            ready = (left == 0).nonzero()[0]
        else:
            left[cols] -= 1
            ready = cols[left[cols] == 0]
        if ready.size:
            self._ready.append((rank_class, position, number, ready))

    def _notify_peers(self, rank_class: RankClass, position: int, name: str, cols: Ints) -> None:
        """Take a need off whoever waits for an instruction on all its peers, once all of them have finished."""
        for group in {
            observer[0] for other in self._rank_classes for observer in other.graph.observers.get(name, ())
        }:
            ready = self._now_done(group, position, name, rank_class.first + cols)
            for other in self._rank_classes:
                own = ready[(ready >= other.first) & (ready < other.first + len(other))] - other.first
                if own.size:
                    for wanted, phase, distance, number in other.graph.observers.get(name, ()):
                        need, target = (group, distance, name), position + distance
                        is_there = target <= self.num_steps + 1 and other.graph.phase(target) == phase
                        if wanted == group and is_there and need in other.graph.peers(target)[number]:
                            self._take_need(other, target, number, own)

    def _now_done(self, group: str, position: int, name: str, ranks: Ints) -> Ints:
        """Note that an instruction has finished on ranks, and return those whose peers all have by now."""
        peers = self._peers[group]
        key = group, position, name
        if key not in self._watched:
            num = len(peers.subgroup)
            state = np.zeros(len(peers.sizes), np.intp), np.zeros(num, np.intp), np.zeros(num, np.intp)
            self._watched[key] = state
        counts, done, notified = self._watched[key]
        done[ranks] = 1
        counts += np.bincount(peers.subgroup[ranks], minlength=len(counts))
        if not (counts[peers.subgroup[ranks]] >= peers.sizes[peers.subgroup[ranks]] - 1).any():
            return np.zeros(0, dtype=np.intp)
        # A rank does not wait for itself, unless it stands for several.
        others = counts[peers.subgroup] - np.where(peers.is_doubled, 0, done)
        ready = np.flatnonzero((others == peers.awaited) & (notified == 0) & peers.waits)
        notified[ready] = 1
        return ready

    # -- steps -------------------------------------------------------------------------------------------------

    def _step_completed(self, position: int) -> None:
        step = position - 1  # the prologue is position 0
        if self.cycle is None:
            times = np.concatenate(
                [
                    field[: len(rank_class.graph.ids["step"])].ravel()
                    for rank_class in self._rank_classes
                    for field in (rank_class.times[position].start_s, rank_class.times[position].end_s)
                ]
            )
            self.cycle = self._detector.completed(times, self._entered - step, self._others_until_s)
            if self.cycle is not None:
                self.shortened = shortened_steps(self.cycle, self.num_steps, self._entered, self._depth)
        self._close(position)

    def _close(self, position: int) -> None:
        """Keep the spans of the listed ranks, and forget the rest."""
        for rank_class in self._rank_classes:
            times = rank_class.times.pop(position, None)
            if times is not None:
                for col, rank in enumerate(rank_class.ranks):
                    if int(rank) in self._listed:
                        self._spans[int(rank)] += self._spans_of(rank_class, position, times, col, int(rank))

    def _spans_of(
        self, rank_class: RankClass, position: int, times: Times, col: int, rank: int
    ) -> Iterator[Span]:
        phase, step = rank_class.graph.phase(position), rank_class.graph.step(position)
        starts, ends = times.start_s[:, col].tolist(), times.end_s[:, col].tolist()
        for item, start_s, end_s in zip(
            getattr(rank_class.template.program, phase), starts, ends, strict=False
        ):
            limiter = rank_class.template.activities[phase, item.id].limiter
            number = self.world.numbers[rank]
            yield Span(
                number, phase, step, item.id, item.stream, item.label, item.segment, start_s, end_s, limiter
            )
