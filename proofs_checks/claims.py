"""What a claim is, and what comes of checking it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proofs_checks.mutation import Mutant, MutantError

Size = Literal["full", "quick"]


@dataclass(frozen=True)
class Context:
    """What a check is given.

    Attributes
    ----------
    seed : int
        Decides every random number of the check.
    size : str
        ``"full"``, or ``"quick"`` for samples that just suffice to catch the planted faults.
    """

    seed: int = 0
    size: Size = "full"

    def samples(self, full: int, quick: int) -> int:
        """Return the sample size."""
        return full if self.size == "full" else quick


@dataclass(frozen=True)
class Outcome:
    """What a check measured. It holds if the statistic does not exceed the bound.

    Attributes
    ----------
    statistic, bound : float
    measured : str
        What the statistic is, with its unit and its sample size.
    details : tuple of str
        One line for each part of the check.
    """

    statistic: float
    bound: float
    measured: str
    details: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the claim held; a statistic that is not a number does not hold."""
        return self.statistic <= self.bound


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome nearest to its bound, with the details of all; outcomes share their unit."""
    last = max(outcomes, key=lambda outcome: math.inf if math.isnan(outcome.statistic) else outcome.statistic)
    details = tuple(line for outcome in outcomes for line in outcome.details)
    return Outcome(last.statistic, last.bound, last.measured, details)


@dataclass(frozen=True)
class Claim:
    """A statement that is checked against the shipped code.

    Attributes
    ----------
    name : str
    statement : str
        What holds, with its symbols.
    source : str
        Paper and equation, section or algorithm.
    assumptions : str
        Under which it holds.
    check : callable
        Takes a :class:`Context`, returns an :class:`Outcome`.
    mutants : tuple of Mutant
        At least one; the check must catch each.
    """

    name: str
    statement: str
    source: str
    assumptions: str
    check: Callable[[Context], Outcome]
    mutants: tuple[Mutant, ...]

    def __post_init__(self) -> None:
        assert self.mutants, f"{self.name} has no planted fault"

    def run(self, context: Context) -> Outcome:
        """Check, and count an error raised on the way as a failure."""
        try:
            return self.check(context)
        except Exception as error:  # noqa: BLE001 - broken mathematics may raise anything, and must name its claim
            text = str(error).partition("\n")[0]
            return Outcome(
                math.nan, 0.0, "raised before it could be measured", (f"{type(error).__name__}: {text}",)
            )


Verdict = Literal["caught", "survived", "does not apply"]


@dataclass(frozen=True)
class MutantResult:
    """What came of checking a claim against a planted fault.

    Attributes
    ----------
    mutant : Mutant
    verdict : str
        ``"caught"`` if the check failed, as it must.
    outcome : Outcome or None
    reason : str
        Why it does not apply.
    """

    mutant: Mutant
    verdict: Verdict
    outcome: Outcome | None = None
    reason: str = ""


def try_mutant(claim: Claim, mutant: Mutant, context: Context) -> MutantResult:
    """Check `claim` while `mutant` is in force."""
    try:
        with mutant.apply():
            outcome = claim.run(context)
    except MutantError as error:
        return MutantResult(mutant, "does not apply", reason=error.message)
    return MutantResult(mutant, "survived" if outcome.passed else "caught", outcome)
