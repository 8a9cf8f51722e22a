"""Which offers come first, with no more machines planned than it takes to know that.

Every machine has a floor (:mod:`zosim.applications.buying.floor`), and so a least cost. What has the least of these is planned
next, until nothing left could be among the first. Planned offers are then simulated from the first on; a simulated step takes
no less than its closed form, so what comes first is what a full search would find. Where no machine does a job within its limits,
:func:`shortfall` says why, which comes closest, and what would let one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from topology.errors import PlanError
from topology.graph import Topology
from topology.units import format_bytes
from zosim.applications.buying.machine import Job, PricedMachine, simulated
from zosim.applications.buying.offers import Cause, MachineOption, Market, Need, Offer, Refusal
from zosim.config import PlanConfig, merge
from zosim.planning.planner import candidates

Key = Callable[[Offer], Any]
"""What offers are ordered by; it never falls when a step takes longer."""
SPENT: Key = attrgetter("cost.spent.value")
HOURS: Key = attrgetter("cost.hours.value")


class OfferSearch:
    """A search among machines for one market.

    - `counts`: devices to use at most; larger numbers than a machine has mean all of it.
    - `num_listed`: offers that are to be found.
    - `watch`: called for each machine that was planned.

    Raises PriceError if a machine has no price.

    Attributes
    ----------
    planned : list of Offer
        By the closed form, or simulated.
    refused : list of Refusal
        Machines that are no offer, by their plans or by the size of the weights alone.
    waiting : dict of int to (MachineOption, list of Offer)
        Machines that were not planned, with their least costs, by their position.
    """

    def __init__(
        self,
        market: Market,
        machines: Iterable[tuple[str, Topology]],
        counts: Sequence[int],
        num_listed: int,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self.market = market
        self.num_listed = num_listed
        self.planned: list[Offer] = []
        self.refused: list[Refusal] = []
        self.waiting: dict[int, tuple[MachineOption, list[Offer]]] = {}
        self._watch = watch
        options = list(market.options(machines, counts))
        for number, option in enumerate(options):
            # Few are planned at once: a plan says more of why it does not fit.
            if len(options) <= num_listed:
                self.plan(option)
                continue
            least = market.floor(option)
            offers = [] if least.missing else market.at_least(option, least.step_s)
            if offers:
                self.waiting[number] = option, offers
            else:
                self.refused.append(market.hopeless(option, least))

    @property
    def listed(self) -> list[Offer]:
        """The best offers, best first."""
        return sorted(self.planned, key=self.market.key)[: self.num_listed]

    @property
    def within(self) -> list[Offer]:
        """The offers within the limits, in no order."""
        return [offer for offer in self.planned if offer.verdict != "no"]

    @property
    def extremes(self) -> tuple[Offer, ...]:
        """The offer of least money and the one of least time, within the limits."""
        return tuple(min(self.within, key=key) for key in (SPENT, HOURS)) if self.within else ()

    def about_others(self) -> tuple[str, ...]:
        """Return in words what became of the machines that were not planned."""
        sentences = []
        for cause, why in (
            ("memory", "the weights alone do not fit"),
            ("way", f"no price to {self.market.pay}"),
        ):
            left_out = [item for item in self.refused if item.option is not None and item.cause == cause]
            if left_out:
                names = ", ".join(dict.fromkeys(f"{item.name} ({item.num_devices})" for item in left_out))
                sentences.append(f"{why}: {names}")
        if self.waiting:
            num = len(self.waiting)
            sentences.append(
                f"{num} more option{'s' if num > 1 else ''} left out: by a lower bound of the step none is among these"
            )
        if num := len(self.planned) - len(self.listed):
            sentences.append(
                f"{num} more offer{'s' if num > 1 else ''} come after these; --offers lists more"
            )
        return tuple(sentences)

    def run(self, num_simulated: int) -> None:
        """Find the first offers, simulate some of them, and find the one of least money and the one of least time."""
        while True:
            listed = self.first(self.market.key, self.num_listed)
            unknown = [o.machine for o in listed[:num_simulated] if o.machine.prediction is None]
            if not unknown:
                break
            self._replace(unknown[0], simulated(self.market.job, unknown[0]))
        for key in (SPENT, HOURS):
            self.first(key, 1)
        shown = {id(offer.machine): offer.machine for offer in (*self.listed, *self.extremes)}
        for machine in shown.values():
            if machine.prediction is None:
                self._replace(machine, self.market.with_interval(machine))

    def first(self, key: Key, num: int) -> list[Offer]:
        """Return the first offers within the limits by a key, having planned every machine that might be among them."""
        while True:
            ranked = sorted(self.within, key=key)[:num]
            floors = [
                (key(offer), number)
                for number, (_, offers) in self.waiting.items()
                for offer in offers
                if offer.verdict != "no"
            ]
            least = min(floors, default=None)
            if least is None or (len(ranked) == num and key(ranked[-1]) <= least[0]):
                return ranked
            self.plan(self.waiting[least[1]][0])

    def plan(self, option: MachineOption) -> None:
        """Plan a machine, and keep its offers or why there are none."""
        self.waiting = {number: item for number, item in self.waiting.items() if item[0] is not option}
        self.refused = [item for item in self.refused if item.option is not option]
        result = self.market.planned(option)
        self._watch()
        if isinstance(result, Refusal):
            self.refused.append(result)
            return
        # More devices may be allowed, and paid for, than are used.
        same = [offer.machine for offer in self.planned if _is_same(offer.machine, result)]
        if all(result.num_rented < machine.num_rented for machine in same):
            self.planned = [
                offer for offer in self.planned if all(offer.machine is not each for each in same)
            ]
            self.planned += self.market.priced(result)

    def _replace(self, machine: PricedMachine, better_known: PricedMachine) -> None:
        others = [offer for offer in self.planned if offer.machine is not machine]
        self.planned = [*others, *self.market.priced(better_known)]


def _is_same(one: PricedMachine, other: PricedMachine) -> bool:
    return (one.name, one.payments, one.plan) == (other.name, other.payments, other.plan)


_WORDS: dict[Cause, str] = {
    "memory": "too little memory",
    "hours": "too slow",
    "money": "too expensive",
    "way": "no price",
    "plan": "no valid plan",
}


def shortfall(search: OfferSearch, machines: Mapping[str, Topology]) -> tuple[str, ...]:
    """Return in words that nothing stays within the limits and what would; empty where something does."""
    if any(offer.verdict != "no" for offer in search.planned):
        return ()
    counts = Counter(item.cause for item in _all_kept_out(search))
    why = ", ".join(f"{count} {_WORDS[cause]}" for cause, count in counts.most_common())
    num, of = (
        counts.total(),
        "the machine cannot" if len(machines) == 1 else f"none of the {len(machines)} machines can",
    )
    if num == 1:
        (why,) = (_WORDS[cause] for cause in counts)
    first = f"{of} do the job{f'; {num} options fail' if num > 1 else ''}: {why}"
    return (first, *_remedies(search, machines))


def _all_kept_out(search: OfferSearch) -> list[Refusal]:
    """Return every machine as what it is refused for, those that were not planned for the least that they take."""
    market = search.market
    return [
        *search.refused,
        *(_kept_out(market, offer) for offer in search.planned),
        *(
            replace(_kept_out(market, offer), option=option, machine=None)
            for option, offers in search.waiting.values()
            for offer in offers
        ),
    ]


def _nearest(search: OfferSearch) -> dict[Cause, Refusal]:
    """Return for each cause the machine that lacks little else, and least of that; each of them planned."""
    while True:
        nearest: dict[Cause, Refusal] = {}
        for item in sorted(_all_kept_out(search), key=lambda item: (len(item.needs), item.needs[0].least)):
            nearest.setdefault(item.cause, item)
        unplanned = [
            item.option for item in nearest.values() if item.option is not None and item.cause != "way"
        ]
        if not unplanned:
            return nearest
        search.plan(unplanned[0])


def _kept_out(market: Market, offer: Offer) -> Refusal:
    """Return an offer beyond the limits as what it is refused for: time first, which money cannot mend."""
    machine, limits = offer.machine, market.limits
    hours, money = limits.waited(offer.cost).value, offer.cost.spent.value
    needs = []
    if limits.deadline_hours is not None and hours > limits.deadline_hours:
        needs.append(Need("hours", least=hours))
    if limits.budget is not None and money > limits.budget:
        needs.append(Need("money", least=money))
    if limits.monthly is not None and offer.cost.outlay is not None and money > limits.monthly:
        needs.append(Need("money", least=money))
    return Refusal(machine.name, machine.num_rented, tuple(needs), machine=machine)


def _remedies(search: OfferSearch, machines: Mapping[str, Topology]) -> Iterator[str]:
    """Yield, for each cause, what would let a machine in."""
    market, nearest = search.market, _nearest(search)
    if "hours" in nearest:
        refusal = _simulated(market, nearest["hours"])
        yield f"with {_all_of(market, refusal)}: {_named(refusal)}, the fastest that fits"
    if "money" in nearest:
        refusal = _simulated(market, nearest["money"])
        yield f"with {_all_of(market, refusal)}: {_named(refusal)}, the cheapest in time"
    if "way" in nearest:
        yield f"without --pay {market.pay}: {_named(nearest['way'])}"
    if "memory" in nearest:
        refusal = nearest["memory"]
        yield f"with {_all_of(market, refusal)}: {_named(refusal)}, the smallest shortfall; {refusal.remedy}"
        yield _with_a_smaller_batch(market.job, refusal, machines[refusal.name])


def _simulated(market: Market, refusal: Refusal) -> Refusal:
    """Return a refusal with the hours and the money of a simulated step, which a closed form bounds from below."""
    machine = refusal.machine
    if machine is None or machine.best.missing:
        return refusal
    times = simulated(market.job, machine).step_s.value / machine.step_s.value
    needs = tuple(
        replace(need, least=times * need.least) if need.cause in ("hours", "money") else need
        for need in refusal.needs
    )
    return replace(refusal, needs=needs)


def _all_of(market: Market, refusal: Refusal) -> str:
    """Return everything that a refused machine needs."""
    return " and ".join(_describe(market, need) for need in refusal.needs)


def _describe(market: Market, need: Need) -> str:
    match need.cause:
        case "memory":
            return f"{format_bytes(round(need.least))} more memory"
        case "hours":
            return f"--deadline {_enough(need.least)}h or more"
        case "money":
            per = "" if market.limits.monthly is None else "/month"
            return f"--budget '{_enough(need.least)} {market.prices.currency}{per}' or more"
        case "way":
            return f"another --pay than {market.pay}"
        case "plan":
            return "another plan"


def _enough(least: float) -> str:
    """Return a number in three digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(least)) - 2)
    return f"{math.ceil(least / unit) * unit:.{max(0, -round(math.log10(unit)))}f}"


def _named(refusal: Refusal) -> str:
    return f"{refusal.name} with {refusal.num_devices} device{'s' if refusal.num_devices > 1 else ''}"


def _with_a_smaller_batch(job: Job, refusal: Refusal, topology: Topology) -> str:
    """Return the largest batch, halved again and again, that fits where least memory lacks."""
    batch = job.config.batch
    if batch == 1 or not _fits(_of(job, 1), refusal, topology):
        return f"no smaller --batch helps there: one sequence of {job.config.seq} tokens does not fit either"
    while not _fits(_of(job, batch), refusal, topology):
        batch //= 2
    return f"with --batch {batch} it fits {_named(refusal)}"


def _of(job: Job, batch: int) -> Job:
    return replace(job, config=merge(job.config, PlanConfig(batch=batch)))


def _fits(job: Job, refusal: Refusal, topology: Topology) -> bool:
    try:
        listed = candidates(job.request(refusal.name, topology, refusal.num_devices))
        return any(not candidate.missing for candidate in listed)
    except PlanError:
        return False
