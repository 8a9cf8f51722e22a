"""Decisions and predictions as people read them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from costmodel.devices.prices import Rent, shipped_prices
from topology.units import format_bytes, format_count, format_seconds
from zosim.analysis.counts import step_counts
from zosim.planning.explain import ALIKE, about_formats, about_ranks, describe_contention
from zosim.planning.pipelining import about_stages, pipelining
from zosim.planning.planner import Candidate, Decision, pareto_front
from zosim.planning.predict import PlannedRun, Prediction
from zosim.plans import Plan
from zosim.report import Bullets, Report, Reportable, Table

_NUM_SHARED = 3
# A resource that is busy for less holds nobody up.
_WORTH_SAYING = 0.05
# Pinning that takes less is not noticed.
_WORTH_WAITING_S = 1.0
_NUM_FITTING = 16
_NUM_REJECTED = 8


def decision_view(decision: Decision) -> Report:
    """Return a decision: the candidates, the prediction of the best, the reasons, and what it is held against."""
    prediction = prediction_view(decision.chosen.planned)
    view = Report("", *_candidates(decision), prediction, Bullets(decision.reasons))
    return view if decision.compared is None else Report("", view, decision.compared.view())


def decision_data(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON knows it."""
    return stages_data(decision.chosen.planned) | {
        "plan": decision.chosen.plan.model_dump(mode="json"),
        "prediction": prediction_data(decision.prediction),
        "guarantee": asdict(decision.guarantee) | {"is_optimal": decision.guarantee.is_optimal},
        "reasons": list(decision.reasons),
        "others": [_candidate_data(candidate) for candidate in decision.others],
        "rejected": [
            _candidate_data(candidate) | {"missing": candidate.missing} for candidate in decision.rejected
        ],
        **({} if decision.compared is None else {"first_order": decision.compared.to_data()}),
    }


def front_view(decision: Decision) -> Report:
    """Return the Pareto front of all plans that fit, money as seconds of devices, and in rent where the price table has the machine."""
    rent = _rent(decision)
    rows = [
        (
            *_row(candidate, "")[:-1],
            f"{candidate.costs[-1]:.4g}",
            *(() if rent is None else (f"{_money_of_1000_steps(rent, candidate):.4g}",)),
        )
        for candidate in decision.front
    ]
    money = () if rent is None else (f"{shipped_prices().currency} per 1,000 steps",)
    columns = ("Pareto front", "step", "device", "host", "device seconds", *money)
    table = Table(columns, rows, numeric=columns[1:])
    if rent is None:
        return Report("", table)
    terms = (
        f"rented {rent} for {rent.value:g} {shipped_prices().currency} an hour and {rent.per}, of {rent.day}"
    )
    return Report("", table, Bullets((terms,)))


def front_data(decision: Decision) -> dict[str, Any]:
    """Return the Pareto front of all plans that fit as JSON knows it."""
    rent = _rent(decision)
    return {
        "front": [
            _candidate_data(candidate)
            | {"device_seconds": candidate.costs[-1]}
            | ({} if rent is None else {"rent_of_1000_steps": _money_of_1000_steps(rent, candidate)})
            for candidate in decision.front
        ],
        **(
            {}
            if rent is None
            else {"rent": rent.model_dump(mode="json") | {"currency": shipped_prices().currency}}
        ),
    }


def _rent(decision: Decision) -> Rent | None:
    """Return the shipped price table's first rent on demand of a decision's machine; None where it has none."""
    machines, name = shipped_prices().machines, decision.chosen.plan.placement.topology
    rents = machines[name].rent_per_hour if name in machines else ()
    return next((rent for rent in rents if rent.term == "on-demand"), None)


def _money_of_1000_steps(rent: Rent, candidate: Candidate) -> float:
    """Return what 1,000 steps cost: of the devices in use, or of the whole machine where it is let whole."""
    step_s = candidate.costs[-1 if rent.per == "device" else 0]
    return 1000 * step_s / 3600 * rent.value


def prediction_view(planned: PlannedRun) -> Table:
    """Return a prediction: time, throughput, bottleneck, memory by component, seconds by label."""
    plan, prediction = planned.plan, planned.prediction
    limit, device, host = prediction.bottleneck, prediction.footprints.largest, prediction.footprints.fullest
    among = f", for {len(host.ranks)} ranks" if len(host.ranks) > 1 else ""
    several, pinned = plan.placement.world_size > 1, prediction.pinning
    facts = [
        ("plan", f"{plan.model.describe()}, batch {plan.batch} x {plan.seq} tokens, {plan.describe()}"),
        ("devices" if several else "device", f"{_devices(plan)} ({_figures(planned)})"),
        *([("experts", _about_experts(plan))] if plan.model.experts else []),
        ("step time", prediction.interval),
        ("throughput", f"{format_count(prediction.tokens_per_s)} tokens/s"),
        (
            "bottleneck",
            f"{limit.description}, {limit.share:.0%} of the critical path"
            + (f" of rank {prediction.slowest_rank}" if several else ""),
        ),
        (
            "device memory",
            f"{format_bytes(device.device_bytes)}  ({device.describe()}"
            + (f"; rank {prediction.footprints.largest_rank}, the most of any)" if several else ")"),
        ),
        ("host memory", f"{format_bytes(host.size_bytes)}  ({host.describe()}{among})"),
        *([("drives", f"{format_bytes(host.disk_bytes)} of blocks{among}")] if host.disk_bytes else []),
        *(
            [("start-up", pinned.description)]
            if pinned is not None and pinned.high_s >= _WORTH_WAITING_S
            else []
        ),
        (
            "busy per step",
            ", ".join(f"{name} {format_seconds(s)}" for name, s in prediction.seconds_by_label),
        ),
    ]
    busy = [item for item in prediction.contention if item.share >= _WORTH_SAYING]
    shared = [describe_contention(item) for item in busy[:_NUM_SHARED]]
    facts += [("shared" if not number else "", description) for number, description in enumerate(shared)]
    return Table(("predicted", ""), facts)


def _about_experts(plan: Plan) -> str:
    """Return how many experts there are, what is assumed of their routing, and how they move."""
    experts = plan.model.experts
    assert experts is not None
    shares = (
        "shares measured"
        if experts.shares
        else "between even shares and half of the experts (`zosim probe --experts` measures)"
    )
    moved = "; a block moves with all of its experts" if plan.is_offloaded else ""
    return f"{experts.num_per_token} of {experts.num_experts} for each token; routing: {shares}{moved}"


def simulation_view(planned: PlannedRun) -> Report:
    """Return a prediction, and what several ranks cost each other."""
    alone = planned.plan.placement.world_size == 1
    notes = list(about_formats(planned))
    notes += [] if alone else about_ranks(planned.plan, planned.prediction)
    if planned.plan.num_stages > 1:
        notes += about_stages(planned)
    return Report("", prediction_view(planned), Bullets(notes))


@dataclass(frozen=True)
class PlanComparison(Reportable):
    """What two plans are predicted to do, side by side."""

    heading = "Two plans"

    first: PlannedRun
    second: PlannedRun

    @property
    def runs(self) -> dict[str, PlannedRun]:
        """Both plans."""
        return {"first": self.first, "second": self.second}

    def to_json(self) -> str:
        """Return both predictions, and the second's figures over the first's."""
        first, second = (prediction_data(planned.prediction) for planned in (self.first, self.second))
        ratios = {
            key: second[key] / first[key]
            for key in ("step_time_s", "tokens_per_s", "device_bytes", "host_bytes")
            if first[key]
        }
        return json.dumps(
            to_jsonable_python({"first": first, "second": second, "second_over_first": ratios}), indent=2
        )

    def view(self) -> Report:
        """Return the table."""
        return Report("", self.table())

    def table(self) -> Table:
        """Return the predictions as columns, and the second over the first."""
        return side_by_side(self.runs, ratio="second / first")


def side_by_side(runs: Mapping[str, PlannedRun], ratio: str = "") -> Table:
    """Return predictions as columns under their names, and the last over the first under `ratio`."""
    predictions = [planned.prediction for planned in runs.values()]
    rows: list[tuple[str, ...]] = []

    def add(name: str, cells: Iterable[str], values: Sequence[float | None] = ()) -> None:
        rows.append((name, *cells, *([_times(values[0], values[-1]) if values else ""] if ratio else [])))

    add("plan", [planned.plan.describe() for planned in runs.values()])
    add("devices", [_devices(planned.plan) for planned in runs.values()])
    add("step time", [p.interval for p in predictions], [p.step_time_s for p in predictions])
    add(
        "throughput",
        [f"{format_count(p.tokens_per_s)} tokens/s" for p in predictions],
        [p.tokens_per_s for p in predictions],
    )
    add("bottleneck", [f"{p.bottleneck.description}, {p.bottleneck.share:.0%}" for p in predictions])
    for name, sizes in {
        "device memory": [p.footprints.largest.device_bytes for p in predictions],
        "host memory": [p.footprints.fullest.size_bytes for p in predictions],
    }.items():
        add(name, map(format_bytes, sizes), sizes)
    seconds = [dict(p.seconds_by_label) for p in predictions]
    for label in dict.fromkeys(itertools.chain(*seconds)):
        taken = [by_label.get(label) for by_label in seconds]
        add(f"{label}, busy", ["-" if s is None else format_seconds(s) for s in taken], taken)
    return Table(("predicted", *runs, *([ratio] if ratio else [])), rows, numeric=(ratio,))


def _times(first: float | None, second: float | None) -> str:
    return f"{second / first:.3g}" if first and second else ""


def stages_data(planned: PlannedRun) -> dict[str, Any]:
    """Return bubbles and traffic as JSON knows them; nothing for a plan of one stage."""
    if planned.plan.num_stages == 1:
        return {}
    return {"stages": pipelining(planned), "counts": step_counts(planned.programs).to_data()}


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON knows it."""
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.low_s,
        "step_time_high_s": prediction.high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "bottleneck": prediction.bottleneck,
        "device_bytes": prediction.footprints.largest.device_bytes,
        "host_bytes": prediction.footprints.fullest.size_bytes,
        "pinning": None if prediction.pinning is None else prediction.pinning._asdict(),
        "memory_components": list(prediction.footprints.largest.components),
        "seconds_by_label": dict(prediction.seconds_by_label),
        "profile_origin": prediction.profile_origin,
        "disturbed_share": prediction.disturbed_share,
        "num_ranks": len(prediction.footprints.ranks),
        "slowest_rank": prediction.slowest_rank,
        "exchange_s": prediction.exchange_s,
        "shared": list(prediction.contention),
        "ranks": [{"device_bytes": taken.device_bytes} for taken in prediction.footprints.ranks],
        "hosts": [
            {
                "host": host.host,
                "ranks": host.ranks,
                "host_bytes": host.size_bytes,
                "disk_bytes": host.disk_bytes,
                "components": host.components,
            }
            for host in prediction.footprints.hosts
        ],
    }


def _figures(planned: PlannedRun) -> str:
    """Return where the figures of a prediction come from, whether their calibration was disturbed, and whether some are assumed."""
    prediction, topology = planned.prediction, planned.topology
    disturbed = "disturbed, " if prediction.disturbed_share else ""
    is_assumed = planned.plan.is_offloaded and topology.with_assumed_memory(2.0) is not topology
    return (
        f"{disturbed}{prediction.profile_origin} figures{', assumed ones of the host' if is_assumed else ''}"
    )


def _devices(plan: Plan) -> str:
    placement = plan.placement
    first, *others = placement.devices
    hosts = len(placement.ranks_by_host)
    listed = (
        ", ".join(placement.devices)
        if len(others) < 4
        else f"{first} .. {others[-1]}, {len(others) + 1} ranks"
    )
    return f"{listed} of {placement.topology}" + (f", {hosts} hosts" if hosts > 1 else "")


def _candidates(decision: Decision) -> tuple[Table, str]:
    """Return the candidates on the Pareto fronts of step time, memory and devices: of what fits, and of what does not."""
    chosen = decision.chosen
    fitting = [c for c in pareto_front((chosen, *decision.others)) if c is not chosen]
    # The second of the reasons, which a bound may dominate.
    second = next((c for c in decision.others if c.is_simulated), None)
    if second is not None and second not in fitting:
        fitting.insert(0, second)
    rows = [
        _row(chosen, "chosen"),
        *[_row(candidate, _verdict(candidate, chosen)) for candidate in fitting[: _NUM_FITTING - 1]],
        *[_row(candidate, "does not fit") for candidate in pareto_front(decision.rejected)[:_NUM_REJECTED]],
    ]
    left_out = decision.guarantee.num_plans - len(rows)
    shown = Table(("placement", "step", "device", "host", ""), rows, numeric=("step", "device", "host"))
    return shown, f"and {left_out:,} others, all of them slower, larger or too large" if left_out > 0 else ""


def _verdict(candidate: Candidate, chosen: Candidate) -> str:
    """Return whether another plan that fits is slower, as far as is known."""
    if candidate.seconds > chosen.seconds * (1 + ALIKE):
        return "fits"
    return "as fast" if candidate.is_simulated else "perhaps as fast"


def _row(candidate: Candidate, verdict: str) -> tuple[str, ...]:
    taken = candidate.footprints
    # A bound, of those that cannot win.
    sign = "" if candidate.is_simulated else ">= "
    return (
        candidate.describe(),
        sign + format_seconds(candidate.seconds),
        format_bytes(taken.largest.device_bytes),
        format_bytes(taken.fullest.size_bytes),
        verdict,
    )


def candidates_data(decision: Decision) -> Iterator[dict[str, Any]]:
    """Yield step time and memory of every candidate, the chosen one first, with what became of it."""
    for outcome, listed in (
        ("chosen", [decision.chosen]),
        ("fits", decision.others),
        ("does not fit", decision.rejected),
    ):
        yield from (_candidate_data(candidate) | {"outcome": outcome} for candidate in listed)


def candidates_svg(decision: Decision) -> str:
    """Return a scatter of step time against device memory of all candidates that fit; empty for one."""
    from zosim.analysis.pictures import scatter_svg

    points = [
        (row["placement"], row["device_bytes"], row["step_time_s"], row["outcome"] == "chosen")
        for row in candidates_data(decision)
        if row["outcome"] != "does not fit"
    ]
    return scatter_svg(points, "device memory", "step time") if len(points) > 1 else ""


def _candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "placement": candidate.describe(),
        "devices": list(candidate.plan.placement.devices),
        "step_time_s": candidate.seconds,
        "is_simulated": candidate.is_simulated,
        "device_bytes": candidate.footprints.largest.device_bytes,
        "host_bytes": candidate.footprints.fullest.size_bytes,
    }
