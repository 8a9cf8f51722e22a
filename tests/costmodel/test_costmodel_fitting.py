"""Weighted robust least squares with priors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, least_squares

from costmodel.rates.fitting import Prior, cauchy, most_probable, soft_l1

LOSSES = {"soft_l1": soft_l1(0.2), "cauchy": cauchy(0.2)}


def line(seed: int, num_data: int = 8) -> tuple[np.ndarray, np.ndarray, Prior]:
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(num_data, 2))
    seen = matrix @ np.array([0.3, -0.2]) + 0.01 * generator.normal(size=num_data)
    return matrix, seen, Prior(np.array([0.1, 0.0]), np.array([0.5, 2.0]))


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_fit_is_the_closed_form(seed):
    """With squares alone the optimum solves the normal equations, which the information matrix is of."""
    matrix, seen, prior = line(seed)
    weights = np.linspace(1, 20, len(seen))
    information = prior.information(matrix, weights**2)
    by_hand = prior.x + np.linalg.solve(information, matrix.T @ (weights**2 * (seen - matrix @ prior.x)))
    for jacobian in (None, lambda _: matrix):
        x, slopes = most_probable(prior, lambda x: matrix @ x - seen, jacobian, weights=weights)
        assert x == pytest.approx(by_hand, rel=1e-6)
        assert slopes.T @ slopes == pytest.approx(information, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_scipys(name):
    """Against scipy's own losses, with a prior so vague that it says nothing."""
    matrix, seen, _ = line(5)
    seen[2] += 3.0
    vague = Prior(np.zeros(2), np.full(2, 1e6))
    x, _ = most_probable(vague, lambda x: matrix @ x - seen, lambda _: matrix, loss=LOSSES[name], xtol=1e-12)
    # From the same start: the Cauchy loss has several minima.
    theirs = least_squares(lambda x: matrix @ x - seen, np.zeros(2), loss=name, f_scale=0.2, xtol=1e-12)
    assert x == pytest.approx(theirs.x, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@given(size=st.floats(-5, 5), far=st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 100.0]))
def test_slopes_are_the_derivatives(name, size, far):
    loss, at = LOSSES[name], np.array([size * far])
    step = max(1e-7, 1e-7 * abs(at[0]))
    slope = approx_fprime(at, lambda r: float(loss.soften(r)[0]), step)
    assert loss.softened_slope(at) == pytest.approx(slope, rel=1e-3, abs=1e-6)
    assert loss.curvature(at) * at == pytest.approx(
        loss.soften(at) * loss.softened_slope(at), rel=1e-7, abs=1e-12
    )


def test_an_outlier_counts_less_and_the_prior_holds_what_data_leave_open():
    matrix = np.array([[1.0, 0.0]] * 5)
    seen = np.array([0.5, 0.5, 0.5, 0.5, 9.0])
    prior = Prior(np.array([0.0, 0.7]), np.ones(2))
    robust, _ = most_probable(
        prior, lambda x: matrix @ x - seen, lambda _: matrix, weights=50.0, loss=soft_l1(0.2)
    )
    square, _ = most_probable(prior, lambda x: matrix @ x - seen, lambda _: matrix, weights=50.0)
    assert robust[0] == pytest.approx(0.5, abs=0.06)
    assert square[0] > 2
    assert robust[1] == pytest.approx(0.7)
