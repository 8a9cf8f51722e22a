"""What would change the answer: one figure of one machine doubled or halved, and memories at which faster plans fit.

All of it is closed form: a step's ratio with the figure changed, over the placements of the same mesh, times what the step
was predicted to take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from costmodel.devices.prices import Range
from topology.errors import PlanError
from topology.graph import Topology
from topology.units import format_bytes
from zosim.analysis.levers import Lever
from zosim.applications.buying.machine import Job, PricedMachine
from zosim.applications.buying.offers import Market, Offer
from zosim.planning.bounds import Bounds
from zosim.planning.explain import ALIKE
from zosim.planning.planner import Candidate, Decision, candidates
from zosim.report import Bullets, Report, Table

_DIGITS = 3
NEAR = 0.025
"""Part of a step by which plans may differ and still tie."""
_WORTH_SAYING = 0.01
"""Part of a step that more memory must save to be mentioned."""


@dataclass(frozen=True)
class Change:
    """A figure multiplied by a factor."""

    factor: float
    times: float | None  # how many times as long a step then takes; None if nothing fits any more
    placement: str  # the best placement then, if it is another one
    is_first: bool

    @property
    def matters(self) -> bool:
        """Whether the step takes another time."""
        return self.times is None or abs(self.times - 1) > ALIKE


@dataclass(frozen=True)
class Effect:
    """What one figure of an offer's machine decides."""

    figure: str
    now: str
    doubled: Change
    halved: Change
    # Whether the offer becomes the best when the figure is doubled, or ceases to be when it is halved.
    changes_answer: bool


@dataclass(frozen=True)
class MemoryThreshold:
    """A memory at which a faster placement fits."""

    where: str  # `device` or `host`
    needed_bytes: int
    placement: str
    times: float  # how many times as long its step takes, at least

    def __str__(self) -> str:
        return f"{format_bytes(self.needed_bytes)} of {self.where} memory: {self.placement}, {percent(self.times)} a step"


def percent(times: float) -> str:
    """Return a factor as what it adds or takes away.

    >>> percent(2.0), percent(0.91), percent(0.997)
    ('+100%', '-9%', '-0.3%')
    """
    change = times - 1
    return f"{change:+.0%}" if abs(change) >= _WORTH_SAYING else f"{change:+.1%}"


def limiter(job: Job, machine: PricedMachine) -> str:
    """Return the figure that shortens the machine's step most when it is doubled, and by how much.

    Memory is left out: it limits which placements there are, not how long this one takes.
    """
    now = _best_s([machine.best])
    gains = {}
    for lever in machine.levers:
        if lever.type != "memory":
            topology = lever.apply(machine.topology, 2.0)
            request = job.request(machine.name, topology, machine.num_devices)
            gains[lever.name] = Bounds(request, bounder=job.bounder).of(machine.plan).seconds / now
    if not gains:
        return ""
    name = min(gains, key=lambda key: gains[key])
    return f"{name} (x2: {percent(gains[name])})" if gains[name] < 1 - ALIKE else "no single figure"


def effects(market: Market, offer: Offer, offers: Sequence[Offer]) -> tuple[Effect, ...]:
    """Return what each figure of an offer's machine decides, those that decide most first."""
    rivals = [other for other in offers if other.machine.name != offer.machine.name]
    best = min((market.key(other) for other in rivals), default=None)
    was_first = best is None or market.key(offer) <= best
    now = _altered(market.job, offer.machine, offer.machine.topology)
    assert now is not None
    all_effects = []
    for lever in offer.machine.levers:
        doubled, halved = (_change(market, offer, lever, factor, now, best) for factor in (2.0, 0.5))
        changes = halved.is_first < was_first or doubled.is_first > was_first
        all_effects.append(Effect(lever.name, lever.now, doubled, halved, changes and best is not None))
    return tuple(sorted(all_effects, key=lambda effect: -_span(effect)))


def _change(
    market: Market,
    offer: Offer,
    lever: Lever,
    factor: float,
    now: Candidate,
    best: tuple[int, float] | None,
) -> Change:
    change = _changed(market.job, offer.machine, lever, factor, now)
    if change.times is None:
        return change
    key = market.key(market.repriced(offer, change.times))
    return replace(change, is_first=best is None or key <= best)


def _changed(job: Job, machine: PricedMachine, lever: Lever, factor: float, now: Candidate) -> Change:
    then = _altered(job, machine, lever.apply(machine.topology, factor))
    if then is None:
        return Change(factor, None, "", False)
    described = then.describe()
    return Change(
        factor,
        then.bound.seconds / now.bound.seconds,
        "" if described == now.describe() else described,
        False,
    )


def effects_view(decision: Decision, effects: Sequence[Effect]) -> Report:
    """Return what would change a decision: figures of its machine, and plans that are nearly as fast."""
    table = effects_table("a step with one figure changed", effects, ranks=False)
    return Report("", table, Bullets(near_ties(decision)))


def plan_effects(decision: Decision) -> tuple[Effect, ...]:
    """Return what each figure of a plan's machine decides, those that decide most first; data sheets stand for all rates."""
    chosen, topology = decision.chosen, decision.chosen.planned.topology
    size = chosen.plan.placement.world_size
    listed = (chosen, *decision.others, *decision.rejected)
    step_s = Range.exactly(chosen.seconds)
    machine = PricedMachine(chosen.plan.placement.topology, topology, size, size, (), listed, step_s)
    job = Job(decision.request.config, 1)
    now = _altered(job, machine, topology)
    if now is None:
        return ()
    decided = []
    for lever in machine.levers:
        doubled, halved = (_changed(job, machine, lever, factor, now) for factor in (2.0, 0.5))
        decided.append(Effect(lever.name, lever.now, doubled, halved, False))
    return tuple(sorted(decided, key=lambda effect: -_span(effect)))


def near_ties(decision: Decision) -> list[str]:
    """Return which plans take hardly longer than the chosen one and less device memory, the least last: the front of both."""
    chosen = decision.chosen
    near = [other for other in decision.others if other.seconds <= (1 + NEAR) * chosen.seconds]
    front, least = [], chosen.footprints.largest.device_bytes
    now = format_bytes(least)
    for other in sorted(near, key=lambda candidate: candidate.seconds):
        size = other.footprints.largest.device_bytes
        if size < (1 - NEAR) * least:
            least = size
            front.append(
                f"near tie: {other.describe()} takes {format_bytes(size)} of device memory instead of {now}, {percent(other.seconds / chosen.seconds)} a step"
            )
    if not near:
        return []
    plans = "1 other plan is" if len(near) == 1 else f"{len(near)} other plans are"
    return [f"{plans} within {NEAR:.1%} of the fastest", *front]


def effects_table(title: str, effects: Sequence[Effect], *, ranks: bool) -> Table:
    """Return figures as a table, those that change nothing left out; `ranks` says whether offers stand beside."""
    rows = [
        (
            effect.figure,
            effect.now,
            _described(effect.doubled),
            _described(effect.halved),
            *(("yes" if effect.changes_answer else "",) if ranks else ()),
        )
        for effect in effects
        if effect.doubled.matters or effect.halved.matters
    ]
    headings = ("figure", "now", "x2", "/2", *(("changes which is first",) if ranks else ()))
    return Table(headings, rows, title=title)


def _described(change: Change) -> str:
    if change.times is None:
        return "nothing fits"
    description = "-" if not change.matters else percent(change.times)
    return f"{description}, then {change.placement}" if change.placement and change.matters else description


def _altered(job: Job, machine: PricedMachine, topology: Topology) -> Candidate | None:
    """Return the fastest placement of the machine's mesh that fits a changed machine."""
    try:
        request = job.request(machine.name, topology, machine.num_devices, mesh=machine.plan.mesh)
        listed = candidates(request, job.bounder)
    except PlanError:
        return None
    fitting = [candidate for candidate in listed if not candidate.missing]
    return min(fitting, key=lambda candidate: candidate.sort_key, default=None)


def _span(effect: Effect) -> float:
    times = [change.times for change in (effect.doubled, effect.halved)]
    return float("inf") if None in times else max(times) - min(times)  # type: ignore[type-var, operator]


def memory_thresholds(machine: PricedMachine) -> tuple[MemoryThreshold, ...]:
    """Return the memories at which faster placements fit, the smallest first; larger ones only if faster still."""
    best: dict[tuple[str, str], MemoryThreshold] = {}
    for threshold in _lacking(machine):
        size = (threshold.where, format_bytes(threshold.needed_bytes, _DIGITS))
        best[size] = min(best.get(size, threshold), threshold, key=lambda item: item.times)
    useful: list[MemoryThreshold] = []
    for threshold in sorted(best.values(), key=lambda item: item.needed_bytes):
        if all(threshold.times < known.times - ALIKE for known in useful if known.where == threshold.where):
            useful.append(threshold)
    return tuple(useful)


def _lacking(machine: PricedMachine) -> Iterator[MemoryThreshold]:
    """Yield what placements that are faster than the machine's best need, where one memory alone lacks."""
    best_s = _best_s([machine.best])
    for candidate in machine.candidates:
        times = candidate.bound.seconds / best_s
        if not candidate.missing or times > 1 - _WORTH_SAYING:
            continue
        parts = candidate.missing.split("; ")
        if len(parts) == 1 and "of device memory" in parts[0]:
            yield MemoryThreshold(
                "device", candidate.footprints.largest.device_bytes, candidate.describe(), times
            )
        elif len(parts) == 1:
            yield MemoryThreshold(
                "host", candidate.footprints.fullest.size_bytes, candidate.describe(), times
            )


def _best_s(listed: Sequence[Candidate]) -> float:
    return min(candidate.bound.seconds for candidate in listed)
