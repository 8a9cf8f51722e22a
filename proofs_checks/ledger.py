"""The ledger: claims run one by one, each with its verdict and what came of its planted faults, as data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from proofs_checks.claims import Check, Claim, FaultResult, Judged, Verdict, faults_of, try_mutant
from proofs_checks.outcomes import Context, Estimate, Outcome


@dataclass(frozen=True)
class Entry:
    """A claim with all that was run for it.

    Attributes
    ----------
    judged : Judged
    faults : tuple of FaultResult
        Empty where none were planted.
    fault_seconds : float
    """

    judged: Judged
    faults: tuple[FaultResult, ...] = ()
    fault_seconds: float = 0.0

    @property
    def claim(self) -> Claim:
        """The claim."""
        return self.judged.claim

    @property
    def verdict(self) -> Verdict:
        """Its verdict."""
        return self.judged.verdict

    @property
    def unnoticed(self) -> tuple[FaultResult, ...]:
        """Faults that were planted and not noticed, or that do not fit the code any more."""
        return tuple(fault for fault in self.faults if fault.verdict in ("survived", "does not apply"))

    @property
    def passed(self) -> bool:
        """Whether the claim has a verdict, and every planted fault was noticed."""
        return self.judged.is_settled and not self.unnoticed

    def to_data(self, context: Context) -> dict[str, Any]:
        """Return the entry for JSON."""
        checks = [
            _check_data(check, outcome, [fault for fault in self.faults if fault.check is check])
            for check, outcome in zip(self.claim.checks, self.judged.outcomes, strict=True)
        ]
        resolutions = [check["resolution"] for check in checks if check["resolution"] is not None]
        return {
            **described(self.claim),
            "verdict": str(self.verdict),
            "verdict_key": self.verdict.name.lower(),
            "passed": self.passed,
            "checks": checks,
            "resolution": max(resolutions, default=None),
            "seconds": round(self.judged.seconds, 3),
            "fault_seconds": round(self.fault_seconds, 3),
            "seed": context.seed,
            "size": context.size,
        }


def run(claims: tuple[Claim, ...], context: Context, *, mutate: bool) -> Iterator[Entry]:
    """Yield an entry for each claim as soon as it is there."""
    planted = replace(context, size="quick")  # a fault shows in small samples, or it is too small a fault
    for claim in claims:
        judged = claim.run(context)
        begin = time.perf_counter()
        faults = tuple(try_mutant(*pair, planted) for pair in faults_of(claim)) if mutate else ()
        yield Entry(judged, faults, time.perf_counter() - begin)


def described(claim: Claim) -> dict[str, Any]:
    """Return what a claim says, for JSON."""
    return {
        "name": claim.name,
        "paper": claim.paper,
        "where": claim.where,
        "quotation": claim.quotation,
        "statement": claim.statement,
        "hypotheses": claim.hypotheses,
        "amendment": claim.amendment,
        "breaks": claim.breaks,
        "consequence": claim.consequence,
        "references": claim.references,
        "derivation": claim.derivation,
        "awaits": claim.awaits,
        "mutants": [{"name": mutant.name, "change": mutant.description} for mutant in claim.mutants],
    }


def _check_data(check: Check, outcome: Outcome, faults: list[FaultResult]) -> dict[str, Any]:
    return {
        "role": str(check.role),
        "title": check.title,
        "passed": outcome.passed,
        "statistic": _finite(outcome.statistic),
        "bound": _finite(outcome.bound),
        "measured": outcome.measured,
        "details": outcome.details,
        "estimates": [_estimate_data(estimate) for estimate in shown_estimates(outcome)],
        "num_comparisons": len(outcome.estimates),
        "resolution": None if outcome.resolution is None else _finite(outcome.resolution),
        "error": outcome.error,
        "mutants": [
            {
                "name": fault.mutant.name,
                "change": fault.mutant.description,
                "verdict": fault.verdict,
                "statistic": None if fault.outcome is None else _finite(fault.outcome.statistic),
                "reason": fault.reason,
            }
            for fault in faults
        ],
    }


_MOST_SHOWN = 40


def shown_estimates(outcome: Outcome) -> list[Estimate]:
    """Return the comparisons that are shown: those farthest from their theory, if there are very many."""
    ordered = sorted(outcome.estimates, key=lambda estimate: estimate.p_value)
    return ordered[:_MOST_SHOWN]


def _estimate_data(estimate: Estimate) -> dict[str, Any]:
    return {
        "name": estimate.name,
        "num_samples": estimate.num_samples,
        **{
            name: _finite(getattr(estimate, name))
            for name in ("value", "theory", "low", "high", "p_value", "resolution")
        },
    }


def _finite(value: float) -> float | None:
    """Return `value` for JSON, which has neither infinity nor NaN."""
    return float(value) if math.isfinite(value) else None
