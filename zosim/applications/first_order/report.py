"""A plan beside a first-order step of the same devices, split points and batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from topology.units import format_bytes
from zosim.analysis.counts import StepCounts, step_counts
from zosim.applications.first_order.programs import FirstOrder, baseline_plan, lower_first_order
from zosim.planning.predict import PlannedRun
from zosim.planning.views import prediction_data
from zosim.report import Bullets, Report, Table


def baseline_run(planned: PlannedRun, settings: FirstOrder) -> PlannedRun:
    """Return a first-order step on the hardware of `planned`, ready to be simulated.

    Raises PlanError if the plan cannot be done first-order.
    """
    settings = with_samples(settings, planned.plan.batch)
    plan = baseline_plan(planned.plan)
    return replace(planned, plan=plan, edited=lower_first_order(plan, settings))


def with_samples(settings: FirstOrder, batch: int) -> FirstOrder:
    """Return settings that keep the messages of a batch at least, where they keep any."""
    if not settings.num_kept_samples:
        return settings
    return settings.model_copy(update={"num_kept_samples": max(settings.num_kept_samples, batch)})


def comparison_data(planned: PlannedRun, baseline: PlannedRun, settings: FirstOrder) -> dict[str, Any]:
    """Return the baseline as JSON knows it, and what both send."""
    settings = with_samples(settings, planned.plan.batch)
    return {
        "counts": step_counts(planned.programs).to_data(),
        "first_order": {
            "settings": settings.model_dump(mode="json"),
            "counts": step_counts(baseline.programs).to_data(),
            **prediction_data(baseline.prediction),
        },
    }


def comparison_view(planned: PlannedRun, baseline: PlannedRun, settings: FirstOrder) -> Report:
    """Return both side by side: time, what is sent, memory by component."""
    settings = with_samples(settings, planned.plan.batch)
    columns = ("per step", planned.plan.describe(), settings.describe())
    sides = [_facts(side) for side in (planned, baseline)]
    rows = [(name, mine, sides[1][name]) for name, mine in sides[0].items()]
    return Report("", Table(columns, rows), Bullets(_remarks(planned, baseline)))


def _facts(planned: PlannedRun) -> dict[str, str]:
    prediction, counts = planned.prediction, step_counts(planned.programs)
    return {
        "time": prediction.interval,
        "activations across split points": _messages(counts.num_activations, counts.activation_bytes),
        "their gradients back": _messages(counts.num_gradients, counts.gradient_bytes),
        "scalars": _messages(counts.num_scalars, counts.scalar_bytes),
        "gradients summed": format_bytes(counts.reduced_bytes),
        "sent in all": format_bytes(counts.size_bytes),
        "device memory, fullest rank": format_bytes(prediction.footprints.largest.device_bytes),
        "": prediction.footprints.largest.describe(),
        "device memory, all ranks": format_bytes(_total_bytes(planned)),
        "host memory, fullest host": format_bytes(prediction.footprints.fullest.size_bytes),
    }


def _remarks(planned: PlannedRun, baseline: PlannedRun) -> Iterator[str]:
    times = [side.prediction.step_time_s for side in (planned, baseline)]
    memory = [_total_bytes(side) for side in (planned, baseline)]
    counts: Sequence[StepCounts] = [step_counts(side.programs) for side in (planned, baseline)]
    phrases = [
        f"{times[1] / times[0]:.2f} times the plan's step time",
        f"{memory[1] / memory[0]:.2f} times its memory",
    ]
    if counts[0].size_bytes:
        phrases.append(f"{counts[1].size_bytes / counts[0].size_bytes:.2f} times its bytes")
    yield f"a first-order step takes {', '.join(phrases)}; how much either learns in a step is not compared"
    short = [
        rank
        for rank, device in enumerate(baseline.plan.placement.devices)
        if baseline.footprints.ranks[rank].device_bytes > baseline.topology.device_spec(device).memory_bytes
    ]
    if short:
        yield f"it does not fit the device of rank {short[0]}{f' and {len(short) - 1} others' if short[1:] else ''}"


def _total_bytes(planned: PlannedRun) -> int:
    return sum(taken.device_bytes for taken in planned.footprints.ranks)


def _messages(count: int, size_bytes: int) -> str:
    return f"{count}, {format_bytes(size_bytes)}" if count else "none"
