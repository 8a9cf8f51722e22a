"""Every claim has a verdict, and every planted fault is noticed, at the smallest samples that suffice: `zosim check --quick --mutate`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from proofs_checks.claims import faults_of, try_fault
from proofs_checks.outcomes import Context
from proofs_checks.registry import CLAIMS, claims_named
from proofs_checks.statistics import MOST_COMPARISONS

QUICK = Context(size="quick")
COMPARISONS = {}
EXECUTED = {
    "same-direction-everywhere",
    "stages-are-one-device",
    "quantized-weights-are-alike-on-all-ranks",
    "delayed-equals-immediate",
    "perturb-sequence",
    "quantized-steps-are-a-literal-loop",
    "zoinfer-rewards-of-a-candidate",
    "zoinfer-fold-before-the-redraw",
    "ranks-are-one-device",
    "released-loop-draws-again",
    "copies-leave-weights-alone",
    "the-last-update-is-in-what-is-read",
    "quzo-full-precision-update",
}
"""Their checks train for seconds, each with choices that quick tests of ``executors`` and `test_proofs_checks_executed.py` cross as well."""

PLANTED = [
    pytest.param(
        check,
        fault,
        id=f"{claim.name}: {fault.name}",
        marks=() if number == 0 and claim.name not in EXECUTED else pytest.mark.slow,
    )
    for claim in CLAIMS
    for check in claim.checks
    for number, fault in enumerate(check.faults)
]


@pytest.mark.crossed(quick=8)
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, id=claim.name, marks=pytest.mark.slow if claim.name in EXECUTED else ())
        for claim in CLAIMS
    ],
)
def test_the_claim_has_a_verdict(claim):
    judged = claim.run(QUICK)
    COMPARISONS[claim.name] = sum(len(outcome.estimates) for outcome in judged.outcomes)
    assert judged.is_settled, [outcome.details for outcome in judged.outcomes if not outcome.passed]


@pytest.mark.crossed(quick=7, slow=3)
@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_the_planted_fault_is_caught(check, fault):
    result = try_fault(check, fault, QUICK)
    refused = result.verdict == "crashed" and result.reason.startswith(
        "CodecError: "
    )  # by the code's own guards
    assert result.verdict == "caught" or refused, (result.reason, result.outcome)


def test_every_fault_can_be_planted():
    """Quick tests plant one of each check; this notices that code has moved away from the others."""
    for fault in dict.fromkeys(fault for claim in CLAIMS for _, fault in faults_of(claim)):
        with fault.apply():
            pass


def test_names_are_unique():
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)


def test_every_claim_quotes_and_says_what_it_takes():
    for claim in CLAIMS:
        assert claim.quotation
        assert claim.hypotheses
        assert claim.statement.endswith(".")


def test_promises_of_our_own_name_modules_that_exist():
    for claim in CLAIMS:
        if claim.paper == "zosim":
            assert [place for place in claim.where if find_spec(place) is None] == [], claim.name


def test_derivations_exist():
    theory = Path(__file__).parents[2] / "docs" / "theory"
    for claim in CLAIMS:
        page = claim.derivation.partition("#")[0]
        assert not page or (theory / page).is_file(), claim.name


def test_there_are_no_more_comparisons_than_false_alarms_are_stated_for():
    if not COMPARISONS:
        pytest.skip("the claims were not run in this process")
    assert sum(COMPARISONS.values()) <= MOST_COMPARISONS


@pytest.mark.parametrize(
    ("name", "coarsest"), [("codec-stochastic-expands", 0.02), ("stochastic-rounding-unbiased", 0.025)]
)
def test_the_coarsest_comparison_is_as_fine_as_the_page_says(name, coarsest):
    (claim,) = claims_named(name)
    assert 0 < max(outcome.resolution or 0 for outcome in claim.run(QUICK).outcomes) <= coarsest
