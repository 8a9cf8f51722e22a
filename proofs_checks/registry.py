"""Every claim, in the order in which they are listed and checked."""

from __future__ import annotations

from proofs_checks import (
    alignment,
    baselines,
    compressors,
    cost_invariants,
    meshes,
    moments,
    quantised,
    quantised_cut,
    restoring,
    schedules,
    sliced_transfers,
    stages,
    step_time,
    unbiasedness,
)
from proofs_checks.claims import Claim
from topology.errors import ZosimError
from topology.validation import did_you_mean

CLAIMS: tuple[Claim, ...] = (
    *unbiasedness.CLAIMS,
    *moments.CLAIMS,
    *alignment.CLAIMS,
    *meshes.CLAIMS,
    *restoring.CLAIMS,
    *schedules.CLAIMS,
    *step_time.CLAIMS,
    *sliced_transfers.CLAIMS,
    *stages.CLAIMS,
    *cost_invariants.CLAIMS,
    *baselines.CLAIMS,
    *quantised.CLAIMS,
    *compressors.CLAIMS,
    *quantised_cut.CLAIMS,
)


def claims_named(name: str | None) -> tuple[Claim, ...]:
    """Return the claim called `name`, or all of them.

    Raises
    ------
    ZosimError
        If there is none of that name.
    """
    if name is None:
        return CLAIMS
    matching = tuple(claim for claim in CLAIMS if claim.name == name)
    if not matching:
        hint = did_you_mean(name, [claim.name for claim in CLAIMS])
        raise ZosimError(f"there is no claim {name!r}", hint=hint)
    return matching
