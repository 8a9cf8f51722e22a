"""What a plan will do: step time with an interval, memory by parts, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from costmodel.profile import Profile
from topology.graph import Topology
from zosim.critical_path import Bottleneck, bottleneck, step_path
from zosim.footprint import Footprint, footprint
from zosim.lowering import lower
from zosim.machine import Machine
from zosim.plan import Plan
from zosim.program import Program
from zosim.simulate import simulate
from zosim.timeline import Timeline
from zosim.validate import validate


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes
    ----------
    step_time_s, low_s, high_s : float
        Steady step time, and where it lies if every constant of the profile is at the end of its interval that
        makes things fastest, or slowest.
    tokens_per_s : float
        Each token counted once per step, although it is forwarded at every evaluation point.
    footprint : Footprint
    bottleneck : Bottleneck
    seconds_by_label : tuple of (str, float)
        Busy seconds per step, the largest first; they overlap where streams do.
    profile_origin : str
        ``calibrated`` or ``datasheet``.
    """

    step_time_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    footprint: Footprint
    bottleneck: Bottleneck
    seconds_by_label: tuple[tuple[str, float], ...]
    profile_origin: str


@dataclass(frozen=True)
class Subject:
    """A plan on the hardware that it is predicted for, with its program.

    Attributes
    ----------
    plan : Plan
    topology : Topology
    profile : Profile
    edited : Program, optional
        A program to use in place of what the plan is lowered to.
    """

    plan: Plan
    topology: Topology
    profile: Profile
    edited: Program | None = None

    @cached_property
    def program(self) -> Program:
        """The program, validated.

        Raises
        ------
        ProgramError
            If the validator refuses it.
        """
        program = self.edited or lower(self.plan)
        validate(program)
        return program

    @cached_property
    def machine(self) -> Machine:
        """What the simulator knows about the first rank's hardware."""
        return Machine.from_topology(self.topology, self.plan.placement.devices[0], self.profile)

    @cached_property
    def footprint(self) -> Footprint:
        """Memory of one rank."""
        return footprint(self.program, self.profile)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated run, until its steps repeat."""
        return simulate(self.program, self.machine)

    @cached_property
    def prediction(self) -> Prediction:
        """The steady step in numbers."""
        low, high = (simulate(self.program, self.machine, bound=bound) for bound in ("low", "high"))
        return Prediction(
            step_time_s=self.timeline.step_time_s,
            low_s=low.step_time_s,
            high_s=high.step_time_s,
            tokens_per_s=self.plan.tokens_per_step / self.timeline.step_time_s,
            footprint=self.footprint,
            bottleneck=bottleneck(step_path(self.timeline, self.program)),
            seconds_by_label=tuple(self.timeline.seconds_by_label().items()),
            profile_origin=self.profile.origin,
        )
