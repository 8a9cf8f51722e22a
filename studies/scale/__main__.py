"""Time predictions of a large cluster, and print a table.

``python -m studies.scale`` predicts a step of OPT-175B with its blocks on the hosts, two perturbations times data
shards, sliced transfers, on 128 hosts of 8 GPUs: event by event on all 1024 ranks, folded to one rank of each kind, and
as a grid of configurations in closed form. The same step written in plain simpy, a process per operation, runs beside
them, with the garbage collector as it is by default. The plain model takes nothing as shared, runs a single step, takes a
minute or two and two gigabytes; ``--naive-hosts`` makes it smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import simpy

from costmodel.models.configs import read_model_spec
from studies.scale.grid import step_time_bounds
from topology.clusters import cluster
from topology.documents import load_preset
from zosim.hardware.machine import Activity, Machine
from zosim.hardware.machines import machines_for
from zosim.hardware.profiles import profile_for
from zosim.lowering import lower_all
from zosim.plans import Mesh, Perturbations, Placement, Plan, Residency, Schedule, Weights
from zosim.program.instructions import Instruction, Stream
from zosim.program.step_graph import RunNode, StepGraph
from zosim.simulators.assembly import MAX_UNLIKE_STEPS
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import Lockstep, periodic_step_s
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


# What folding may change: rounding.
AGREEMENT = 1e-9
_Result = TypeVar("_Result")
_GRID_AXES = ("copy_h2d_bandwidth", "copy_d2h_bandwidth", "matmul_rate", "sampling_rate")


@dataclass(frozen=True)
class Timing:
    """One way of predicting."""

    name: str
    seconds: float  # that it took
    core_s: float  # seconds of a core that it took; less than the seconds where other processes ran
    num_done: int  # ends of instructions, processes, or configurations
    step_s: float | None  # what it says that a step takes


def main() -> int:
    """Time everything and print the table; 1 if folding changed the prediction."""
    options = _options()
    begin = time.perf_counter()
    world, _, _ = setting(options.model, options.preset, options.hosts)
    made_s = time.perf_counter() - begin
    rows = [median([event_by_event(world) for _ in range(options.rounds)])]
    rows += [median([folded(world) for _ in range(options.rounds)])]
    _, plan, machine = setting(options.model, options.preset, 1)
    rows.append(grid(plan, machine, options.points))
    if options.naive_hosts:
        rows.append(naive(world if options.naive_hosts == options.hosts else _hosts(options)))
    num_ranks = world.size
    print(f"{options.model}, {options.hosts} x {options.preset}, {num_ranks} ranks; made in {made_s:.1f} s")
    print(f"{'':42s}{'seconds':>10s}{'of a core':>10s}{'done':>12s}{'a second':>12s}{'step':>16s}")
    for row in rows:
        step = "" if row.step_s is None else f"{row.step_s:.9f} s"
        print(
            f"{row.name:42s}{row.seconds:10.3f}{row.core_s:10.3f}{row.num_done:12d}"
            f"{row.num_done / row.seconds:12.0f}{step:>16s}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    every, few = rows[0].step_s or 0.0, rows[1].step_s or 0.0
    if abs(every - few) > AGREEMENT * every:
        print(f"folding changed the step from {every!r} to {few!r} s", file=sys.stderr)
        return 1
    return 0


def setting(model: str, preset: str, num_hosts: int) -> tuple[World, Plan, Machine]:
    """Return the world of a plan on so many hosts, with the plan and the first rank's machine."""
    topology = load_preset(preset)
    if num_hosts > 1:
        topology = cluster(topology, num_hosts)
    devices = tuple(node.id for node in topology.compute_devices)
    size = len(devices)
    plan = Plan(
        model=read_model_spec(model),
        placement=Placement(
            topology=topology.name,
            devices=devices,
            hosts=tuple(topology.host_of(device).id for device in devices),
        ),
        batch=size,
        seq=2048,
        mesh=Mesh(data=size // 2, perturb=2),
        perturbations=Perturbations(rng="counter"),
        weights=Weights(dtype="float16"),
        schedule=Schedule(update="delayed", traversal="blockwise"),
        residency=Residency(blocks="offloaded", transfers="sliced"),
    )
    profile = profile_for(topology, devices[0], path=None, num_threads=None, is_host=False)
    machines = machines_for(topology, devices, profile, plan.process_groups)
    return World.of(lower_all(plan), machines), plan, machines[0]


def event_by_event(world: World) -> Timing:
    """Time the simulation of every rank until steps repeat."""
    run = Lockstep(world, MAX_UNLIKE_STEPS, ())
    times, _ = timed(run.run_to_end)
    step_s = None if run.cycle is None else run.cycle.period_s / run.cycle.num_steps
    return Timing("event by event, with contention", *times, run.num_events, step_s)


def folded(world: World) -> Timing:
    """Time folding, and the simulation of one rank of each kind."""
    num_ranks = fold(world).size
    times, step_s = timed(lambda: periodic_step_s(fold(world)))
    return Timing(f"folded to {num_ranks} ranks, with contention", *times, world.size, step_s)


def grid(plan: Plan, machine: Machine, points_per_axis: int) -> Timing:
    """Time the closed form of one rank's program over a grid of batches, lengths, bandwidths and rates."""
    factors = {name: np.geomspace(0.1, 10.0, points_per_axis).tolist() for name in _GRID_AXES}
    times, step_times = timed(
        lambda: step_time_bounds(
            plan, machine, batches=[plan.batch, 2 * plan.batch], seqs=[1024, 2048], factors=factors
        )
    )
    return Timing("closed form, configurations", *times, int(step_times.size), None)


def naive(world: World) -> Timing:
    """Time the plain model of one step."""
    times, (step_s, num_processes) = timed(lambda: naive_step(world))
    name = f"plain simpy, {world.size} ranks, nothing shared"
    return Timing(name, *times, num_processes, step_s)


def unshared(world: World) -> World:
    """Return the same ranks with enough of everything."""
    return replace(world, capacities={}, fifo=frozenset())


def median(rows: Sequence[Timing]) -> Timing:
    """Return the middle one of several readings."""
    return sorted(rows, key=lambda row: row.seconds)[len(rows) // 2]


def timed(action: Callable[[], _Result]) -> tuple[tuple[float, float], _Result]:
    """Return the seconds that an action took, those of a core that it had, and its result."""
    begin, began = time.perf_counter(), time.process_time()
    result = action()
    return (time.perf_counter() - begin, time.process_time() - began), result


def _hosts(options: argparse.Namespace) -> World:
    return setting(options.model, options.preset, options.naive_hosts)[0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.scale", description=__doc__)
    parser.add_argument("--model", default="opt-175b")
    parser.add_argument("--preset", default="dgx-1v", help="a one-host preset with a network")
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument(
        "--naive-hosts", type=int, default=128, help="hosts of the plain model; 0: without it"
    )
    parser.add_argument("--points", type=int, default=16, help="values on each of the grid's four axes")
    parser.add_argument(
        "--rounds", type=int, default=5, help="readings of the first two rows, of which the median is printed"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
