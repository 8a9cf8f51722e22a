"""Decisions and predictions as people read them."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from topology.units import format_bytes, format_seconds
from zosim.console import table
from zosim.footprint import Footprint
from zosim.planner import Candidate, Decision, describe
from zosim.predict import Prediction, Subject


def decision_view(decision: Decision) -> RenderableType:
    """Return a decision: the candidates, the prediction of the best, and the reasons."""
    return Group(
        _candidates_table(decision),
        "",
        prediction_view(decision.chosen.subject, _prediction(decision.chosen)),
        "",
        *[f"- {reason}" for reason in decision.reasons],
    )


def decision_data(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON knows it."""
    prediction = _prediction(decision.chosen)
    return {
        "plan": decision.chosen.plan.model_dump(mode="json"),
        "prediction": prediction_data(prediction),
        "reasons": list(decision.reasons),
        "others": [_candidate_data(candidate) for candidate in decision.others],
        "rejected": [
            _candidate_data(candidate) | {"missing": candidate.missing} for candidate in decision.rejected
        ],
    }


def prediction_view(subject: Subject, prediction: Prediction) -> RenderableType:
    """Return a prediction: time, throughput, bottleneck, memory by parts, seconds by label."""
    plan = subject.plan
    limit = prediction.bottleneck
    facts = [
        ("plan", f"{plan.model.name}, batch {plan.batch} x {plan.seq} tokens, {describe(plan)}"),
        (
            "device",
            f"{plan.placement.devices[0]} of {plan.placement.topology} ({prediction.profile_origin} figures)",
        ),
        ("step time", _interval(prediction)),
        ("throughput", f"{prediction.tokens_per_s:,.4g} tokens/s"),
        ("bottleneck", f"{limit.words}, {limit.share:.0%} of the critical path"),
        ("device memory", _memory(prediction.footprint, "device")),
        ("host memory", _memory(prediction.footprint, "host")),
        (
            "busy per step",
            ", ".join(f"{name} {format_seconds(s)}" for name, s in prediction.seconds_by_label),
        ),
    ]
    return table(("predicted", ""), facts)


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON knows it."""
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.low_s,
        "step_time_high_s": prediction.high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "bottleneck": prediction.bottleneck,
        "device_bytes": prediction.footprint.device_bytes,
        "host_bytes": prediction.footprint.host_bytes,
        "memory_parts": list(prediction.footprint.parts),
        "seconds_by_label": dict(prediction.seconds_by_label),
        "profile_origin": prediction.profile_origin,
    }


def _prediction(candidate: Candidate) -> Prediction:
    assert candidate.prediction is not None
    return candidate.prediction


def _interval(prediction: Prediction) -> str:
    middle, low, high = (
        format_seconds(seconds) for seconds in (prediction.step_time_s, prediction.low_s, prediction.high_s)
    )
    return f"{middle}  (between {low} and {high})"


def _memory(footprint: Footprint, where: str) -> str:
    size = footprint.device_bytes if where == "device" else footprint.host_bytes
    return f"{format_bytes(size)}  ({footprint.describe(where)})"


def _candidates_table(decision: Decision) -> RenderableType:
    rows = [
        *[
            _row(candidate, "chosen" if candidate is decision.chosen else "fits")
            for candidate in _fitting(decision)
        ],
        *[_row(candidate, "does not fit") for candidate in decision.rejected],
    ]
    return table(("placement", "step", "device", "host", ""), rows, numeric=("step", "device", "host"))


def _fitting(decision: Decision) -> tuple[Candidate, ...]:
    return (decision.chosen, *decision.others)


def _row(candidate: Candidate, verdict: str) -> tuple[str, ...]:
    taken = candidate.subject.footprint
    sign = "" if candidate.is_simulated else ">= "
    return (
        candidate.describe(),
        sign + format_seconds(candidate.seconds),
        format_bytes(taken.device_bytes),
        format_bytes(taken.host_bytes),
        verdict,
    )


def _candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "placement": candidate.describe(),
        "step_time_s": candidate.seconds,
        "is_simulated": candidate.is_simulated,
        "device_bytes": candidate.subject.footprint.device_bytes,
        "host_bytes": candidate.subject.footprint.host_bytes,
    }
