"""Every claim holds, and every planted fault is caught, at the smallest samples that suffice.

One fault of each claim is quick: it shows that the check can fail. The others are planted by `test --full`.
"""

from __future__ import annotations

import pytest

from proofs_checks.claims import Context, try_mutant
from proofs_checks.registry import CLAIMS

QUICK = Context(size="quick")
PLANTED = [
    pytest.param(
        claim, mutant, id=f"{claim.name}: {mutant.name}", marks=[] if number == 0 else [pytest.mark.slow]
    )
    for claim in CLAIMS
    for number, mutant in enumerate(claim.mutants)
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_claim_holds(claim):
    outcome = claim.run(QUICK)
    assert outcome.passed, "\n".join(outcome.details)


@pytest.mark.parametrize(("claim", "mutant"), PLANTED)
def test_the_planted_fault_is_caught(claim, mutant):
    result = try_mutant(claim, mutant, QUICK)
    assert result.verdict == "caught", (result.reason, result.outcome)


def test_names_are_unique():
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)


def test_every_claim_states_its_source_and_assumptions():
    for claim in CLAIMS:
        assert claim.source
        assert claim.assumptions
        assert claim.statement.endswith(".")
