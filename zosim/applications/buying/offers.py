"""What to buy or rent for a job: machines by hours, money and energy, what limits each, and what would change the answer.

Every machine is predicted from its data sheets, also one that a calibration exists of, so that all are judged alike. The
closed form of :mod:`zosim.planning.bounds` ranks; :mod:`zosim.applications.buying.search` plans no more machines than it takes to know
which come first. A machine that the closed form puts far past the budget or the deadline is not looked at further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from costmodel.devices.prices import (
    HOURS_PER_MONTH,
    JobCost,
    Payment,
    PriceTable,
    Quote,
    Range,
    Term,
    job_costs,
)
from topology.errors import PlanError
from topology.graph import Topology
from zosim.applications.buying.floor import Floor, floor
from zosim.applications.buying.machine import Job, PricedMachine, interval, share_of
from zosim.planning.planner import Candidate, candidates

RankBy = Literal["money", "hours", "energy"]
Verdict = Literal["yes", "perhaps", "no"]
Cause = Literal["memory", "hours", "money", "way", "plan"]

HOPELESS = 2.0
"""Times the deadline that a closed form may reach before its machine is given up."""

_ORDER: tuple[Verdict, ...] = ("yes", "perhaps", "no")


@dataclass(frozen=True)
class BuyerLimits:
    """What the buyer can spend, in all or a month, in the price table's currency, and how long they can wait.

    Who has spent a month's money on rent waits for the next month's.
    """

    budget: float | None = None
    deadline_hours: float | None = None
    monthly: float | None = None

    def waited(self, cost: JobCost) -> Range:
        """Return the hours from the first step to the last, months without money included."""
        if self.monthly is None or cost.payment == "own":
            return cost.hours
        paid = cost.money * (HOURS_PER_MONTH / self.monthly)
        return Range(*(max(getattr(cost.hours, end), getattr(paid, end)) for end in ("value", "low", "high")))

    def verdict(self, cost: JobCost) -> Verdict:
        """Return whether a job on a machine stays within all: perhaps, if only some of its interval does."""
        pairs = [(self.budget, cost.spent), (self.deadline_hours, self.waited(cost))]
        if cost.outlay is not None:
            pairs.append((self.monthly, cost.outlay))
        declared = [(limit, spent) for limit, spent in pairs if limit is not None]
        if any(spent.value > limit for limit, spent in declared):
            return "no"
        return "perhaps" if any(spent.high > limit for limit, spent in declared) else "yes"


@dataclass(frozen=True)
class Offer:
    """A way to get a job done."""

    machine: PricedMachine
    cost: JobCost
    verdict: Verdict

    @property
    def payment(self) -> Payment:
        """How the machine is paid for."""
        return self.cost.payment

    def quote(self, prices: PriceTable) -> Quote:
        """Return the price that it rests on."""
        quote = self.cost.rent or prices.machine(self.machine.name).purchase
        assert quote is not None
        return quote

    def metric(self, by: RankBy) -> float:
        """Return the number that offers are ranked by."""
        figures = {"money": self.cost.money, "hours": self.cost.hours, "energy": self.cost.energy_kwh}
        return figures[by].value


@dataclass(frozen=True)
class MachineOption:
    """Some devices of a machine, and ways to pay in which a job has the same of it."""

    name: str
    topology: Topology  # what the job has of the machine
    num_devices: int
    payments: tuple[Payment, ...]


@dataclass(frozen=True)
class Need:
    """One reason for which a machine is no offer."""

    cause: Cause  # `way`: it cannot be paid for as asked; `plan`: the planner finds a contradiction
    description: str = ""
    # Bytes that lack, hours that the job takes there or money that it costs, by the closed form.
    least: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """A machine that is no offer."""

    name: str
    num_devices: int
    needs: tuple[Need, ...]  # every reason, the first one first
    # What the job would take with the memory that lacks; empty where memory is not what lacks.
    remedy: str = ""
    payments: tuple[Payment, ...] = ()  # ways to pay that this is said of
    machine: PricedMachine | None = None  # with its best plan, where there is one
    # Where it was not planned, so that `needs` are the least that it can be.
    option: MachineOption | None = None

    @property
    def reason(self) -> str:
        """All reasons in words."""
        return "; ".join(need.description for need in self.needs)

    @property
    def cause(self) -> Cause:
        """What keeps it out first of all."""
        return self.needs[0].cause


@dataclass(frozen=True)
class Market:
    """What is for sale: a job, prices and limits, and how to rank."""

    job: Job
    prices: PriceTable
    limits: BuyerLimits = BuyerLimits()
    by: RankBy = "money"
    pay: Payment | Term | None = None  # the only way in which machines may be paid for; by default any

    def options(
        self, machines: Iterable[tuple[str, Topology]], counts: Sequence[int]
    ) -> Iterator[MachineOption]:
        """Yield each machine with numbers of its devices, and the ways to pay in which a job has the same of it.

        `counts` are in ascending order.

        Raises PriceError if a machine has no price.
        """
        for name, topology in machines:
            tried = list(dict.fromkeys(min(count, len(topology.compute_devices)) for count in counts))
            for count in tried:
                for payments in self._together(name, topology, count):
                    # Who rents a part of a machine has a share of its host.
                    is_part = "own" not in payments and self._is_share(name, topology, count)
                    # Who pays for all of it loses nothing by being allowed more devices, but perhaps energy.
                    if is_part or count == tried[-1] or self.by == "energy":
                        yield MachineOption(
                            name, share_of(topology, count) if is_part else topology, count, tuple(payments)
                        )

    def floor(self, option: MachineOption) -> Floor:
        """Return the least that a step takes there; nothing where that cannot be asked for."""
        try:
            return floor(self.job.request(option.name, option.topology, option.num_devices))
        except PlanError:
            return Floor(0.0)

    def at_least(self, option: MachineOption, step_s: float) -> list[Offer]:
        """Return the offers of a machine as if a step took so long, with the least power."""
        return self.priced(
            PricedMachine(
                option.name,
                option.topology,
                1,
                option.num_devices,
                option.payments,
                (),
                Range.exactly(step_s),
            )
        )

    def _together(self, name: str, topology: Topology, count: int) -> list[Collection[Payment]]:
        """Return the ways to pay, those together in which a job has the same of a machine."""
        prices = self.prices.machine(name)
        rent: list[Payment] = ["rent"] if prices.rent_per_hour else []
        own: list[Payment] = [] if prices.purchase is None else ["own"]
        is_share = bool(rent) and self._is_share(name, topology, count)
        requested = [
            [
                payment
                for payment in together
                if self.pay in (None, payment) or (self.pay != "own" and payment == "rent")
            ]
            for together in ([rent, own] if is_share else [rent + own])
        ]
        return [together for together in requested if together] or [rent + own]

    def _is_share(self, name: str, topology: Topology, count: int) -> bool:
        rents = self.prices.machine(name).rent_per_hour
        return any(rent.per == "device" for rent in rents) and count < len(topology.compute_devices)

    def planned(self, option: MachineOption) -> PricedMachine | Refusal:
        """Return a machine with its best placement by the closed form, or why it is no offer."""
        name, topology, count, payments = option.name, option.topology, option.num_devices, option.payments
        try:
            listed = candidates(self.job.request(name, topology, count), self.job.bounder)
        except PlanError as error:
            return Refusal(name, count, (Need("plan", error.message),), payments=payments)
        if not listed:
            description = (
                f"--method {self.job.config.search.method} has no placement on this number of devices"
            )
            return Refusal(name, count, (Need("plan", description),), payments=payments)
        if listed[0].missing:
            # The placement that lacks least, as if it had the memory: time and money may lack as well.
            # A host's memory can be added to, a device's not.
            listed = [min(listed, key=lambda c: ("of device memory" in c.missing, c.bound.missing_bytes))]
        best = listed[0]
        machine = PricedMachine(
            name,
            topology,
            best.plan.placement.world_size,
            count,
            payments,
            tuple(listed),
            Range.exactly(best.bound.seconds),
        )
        # Without limits an interval changes nothing until it is shown.
        if not best.missing and self.limits != BuyerLimits():
            machine = self.with_interval(machine)
        needs = [*self._lacking(best), *self._beyond(machine)]
        hours = self.job.hours(machine.step_s).value
        remedy = f"with that memory it takes {plain(hours)} hours" if best.missing else ""
        return Refusal(name, count, tuple(needs), remedy, payments, machine) if needs else machine

    def with_interval(self, machine: PricedMachine) -> PricedMachine:
        """Return a machine with the interval of its step by the closed form."""
        return replace(machine, step_s=interval(self.job, machine.name, machine.topology, machine.best))

    def hopeless(self, option: MachineOption, least: Floor) -> Refusal:
        """Return that the weights alone do not fit a machine, or that it has no price as asked."""
        need = (
            Need("memory", least.missing, least.missing_bytes)
            if least.missing
            else Need("way", self._no_price)
        )
        return Refusal(option.name, option.num_devices, (need,), payments=option.payments, option=option)

    def _lacking(self, candidate: Candidate) -> Iterator[Need]:
        if candidate.missing:
            lack = "; ".join(part.partition(":")[0] for part in candidate.missing.split("; "))
            yield Need("memory", f"{candidate.describe()} {lack}", candidate.bound.missing_bytes)

    def _beyond(self, machine: PricedMachine) -> Iterator[Need]:
        """Yield why a machine is given up before it is simulated."""
        deadline, budget = self.limits.deadline_hours, self.limits.budget
        costs = self._costs(machine)
        if not costs:
            yield Need("way", self._no_price)
            return
        hours = self.job.hours(machine.step_s).value
        if deadline is not None and hours > HOPELESS * deadline:
            yield Need("hours", f"at least {plain(hours)} hours, deadline {plain(deadline)}", hours)
        least = min(cost.spent.low for cost in costs)
        budgets = [limit for limit in (budget, self._at_once(costs)) if limit is not None]
        budget = min(budgets, default=None)
        if budget is not None and least > budget:
            description = (
                f"costs at least {plain(least)} {self.prices.currency}, above the budget of {plain(budget)}"
            )
            yield Need("money", description, min(cost.spent.value for cost in costs))

    @property
    def _no_price(self) -> str:
        return f"no price to {self.pay} it"

    def _at_once(self, costs: Sequence[JobCost]) -> float | None:
        """Return a month's money where every way to pay takes the machine's price at once."""
        return self.limits.monthly if all(cost.outlay is not None for cost in costs) else None

    def _costs(self, machine: PricedMachine) -> tuple[JobCost, ...]:
        hours = self.job.hours(machine.step_s)
        costs = job_costs(
            self.prices,
            machine.name,
            machine.topology,
            machine.num_devices,
            hours,
            num_rented=machine.num_rented,
        )
        return tuple(
            cost
            for cost in costs
            if cost.payment in machine.payments
            and self.pay in (None, cost.payment, cost.rent and cost.rent.term)
        )

    def priced(self, machine: PricedMachine) -> list[Offer]:
        """Return the offers of a machine: one for each way to pay."""
        return [Offer(machine, cost, self.limits.verdict(cost)) for cost in self._costs(machine)]

    def key(self, offer: Offer) -> tuple[int, float]:
        """Return what offers are ranked by: those within limits first, then by money, hours or energy."""
        return _ORDER.index(offer.verdict), offer.metric(self.by)

    def repriced(self, offer: Offer, times: float) -> Offer:
        """Return an offer as it would be if its step took so many times as long."""
        changed = replace(offer.machine, step_s=offer.machine.step_s * times)
        (cost,) = (cost for cost in self._costs(changed) if cost.terms == offer.cost.terms)
        return Offer(changed, cost, self.limits.verdict(cost))


def plain(value: float) -> str:
    """Return a number in words: three digits of it, more where it is 1,000 or larger, never an exponent.

    >>> plain(0.12345), plain(12345.6)
    ('0.123', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
