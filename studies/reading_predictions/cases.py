"""Predictions to look at, and runs on machines that are not quite what their profile says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import estimate
from costmodel.models.configs import read_model_spec
from costmodel.rates.profile import Profile
from topology import load_preset
from zosim.planning.predict import PlannedRun
from zosim.plans import Placement, Plan, Residency, Schedule, Weights
from zosim.timeline import Timeline

TERMS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul_rate", "memory_bandwidth"),
    "param_pass": ("param_pass_bandwidth", "param_pass_cache_bandwidth", "scratch_bandwidth"),
    "sampling": ("sampling_rate",),
    "elementwise": ("elementwise_bandwidth", "elementwise_cache_bandwidth"),
    "dispatch": ("dispatch_s", "product_s", "call_s"),
}
"""Causes of a duration, and the constants that each depends on."""

_NOISE = 0.01
"""Relative standard deviation of a measured instruction."""


@dataclass(frozen=True)
class Reading:
    """One instruction of a step."""

    instruction: str
    label: str
    predicted_s: float
    measured_s: float
    terms: Mapping[str, float]  # what the prediction adds up: seconds by cause


def offloaded(model: str = "opt-13b", *, seq: int = 512) -> PlannedRun:
    """Return a model that passes through a desktop GPU block by block."""
    half = Weights(dtype="float16")
    return _planned(
        "rtx4090-2x",
        "gpu0",
        model,
        seq,
        weights=half,
        residency=Residency(blocks="offloaded"),
        schedule=Schedule(update="delayed"),
    )


def on_cpu(model: str = "opt-125m", *, batch: int = 1, seq: int = 64) -> PlannedRun:
    """Return a model that stays in a laptop's memory."""
    return _planned("cpu-laptop", "cpu0", model, seq, batch=batch)


def _planned(
    machine: str, device: str, model: str, seq: int, *, batch: int = 1, **axes: object
) -> PlannedRun:
    topology = load_preset(machine)
    plan = Plan.model_validate(
        {
            "model": read_model_spec(model),
            "placement": Placement(topology=machine, devices=(device,)),
            "batch": batch,
            "seq": seq,
        }
        | axes
    )
    return PlannedRun(plan, topology, datasheet_profile(topology, device))


def changed(profile: Profile, kinds: Sequence[str], times: float) -> Profile:
    """Return a profile of a machine on which what depends on these constants takes `times` as long."""
    constants = []
    for constant in profile.constants:
        if constant.quantity in kinds:
            factor = 1 / times if constant.is_rate else times
            ends = {end: getattr(constant, end) * factor for end in ("value", "low", "high")}
            constants.append(constant.model_copy(update=ends))
    return profile.with_constants(*constants, origin=profile.origin)


def run_on(planned: PlannedRun, term: str, times: float) -> Timeline:
    """Return what a run on a machine looks like whose `term` takes `times` as long as the profile says."""
    other = PlannedRun(planned.plan, planned.topology, changed(planned.profile, TERMS[term], times))
    return replace(other.simulated(num_steps=6).expanded(), source="measured")


def rows_of(planned: PlannedRun, term: str, times: float, *, seed: int = 0) -> list[Reading]:
    """Return a step's instructions, predicted, and measured on such a machine with some noise."""
    generator = np.random.default_rng(seed)
    actual = changed(planned.profile, TERMS[term], times)
    rows = []
    for item in planned.program.step:
        cost = estimate(item.work, planned.profile)
        noise = 1 + _NOISE * float(generator.standard_normal())
        measured_s = estimate(item.work, actual).seconds * noise
        rows.append(Reading(item.id, item.label, cost.seconds, measured_s, _causes(cost.terms)))
    return rows


def _causes(terms: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by cause, with all that depends on the rate of the generator as one."""
    sampling = {"sampling", "shared_sampling", "skip"} & terms.keys()
    rest = {name: seconds for name, seconds in terms.items() if name not in sampling}
    return rest | ({"sampling": sum(terms[name] for name in sampling)} if sampling else {})
