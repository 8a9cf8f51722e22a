"""Ranks of one template as arrays, and the groups that they are members of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zosim.engines.flows import STREAM_NUMBER, Counts, FlowTable
from zosim.engines.rows import Floats, Ints
from zosim.engines.wiring import Wiring
from zosim.engines.world import Group, World
from zosim.instructions import PARTS, Part, Stream


@dataclass
class Times:
    """Of the instructions at one position of a run: arrays of shape (num_instructions, num_ranks).

    Attributes
    ----------
    start_s, end_s : array of float
    needs : array of int
        How many others each instruction still waits for.
    """

    start_s: Floats
    end_s: Floats
    needs: Counts


class Kind:
    """The ranks of one template, and what the engine keeps of them.

    Attributes
    ----------
    ranks : array of shape (num_ranks,)
        Their positions in the world.
    first : int
        Where they begin in the engine's order of all ranks.
    streams, seconds, classes : dict
        By part, for each instruction in order: number of its stream, its seconds alone, and the class of activities that it
        shares resources with (-1 where nothing limits it). The last of a step is the host's own part.
    times : dict of int to Times
        By position, of those that have begun and not yet ended.
    chains : dict of int to (array, array)
        By the first of a chain of instructions that nothing else can hold up: the chain, and when each of it starts and the last
        one ends, as columns.
    """

    def __init__(
        self, world: World, number: int, ranks: Ints, first: int, table: FlowTable, num_steps: int
    ) -> None:
        template = world.templates[number]
        self.ranks = ranks
        self.first = first
        self.template = template
        self.wiring = Wiring(template, num_steps)
        own = [dict(zip(template.resources, world.resources[rank], strict=True)) for rank in ranks]
        self.streams: dict[Part, list[int]] = {}
        self.seconds: dict[Part, list[float]] = {}
        self.classes: dict[Part, list[int]] = {}
        for part in PARTS:
            listed = getattr(template.program, part)
            activities = [template.activities[part, item.id] for item in listed]
            self.streams[part] = [STREAM_NUMBER[item.stream] for item in listed]
            self.seconds[part] = [activity.seconds for activity in activities]
            self.classes[part] = [table.class_of(activity, own, first) for activity in activities]
        self.streams["step"].append(STREAM_NUMBER[Stream.COMPUTE])
        self.seconds["step"].append(template.step_s)
        self.classes["step"].append(-1)
        self.times: dict[int, Times] = {}
        self.chains: dict[int, tuple[Ints, Floats]] = {}
        for chain in self.wiring.chains([number < 0 for number in self.classes["step"]]):
            offsets = np.concatenate([[0.0], np.cumsum([self.seconds["step"][item] for item in chain])])
            self.chains[chain[0]] = np.array(chain)[:, None], offsets[:, None]

    def __len__(self) -> int:
        return len(self.ranks)


class Parties:
    """Who meets in a group's collectives, or in messages of one offset, over the ranks in the engine's order.

    Attributes
    ----------
    of : mapping of bool to array
        Number of each rank's party, where it receives (or takes part in a collective) and where it sends.
    sizes : array
        Of each party.
    """

    def __init__(self, group: Group, offset: int, ranks: Ints) -> None:
        if not offset:
            part = np.array([group.part_of[rank] for rank in ranks], dtype=np.intp)
            self.of = {False: part}
            self.sizes = np.bincount(part, minlength=len(group.parts))
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
    """A group as arrays over the ranks in the engine's order."""

    def __init__(self, group: Group, ranks: Ints) -> None:
        all_meet = Parties(group, 0, ranks)
        self.part, self.sizes = all_meet.of[False], all_meet.sizes
        self.is_doubled = np.array([rank in group.doubled for rank in ranks], dtype=bool)
        # How many finish before a rank may go on, its own included or not.
        self.awaited = self.sizes[self.part] - ~self.is_doubled
        self.waits = self.awaited > 0
