"""Evidence against claims over many runs: bets are fair, wealth is bounded by Ville's inequality, and small errors show in time."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import typer
from scipy.integrate import quad
from typer.testing import CliRunner

from proofs_checks.claims import Check, Claim, Role
from proofs_checks.cli import check
from proofs_checks.evidence import ALARM, MOST_CLAIMS, Wealth, add_to, bet, read_evidence
from proofs_checks.outcomes import Context
from proofs_checks.planting import Fault
from proofs_checks.registry import CLAIMS
from proofs_checks.statistics import compare_means
from topology.errors import ZosimError


def test_a_bet_is_fair_whatever_the_probability():
    near, _ = quad(lambda log: bet(np.exp(-log)) * np.exp(-log), 0, 600, limit=500, points=[1e-3, 1, 10])
    assert near == pytest.approx(1, abs=2e-3)  # the tail beyond e⁻⁶⁰⁰ has 1/600
    values = [bet(p) for p in np.linspace(1e-6, 1, 2001)]
    assert values == sorted(values, reverse=True)


def test_wealth_is_a_mixture_of_bets_from_each_run_on():
    factors, wealth = [2.0, 0.5, 3.0], Wealth()
    for factor in factors:
        wealth = wealth.after(factor)
    begun = [np.prod(factors[run:]) / ((run + 1) * (run + 2)) for run in range(3)]
    assert wealth.total == pytest.approx(sum(begun) + 1 / 4)
    assert wealth.largest == pytest.approx(max(1.5, 2 / 4 + 0.5 / 6 + 1 / 3, wealth.total))


def test_fair_bets_seldom_make_rich():
    generator = np.random.default_rng(1)
    largest = []
    for _ in range(2000):
        wealth = Wealth()
        for p in generator.random(100):
            wealth = wealth.after(bet(p))
        largest.append(wealth.largest)
    for rich in (4.0, 20.0):  # Ville: at most 1/rich of them, ever
        assert np.mean(np.array(largest) >= rich) <= 1 / rich


def sampled(off):
    def measure(context):
        """Compare a mean with 0."""
        generator = torch.Generator().manual_seed(context.seed)
        return compare_means("mean", torch.randn((4000, 1), generator=generator) + off, torch.zeros(1))

    checked = Check(
        Role.PRINTED, measure, (Fault("any", "proofs_checks.statistics:LEVEL", lambda level: 2 * level),)
    )
    return Claim("mean-is-zero", "zosim", ("here",), "A mean.", "It is 0.", "normals", (checked,))


def test_an_error_that_no_run_notices_shows_in_time_even_after_many_correct_runs():
    evidence = {}
    for seed in range(30):
        assert add_to(evidence, [sampled(0.0).run(Context(seed))]) == []
    judged = [sampled(0.05).run(Context(1000 + seed)) for seed in range(25)]  # 3 standard errors
    assert all(each.is_settled for each in judged)
    assert [add_to(evidence, [each]) for each in judged][-1] == ["mean-is-zero"]
    assert evidence["mean-is-zero"].largest >= ALARM


def test_the_command_takes_a_fresh_seed_and_goes_on_from_its_file(tmp_path):
    path, seeds = tmp_path / "evidence.json", []
    for run in (1, 2):
        app = typer.Typer(add_completion=False)
        app.command()(check)
        result = CliRunner().invoke(app, ["quantized-rge", "--quick", "--json", "--evidence", str(path)])
        assert result.exit_code == 0, result.stdout
        seeds.append(json.loads(result.stdout)["seed"])
        assert read_evidence(path)["quantized-rge"].num_runs == run
    assert len({*seeds, 0}) == 3
    path.write_text("[1]")
    with pytest.raises(ZosimError, match="does not hold evidence"):
        read_evidence(path)


def test_all_claims_can_be_bet_against():
    assert len(CLAIMS) <= MOST_CLAIMS
