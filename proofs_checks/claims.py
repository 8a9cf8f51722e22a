"""What a claim is, what its checks must return for each verdict, and what comes of checking it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from proofs_checks.outcomes import COARSEST, Context, Outcome
from proofs_checks.papers import PAPERS, Paper
from proofs_checks.planting import Fault, FaultError

MOST_SLACK = 10.0
"""What a bound may be over the quantity that it bounds, in the nearest of a check's cases: one that is never nearly reached may be
wrong by that factor, unnoticed."""


class Role(StrEnum):
    """What it says of a statement that a check passes."""

    PRINTED = "as printed"
    CONDITIONED = "under the added condition"
    CORRECTED = "as corrected"
    COUNTEREXAMPLE = "counterexample"
    READING = "reading"
    MISSING = "what is lacking"


class Verdict(StrEnum):
    """The verdict on a statement, computed by :func:`verdict_of` from what its checks return."""

    HOLDS = "holds"
    CONDITION = "holds under a condition that the paper does not state"
    CORRECTION = "holds after correction"
    FAILS = "fails"
    UNDECIDED = "cannot be decided from what is printed"
    UNRESOLVED = "not resolved: random samples of a check are too few to notice an error of a quarter"
    UNSETTLED = "unsettled: its checks do not return what any verdict needs"


@dataclass(frozen=True)
class Check:
    """One thing that is run, and can come out wrong."""

    role: Role  # what passing says: see :class:`Claim`
    # Takes a :class:`~proofs_checks.outcomes.Context`, returns an :class:`~proofs_checks.outcomes.Outcome`.
    measure: Callable[[Context], Outcome]
    faults: tuple[Fault, ...] = ()  # faults that the check must notice
    # Of a reading: how the print is read. Else what the check does, by default its function's first line.
    name: str = ""

    @property
    def title(self) -> str:
        """What the check does, in a line."""
        if self.name:
            return self.name
        function = self.measure.func if isinstance(self.measure, partial) else self.measure
        return (function.__doc__ or function.__name__).strip().partition("\n")[0]

    def run(self, context: Context) -> Outcome:
        """Measure, and count an error raised on the way as a failure."""
        try:
            outcome = self.measure(context)
        except Exception as error:  # noqa: BLE001 - broken mathematics may raise anything, and must name its claim
            error_text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return Outcome(
                math.nan, 0.0, "raised before it could be measured", (error_text,), error=error_text
            )
        if outcome.passed and outcome.slack > MOST_SLACK and self.role is not Role.COUNTEREXAMPLE:
            return replace(
                outcome,
                statistic=outcome.slack,
                bound=MOST_SLACK,
                measured="bound over what is measured: too far above it to show anything",
            )
        return outcome


def printed(measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where the statement holds as it is printed."""
    return Check(Role.PRINTED, measure, faults)


def conditioned(measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where the statement holds under the claim's amendment, a condition."""
    return Check(Role.CONDITIONED, measure, faults)


def corrected(measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where the statement holds with the claim's amendment, a correction."""
    return Check(Role.CORRECTED, measure, faults)


def counterexample(measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where a case that meets every printed hypothesis breaks what is printed.

    It asserts what happens instead, by theory of its own, so that wrong code does not pass for a counterexample.
    """
    return Check(Role.COUNTEREXAMPLE, measure, faults)


def reading(name: str, measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where the statement holds, if the print is read as `name` says."""
    return Check(Role.READING, measure, faults, name)


def missing(measure: Callable[[Context], Outcome], *faults: Fault) -> Check:
    """Return a check that passes where what is printed admits several outcomes; the amendment says what is lacking."""
    return Check(Role.MISSING, measure, faults)


Checks = dict[str, Check | tuple[Check, ...]]
"""What a module runs for claims, by their names."""


@dataclass(frozen=True)
class Claim:
    """A statement, judged by what is run: what its page says of it (:mod:`proofs_checks.pages`), and its checks.

    The verdict is computed:

    ==================  ===============================================================
    verdict             what must run, and pass
    ==================  ===============================================================
    holds               every ``printed`` check
    under a condition   every ``conditioned`` check and every ``counterexample``
    after correction    every ``corrected`` check and every ``counterexample``
    fails               every ``counterexample``, of at least one, and no amended check
    cannot be decided   of at least two ``reading`` checks some pass and some do not; or
                        every ``missing`` check passes
    not resolved        any of these, but some comparison of random samples would not
                        notice an error of 25 %
    ==================  ===============================================================
    """

    name: str  # identifier: lower case, with dashes
    paper: str  # a key of :data:`~proofs_checks.papers.PAPERS`
    # Where in it, as it numbers: ``"Eq. 3"``, ``"Alg. 1"``, ``"Sec. 5.2"``, ``"App. C.1"``.
    where: tuple[str, ...]
    # The paper's sentence or formula, briefly. Of ``zosim``, the promise in words.
    quotation: str
    statement: str  # the same made precise, with every symbol; with the amendment, if there is one
    hypotheses: str  # under which it is judged: the paper's own, and what the checks take
    checks: tuple[Check, ...]
    # The condition that is added, the correction, or what is lacking: needed where a check has such a role.
    amendment: str = ""
    # Of a statement that does not hold as printed: which step of its proof the counterexample breaks.
    breaks: str = ""
    consequence: str = ""  # what that means for whoever runs the software
    references: str = ""  # what else it rests on
    # Page of ``docs/theory``, with its section where it names one: ``"zo2/narrow-transfers.md#sizes"``.
    derivation: str = ""
    awaits: str = ""  # code that is not built yet, and with which the claim gets its faults

    def __post_init__(self) -> None:
        assert self.paper in PAPERS, f"{self.name}: no paper {self.paper!r}"
        assert self.where, f"{self.name} names no place"
        for place in self.where:
            self.source.check(place)
        roles = {check.role for check in self.checks}
        allowed = _ROLES_TOGETHER[_leading(roles)]
        assert roles <= allowed, f"{self.name}: {', '.join(sorted(roles))} do not go together"
        amended = roles & {Role.CONDITIONED, Role.CORRECTED, Role.MISSING}
        assert bool(self.amendment) == bool(amended), f"{self.name}: an amendment goes with amended checks"
        if amended & {Role.CONDITIONED, Role.CORRECTED}:
            assert Role.COUNTEREXAMPLE in roles, f"{self.name}: no case breaks what is printed"
        if Role.COUNTEREXAMPLE in roles:
            assert self.breaks, f"{self.name} does not say what breaks"
            assert self.consequence, f"{self.name} does not say what that means for a user"
        if roles == {Role.READING}:
            assert len(self.checks) > 1, f"{self.name} has one reading"
        assert self.awaits or self.faults, f"{self.name} has no planted fault"

    @property
    def source(self) -> Paper:
        """The paper."""
        return PAPERS[self.paper]

    @property
    def verdict_if_settled(self) -> Verdict:
        """The verdict that the checks lead to where they return what it needs."""
        return _VERDICTS[_leading({check.role for check in self.checks})]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Planted faults of all checks, each once."""
        return tuple(dict.fromkeys(fault for check in self.checks for fault in check.faults))

    def run(self, context: Context) -> Judged:
        """Run every check, and compute the verdict."""
        begin = time.perf_counter()
        outcomes = tuple(check.run(context) for check in self.checks)
        return Judged(self, outcomes, verdict_of(self, outcomes), time.perf_counter() - begin)


_ROLES_TOGETHER = {
    Role.PRINTED: {Role.PRINTED},
    Role.CONDITIONED: {Role.CONDITIONED, Role.COUNTEREXAMPLE},
    Role.CORRECTED: {Role.CORRECTED, Role.COUNTEREXAMPLE},
    Role.COUNTEREXAMPLE: {Role.COUNTEREXAMPLE},
    Role.READING: {Role.READING},
    Role.MISSING: {Role.MISSING},
}
"""By the role that leads to a verdict: roles that the checks of one claim may have."""

_VERDICTS = {
    Role.PRINTED: Verdict.HOLDS,
    Role.CONDITIONED: Verdict.CONDITION,
    Role.CORRECTED: Verdict.CORRECTION,
    Role.COUNTEREXAMPLE: Verdict.FAILS,
    Role.READING: Verdict.UNDECIDED,
    Role.MISSING: Verdict.UNDECIDED,
}


def _leading(roles: set[Role]) -> Role:
    return min(roles, key=list(_ROLES_TOGETHER).index)


def verdict_of(claim: Claim, outcomes: tuple[Outcome, ...]) -> Verdict:
    """Return the verdict on a statement whose checks returned `outcomes`, by the table of :class:`Claim`."""
    leading = _leading({check.role for check in claim.checks})
    if leading is Role.READING:
        raised = any(outcome.error for outcome in outcomes)
        is_so = len({outcome.passed for outcome in outcomes}) > 1 and not raised
    else:
        is_so = all(outcome.passed for outcome in outcomes)
    if is_so and any((outcome.resolution or 0.0) > COARSEST for outcome in outcomes):
        return Verdict.UNRESOLVED
    return _VERDICTS[leading] if is_so else Verdict.UNSETTLED


@dataclass(frozen=True)
class Judged:
    """What came of running a claim's checks."""

    claim: Claim
    outcomes: tuple[Outcome, ...]  # of each check
    verdict: Verdict
    seconds: float

    @property
    def is_settled(self) -> bool:
        """Whether the checks returned what a verdict needs, and would have noticed an error."""
        return self.verdict not in (Verdict.UNSETTLED, Verdict.UNRESOLVED)


FaultVerdict = Literal["caught", "crashed", "survived", "not reached", "does not apply"]


@dataclass(frozen=True)
class FaultResult:
    """What came of a check while a fault was planted."""

    check: Check
    fault: Fault
    # ``"caught"`` if the check measured that something is wrong, ``"crashed"`` if it could not measure, ``"not reached"``
    # if it never called what the fault changes.
    verdict: FaultVerdict
    outcome: Outcome | None = None
    reason: str = ""  # why the fault does not apply, or what was raised


def faults_of(claim: Claim) -> Iterator[tuple[Check, Fault]]:
    """Yield each check with each fault that it must notice."""
    for check in claim.checks:
        for fault in check.faults:
            yield check, fault


def try_fault(check: Check, fault: Fault, context: Context) -> FaultResult:
    """Run `check` while `fault` is in force."""
    try:
        with fault.apply() as in_force:
            outcome = check.run(context)
    except FaultError as error:
        return FaultResult(check, fault, "does not apply", reason=error.message)
    if not in_force.is_reached:
        return FaultResult(check, fault, "not reached", outcome, outcome.error)
    if outcome.error:
        return FaultResult(check, fault, "crashed", outcome, outcome.error)
    return FaultResult(check, fault, "survived" if outcome.passed else "caught", outcome)
