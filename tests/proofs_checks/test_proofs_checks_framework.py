from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from executors.steps import arithmetic
from proofs_checks.claims import (
    Claim,
    Verdict,
    conditioned,
    corrected,
    counterexample,
    missing,
    printed,
    reading,
    try_fault,
)
from proofs_checks.exact import at_most, within
from proofs_checks.ledger import matrix, run
from proofs_checks.outcomes import Context, Estimate, Outcome, everything_holds, worst
from proofs_checks.planting import Fault, FaultError, planted
from proofs_checks.registry import claims_named
from proofs_checks.setups.placements import tiny_model, tiny_plan
from proofs_checks.statistics import compare_means, estimates_of
from topology.errors import ZosimError

CPU = torch.device("cpu")
PROJECTED = "executors.steps.arithmetic:projected_gradient"
HALVED = Fault("halved", PROJECTED, lambda shipped, *given, **named: shipped(*given, **named) / 2)


def gradient():
    return arithmetic.projected_gradient(torch.tensor(3.0), torch.tensor(1.0), 1.0, central=True).item()


def claim_of(*checks, **fields):
    texts = {"quotation": "g", "statement": "It holds.", "hypotheses": "none"}
    return Claim(name="c", paper="zo2", where=("Eq. 1",), checks=checks, **texts, **fields)


def yes(_context):
    return Outcome(0.0, 1.0, "nothing", ("as it should be",))


def no(_context):
    return Outcome(2.0, 1.0, "nothing")


BROKEN = {"breaks": "line 3", "consequence": "none"}


def test_a_planted_fault_lasts_as_long_as_its_context_and_reaches_every_importer():
    from executors.steps.arithmetic import projected_gradient as imported_by_name

    with HALVED.apply() as in_force:
        assert not in_force.is_reached
        assert gradient() == 0.5
        assert in_force.is_reached
        assert imported_by_name(torch.tensor(3.0), torch.tensor(1.0), 1.0, central=True) == 0.5
    assert gradient() == 1.0


@planted("executors.steps.arithmetic:projected_gradient", "twice as large")
def doubled(shipped, loss_plus, loss_other, epsilon, *, central):
    return 2 * shipped(loss_plus, loss_other, epsilon, central=central)


def test_a_fault_runs_in_place_of_a_function_wherever_it_was_imported_and_calls_it():
    from executors.steps.arithmetic import projected_gradient as imported_by_name

    with doubled.apply():
        assert gradient() == 2.0
        assert imported_by_name(torch.tensor(3.0), torch.tensor(1.0), 1.0, central=True) == 2.0
    assert gradient() == 1.0
    assert doubled.description == "executors.steps.arithmetic:projected_gradient: twice as large"


def test_a_fault_runs_in_place_of_methods_properties_and_what_calls_super():
    from executors.models.recording_blocks import _StandIn

    opposite = Fault(
        "off",
        "executors.models.recording_blocks:_StandIn.__init__",
        lambda made, self, block, called: made(self, block, lambda hidden: -called(hidden)),
    )
    block = torch.nn.Linear(1, 1)
    with opposite.apply():
        assert _StandIn(block, abs)._called(2) == -2
    assert _StandIn(block, abs)._called(2) == 2
    narrow = Fault("narrow", "zosim.plans:Plan.transfer_dtype", lambda dtype, self: f"half of {dtype(self)}")
    plan = tiny_plan(tiny_model("untied"))
    with narrow.apply():
        assert plan.transfer_dtype == "half of float32"
    assert plan.transfer_dtype == "float32"


def test_a_fault_names_what_it_does_not_use_behind_an_underscore():
    alone = Fault(
        "one loss alone",
        PROJECTED,
        lambda shipped, loss_plus, _loss_other, *rest, **named: shipped(loss_plus, 0.0, *rest, **named),
    )
    with alone.apply():
        assert gradient() == 1.5


def test_a_fault_whose_parameters_the_function_has_not_or_that_changes_no_constant_is_refused():
    renamed = Fault(
        "renamed", doubled.target, lambda shipped, losses, *rest, **more: shipped(losses, *rest, **more)
    )
    with pytest.raises(FaultError, match=r"takes 'losses', but .* has no such parameter"), renamed.apply():
        pass
    same = Fault("same", "executors.models.parameters:_NO_DECAY", lambda names: names)
    with pytest.raises(FaultError, match="the planted fault 'same' leaves"), same.apply():
        pass


def test_a_fault_of_a_constant_reaches_whoever_imported_it_and_is_taken_back():
    from executors.models import parameters

    fault = Fault("decays", "executors.models.parameters:_NO_DECAY", lambda names: names[1:])
    with fault.apply():
        assert parameters.decays("fc1.bias")
    assert not parameters.decays("fc1.bias")


def test_a_fault_is_taken_back_after_an_error():
    with pytest.raises(KeyError), HALVED.apply():
        raise KeyError
    assert gradient() == 1.0


@pytest.mark.parametrize(
    "fault",
    [
        Fault("renamed", PROJECTED, lambda shipped, losses: shipped(losses)),
        Fault("moved", "executors.steps.arithmetic:no_such_function", lambda shipped: shipped()),
        Fault("same", "executors.models.parameters:_NO_DECAY", lambda names: names),
    ],
    ids=lambda fault: fault.name,
)
def test_a_fault_that_does_not_fit_is_refused_and_counts_as_uncaught(fault):
    with pytest.raises(FaultError), fault.apply():
        pass
    result = try_fault(printed(yes, fault), fault, Context())
    assert (result.verdict, bool(result.reason)) == ("does not apply", True)


def test_an_error_in_a_check_fails_its_claim_naming_the_error():
    def check(_context):
        raise ZeroDivisionError("by nothing")

    judged = claim_of(printed(check, HALVED)).run(Context())
    assert judged.verdict is Verdict.UNSETTLED
    assert judged.outcomes[0].error == "ZeroDivisionError: by nothing"


def test_a_check_that_looks_away_lets_the_fault_survive():
    seeing = printed(lambda _context: Outcome(abs(gradient() - 1.0), 0.0, "error"), HALVED)
    falling = printed(lambda _context: Outcome(1 / (gradient() - 0.5), 3.0, "inverse"), HALVED)
    blind = printed(lambda _context: Outcome(0 * gradient(), 0.0, "error"), HALVED)
    assert try_fault(blind, HALVED, Context()).verdict == "survived"
    assert try_fault(seeing, HALVED, Context()).verdict == "caught"
    assert try_fault(falling, HALVED, Context()).verdict == "crashed"


def test_a_fault_of_what_a_check_does_not_call_is_not_reached_and_fails_its_claim():
    def misses(_context):
        return Outcome(2.0, 1.0, "nothing")

    for check in (printed(yes, HALVED), printed(misses, HALVED)):
        assert try_fault(check, HALVED, Context()).verdict == "not reached"
    (entry,) = run((claim_of(printed(yes, HALVED)),), Context(), mutate=True)
    assert (entry.verdict, entry.passed) == (Verdict.HOLDS, False)
    assert [tried.fault for tried in entry.unnoticed] == [HALVED]


@pytest.mark.parametrize(
    ("checks", "fields", "verdict"),
    [
        ((printed(yes, HALVED),), {}, Verdict.HOLDS),
        ((printed(yes, HALVED), printed(no)), {}, Verdict.UNSETTLED),
        ((conditioned(yes, HALVED), counterexample(yes)), {"amendment": "x", **BROKEN}, Verdict.CONDITION),
        ((conditioned(yes, HALVED), counterexample(no)), {"amendment": "x", **BROKEN}, Verdict.UNSETTLED),
        ((corrected(yes, HALVED), counterexample(yes)), {"amendment": "x", **BROKEN}, Verdict.CORRECTION),
        ((corrected(no, HALVED), counterexample(yes)), {"amendment": "x", **BROKEN}, Verdict.UNSETTLED),
        ((counterexample(yes, HALVED),), BROKEN, Verdict.FAILS),
        ((counterexample(no, HALVED),), BROKEN, Verdict.UNSETTLED),
        ((reading("a", yes, HALVED), reading("b", no)), {}, Verdict.UNDECIDED),
        ((reading("a", yes, HALVED), reading("b", yes)), {}, Verdict.UNSETTLED),
        ((missing(yes, HALVED),), {"amendment": "the learning rate"}, Verdict.UNDECIDED),
    ],
)
def test_a_verdict_follows_from_what_the_checks_return(checks, fields, verdict):
    assert claim_of(*checks, **fields).run(Context()).verdict is verdict


@pytest.mark.parametrize(
    ("checks", "fields"),
    [
        ((printed(yes),), {}),
        ((printed(yes, HALVED), counterexample(yes)), BROKEN),
        ((corrected(yes, HALVED),), {"amendment": "x"}),
        ((corrected(yes, HALVED), counterexample(yes)), BROKEN),
        ((counterexample(yes, HALVED),), {}),
        ((reading("a", yes, HALVED),), {}),
    ],
)
def test_a_claim_whose_checks_allow_no_verdict_is_refused(checks, fields):
    with pytest.raises(AssertionError):
        claim_of(*checks, **fields)


def sampled(*resolutions):
    estimates = tuple(Estimate("mean", 1.0, 1.0, 0.9, 1.1, 0.5, each, 100) for each in resolutions)
    return lambda _context: Outcome(0.0, 1.0, "nothing", estimates=estimates)


def test_the_resolution_of_a_check_is_that_of_its_coarsest_comparison():
    assert sampled(0.01, 0.2)(Context()).resolution == 0.2
    assert sampled(0.01, 1e-9)(Context()).resolution == 0.01  # what does not vary has none
    assert yes(Context()).resolution is None


@pytest.mark.parametrize(
    ("checks", "fields"),
    [
        ((printed(sampled(0.01, 0.26), HALVED),), {}),
        ((conditioned(yes, HALVED), counterexample(sampled(0.26))), {"amendment": "x", **BROKEN}),
        ((reading("a", sampled(8.6), HALVED), reading("b", no)), {}),
    ],
)
def test_a_claim_whose_samples_are_too_few_is_not_resolved(checks, fields):
    judged = claim_of(*checks, **fields).run(Context())
    assert judged.verdict is Verdict.UNRESOLVED
    assert not judged.is_settled


def test_samples_that_suffice_resolve_a_claim_and_too_few_do_not_hide_a_failure():
    assert claim_of(printed(sampled(0.25), HALVED)).run(Context()).verdict is Verdict.HOLDS
    assert claim_of(printed(no, HALVED), printed(sampled(9.0))).run(Context()).verdict is Verdict.UNSETTLED


def test_a_bound_that_no_case_nearly_reaches_shows_nothing():
    def check(*shares):
        return conditioned(
            lambda _context: everything_holds(
                {
                    f"case {number}": at_most(share, 1.0, what="the inequality")
                    for number, share in enumerate(shares)
                }
            )
        )

    loose = check(0.09, 0.01).run(Context())
    assert not loose.passed
    assert loose.statistic == pytest.approx(1 / 0.09)
    assert check(0.11, 1e-6).run(Context()).passed  # one near case suffices
    assert not check(1.1).run(Context()).passed
    twice = conditioned(
        lambda _context: worst([at_most(0.5, 1.0, what="one"), at_most(1e-3, 1.0, what="another")])
    )
    assert not twice.run(Context()).passed  # each inequality needs its own
    assert conditioned(lambda _context: within(1e-9, 1.0, what="an error")).run(Context()).passed
    assert counterexample(lambda _context: at_most(1e-3, 1.0, what="beside")).run(Context()).passed
    assert conditioned(lambda _context: at_most(0.0, 0.0, what="nothing")).run(Context()).passed


def test_a_place_that_the_paper_does_not_have_is_refused():
    with pytest.raises(ZosimError, match=r"zo2 has no place 'Eq\. 9'"):
        Claim("c", "zo2", ("Eq. 9",), "g", "It holds.", "none", (printed(yes, HALVED),))


def test_a_mean_is_compared_in_standard_errors():
    samples = torch.tensor(
        [[1.0], [3.0]], dtype=torch.float64
    )  # mean 2, standard error 1, one degree of freedom
    (estimate,) = estimates_of("", samples, torch.tensor([5.0]))
    assert estimate.p_value == pytest.approx(1 - 2 / math.pi * math.atan(3.0))
    constant = torch.ones((4, 2), dtype=torch.float64)
    right, wrong = estimates_of("", constant, torch.tensor([1.0, 2.0]))
    assert (right.p_value, wrong.p_value) == (1.0, 0.0)


def test_true_means_stay_within_the_bound_and_false_ones_do_not():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn((4000, 5), generator=generator, dtype=torch.float64) + 1
    ones = torch.ones(5, dtype=torch.float64)
    assert compare_means("true", samples, ones).passed
    assert not compare_means("false", samples, 1.2 * ones).passed


def invoke(*arguments):
    from proofs_checks.cli import check

    app = typer.Typer(add_completion=False)
    app.command()(check)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_reports_one_claim_in_json():
    result = invoke("quantized-rge", "--mutate", "--quick", "--json")
    assert result.exit_code == 0
    (claim,) = map(json.loads, result.stdout.splitlines())
    assert claim["passed"]
    assert claim["verdict"] == "holds"
    assert (claim["seed"], claim["size"]) == (0, "quick")
    verdicts = {fault["verdict"] for check in claim["checks"] for fault in check["faults"]}
    assert verdicts == {"caught"}


def test_the_matrix_tries_each_fault_on_every_chosen_claim():
    names = ["zoinfer-window-on-one-factor", "zoinfer-window-subspace"]
    result = invoke(*names, "--matrix", "--json")
    assert result.exit_code == 0, result.stdout
    rows = {row["fault"]: row for row in map(json.loads, result.stdout.splitlines())}
    both, one = rows["V drawn anew in every step"], rows["an update that is 3 % long"]
    assert both["planted_by"] == both["caught_by"] == names
    assert (one["planted_by"], one["caught_by"]) == (names[:1], names[:1])
    assert (one["survived"], one["num_not_reached"]) == ([], 1)  # the second claim adds no increments
    assert len(rows) == len({fault for claim in claims_named(*names) for fault in claim.faults})


def test_the_matrix_does_not_run_claims_that_do_not_call_the_changed_function():
    names = ["zoinfer-window-on-one-factor", "sparq-fewer-bits-send-less"]
    rows = list(matrix(claims_named(*names), Context()))
    for row in rows:
        assert row.verdicts == {**dict.fromkeys(names, "not reached"), row.planted_by[0]: "caught"}
        assert row.passed


def test_a_check_that_is_stopped_has_said_what_it_knows(monkeypatch):
    chosen = claims_named()[:2]

    def interrupted(_context):
        raise KeyboardInterrupt

    stopped = replace(chosen[1], checks=(printed(interrupted, HALVED),))
    monkeypatch.setattr("proofs_checks.registry.claims_named", lambda **_chosen: (chosen[0], stopped))
    result = invoke("--quick", "--json")
    assert result.exit_code != 0
    (claim,) = map(json.loads, result.stdout.splitlines())
    assert claim["name"] == chosen[0].name


def test_the_command_fails_naming_the_claim_when_shipped_code_is_wrong():
    fault = Fault(
        "off", "executors.low_bits.grids:Integers.at_random", lambda shipped, *given: shipped(*given) + 1
    )
    with fault.apply():
        result = invoke("stochastic-rounding-unbiased", "--quick")
    assert result.exit_code == 1
    assert "  stochastic-rounding-unbiased" in result.stdout
    assert "unsettled" in result.stdout
    assert "wrong: stochastic-rounding-unbiased" in result.stdout


def test_the_command_lists_claims_with_their_faults():
    result = invoke("--list")
    assert result.exit_code == 0
    assert "quantized-rge" in result.stdout
    assert "one rounding for both copies of a perturbation" in result.stdout
