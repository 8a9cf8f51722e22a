"""The statistics of checks: right code rarely alarms, wrong code of the stated size is noticed."""

from __future__ import annotations

import json
import math

import pytest
import torch
import typer
from scipy.stats import binom
from typer.testing import CliRunner

from proofs_checks.calibration import calibrated, main
from proofs_checks.registry import claims_named
from proofs_checks.statistics import LEVEL, compare_means, compare_two_points, estimates_of, threshold

ONE = torch.ones(1, dtype=torch.float64)


def normals(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probabilities(make, runs=400):
    return [make(seed).estimates[0].p_value for seed in range(runs)]


@pytest.mark.parametrize("size", [40, 256, 3000])
def test_right_means_report_probabilities_no_smaller_than_chance(size):
    reported = probabilities(lambda seed: compare_means("", normals(size, 1, seed=seed) + 1, ONE))
    for nominal in (0.1, 0.01):
        assert binom.sf(sum(p < nominal for p in reported) - 1, len(reported), nominal) > 1e-6


def test_right_roundings_report_probabilities_no_smaller_than_chance():
    def rounded(seed):
        uniform = torch.rand((3000, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return compare_two_points("", (uniform < 0.02).double(), 0.02 * ONE)

    reported = probabilities(rounded)
    for nominal in (0.1, 0.01):
        assert binom.sf(sum(p < nominal for p in reported) - 1, len(reported), nominal) > 1e-6


def test_an_error_of_the_stated_size_is_noticed():
    samples = normals(20_000, 1, seed=0) + 1
    (estimate,) = estimates_of("", samples, ONE)
    assert estimate.resolution < 0.1
    missed = sum(
        compare_means("", normals(20_000, 1, seed=seed) + 1 + estimate.resolution, ONE).passed
        for seed in range(1, 101)
    )
    assert missed <= 4  # one in a thousand, by what is stated


def test_a_number_rounded_to_a_third_value_or_out_of_its_cell_is_noticed():
    values = torch.tensor([[0.0], [1.0]] * 500, dtype=torch.float64)
    assert compare_two_points("", values, 0.5 * ONE).passed
    assert not compare_two_points("", torch.cat([values, 2 * ONE[None]]), 0.5 * ONE).passed
    assert not compare_two_points("", values, 1.5 * ONE).passed
    assert not compare_two_points("", values[1::2], 0.5 * ONE).passed


def test_the_error_of_a_rounding_is_told_of_the_number_or_of_the_step():
    generator = torch.Generator().manual_seed(0)
    up = (
        torch.rand((4000, 2), generator=generator, dtype=torch.float64) < torch.tensor([0.5, 0.02])
    ).double()
    near, far = compare_two_points("", up + torch.tensor([0.0, 7.0]), torch.tensor([0.5, 7.02])).estimates
    assert near.resolution == pytest.approx((threshold(4000) + 3.093) * 0.5 / 4000**0.5, rel=0.01)
    assert far.resolution == pytest.approx(
        (threshold(4000) + 3.093) * (0.02 * 0.98 / 4000) ** 0.5 / 7.02, rel=0.01
    )
    (whole,) = compare_two_points("", torch.zeros((40, 1)), torch.zeros(1)).estimates
    assert not whole.varies


def test_the_quantile_is_students():
    assert threshold(2) > 1e9
    assert threshold(256) == pytest.approx(6.866, abs=1e-3)
    assert pytest.approx(5e-11) == LEVEL


@pytest.mark.slow
def test_checks_are_calibrated_over_a_few_seeds():
    chosen = claims_named("stochastic-rounding-unbiased", "codec-stochastic-expands")
    results = list(calibrated(chosen, range(1, 7)))
    assert {result.claim.name for result in results} == {claim.name for claim in chosen}
    for result in results:
        assert not result.num_alarms
        assert not any(result.is_off(nominal) for nominal in (0.01, 0.001))


def test_a_check_that_alarms_too_often_is_named():
    (claim,) = claims_named("codec-stochastic-expands")
    (result,) = calibrated([claim], range(1, 3))
    result.p_values = [1e-4] * 5 + [0.5] * 95
    assert result.is_off(0.001)
    assert math.isclose(result.rate(0.001), 0.05)


def test_the_command_reports_rates_in_json():
    app = typer.Typer(add_completion=False)
    app.command()(main)
    result = CliRunner().invoke(app, ["codec-stochastic-expands", "--seeds", "2", "--json"])
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert (row["claim"], row["comparisons"], row["false_alarms"]) == ("codec-stochastic-expands", 14, 0)
