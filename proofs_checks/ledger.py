"""The ledger: claims run one by one, each with its verdict and what came of its planted faults, as data."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, Self

from proofs_checks.claims import (
    Check,
    Claim,
    FaultResult,
    FaultVerdict,
    Judged,
    Verdict,
    faults_of,
    try_fault,
)
from proofs_checks.outcomes import Context, Estimate, Outcome
from proofs_checks.planting import Fault, FaultError


@dataclass(frozen=True)
class Entry:
    """A claim with all that was run for it."""

    judged: Judged
    faults: tuple[FaultResult, ...] = ()  # empty where none were planted
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
        """Faults that were planted and not noticed: no check measured, called or fits what they change."""
        return tuple(tried for tried in self.faults if tried.verdict not in ("caught", "crashed"))

    @property
    def passed(self) -> bool:
        """Whether the claim has a verdict, and every planted fault was noticed."""
        return self.judged.is_settled and not self.unnoticed

    def to_data(self, context: Context) -> dict[str, Any]:
        """Return the entry for JSON."""
        checks = [
            _check_data(check, outcome, [tried for tried in self.faults if tried.check is check])
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
    """Yield an entry for each claim as soon as the claim has been checked."""
    planted = replace(context, size="quick")  # a fault shows in small samples, or it is too small a fault
    for claim in claims:
        judged = claim.run(context)
        begin = time.perf_counter()
        faults = tuple(try_fault(*pair, planted) for pair in faults_of(claim)) if mutate else ()
        yield Entry(judged, faults, time.perf_counter() - begin)


@dataclass(frozen=True)
class FaultRow:
    """A planted fault, and what came of every chosen claim while it was in force."""

    fault: Fault
    planted_by: tuple[str, ...]  # names of the claims that plant it
    verdicts: dict[str, FaultVerdict]  # by the name of the claim

    def of(self, verdict: FaultVerdict) -> list[str]:
        """Return the names of the claims on which the fault had this verdict."""
        return [name for name, came in self.verdicts.items() if came == verdict]

    @property
    def passed(self) -> bool:
        """Whether every claim that plants the fault noticed it."""
        return all(self.verdicts[name] in ("caught", "crashed") for name in self.planted_by)

    def to_data(self, context: Context) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "fault": self.fault.name,
            "change": self.fault.description,
            "planted_by": self.planted_by,
            "caught_by": self.of("caught"),
            "crashed": self.of("crashed"),
            "survived": self.of("survived"),
            "num_not_reached": len(self.of("not reached")),
            "passed": self.passed,
            "seed": context.seed,
        }


def matrix(claims: tuple[Claim, ...], context: Context) -> Iterator[FaultRow]:
    """Yield a row for each fault of `claims`, each once, tried on all of them in small samples.

    A claim that neither calls the changed function, nor one that names the changed constant, cannot notice: which functions
    claims call is recorded while they run without a fault, and the others are not run.
    """
    planted = replace(context, size="quick")
    sound = {}
    for claim in claims:
        with _Calls() as calls:
            sound[claim.name] = claim.run(planted).verdict, calls.codes
    for fault in dict.fromkeys(fault for claim in claims for fault in claim.faults):
        verdicts: dict[str, FaultVerdict]
        try:
            reached = {name for name, (_, codes) in sound.items() if fault.is_reached_by(codes)}
            with fault.apply():
                verdicts = {
                    claim.name: _noticed(claim.run(planted), sound[claim.name][0])
                    if claim.name in reached
                    else "not reached"
                    for claim in claims
                }
        except FaultError:
            verdicts = dict.fromkeys(sound, "does not apply")
        yield FaultRow(fault, tuple(claim.name for claim in claims if fault in claim.faults), verdicts)


class _Calls:
    """A context that records which functions are called, in every thread that starts within it."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> Self:
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_raised: object) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def _seen(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.codes.add(frame.f_code)


def _noticed(judged: Judged, sound: Verdict) -> FaultVerdict:
    """Return what a claim made of a fault; a check that measures outweighs one that raises."""
    if judged.verdict is sound:
        return "survived"
    measured = any(not outcome.passed and not outcome.error for outcome in judged.outcomes)
    return "caught" if measured else "crashed"


def described(claim: Claim) -> dict[str, Any]:
    """Return what a claim says, for JSON."""
    return {
        "name": claim.name,
        "paper": claim.paper,
        "where": claim.where,
        "quotation": claim.quotation,
        "statement": claim.statement,
        "stated_verdict": claim.verdict_if_settled.name.lower(),
        "hypotheses": claim.hypotheses,
        "amendment": claim.amendment,
        "breaks": claim.breaks,
        "consequence": claim.consequence,
        "references": claim.references,
        "derivation": claim.derivation,
        "awaits": claim.awaits,
        "faults": [{"name": fault.name, "change": fault.description} for fault in claim.faults],
    }


def _check_data(check: Check, outcome: Outcome, tried: list[FaultResult]) -> dict[str, Any]:
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
        "faults": [
            {
                "name": result.fault.name,
                "change": result.fault.description,
                "verdict": result.verdict,
                "statistic": None if result.outcome is None else _finite(result.outcome.statistic),
                "reason": result.reason,
            }
            for result in tried
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
