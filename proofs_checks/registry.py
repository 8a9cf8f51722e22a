"""Every claim, in the order in which they are listed and checked: a module of claims is added to ``_MODULES``."""

from __future__ import annotations

from proofs_checks import (
    alignment,
    baselines,
    compositions,
    compressors,
    cost_invariants,
    distzo2_statements,
    estimators,
    kept_results,
    low_bits,
    meshes,
    moments,
    printed_ranges,
    printed_tables,
    quantised,
    quantised_cut,
    quzo_statements,
    restoring,
    runtimes,
    schedules,
    served_adapters,
    sliced_transfers,
    smoothing,
    sparq_chains,
    sparq_methods,
    sparq_premises,
    sparq_theorems,
    stages,
    step_time,
    zo2_statements,
    zoinfer_statements,
)
from proofs_checks.claims import Claim
from proofs_checks.papers import PAPERS
from topology.errors import ZosimError
from topology.validation import did_you_mean

_MODULES = (
    estimators,
    moments,
    alignment,
    meshes,
    restoring,
    kept_results,
    schedules,
    step_time,
    sliced_transfers,
    stages,
    quantised,
    compressors,
    quantised_cut,
    zo2_statements,
    distzo2_statements,
    smoothing,
    sparq_methods,
    sparq_premises,
    sparq_theorems,
    sparq_chains,
    quzo_statements,
    low_bits,
    zoinfer_statements,
    served_adapters,
    printed_ranges,
    printed_tables,
    compositions,
    runtimes,
    cost_invariants,
    baselines,
)

CLAIMS: tuple[Claim, ...] = tuple(
    sorted(
        (claim for module in _MODULES for claim in module.CLAIMS),
        key=lambda claim: list(PAPERS).index(claim.paper),
    )
)
"""By paper, in the order of :data:`~proofs_checks.papers.PAPERS`."""


def claims_named(*names: str, paper: str | None = None) -> tuple[Claim, ...]:
    """Return the claims of these names, or all of them, of one paper or of all.

    Raises
    ------
    ZosimError
        If there is no claim of a name, no such paper, or none of the named claims is of that paper.
    """
    known = [claim.name for claim in CLAIMS]
    for name in names:
        if name not in known:
            raise ZosimError(f"there is no claim {name!r}", hint=did_you_mean(name, known))
    if paper is not None and paper not in PAPERS:
        raise ZosimError(f"there is no paper {paper!r}", hint=did_you_mean(paper, list(PAPERS)))
    chosen = tuple(
        claim
        for claim in CLAIMS
        if (not names or claim.name in names) and (paper is None or claim.paper == paper)
    )
    if not chosen:
        raise ZosimError(f"none of these claims is of {paper}", hint="name no paper, or claims of that paper")
    return chosen
