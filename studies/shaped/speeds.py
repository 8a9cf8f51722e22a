"""``python -m studies.shaped.speeds``: two ranks of unequal speed on this machine, predicted and measured.

The second rank is stopped for a part of every few milliseconds, which makes its core slower by any factor. The planner shares the
batch out between the two, with the rates that ``zosim calibrate --threads 1`` has measured. Its plan and the same one with even
shares then run in turns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer

from costmodel.rates.profile import Profile
from costmodel.rates.slowdown import at_slowdown
from executors.formats import TORCH_DTYPES
from executors.models.spec import spec_of_model
from executors.ranks.launch import launch, process_group
from executors.turns import TurnTimes, in_turns
from studies.prediction.cases import Case, Shape
from studies.prediction.regret import calibrated_rates, turn_of
from studies.prediction.setting import model_of, session_on
from topology.changes import changed
from topology.errors import PlanError, ZosimError
from topology.graph import Topology
from topology.hardware import resolve
from zosim.config import HOST, PlanConfig, Search
from zosim.console import emit
from zosim.hardware.profiles import Profiles
from zosim.planning.planner import choose
from zosim.planning.predict import PlannedRun
from zosim.planning.request import Hardware, Request
from zosim.plans import Plan
from zosim.report import Bullets, Report, Table

CASE = Case(Shape("opt", 256, 4, 2000), 8, 128, "float32", 1, "")
FAST, SLOW = "cpu0", "cpu1"
PERIOD_S = 0.004
_SHARES, _EVEN = "shares that end together", "even shares"

_DUTY_CYCLE = """
import os, signal, sys, time
pid, busy_s, stopped_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    while os.getppid() == pid:
        time.sleep(busy_s)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
finally:
    os.kill(pid, signal.SIGCONT)
"""


@contextmanager
def slowed(speed: float) -> Iterator[None]:
    """Run this process for a part of the time: a child stops it and lets it go on, again and again."""
    busy_s, stopped_s = speed * PERIOD_S, (1 - speed) * PERIOD_S
    command = [sys.executable, "-S", "-c", _DUTY_CYCLE, str(os.getpid()), str(busy_s), str(stopped_s)]
    with subprocess.Popen(command) as child:
        try:
            yield
        finally:
            child.send_signal(signal.SIGTERM)


def two_processors(machine: Topology, speed: float) -> Topology:
    """Return a machine with a second processor beside its first, which has a part of its speed."""
    node = machine.node(FAST)
    links = [link for link in machine.links if FAST in (link.source, link.target)]
    ends = {FAST: SLOW}
    again = [
        link.model_copy(
            update={
                "id": None if link.id is None else f"{link.id}-{SLOW}",
                "source": ends.get(link.source, link.source),
                "target": ends.get(link.target, link.target),
            }
        )
        for link in links
    ]
    both = machine.model_copy(
        update={
            "nodes": (*machine.nodes, node.model_copy(update={"id": SLOW})),
            "links": (*machine.links, *again),
        }
    )
    return changed(Topology.model_validate(both.model_dump()), [f"{SLOW}.speed={speed}"])


@dataclass(frozen=True)
class TwoSpeeds(Profiles):
    """The rates of two processors, of which one is slower in everything by a factor."""

    fast: Profile | None = None
    speed: float = 1.0

    def of(self, device: str, num_ranks: int = 1) -> Profile:
        """Return the rates of one of the two."""
        del num_ranks
        assert self.fast is not None
        return _slower(self.fast, self.speed) if device == SLOW else self.fast


def _slower(profile: Profile, speed: float) -> Profile:
    values = profile.values()
    if "slowdown" not in values:
        raise PlanError("the profile knows no slowdown", hint="zosim calibrate --threads 1")
    # All work takes longer by one factor where a process is stopped, whatever it does.
    alike = [
        constant.model_copy(update={"low": 1.0, "value": 1.0, "high": 1.0})
        for constant in profile.constants
        if constant.quantity.startswith("slowdown_fraction.")
    ]
    return at_slowdown(profile.with_constants(*alike, origin=profile.origin), values["slowdown"] / speed)


def planned_runs(machine: Topology, profile: Profile, speed: float) -> dict[str, PlannedRun]:
    """Return the plan that the planner chooses for both ranks, and the same with even shares."""
    topology = two_processors(machine, speed)
    # Of the cores of the machine, each rank has its half.
    profile = profile.model_copy(update={"num_cores": max(1, profile.num_cores // 2)})
    profiles = TwoSpeeds(topology, fast=profile, speed=speed)
    hardware = Hardware(topology, HOST, FAST, profile, profiles, max_ranks=2)
    spec = spec_of_model(model_of(CASE.shape).to(TORCH_DTYPES[CASE.dtype]), name=CASE.shape.name)
    config = PlanConfig(model=spec, batch=CASE.batch, seq=CASE.seq, search=Search(method="ddp", ranks=2))
    chosen = choose(Request(config, hardware)).chosen.planned
    even = chosen.plan.mesh.model_copy(update={"num_sequences": None})
    return {
        _SHARES: chosen,
        _EVEN: replace(chosen, plan=chosen.plan.model_copy(update={"mesh": even})),
    }


def measured(plans: Mapping[str, Plan], speed: float, num_rounds: int) -> dict[str, TurnTimes]:
    """Return what steps of each plan take, in turns, while the second rank is slowed."""
    times: dict[str, TurnTimes] = launch(_in_rank, dict(plans), speed, num_rounds, world_size=2)
    return times


def _in_rank(plans: Mapping[str, Plan], speed: float, num_rounds: int) -> dict[str, TurnTimes]:
    torch.set_num_threads(1)
    with process_group(device_type="cpu") as info:
        sessions = {name: session_on(plan, CASE) for name, plan in plans.items()}
        ways = {name: turn_of(session, CASE) for name, session in sessions.items()}
        with slowed(speed) if info.rank == 1 else nullcontext():
            times = in_turns(ways, num_rounds, num_warm_rounds=2)
        for session in sessions.values():
            session.close()
    return times


def report(runs: Mapping[str, PlannedRun], times: Mapping[str, TurnTimes], speed: float) -> Report:
    """Return predicted and measured step times, and what the shares gain."""
    columns = ("plan", "sequences", "predicted (ms)", "measured (ms)", "error")
    predicted_s = {name: run.step_time_s for name, run in runs.items()}
    rows = [
        (
            name,
            " and ".join(str(len(run.plan.rows_of(rank))) for rank in range(2)),
            f"{1e3 * predicted_s[name]:.1f}",
            f"{1e3 * times[name].median_s:.1f}",
            f"{predicted_s[name] / times[name].median_s - 1:+.1%}",
        )
        for name, run in runs.items()
    ]
    gains = (
        predicted_s[_EVEN] / predicted_s[_SHARES],
        times[_EVEN].median_s / times[_SHARES].median_s,
    )
    lines = [
        f"the second rank has {speed:g} of the first one's speed",
        f"even shares take {gains[0]:.2f} times as long by the prediction, {gains[1]:.2f} as measured",
    ]
    return Report("", Table(columns, rows, numeric=columns[2:]), Bullets(lines))


def main(
    speed: Annotated[
        float, typer.Option(min=0.05, max=1, help="Speed of the second rank, as a part of the first one's.")
    ] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 21,
) -> None:
    """Predict and measure two ranks of unequal speed."""
    machine = resolve(HOST)
    try:
        runs = planned_runs(machine, calibrated_rates(machine, 1), speed)
        times = measured({name: run.plan for name, run in runs.items()}, speed, rounds)
    except ZosimError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        raise typer.Exit(2) from None
    emit(None, json=False, text=report(runs, times, speed))


if __name__ == "__main__":
    typer.run(main)
