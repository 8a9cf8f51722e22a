"""``python -m proofs_checks.calibration``: how often checks raise a false alarm, beside how often they say they do.

On correct code the probability that a comparison reports is uniform, or larger where counts are discrete. So the part of
comparisons below ``p`` is at most ``p``, whatever ``p``: rates at 1e-2 to 1e-4 are measured over many seeds, where the suite's own
level, far below, could not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from scipy.stats import binom

from proofs_checks.claims import Check, Claim
from proofs_checks.outcomes import Context
from proofs_checks.registry import claims_named
from proofs_checks.statistics import LEVEL
from zosim.console import emit, progress
from zosim.report import Table

RATES = (1e-2, 1e-3, 1e-4)
_SURPRISING = 1e-6


@dataclass
class Calibration:
    """What a check reported over many seeds."""

    claim: Claim
    check: Check
    p_values: list[float] = field(default_factory=list)  # of all comparisons of what varies
    # num_seeds, num_alarms: runs, and those in which the check did not come out as on seed 0.
    num_seeds: int = 0
    num_alarms: int = 0

    def rate(self, nominal: float) -> float:
        """Return the part of comparisons that report a probability below `nominal`."""
        return sum(p < nominal for p in self.p_values) / max(1, len(self.p_values))

    def is_off(self, nominal: float) -> bool:
        """Whether more comparisons report one below `nominal` than chance explains."""
        below = sum(p < nominal for p in self.p_values)
        return float(binom.sf(below - 1, len(self.p_values), nominal)) < _SURPRISING

    def row(self) -> tuple[str, ...]:
        """Return a row of the report."""
        rates = (f"{self.rate(nominal):.2g}{' !' if self.is_off(nominal) else ''}" for nominal in RATES)
        least = min(self.p_values, default=1.0)
        return (
            self.claim.name,
            str(self.num_seeds),
            str(len(self.p_values)),
            *rates,
            f"{least:.1g}",
            str(self.num_alarms),
        )


def calibrated(claims: Iterable[Claim], seeds: Sequence[int]) -> Iterator[Calibration]:
    """Yield what every statistical check of `claims` reports over `seeds`, with quick samples."""
    for claim in claims:
        for check in claim.checks:
            expected = check.run(Context(seed=seeds[0], size="quick"))
            if not any(0 < estimate.p_value < 1 for estimate in expected.estimates):
                continue
            result = Calibration(claim, check)
            for seed in seeds:
                outcome = check.run(Context(seed=seed, size="quick"))
                result.p_values += [
                    estimate.p_value for estimate in outcome.estimates if estimate.p_value < 1
                ]
                result.num_alarms += outcome.passed != expected.passed
                result.num_seeds += 1
            yield result


def main(
    claims: Annotated[
        list[str] | None, typer.Argument(help="Names of the claims to check.", show_default="all claims")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every check, of seeds 1, 2, ...")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Measure the false-alarm rate of every statistical check over many seeds, beside its nominal one."""
    import torch

    torch.set_num_threads(1)
    results = []
    with progress() as bar:
        task = bar.add_task("checks", total=None)
        for result in calibrated(claims_named(*(claims or ())), range(1, seeds + 1)):
            results.append(result)
            bar.update(task, description=result.claim.name, advance=1)
    headings = (
        "claim",
        "seeds",
        "comparisons",
        *(f"below {rate:g}" for rate in RATES),
        "least",
        "false alarms",
    )
    data = [
        {
            "claim": result.claim.name,
            "check": result.check.title,
            "seeds": result.num_seeds,
            "comparisons": len(result.p_values),
            "rates": {f"{rate:g}": result.rate(rate) for rate in RATES},
            "least": min(result.p_values, default=1.0),
            "false_alarms": result.num_alarms,
            "nominal_level": LEVEL,
            "is_off": any(result.is_off(rate) for rate in RATES),
        }
        for result in results
    ]
    title = f"one comparison alarms below {LEVEL:.1g} (10^{math.log10(LEVEL):.1f}); ! is more than chance explains"
    emit(data, json=json, text=Table(headings, [result.row() for result in results], title=title))
    if any(row["is_off"] or row["false_alarms"] for row in data):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
