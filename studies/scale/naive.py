"""The same step as anybody would write it in simpy first: a process per operation, a resource per stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any

import simpy

from zosim.hardware.machine import Activity
from zosim.program.instructions import Instruction, Stream
from zosim.program.step_graph import RunNode, StepGraph
from zosim.simulators.world import World


def naive_step(world: World) -> tuple[float, int]:
    """Return the seconds of a single step of all ranks, as if nothing were shared, and the number of processes.

    Dependencies that reach into the step before are left out: there is none.
    """
    model = _Model(world)
    model.env.run()
    return float(model.env.now), model.num_processes


class _Model:
    """Every rank's first step."""

    def __init__(self, world: World) -> None:
        self.env = simpy.Environment()
        self.num_processes = 0
        self._world = world
        self._done: dict[tuple[int, str], simpy.Event] = {}
        self._came: dict[object, list[simpy.Event]] = defaultdict(list)
        for rank in range(world.size):
            for item in world.program(rank).step:
                self._done[rank, item.id] = self.env.event()
        for rank in range(world.size):
            self._create(rank)

    def _create(self, rank: int) -> None:
        template = self._world.template(rank)
        graph = StepGraph(template.program, 1)
        streams = {stream: simpy.Resource(self.env) for stream in Stream}
        before: dict[Stream, str] = {}
        for item in template.program.step:
            needed = [
                self._done[rank, edge.instruction]
                for edge in item.after
                if not edge.distance and not edge.process_group
            ]
            for edge in item.after:
                if edge.process_group and not edge.distance:
                    peers = self._world.process_groups[edge.process_group].peers(rank)
                    needed += [self._done[peer, edge.instruction] for peer in peers]
            if item.stream in before:
                needed.append(self._done[rank, before[item.stream]])
            before[item.stream] = item.id
            rendezvous = graph.rendezvous(RunNode(1, item.id))
            arrivals = None
            if rendezvous is not None:
                arrivals = self._came[rendezvous, self._world.process_groups[rendezvous[0]].subgroup_of[rank]]
                arrivals.append(self.env.event())
            activity = template.activities["step", item.id]
            host_s = template.step_s if graph.opens_step(RunNode(1, item.id)) else 0.0
            self.env.process(self._run(rank, item, activity, streams[item.stream], needed, arrivals, host_s))
            self.num_processes += 1

    def _run(
        self,
        rank: int,
        item: Instruction,
        activity: Activity,
        stream: simpy.Resource,
        needed: list[simpy.Event],
        arrivals: list[simpy.Event] | None,
        host_s: float,
    ) -> Generator[Any, Any, None]:
        own = None if arrivals is None else arrivals[self._position(rank, item)]
        yield self.env.timeout(host_s)
        yield self.env.all_of(needed)
        with stream.request() as turn:
            yield turn
            if own is not None and arrivals is not None:
                own.succeed()
                yield self.env.all_of(arrivals)
            yield self.env.timeout(activity.seconds)
        self._done[rank, item.id].succeed()

    def _position(self, rank: int, item: Instruction) -> int:
        group = self._world.process_groups[item.op.process_group]  # type: ignore[union-attr]
        return group.subgroups[group.subgroup_of[rank]].index(rank)
