"""Which offers come first, with no more machines planned than it takes to know that.

Every machine has a floor (:mod:`zosim.applications.buying.floor`), and so a least cost. What has the least of these is planned
next, until nothing left could be among the first. Planned offers are then simulated from the first on; a simulated step takes
no less than its closed form, so what comes first is what a full search would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from topology.graph import Topology
from zosim.applications.buying.machine import PricedMachine, simulated
from zosim.applications.buying.offers import MachineOption, Market, Offer, Refusal
from zosim.console import progress

Key = Callable[[Offer], Any]
"""What offers are ordered by; it never falls when a step takes longer."""
_SPENT: Key = attrgetter("cost.spent.value")
_HOURS: Key = attrgetter("cost.hours.value")


class OfferSearch:
    """A search among machines for one market.

    Parameters
    ----------
    counts : sequence of int
        Devices to use at most; larger numbers than a machine has mean all of it.
    num_listed : int
        Offers that are to be found.

    Attributes
    ----------
    planned : list of Offer
        By the closed form, or simulated.
    refused : list of Refusal
        Machines that are no offer, by their plans or by the size of the weights alone.
    waiting : dict of int to (MachineOption, list of Offer)
        Machines that were not planned, with their least costs, by their position.

    Raises
    ------
    PriceError
        If a machine has no price.
    """

    def __init__(
        self, market: Market, machines: Iterable[tuple[str, Topology]], counts: Sequence[int], num_listed: int
    ) -> None:
        self.market = market
        self.num_listed = num_listed
        self.planned: list[Offer] = []
        self.refused: list[Refusal] = []
        self.waiting: dict[int, tuple[MachineOption, list[Offer]]] = {}
        self._bar = progress()
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
        return tuple(min(self.within, key=key) for key in (_SPENT, _HOURS)) if self.within else ()

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
        with self._bar:
            while True:
                listed = self.first(self.market.key, self.num_listed)
                unknown = [o.machine for o in listed[:num_simulated] if o.machine.prediction is None]
                if not unknown:
                    break
                self._simulate(unknown[0])
            for key in (_SPENT, _HOURS):
                self.first(key, 1)

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

    def _simulate(self, machine: PricedMachine) -> None:
        others = [offer for offer in self.planned if offer.machine is not machine]
        self.planned = [*others, *self.market.priced(simulated(self.market.job, machine))]


def _is_same(one: PricedMachine, other: PricedMachine) -> bool:
    return (one.name, one.payments, one.plan) == (other.name, other.payments, other.plan)
