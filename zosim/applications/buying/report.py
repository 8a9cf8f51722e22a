"""Offers as people read them, and as JSON knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodel.prices import Range
from topology.units import format_seconds
from zosim.applications.buying.machine import Machine
from zosim.applications.buying.offers import Market, Offer, Refusal, plain
from zosim.applications.buying.sensitivity import Change, Effect, Room, percent
from zosim.report import Bullets, Part, Report, Table

_NUMERIC = ("step", "hours", "money", "kWh", "outlay")


def answer_view(
    market: Market,
    offers: Sequence[Offer],
    refused: Sequence[Refusal],
    limiters: Sequence[str],
    explained: Sequence[tuple[Offer, tuple[Effect, ...], tuple[Room, ...]]],
    lacking: Sequence[str] = (),
) -> Report:
    """Return offers, what is none, and what would change the answer; what would let one in where none stays in limits."""
    parts: list[Part] = [_offers_table(market, offers, limiters)] if offers else []
    if lacking:
        first, *others = lacking
        parts += [first, Bullets(others)]
    if refused:
        rows = [(item.name, str(item.num_devices), item.reason, item.remedy) for item in refused]
        parts.append(Table(("no offer", "devices", "because", "if not for that"), rows))
    for offer, effects, rooms in explained:
        parts += [_effects_table(offer, effects), Bullets(_sayings(offer, effects, rooms))]
    return Report("", *parts)


def answer_data(
    market: Market,
    offers: Sequence[Offer],
    refused: Sequence[Refusal],
    limiters: Sequence[str],
    explained: Sequence[tuple[Offer, tuple[Effect, ...], tuple[Room, ...]]],
    lacking: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the same as JSON knows it."""
    job, prices = market.job, market.prices
    return {
        "job": {
            "model": job.model.name,
            "batch": job.batch,
            "seq": job.seq,
            "num_steps": job.num_steps,
            "method": job.method,
            "weights": job.weights,
        },
        "currency": prices.currency,
        "prices_date": prices.date.isoformat(),
        "ranked_by": market.by,
        "limits": market.limits,
        "offers": [_offer_data(offer, limiter) for offer, limiter in zip(offers, limiters, strict=True)],
        "refused": list(refused),
        "nothing_within_limits": list(lacking),
        "sensitivity": [
            {
                "machine": offer.machine.name,
                "num_devices": offer.machine.num_devices,
                "way": offer.way,
                "figures": list(effects),
                "memory_for_faster": list(rooms),
            }
            for offer, effects, rooms in explained
        ],
    }


def _offers_table(market: Market, offers: Sequence[Offer], limiters: Sequence[str]) -> Table:
    job, limits = market.job, market.limits
    money = f"money ({market.prices.currency})"
    asked = limits.budget is not None or limits.deadline_hours is not None
    columns = ("", "machine", "devices", "pay", "step", "hours", money, "kWh", "placement", "limited by")
    rows = [
        (
            str(number),
            offer.machine.name,
            str(offer.machine.num_devices),
            offer.way,
            ("" if offer.machine.prediction else ">= ") + format_seconds(offer.machine.step_s.value),
            _range(offer.cost.hours),
            _range(offer.cost.money),
            _range(offer.cost.energy_kwh),
            offer.machine.best.describe(),
            limiter,
            *((offer.verdict,) if asked else ()),
        )
        for number, (offer, limiter) in enumerate(zip(offers, limiters, strict=True), start=1)
    ]
    title = (
        f"{job.num_steps:,} steps of {job.model.name}, {job.batch} x {job.seq} tokens, ranked by {market.by}"
    )
    headings = (*columns, "within limits") if asked else columns
    return Table(headings, rows, title=title, numeric=(*_NUMERIC, money))


def _range(interval: Range) -> str:
    return f"{plain(interval.value)} ({plain(interval.low)} - {plain(interval.high)})"


def _effects_table(offer: Offer, effects: Sequence[Effect]) -> Table:
    shown = [effect for effect in effects if effect.doubled.matters or effect.halved.matters]
    rows = [
        (
            effect.figure,
            effect.now,
            _change(effect.doubled),
            _change(effect.halved),
            "yes" if effect.changes_answer else "",
        )
        for effect in shown
    ]
    machine = offer.machine
    title = f"{machine.name}, {machine.num_devices} device{'s' if machine.num_devices > 1 else ''}, {offer.way}: a step with one figure changed"
    return Table(("figure", "now", "x2", "/2", "changes which is first"), rows, title=title)


def _change(change: Change) -> str:
    if change.times is None:
        return "nothing fits"
    words = "-" if not change.matters else percent(change.times)
    return f"{words}, then {change.placement}" if change.placement and change.matters else words


def _sayings(offer: Offer, effects: Sequence[Effect], rooms: Sequence[Room]) -> list[str]:
    """Return in words what simulating found, and what memory would buy."""
    sentences = []
    prediction = offer.machine.prediction
    if prediction is not None:
        limit = prediction.bottleneck
        sentences.append(f"its critical path: {limit.share:.0%} {limit.words}")
    idle = [effect.figure for effect in effects if not (effect.doubled.matters or effect.halved.matters)]
    if idle:
        sentences.append(f"changes nothing, twice or half as large: {', '.join(idle)}")
    sentences += [f"with {room}" for room in rooms]
    return sentences


def _offer_data(offer: Offer, limiter: str) -> dict[str, Any]:
    machine = offer.machine
    return {
        "machine": machine.name,
        "num_devices": machine.num_devices,
        "way": offer.way,
        "within_limits": offer.verdict,
        "placement": machine.best.describe(),
        "step_time_s": machine.step_s,
        "is_simulated": machine.prediction is not None,
        "hours": offer.cost.hours,
        "money": offer.cost.money,
        "outlay": offer.cost.outlay,
        "energy_kwh": offer.cost.energy_kwh,
        "limited_by": limiter,
        "bottleneck": None if machine.prediction is None else machine.prediction.bottleneck,
        "plan": _plan_data(machine),
    }


def _plan_data(machine: Machine) -> dict[str, Any]:
    """Return the plan without the model, which all offers share."""
    return machine.plan.model_dump(mode="json", exclude={"model"})
