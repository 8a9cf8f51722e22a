"""A machine with other rates: what would change the prediction, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from costmodel.rates.profile import CONSTANT_UNITS
from topology.errors import PlanError
from topology.validation import did_you_mean
from zosim.hardware.machine import Machine

LINKS = "links"
"""Axis of the bandwidth of everything on the way of a copy."""


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return a machine with some of its rates multiplied.

    Parameters
    ----------
    factors : mapping of str to float
        By constant (:data:`~costmodel.rates.profile.CONSTANT_UNITS`; all its formats alike), or ``"links"`` for the
        capacities of whatever copies cross. Positive.

    Raises
    ------
    PlanError
        If there is no such constant, or a factor is not positive.
    """
    for name, factor in factors.items():
        if name != LINKS and name not in CONSTANT_UNITS:
            message = f"unknown constant {name!r}"
            raise PlanError(message, hint=did_you_mean(name, [LINKS, *CONSTANT_UNITS]))
        if not 0 < factor < math.inf:
            message = f"factor {factor} of {name} must be positive and finite"
            raise PlanError(message, hint="1 leaves it as it is")
    used = {name for route in machine.routes.values() for name in route}
    capacities = {
        name: capacity * (factors.get(LINKS, 1.0) if name in used else 1.0)
        for name, capacity in machine.capacities.items()
    }
    changed = [
        constant.model_copy(
            update={
                end: getattr(constant, end) * factors[constant.quantity] for end in ("value", "low", "high")
            }
        )
        for constant in machine.profile.constants
        if constant.quantity in factors
    ]
    profile = machine.profile
    if changed:
        profile = profile.with_constants(*changed, origin=profile.origin)
    return replace(machine, profile=profile, capacities=MappingProxyType(capacities))
