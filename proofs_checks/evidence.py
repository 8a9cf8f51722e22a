"""What runs with fresh random numbers say together: evidence against each claim, kept from run to run.

A run that repeats seed 0 says nothing new. With a fresh seed each time, small errors that no single run notices add up: whoever bets
against a claim by every run's comparisons grows rich if the claim is wrong, and hardly ever if it is right.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from executors.files import write_atomically
from proofs_checks.claims import Judged, Role
from proofs_checks.statistics import FALSE_ALARMS
from topology.errors import ZosimError
from topology.limits import MAX_SEED

MOST_CLAIMS = 500
"""Claims that bets may be made against."""

ALARM = MOST_CLAIMS / FALSE_ALARMS
"""Wealth at which a claim is given up."""

_LEAST = 1e-300


def fresh_seed() -> int:
    """Return a seed that nobody has chosen."""
    return secrets.randbelow(MAX_SEED + 1)


def bet(p_value: float) -> float:
    """Return what a stake of 1 becomes, by a comparison's probability.

    ``∫₀¹ κp^{κ-1} dκ = (1 - p + p·ln p)/(p·ln²p)``: its mean over uniform ``p`` is 1, and smaller where ``p`` is larger than uniform.

    .. [1] V. Vovk, R. Wang, "E-values: Calibration, Combination and Applications", Annals of Statistics 49(3),
       2021, arXiv:1912.06116.

    >>> round(bet(1.0), 6), round(bet(0.1), 3), round(bet(1e-6))
    (0.5, 1.263, 5239)
    """
    p = max(p_value, _LEAST)
    log = math.log(p)
    if log > -1e-4:
        return 0.5 - log / 6
    return (1 - p + p * log) / (p * log * log)


@dataclass(frozen=True)
class Wealth:
    """What has become of a stake of 1 that was bet against a claim, a part of it from each run on.

    From run ``t`` on ``1/(t(t + 1))`` of the stake is bet, all of it in every run; ``1/(t + 1)`` is left after it. If the claim is
    right the total has a mean of at most 1, whatever runs came before, so that by Ville's inequality it *ever* reaches ``W``, in any
    number of runs, with a probability of at most ``1/W``. That parts begin late keeps a fault of tomorrow from having to make up for
    the losses of all correct runs before.
    """

    num_runs: int = 0
    invested: float = 0.0  # what has become of the parts that were bet
    largest: float = 1.0  # the largest :attr:`total` of any run

    @property
    def total(self) -> float:
        """Wealth now."""
        return self.invested + 1 / (self.num_runs + 1)

    def after(self, factor: float) -> Wealth:
        """Return the wealth after a run that multiplies a stake by `factor`."""
        run = self.num_runs + 1
        invested = min((self.invested + 1 / (run * (run + 1))) * factor, 1 / _LEAST)
        grown = Wealth(run, invested)
        return Wealth(run, invested, max(self.largest, grown.total))


def factor_of(judged: Judged) -> float | None:
    """Return what a run multiplies a stake against a claim by: the mean over its comparisons; None if it has none.

    Comparisons of one run may depend on each other; a mean of bets is a bet all the same. Readings, of which some must fail,
    are left out.
    """
    bets = [
        bet(estimate.p_value)
        for check, outcome in zip(judged.claim.checks, judged.outcomes, strict=True)
        if check.role is not Role.READING
        for estimate in outcome.estimates
        if estimate.varies
    ]
    return math.fsum(bets) / len(bets) if bets else None


def read_evidence(path: Path) -> dict[str, Wealth]:
    """Return the evidence that earlier runs left, by claim; none where there is no file.

    Raises ZosimError if the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        return {name: Wealth(**held) for name, held in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise ZosimError(
            f"{path} does not hold evidence of earlier runs", hint="name a new file to start from nothing"
        ) from None


def write_evidence(path: Path, evidence: Mapping[str, Wealth]) -> None:
    """Write evidence for the next run to go on from."""
    data = {name: asdict(wealth) for name, wealth in sorted(evidence.items())}
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def add_to(evidence: dict[str, Wealth], judged: Iterable[Judged]) -> list[str]:
    """Add what a run measured, and return the claims against which evidence has reached :data:`ALARM`, now or ever."""
    for entry in judged:
        if (factor := factor_of(entry)) is not None:
            evidence[entry.claim.name] = evidence.get(entry.claim.name, Wealth()).after(factor)
    return [name for name, wealth in evidence.items() if wealth.largest >= ALARM]
