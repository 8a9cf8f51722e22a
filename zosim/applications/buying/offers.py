"""What to buy or rent for a job: machines by hours, money and energy, what limits each, and what would change the answer.

Every machine is predicted from its data sheets, also one that a calibration exists of, so that all are judged alike. The
closed form of :mod:`zosim.planning.bounds` ranks; the offers that come first are then simulated until those that are
shown first all are. A machine that the closed form puts far past the budget or the deadline is not looked at further.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from costmodel.prices import JobCost, Payment, PriceTable, Range, job_costs
from topology.errors import PlanError
from topology.graph import Topology
from zosim.applications.buying.machine import Job, PricedMachine, interval, simulated
from zosim.planning.planner import Candidate, candidates

RankBy = Literal["money", "hours", "energy"]
Verdict = Literal["yes", "perhaps", "no"]
Cause = Literal["memory", "hours", "money", "way", "plan"]

HOPELESS = 2.0
"""Times the deadline that a closed form may reach before its machine is given up."""

_ORDER: tuple[Verdict, ...] = ("yes", "perhaps", "no")


@dataclass(frozen=True)
class BuyerLimits:
    """What the buyer can spend, in the price table's currency, and how long they can wait."""

    budget: float | None = None
    deadline_hours: float | None = None

    def verdict(self, cost: JobCost) -> Verdict:
        """Return whether a job on a machine stays within both: perhaps, if only some of its interval does."""
        pairs = [(self.budget, cost.spent), (self.deadline_hours, cost.hours)]
        stated = [(limit, spent) for limit, spent in pairs if limit is not None]
        if any(spent.value > limit for limit, spent in stated):
            return "no"
        return "perhaps" if any(spent.high > limit for limit, spent in stated) else "yes"


@dataclass(frozen=True)
class Offer:
    """A way to get a job done.

    Attributes
    ----------
    machine : PricedMachine
    cost : JobCost
    verdict : {"yes", "perhaps", "no"}
        Whether it stays within budget and deadline.
    """

    machine: PricedMachine
    cost: JobCost
    verdict: Verdict

    @property
    def payment(self) -> Payment:
        """How the machine is paid for."""
        return self.cost.payment

    def metric(self, by: RankBy) -> float:
        """Return the number that offers are ranked by."""
        figures = {"money": self.cost.money, "hours": self.cost.hours, "energy": self.cost.energy_kwh}
        return figures[by].value


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
    cause : {"memory", "hours", "money", "way", "plan"}
        What keeps it out; ``way`` that it cannot be paid for as asked, ``plan`` that the planner finds a contradiction.
    least : float
        Bytes that lack, hours that the job takes there or money that it costs, by the closed form.
    """

    name: str
    num_devices: int
    reason: str
    remedy: str = ""
    cause: Cause = "plan"
    least: float = 0.0


@dataclass(frozen=True)
class Market:
    """What is for sale: a job, prices and limits, and how to rank.

    Attributes
    ----------
    job : Job
    prices : PriceTable
    limits : BuyerLimits
    by : {"money", "hours", "energy"}
    pay : {"rent", "own"} or None
        The only way in which machines may be paid for; by default either.
    """

    job: Job
    prices: PriceTable
    limits: BuyerLimits = BuyerLimits()
    by: RankBy = "money"
    pay: Payment | None = None

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
        priced: list[Offer] = []
        refused: list[Refusal] = []
        for name, topology in machines:
            for count in dict.fromkeys(min(count, len(topology.compute_devices)) for count in counts):
                result = self._bounded(name, topology, count)
                if isinstance(result, Refusal):
                    refused.append(result)
                elif not any(_is_same(result, offer.machine) for offer in priced):
                    priced += self._priced(result)
        return self._simulated(self._ranked(priced), num_simulated), refused

    def _bounded(self, name: str, topology: Topology, count: int) -> PricedMachine | Refusal:
        try:
            listed = sorted(
                candidates(self.job.request(name, topology, count)),
                key=lambda c: (bool(c.missing), c.sort_key),
            )
        except PlanError as error:
            return Refusal(name, count, error.message)
        if not listed:
            return Refusal(name, count, f"--method {self.job.method} has no placement on so many devices")
        best = listed[0]
        if best.missing:
            return self._lacking(name, count, listed)
        machine = PricedMachine(
            name,
            topology,
            best.plan.placement.world_size,
            tuple(listed),
            interval(self.job, name, topology, best),
        )
        return self._hopeless(machine) or machine

    def _lacking(self, name: str, count: int, listed: Sequence[Candidate]) -> Refusal:
        """Return a machine on which nothing fits, with what the placement that comes closest lacks."""
        closest = min(
            listed, key=lambda c: (c.footprints.largest.device_bytes, c.footprints.fullest.size_bytes)
        )
        lack = "; ".join(part.partition(":")[0] for part in closest.missing.split("; "))
        hours = self.job.hours(Range.exactly(closest.bound.seconds)).value
        return Refusal(
            name,
            count,
            f"{closest.describe()} {lack}",
            f"with that much it takes {plain(hours)} hours",
            "memory",
            closest.bound.missing_bytes,
        )

    def _hopeless(self, machine: PricedMachine) -> Refusal | None:
        """Return why a machine is given up before it is simulated, if it is."""
        deadline, budget = self.limits.deadline_hours, self.limits.budget
        alone = partial(Refusal, machine.name, machine.num_devices, remedy="")
        costs = self._costs(machine)
        if not costs:
            return alone(f"no price to {self.pay} it", cause="way")
        hours = self.job.hours(machine.step_s).value
        if deadline is not None and hours > HOPELESS * deadline:
            reason = f"at least {plain(hours)} hours, deadline {plain(deadline)}"
            return alone(reason, cause="hours", least=hours)
        least = min(cost.spent.low for cost in costs)
        if budget is not None and least > budget:
            reason = f"at least {plain(least)} {self.prices.currency}, budget {plain(budget)}"
            return alone(reason, cause="money", least=min(cost.spent.value for cost in costs))
        return None

    def _costs(self, machine: PricedMachine) -> tuple[JobCost, ...]:
        hours = self.job.hours(machine.step_s)
        costs = job_costs(self.prices, machine.name, machine.topology, machine.num_devices, hours)
        return tuple(cost for cost in costs if self.pay in (None, cost.payment))

    def _priced(self, machine: PricedMachine) -> list[Offer]:
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
        (cost,) = (cost for cost in self._costs(changed) if cost.payment == offer.payment)
        return Offer(changed, cost, self.limits.verdict(cost))


def plain(value: float) -> str:
    """Return a number in words: three digits of it, more where it is 1,000 or larger, never an exponent.

    Examples
    --------
    >>> plain(0.12345), plain(12345.6)
    ('0.123', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _is_same(one: PricedMachine, other: PricedMachine) -> bool:
    """Whether more devices were allowed, but not used."""
    return one.name == other.name and one.plan == other.plan
