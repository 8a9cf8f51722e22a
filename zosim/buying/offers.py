"""What to buy or rent for a job: machines by hours, money and energy, what limits each, and what would change the answer.

Every machine is predicted from its data sheets, also one that a calibration exists of, so that all are judged alike. The
closed form of :mod:`zosim.planning.bounds` ranks; the offers that come first are then simulated until those that are
shown first all are. A machine that the closed form puts far past the budget or the deadline is not looked at further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from costmodel.model_spec import ModelSpec
from costmodel.prices import JobCost, PriceTable, Range, Way, job_costs
from costmodel.profile import Bound, Profile
from topology.errors import PlanError
from topology.graph import Topology
from zosim.axes import Estimator, Mesh, Precision
from zosim.buying.levers import Lever, levers
from zosim.plan import Plan
from zosim.planning.bounds import Bounds
from zosim.planning.explain import ALIKE
from zosim.planning.planner import Candidate, candidates
from zosim.planning.predict import Prediction
from zosim.planning.request import Method, Request
from zosim.profiles import Profiles

RankBy = Literal["money", "hours", "energy"]
Verdict = Literal["yes", "perhaps", "no"]

HOPELESS = 2.0
"""Times the deadline that a closed form may reach before its machine is given up."""

_SECONDS_PER_HOUR = 3600.0
_ORDER: tuple[Verdict, ...] = ("yes", "perhaps", "no")


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes
    ----------
    model : ModelSpec
    batch, seq, num_steps : int
    precision : Precision
    method : str
        As for the planner.
    estimator : Estimator
    """

    model: ModelSpec
    batch: int
    seq: int
    num_steps: int
    precision: Precision = field(default_factory=Precision)
    method: Method = "auto"
    estimator: Estimator = field(default_factory=Estimator)

    def __post_init__(self) -> None:
        if self.seq > self.model.max_positions:
            raise PlanError(
                f"seq={self.seq} exceeds the {self.model.max_positions} positions of {self.model.name}",
                hint=f"use --seq {self.model.max_positions} or less",
            )

    def request(
        self, name: str, topology: Topology, num_devices: int, *, mesh: Mesh | None = None
    ) -> Request:
        """Return what the planner is asked for on a machine."""
        device, profiles = topology.compute_devices[0].id, Profiles(topology)
        return Request(
            model=self.model,
            topology=topology,
            hardware=name,
            device=device,
            profile=profiles.of(device),
            profiles=profiles,
            batch=self.batch,
            seq=self.seq,
            estimator=self.estimator,
            precision=self.precision,
            method=self.method,
            mesh=mesh,
            max_ranks=num_devices,
        )

    def hours(self, step_s: Range) -> Range:
        """Return what the job takes at so many seconds a step."""
        return step_s * (self.num_steps / _SECONDS_PER_HOUR)


@dataclass(frozen=True)
class Limits:
    """What the buyer can spend, in the price table's currency, and how long they can wait."""

    budget: float | None = None
    deadline_hours: float | None = None

    def verdict(self, cost: JobCost) -> Verdict:
        """Return whether a job on a machine stays within both: perhaps, if only some of its interval does."""
        pairs = [(self.budget, cost.spent), (self.deadline_hours, cost.hours)]
        stated = [(limit, found) for limit, found in pairs if limit is not None]
        if any(found.value > limit for limit, found in stated):
            return "no"
        return "perhaps" if any(found.high > limit for limit, found in stated) else "yes"


@dataclass(frozen=True)
class Machine:
    """A machine with as many of its devices as a job may use, and what the job takes there.

    Attributes
    ----------
    name : str
        As the price table and the command line know it.
    topology : Topology
    num_devices : int
        That the plan uses, at most those that were asked for.
    candidates : tuple of Candidate
        Every placement that was bounded, those that fit first, fastest first.
    step_s : Range
        Of the best that fits, from the closed form or simulated.
    prediction : Prediction or None
        If it was simulated.
    """

    name: str
    topology: Topology
    num_devices: int
    candidates: tuple[Candidate, ...]
    step_s: Range
    prediction: Prediction | None = None

    @property
    def best(self) -> Candidate:
        """The fastest placement that fits."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """That placement as a plan."""
        return self.best.plan

    @cached_property
    def levers(self) -> tuple[Lever, ...]:
        """Figures that its plan depends on."""
        return levers(self.topology, self.plan.placement.devices)


@dataclass(frozen=True)
class Offer:
    """A way to get a job done.

    Attributes
    ----------
    machine : Machine
    cost : JobCost
    verdict : {"yes", "perhaps", "no"}
        Whether it stays within budget and deadline.
    """

    machine: Machine
    cost: JobCost
    verdict: Verdict

    @property
    def way(self) -> Way:
        """How the machine is paid for."""
        return self.cost.way

    def metric(self, by: RankBy) -> float:
        """Return the number that offers are ranked by."""
        found = {"money": self.cost.money, "hours": self.cost.hours, "energy": self.cost.energy_kwh}
        return found[by].value


@dataclass(frozen=True)
class Refusal:
    """A machine that is no offer.

    Attributes
    ----------
    name : str
    num_devices : int
    reason : str
    remedy : str
        What it would take to be one; empty where nothing is lacking but time or money.
    """

    name: str
    num_devices: int
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Market:
    """What is for sale: a job, prices and limits, and how to rank.

    Attributes
    ----------
    job : Job
    prices : PriceTable
    limits : Limits
    by : {"money", "hours", "energy"}
    pay : {"rent", "own"} or None
        The only way in which machines may be paid for; by default either.
    """

    job: Job
    prices: PriceTable
    limits: Limits = Limits()
    by: RankBy = "money"
    pay: Way | None = None

    def offers(
        self, machines: Iterable[tuple[str, Topology]], counts: Sequence[int], *, num_simulated: int
    ) -> tuple[list[Offer], list[Refusal]]:
        """Return offers, best first, and the machines that are none.

        Parameters
        ----------
        machines : iterable of (str, Topology)
        counts : sequence of int
            Devices to use at most; larger ones than a machine has mean all of it.
        num_simulated : int
            Offers to simulate, from the best on.

        Raises
        ------
        PriceError
            If a machine has no price.
        """
        found: list[Offer] = []
        refused: list[Refusal] = []
        for name, topology in machines:
            for count in dict.fromkeys(min(count, len(topology.compute_devices)) for count in counts):
                result = self._bounded(name, topology, count)
                if isinstance(result, Refusal):
                    refused.append(result)
                elif not any(_is_same(result, offer.machine) for offer in found):
                    found += self._priced(result)
        return self._simulated(self._ranked(found), num_simulated), refused

    def _bounded(self, name: str, topology: Topology, count: int) -> Machine | Refusal:
        try:
            listed = sorted(
                candidates(self.job.request(name, topology, count)),
                key=lambda c: (bool(c.missing), c.sort_key),
            )
        except PlanError as error:
            return Refusal(name, count, error.message)
        best = listed[0]
        if best.missing:
            return self._lacking(name, count, listed)
        machine = Machine(
            name,
            topology,
            best.plan.placement.world_size,
            tuple(listed),
            interval(self.job, name, topology, best),
        )
        hopeless = self._hopeless(machine) if self._costs(machine) else f"no price to {self.pay} it"
        return Refusal(name, machine.num_devices, hopeless) if hopeless else machine

    def _lacking(self, name: str, count: int, listed: Sequence[Candidate]) -> Refusal:
        """Return a machine on which nothing fits, with what the placement that comes closest lacks."""
        closest = min(
            listed, key=lambda c: (c.footprints.largest.device_bytes, c.footprints.fullest.size_bytes)
        )
        lack = "; ".join(part.partition(":")[0] for part in closest.missing.split("; "))
        hours = closest.bound.seconds * self.job.num_steps / _SECONDS_PER_HOUR
        return Refusal(
            name,
            count,
            f"{closest.describe()} {lack}",
            f"with that much it takes {plain(hours)} hours",
        )

    def _hopeless(self, machine: Machine) -> str:
        """Return why a machine is given up before it is simulated, or nothing."""
        deadline, budget = self.limits.deadline_hours, self.limits.budget
        hours = self.job.hours(machine.step_s)
        if deadline is not None and hours.value > HOPELESS * deadline:
            return f"at least {plain(hours.value)} hours, deadline {plain(deadline)}"
        if budget is not None:
            least = min(cost.spent.low for cost in self._costs(machine))
            if least > budget:
                return f"at least {plain(least)} {self.prices.currency}, budget {plain(budget)}"
        return ""

    def _costs(self, machine: Machine) -> tuple[JobCost, ...]:
        hours = self.job.hours(machine.step_s)
        costs = job_costs(self.prices, machine.name, machine.topology, machine.num_devices, hours)
        return tuple(cost for cost in costs if self.pay in (None, cost.way))

    def _priced(self, machine: Machine) -> list[Offer]:
        return [Offer(machine, cost, self.limits.verdict(cost)) for cost in self._costs(machine)]

    def key(self, offer: Offer) -> tuple[int, float]:
        """Return what offers are ranked by: those within limits first, then by money, hours or energy."""
        return _ORDER.index(offer.verdict), offer.metric(self.by)

    def _ranked(self, offers: Iterable[Offer]) -> list[Offer]:
        return sorted(offers, key=self.key)

    def _simulated(self, offers: list[Offer], wanted: int) -> list[Offer]:
        """Simulate from the best on until the first `wanted` all are."""
        while True:
            waiting = next((o.machine for o in offers[:wanted] if o.machine.prediction is None), None)
            if waiting is None:
                return offers
            others = [offer for offer in offers if offer.machine is not waiting]
            offers = self._ranked([*others, *self._priced(simulated(waiting))])

    def repriced(self, offer: Offer, times: float) -> Offer:
        """Return an offer as it would be if its step took so many times as long."""
        changed = replace(offer.machine, step_s=offer.machine.step_s * times)
        (cost,) = (cost for cost in self._costs(changed) if cost.way == offer.way)
        return Offer(changed, cost, self.limits.verdict(cost))


def interval(job: Job, name: str, topology: Topology, best: Candidate) -> Range:
    """Return the closed form of a plan's step with every constant at its middle, and at either end of its interval."""
    request = job.request(name, topology, best.plan.placement.world_size)
    ends = [_bound_s(_at_end(request, end), best.plan) for end in ("central", "low", "high")]
    central, low, high = ends
    return Range(best.seconds, best.seconds * low / central, best.seconds * high / central)


def _at_end(request: Request, end: Bound) -> Request:
    """Return a request with the first device's constants, all at one end of their intervals, for every rank."""
    return replace(request, profile=_fixed(request.profile, end), profiles=None)


def _fixed(profile: Profile, end: Bound) -> Profile:
    constants = [
        constant.model_copy(update=dict.fromkeys(("value", "low", "high"), constant.at(end)))
        for constant in profile.constants
    ]
    return profile.with_constants(*constants, origin=profile.origin)


def _bound_s(request: Request, plan: Plan) -> float:
    """Return the closed form of a plan's step."""
    return Bounds(request).of(plan).seconds


def simulated(machine: Machine) -> Machine:
    """Return a machine with its best plan simulated, event by event, interval included.

    Where the simulated step takes longer than another placement's bound, that one is simulated, too.
    """
    rest = [candidate for candidate in machine.candidates if not candidate.missing]
    best, best_s = None, float("inf")
    for candidate in rest:
        if candidate.bound.seconds >= best_s * (1 - ALIKE):
            break
        seconds = candidate.subject.timeline.step_time_s
        if seconds < best_s * (1 - ALIKE):
            best, best_s = candidate, seconds
    assert best is not None
    prediction = best.subject.prediction
    others = [candidate for candidate in machine.candidates if candidate is not best]
    return replace(
        machine,
        num_devices=best.plan.placement.world_size,
        candidates=(replace(best, seconds=best_s, is_simulated=True, prediction=prediction), *others),
        step_s=Range(prediction.step_time_s, prediction.low_s, prediction.high_s),
        prediction=prediction,
    )


def _is_same(one: Machine, other: Machine) -> bool:
    """Whether more devices were allowed, but not used."""
    return one.name == other.name and one.plan == other.plan


def plain(value: float) -> str:
    """Return three digits of a number at least, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machines_named(names: Sequence[str]) -> Iterator[tuple[str, Topology]]:
    """Yield the machines of these names.

    Raises
    ------
    TopologyError
        If a name is neither a preset nor a file.
    """
    from topology.documents import resolve

    for name in names:
        yield name, resolve(name)
