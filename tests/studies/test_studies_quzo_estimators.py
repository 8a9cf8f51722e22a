"""Estimates along rounded perturbations are on average what their moments say, and what is planted shows."""

from __future__ import annotations

import pytest
import torch

from studies.quzo import estimators
from studies.quzo.estimators import ablations, estimates, rounded


@pytest.fixture(scope="module")
def measured():
    return list(estimates(2000, bits=(2, 3)))


def test_every_estimator_is_along_the_gradient_what_its_moments_say(measured):
    assert len(measured) == 2 * 2 * 3
    for one in measured:
        assert abs(one.along - one.predicted) < 4.5 * one.along_stderr, one


def test_the_mean_is_off_by_its_bias_and_nothing_else(measured):
    for one in measured:
        assert abs(one.error - (1 - one.predicted) ** 2) < 5 * one.error_stderr, one


def test_two_roundings_pay_for_what_they_mend(measured):
    """On a wide grid Q-RGE2 has no bias and the noise of Q-RGE1, of which division leaves little."""
    by_name = {one.estimator: one for one in measured if (one.grid, one.bits) == ("wide", 2)}
    assert by_name["q-rge1"].predicted > 4
    assert by_name["q-rge2"].predicted == pytest.approx(1, abs=1e-3)
    assert by_name["q-rge2"].energy > 15 * by_name["normalised"].energy


def test_one_seed_for_both_roundings_is_the_first_estimator(monkeypatch):
    """What QuZO warns of: the second rounding is then the first."""

    def same(values, perturbation, _generator):
        return rounded(values, perturbation, torch.Generator().manual_seed(0))

    monkeypatch.setattr(estimators, "rounded", same)
    first, second, _ = estimates(1000, bits=(3,), grids=("wide",))
    assert first.along == second.along
    assert second.along - second.predicted > 4.5 * second.along_stderr


def test_perturbations_divide_noise_and_zeros_hardly_add_any():
    for one in ablations(2000):
        assert abs(one.energy - one.predicted) < 4.5 * one.stderr, one


@pytest.mark.slow
def test_every_kind_of_training_takes_steps(tmp_path):
    from studies.quzo.training import TrainingRow, main
    from studies.records import records_in

    out = tmp_path / "rows.csv"
    names = "bfloat16;int4;fp8;int4, first order;int4, sparse, perturbations of 2 bits, q-rge2;int8, sparse, 5 perturbations"
    for _ in range(2):  # what is there is not run again
        main(steps=2, cases=names, seeds="0", evaluated=4, out=out)
    rows = records_in(out, TrainingRow)
    assert [row.case for row in rows] == names.split(";")
    assert all(row.loss_first > 0.5 for row in rows)
