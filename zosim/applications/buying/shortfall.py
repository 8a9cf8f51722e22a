"""Why no machine does a job within its limits, which comes closest, and what would let one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from topology.errors import PlanError
from topology.graph import Topology
from topology.units import format_bytes
from zosim.applications.buying.machine import Job, simulated
from zosim.applications.buying.offers import Cause, Market, Need, Offer, Refusal
from zosim.applications.buying.search import OfferSearch
from zosim.config import PlanConfig, merge
from zosim.planning.planner import candidates

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
    first = f"{of} do the job; {num} option{'s fail' if num > 1 else ' fails'}: {why}"
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
