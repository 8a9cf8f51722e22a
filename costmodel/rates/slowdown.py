"""The slowdown of a CPU, and what a profile predicts at another one.

Cores of a virtual machine may be hardware threads whose siblings belong to other tenants. While those are busy, everything takes
longer, and types of work by different factors. A profile holds the slowdown that its rates are for: how many times as long
a reference computation takes as at full speed. It also holds how far each type of work follows the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile

WorkType = Literal["products", "sampling", "passes", "calls"]

_CONSTANTS: Mapping[WorkType, tuple[str, ...]] = {
    "products": ("matmul_rate", "attention_rate", "attention_score_rate", "memory_bandwidth"),
    "sampling": ("sampling_rate", "split_s", "seed_s", "jump_s", "kept_row_s"),
    "passes": (
        "elementwise_bandwidth",
        "elementwise_cache_bandwidth",
        "param_pass_bandwidth",
        "param_pass_cache_bandwidth",
        "scratch_bandwidth",
        "exponential_rate",
        "cast_rate",
        "copy_h2d_bandwidth",
        "copy_d2h_bandwidth",
        "copy_cache_bandwidth",
        "copy_latency_s",
        "allocation_s",
        "allocation_s_per_byte",
        "codec_s",
        "quant_rate",
    ),
    "calls": (
        "dispatch_s",
        "product_s",
        "call_s",
        "gather_s",
        "kernel_s",
        "sharing_s",
        "instruction_s",
        "step_s",
    ),
}
_WORK_TYPE_OF = {constant: work_type for work_type, constants in _CONSTANTS.items() for constant in constants}


@dataclass(frozen=True)
class Slowdown:
    """The pace while a machine was calibrated."""

    fast_s: float  # what the reference takes at full speed
    # ratio, low, high: median of what it took, over that, and the range of this over seconds of the calibration.
    ratio: float
    low: float
    high: float
    # Part of the reference's slowing that each kind of work sees; kinds that were not seen slowed are left out.
    fractions: Mapping[WorkType, float]


def with_slowdown(profile: Profile, slowdown: Slowdown) -> Profile:
    """Return a profile of rates at full speed as one at the pace of its calibration, which it then knows."""
    source = "what a reference computation takes at full speed"
    constants = [_constant("reference_s", slowdown.fast_s, slowdown.fast_s, slowdown.fast_s, source)]
    source = "median time of the reference while calibrating, over that"
    constants.append(_constant("slowdown", 1.0, 1.0, max(1.0, slowdown.high), source))
    for work_type in _CONSTANTS:
        fraction = slowdown.fractions.get(work_type)
        source = "slowing of this work with that of the reference"
        if fraction is None:
            fraction, source = 1.0, "assumed: slows as the reference does, none was seen slowed"
        constants.append(
            _constant(f"slowdown_fraction.{work_type}", fraction, fraction / 2, 2 * fraction, source)
        )
    return at_slowdown(profile.with_constants(*constants, origin=profile.origin), slowdown.ratio)


def at_slowdown(profile: Profile, ratio: float) -> Profile:
    """Return what a profile says at a slowdown, as times what the reference takes at full speed.

    - `profile`: one that knows its pace: others are returned as they are.
    - `ratio`: at least 1; less counts as 1.
    """
    own = profile.values().get("slowdown")
    if own is None:
        return profile
    ratio = max(1.0, ratio)
    scaled = []
    for constant in profile.constants:
        slowing = _slowing(profile, constant.quantity, own, ratio)
        factor = 1 / slowing if constant.is_rate else slowing
        ends = {name: getattr(constant, name) * factor for name in ("low", "value", "high")}
        scaled.append(constant.model_copy(update=ends))
    slowdown = profile.constant("slowdown")
    known = slowdown.model_copy(update={"value": ratio, "high": max(ratio, slowdown.high)})
    return profile.with_constants(*scaled, known, origin=profile.origin)


def slowdown_in(profile: Profile, reference_s: float) -> float:
    """Return the pace, as a profile has it, at which the reference takes so long; 1 if the profile knows none."""
    fast_s = profile.values().get("reference_s")
    return 1.0 if fast_s is None else max(1.0, reference_s / fast_s)


def off_slowdown(profile: Profile, ratio: float) -> float:
    """Return by how much longer a step of all kinds of work takes at a pace than the profile says; 0 if it knows none."""
    values = profile.values()
    if "slowdown" not in values:
        return 0.0
    slowings = [
        _slowing(profile, constants[0], values["slowdown"], ratio) for constants in _CONSTANTS.values()
    ]
    return math.exp(sum(map(math.log, slowings)) / len(slowings)) - 1


def _slowing(profile: Profile, constant: str, own: float, ratio: float) -> float:
    work_type = _WORK_TYPE_OF.get(constant)
    if work_type is None:
        return 1.0
    fraction = profile.values()[f"slowdown_fraction.{work_type}"]
    return (1 + fraction * (ratio - 1)) / (1 + fraction * (own - 1))


def _constant(name: str, value: float, low: float, high: float, source: str) -> Constant:
    unit = CONSTANT_UNITS[name.partition(".")[0]]
    return Constant(name=name, value=value, low=low, high=high, unit=unit, source=source)
