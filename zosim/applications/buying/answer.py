"""What to buy: the answer for a job, as people read it and as JSON knows it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from costmodel.devices.prices import (
    HOURS_PER_MONTH,
    Payment,
    PriceTable,
    Range,
    Term,
    load_prices,
    shipped_prices,
)
from topology.errors import PlanError
from topology.figures import Basis
from topology.units import QuantityError, format_seconds, parse_quantity
from zosim.applications.buying.machine import Job, machines_named
from zosim.applications.buying.offers import BuyerLimits, Market, Offer, RankBy, Refusal, plain
from zosim.applications.buying.search import HOURS, SPENT, OfferSearch, shortfall
from zosim.applications.buying.sensitivity import (
    Effect,
    MemoryThreshold,
    effects,
    effects_table,
    limiter,
    memory_thresholds,
)
from zosim.config import PlanConfig, filled, merge
from zosim.console import LateBar
from zosim.options import config_of, takes_earlier_names
from zosim.planning.explain import about_host_memory
from zosim.planning.split_options import model_spec, split_options_of
from zosim.report import Bullets, Element, Report, Reportable, Table, frame

JOB_OPTIONS = ("batch", "seq", "dtype", "method", "allow_lossy")
"""Options of a plan that a job has."""


@dataclass(frozen=True, repr=False)
class Answer(Reportable):
    """What a job costs where, and what would change that."""

    heading = "What to buy"

    market: Market
    offers: tuple[Offer, ...]  # best first
    refused: tuple[Refusal, ...]
    limiters: tuple[str, ...]
    explained: tuple[tuple[Offer, tuple[Effect, ...], tuple[MemoryThreshold, ...]], ...]
    lacking: tuple[str, ...] = ()  # where nothing stays within the limits, what would let something in
    num_examples: int | None = None  # examples over all epochs, where the steps were counted from these
    extremes: tuple[Offer, ...] = ()  # the offer of least money and the one of least time, of all machines
    # What became of the machines that are neither offered nor refused, in words.
    others: tuple[str, ...] = ()

    def __repr__(self) -> str:
        job = f"{self.market.job.num_steps:,} steps of {self.market.job.config.spec.name}"
        if not self.offers:
            return f"Answer({job}: no machine fits)"
        best = self.offers[0]
        money = f"{plain(best.cost.money.value)} {self.market.prices.currency}"
        return f"Answer({job}: {best.machine.name}, {best.cost.terms}, {plain(best.cost.hours.value)} h, {money})"

    def view(self) -> Report:
        """Return offers, what is none, and what would change the answer."""
        elements: list[Element] = [Bullets(self.sentences())]
        if self.offers:
            elements += _offers_tables(self.market, self.offers, self.limiters)
        if self.lacking:
            first, *others = self.lacking
            elements += [first, Bullets(others)]
        if self.refused:
            rows = [
                (
                    item.name,
                    str(item.num_devices),
                    " or ".join(item.payments),
                    "; ".join(filter(None, (item.reason, item.remedy))),
                )
                for item in self.refused
            ]
            elements.append(Table(("no offer", "devices", "pay", "because"), rows, numeric=("devices",)))
        if self.others:
            elements.append(Bullets(self.others))
        for offer, effects_of_offer, thresholds_of_offer in self.explained:
            sentences = _sentences(offer, effects_of_offer, thresholds_of_offer)
            elements += [_effects_table(offer, effects_of_offer), Bullets(sentences)]
        return Report("", *elements)

    def sentences(self) -> list[str]:
        """Return the answer in sentences: the best offer, the least paid by the end and the least time, and how many steps there may be."""
        job, currency = self.market.job, self.market.prices.currency
        within = [offer for offer in self.offers if offer.verdict != "no"]
        sentences = []
        if within:
            best = within[0]
            money = _with_unit(best.cost.money, currency)
            per_thousand = plain(best.cost.money.value * 1000 / job.num_steps)
            sentences.append(
                f"{_named(best)} does {job.num_steps:,} steps in {_with_unit(best.cost.hours, 'hours')} for {money}: {per_thousand} {currency} per 1,000 steps"
            )
            if best.cost.outlay is not None:
                sentences.append(
                    f"that is its wear and electricity; the machine costs {_with_unit(best.cost.outlay, currency)} at once"
                )
            quote = best.quote(self.market.prices)
            price = _PRICES.get(quote.basis, "a list price")
            sentences.append(f"its price is {price} of {quote.day}: {quote.source}")
            if self.market.limits.monthly is not None:
                months = self.market.limits.waited(best.cost).value / HOURS_PER_MONTH
                when = "within the first month" if months <= 1 else f"after {plain(months)} months"
                sentences.append(
                    f"with {plain(self.market.limits.monthly)} {currency} a month it ends {when}"
                )
        extremes = zip(("least paid by the end", "least time"), (SPENT, HOURS), self.extremes, strict=False)
        others = [(what, offer) for what, key, offer in extremes if key(offer) < key(within[0])]
        sentences += [
            f"{what}: {_named(offer)}, {plain(offer.cost.hours.value)} hours, {_spent(offer, currency)}"
            for what, offer in others
        ]
        if len(within) > 1 and not others:
            sentences.append("no other offer takes less money or less time")
        steps = about_steps(job.num_steps, self.num_examples)
        if within and self.num_examples is not None:
            hours, spent = within[0].cost.hours.value, within[0].cost.money.value
            least, most = MORE_STEPS
            steps += f", there {plain(least * hours)} to {plain(most * hours)} hours and {plain(least * spent)} to {plain(most * spent)} {currency}"
        return [*sentences, steps]

    def to_pandas(self) -> Any:
        """Return the offers as a pandas frame, best first."""
        return frame(self.to_data()["offers"])

    def to_data(self) -> dict[str, Any]:
        """Return the same in the terms of JSON."""
        job, prices = self.market.job, self.market.prices
        return {
            "answer": self.sentences(),
            "job": {
                "model": job.config.spec.name,
                "batch": job.config.batch,
                "seq": job.config.seq,
                "num_steps": job.num_steps,
                "method": job.config.search.method,
                "dtype": job.config.weights.given("dtype"),
            },
            "currency": prices.currency,
            "prices_date": prices.date.isoformat(),
            "ranked_by": self.market.by,
            "limits": self.market.limits,
            "offers": [
                _offer_data(offer, limiter, job.num_steps)
                for offer, limiter in zip(self.offers, self.limiters, strict=True)
            ],
            "refused": [
                {
                    "name": item.name,
                    "num_devices": item.num_devices,
                    "ways": list(item.payments),
                    "needs": list(item.needs),
                }
                | {"reason": item.reason, "cause": item.cause, "remedy": item.remedy}
                for item in self.refused
            ],
            "not_listed": list(self.others),
            "nothing_within_limits": list(self.lacking),
            "sensitivity": [
                {
                    "machine": offer.machine.name,
                    "num_devices": offer.machine.num_devices,
                    "way": offer.payment,
                    "figures": list(effects_of_offer),
                    "memory_for_faster": list(thresholds_of_offer),
                }
                for offer, effects_of_offer, thresholds_of_offer in self.explained
            ],
        }


MAX_EPOCHS = 1_000_000
MORE_STEPS = (10, 100)
"""Steps of zeroth order for one of first order. MeZO takes 20,000 of 16 sequences where fine-tuning takes 625 of 8 (5 epochs of 1,000 examples), and
100,000 where it takes 1,000 (arXiv:2305.17333, appendix on hyperparameters); "tens of times more" says https://dkmiyan.github.io/FZOO_hp."""


def about_steps(num_steps: int, num_examples: int | None = None) -> str:
    """Return what is known of how many steps zeroth order takes, and what that makes of a number of steps or epochs."""
    least, most = MORE_STEPS
    known = f"zeroth order typically takes {least} to {most} times the steps of first order (arXiv:2305.17333: 20,000 for 625, 100,000 for 1,000)"
    if num_examples is None:
        return f"{known}: {num_steps:,} steps compare with {max(1, num_steps // most):,} to {max(1, num_steps // least):,} of first order"
    return f"{num_examples:,} examples are {num_steps:,} steps; {known}: if first order learns in these, plan for {least * num_steps:,} to {most * num_steps:,}"


@takes_earlier_names(PlanConfig, JOB_OPTIONS)
def buy(
    model: str,
    *,
    steps: int | None = None,
    examples: int | None = None,
    epochs: float = 1.0,
    machines: str | Sequence[str] | None = None,
    count: int | str | Sequence[int] = (1, 2, 4, 8),
    budget: str | float | None = None,
    deadline: str | float | None = None,
    prices: str | Path | None = None,
    pay: Payment | Term | None = None,
    by: RankBy = "money",
    offers: int = 6,
    explain: int = 2,
    simulate: int = 3,
    **settings: Any,
) -> Answer:
    """Rank machines by time, money and energy for a training job, and show what would change the ranking.

    Parameters
    ----------
    model : str
        A shipped size such as ``"opt-66b"``, a model directory, a config.json, or a saved ModelSpec.
    steps : int, optional
        Number of steps of the job; 10,000 if neither these nor examples are given.
    examples, epochs : int, float
        Sequences to see, and how often, instead of `steps`.
    machines : str or sequence of str, optional
        Presets or topology files, as in ``"a,b"``; by default all that the price table has.
    count : int, str or sequence of int
        Devices to use at most, each tried, as in ``"1,8"``; more than there are means all.
    budget : str or float, optional
        Most that may be spent, such as ``"5000 USD"``, or ``"500 USD/month"``.
    deadline : str or float, optional
        Most that it may take, such as ``"48h"`` or ``"3d"``; a number is hours.
    prices : path, optional
        A price table of your own.
    pay : {"rent", "own", "on-demand", "reserved", "spot"}, optional
        The only way in which machines may be paid for.
    by : {"money", "hours", "energy"}
        Quantity to rank by.
    offers : int
        Number of offers to list, the best first; machines that cannot be among them are not planned.
    explain : int
        Number of offers to explain: which changes would make them the best.
    simulate : int
        Number of offers to simulate, from the first; the others come from a closed form.
    **settings
        Of the plans: ``batch``, ``seq``, ``dtype``, ``method`` and ``allow_lossy``, as of `zosim plan`.

    Raises
    ------
    ZosimError
        If a machine, model or price table cannot be read, a budget is no sum of money, a deadline no time, or something else is none of
        what it may be.

    Examples
    --------
    >>> buy("opt-66b", steps=10_000, budget="500 USD", machines="h200-1x,a100-80gb-milan")  # doctest: +SKIP
    """
    _one_of("by", by, get_args(RankBy))
    _one_of("pay", pay, (None, *get_args(Payment), *get_args(Term)))
    if steps is not None and examples is not None:
        raise PlanError("--steps and --examples both say how long the job is", hint="leave one out")
    if not 0 < epochs <= MAX_EPOCHS:
        raise PlanError(
            f"--epochs {epochs} must be more than 0 and at most {MAX_EPOCHS:,}", hint="such as 1 or 0.5"
        )
    for name, number, least in (
        ("steps", 1 if steps is None else steps, 1),
        ("examples", 1 if examples is None else examples, 1),
        ("offers", offers, 1),
        ("explain", explain, 0),
        ("simulate", simulate, 0),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise PlanError(f"--{name} {number!r} must be a whole number of at least {least}")
    table = shipped_prices() if prices is None else load_prices(prices)
    options = config_of(PlanConfig, settings, only=JOB_OPTIONS)
    config = merge(PlanConfig(model=model_spec(model)), options)
    seen = None if examples is None else math.ceil(examples * epochs)
    num_steps = steps or 10_000 if seen is None else math.ceil(seen / filled(config).batch)
    job = Job(config, num_steps, split_options_of(model, config.split))
    total, monthly = _money(budget, table)
    market = Market(
        job=job, prices=table, limits=BuyerLimits(total, _hours(deadline), monthly), by=by, pay=pay
    )
    by_name = dict(machines_named(list(table.machines) if machines is None else _names(machines)))
    with LateBar("planning machines") as bar:
        num_listed = max(offers, simulate, explain)
        search = OfferSearch(market, by_name.items(), _counts(count), num_listed, bar.advance)
        search.run(simulate)
    listed = search.listed
    # Of a machine that is offered twice, for rent and to own, the first stands for both.
    once = {id(offer.machine): offer for offer in reversed(listed)}
    explained = [offer for offer in listed if once[id(offer.machine)] is offer][:explain]
    return Answer(
        market,
        tuple(listed),
        tuple(item for item in search.refused if item.option is None),
        tuple(limiter(job, offer.machine) for offer in listed),
        tuple(
            (offer, effects(market, offer, listed), memory_thresholds(offer.machine)) for offer in explained
        ),
        shortfall(search, by_name),
        seen,
        search.extremes,
        search.about_others(),
    )


def _one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise PlanError(
            f"--{name} {value!r} is not one of its choices",
            hint=f"use {', '.join(map(str, filter(None, choices)))}",
        )


def _names(machines: str | Sequence[str]) -> list[str]:
    """Return names of machines: a list of them, or what the command line takes for one."""
    listed = machines.split(",") if isinstance(machines, str) else machines
    names = [name.strip() for name in listed if name.strip()]
    if not names:
        raise PlanError(f"--machines {machines!r} names no machine", hint="such as h200-1x,dgx-h100")
    return names


def _counts(count: int | str | Sequence[int]) -> list[int]:
    """Return numbers of devices, the smallest first: one, a list of them, or what the command line takes for one."""
    try:
        counts = sorted(
            {
                int(part)
                for part in (
                    count.split(",")
                    if isinstance(count, str)
                    else [count]
                    if isinstance(count, int)
                    else count
                )
            }
        )
    except (TypeError, ValueError):
        counts = []
    if not counts or counts[0] < 1:
        raise PlanError(
            f"--count {count} must be numbers of devices, separated by commas", hint="such as 1,2,4,8"
        )
    return counts


def _money(budget: str | float | None, table: PriceTable) -> tuple[float | None, float | None]:
    """Return a sum in the table's currency, in all or a month."""
    if budget is None:
        return None, None
    match = re.fullmatch(r"\s*([\d,]*\.?\d+)\s*([A-Za-z]*)\s*(/ ?month|a month)?\s*", f"{budget}")
    if match is None or float(match[1].replace(",", "")) <= 0:
        raise PlanError(
            f"--budget {budget} is not a sum of money",
            hint=f"such as '5000 {table.currency}', or '500 {table.currency}/month'",
        )
    if match[2] and match[2].upper() != table.currency:
        raise PlanError(
            f"--budget {budget} must be in {table.currency}, the currency of the price table",
            hint="convert it, or give a price table in its currency with --prices",
        )
    amount = float(match[1].replace(",", ""))
    return (amount, None) if match[3] is None else (None, amount)


def _hours(deadline: str | float | None) -> float | None:
    """Return a time in hours."""
    if deadline is None:
        return None
    text = deadline if isinstance(deadline, str) else f"{deadline} h"
    days = re.fullmatch(r"\s*(\d*\.?\d+)\s*d(ays?)?\s*", text)
    try:
        hours = float(days[1]) * 24 if days else parse_quantity(text, "time") / 3600
    except QuantityError as error:
        raise PlanError(f"--deadline {text}: {error.message}", hint="such as 48h or 3d") from None
    if hours <= 0:
        raise PlanError(f"--deadline {text} must be more than 0", hint="such as 48h")
    return hours


def _offers_tables(market: Market, offers: Sequence[Offer], limiters: Sequence[str]) -> list[Table]:
    """Return what offers cost, and by what placement: two tables of at most 80 columns each."""
    job, limits = market.job, market.limits
    money = f"money ({market.prices.currency})"
    requested = limits != BuyerLimits()
    costs = [
        (
            str(number),
            offer.machine.name,
            offer.cost.terms,
            ("" if offer.machine.prediction else ">= ") + format_seconds(offer.machine.step_s.value),
            _range(offer.cost.hours),
            _range(offer.cost.money),
            *((offer.verdict,) if requested else ()),
        )
        for number, offer in enumerate(offers, start=1)
    ]
    placements = [
        (
            str(number),
            str(offer.machine.num_devices),
            offer.machine.best.describe(),
            limiter,
            _range(offer.cost.energy_kwh),
        )
        for number, (offer, limiter) in enumerate(zip(offers, limiters, strict=True), start=1)
    ]
    formats = " or ".join(sorted({offer.machine.plan.storage_dtype for offer in offers}))
    title = f"{job.num_steps:,} steps of {job.config.spec.name} in {formats}, {job.config.batch} x {job.config.seq} tokens, ranked by {market.by}"
    headings = ("", "machine", "pay", "step", "hours", money, *(("within limits",) if requested else ()))
    return [
        Table(headings, costs, title=title, numeric=("step", "hours", money), keeps_words=True),
        Table(
            ("", "devices", "placement", "limited by", "kWh"),
            placements,
            title="how each of them does it",
            numeric=("devices", "kWh"),
        ),
    ]


def _named(offer: Offer) -> str:
    """Return an offer's devices, machine and terms."""
    machine = offer.machine
    devices = f"{machine.num_devices} device{'s' if machine.num_devices > 1 else ''}"
    return f"{machine.name} ({offer.cost.terms}, {devices})"


_PRICES: Mapping[Basis, str] = {"estimated": "an estimate", "assumed": "an assumption", "measured": "a quote"}
"""What a price is, by what kind of knowledge it is; others are list prices."""


def _spent(offer: Offer, currency: str) -> str:
    """Return what leaves the account, and of a machine that must be bought what the job wears off."""
    spent = f"{plain(offer.cost.spent.value)} {currency}"
    if offer.cost.outlay is None:
        return spent
    return f"{spent} to buy it, or {plain(offer.cost.money.value)} {currency} of wear and electricity if you own it"


def _with_unit(interval: Range, unit: str) -> str:
    return f"{plain(interval.value)} {unit} ({plain(interval.low)} - {plain(interval.high)})"


def _range(interval: Range) -> str:
    return f"{plain(interval.value)} ({plain(interval.low)}-{plain(interval.high)})"


def _effects_table(offer: Offer, effects: Sequence[Effect]) -> Table:
    machine = offer.machine
    devices = f"{machine.num_devices} device{'s' if machine.num_devices > 1 else ''}"
    title = f"{machine.name}, {devices}, {offer.cost.terms}: a step with one figure changed"
    return effects_table(title, effects, ranks=True)


def _sentences(
    offer: Offer, effects: Sequence[Effect], memory_thresholds: Sequence[MemoryThreshold]
) -> list[str]:
    """Return in words what simulating found, and what memory would buy."""
    sentences = []
    prediction = offer.machine.prediction
    if prediction is not None:
        limit = prediction.bottleneck
        sentences.append(f"its critical path: {limit.share:.0%} {limit.description}")
    sentences += about_host_memory(offer.machine.best.planned)
    idle = [effect.figure for effect in effects if not (effect.doubled.matters or effect.halved.matters)]
    if idle:
        sentences.append(f"changes nothing, twice or half as large: {', '.join(idle)}")
    sentences += [f"with {threshold}" for threshold in memory_thresholds]
    return sentences


def _offer_data(offer: Offer, limiter: str, num_steps: int) -> dict[str, Any]:
    machine = offer.machine
    return {
        "machine": machine.name,
        "num_devices": machine.num_devices,
        "way": offer.payment,
        "rent": offer.cost.rent,
        "within_limits": offer.verdict,
        "placement": machine.best.describe(),
        "step_time_s": machine.step_s,
        "is_simulated": machine.prediction is not None,
        "hours": offer.cost.hours,
        "money": offer.cost.money,
        "money_per_1000_steps": offer.cost.money * (1000 / num_steps),
        "outlay": offer.cost.outlay,
        "energy_kwh": offer.cost.energy_kwh,
        "limited_by": limiter,
        "bottleneck": None if machine.prediction is None else machine.prediction.bottleneck,
        # Without the model, which all offers share.
        "plan": machine.plan.model_dump(mode="json", exclude={"model"}),
    }
