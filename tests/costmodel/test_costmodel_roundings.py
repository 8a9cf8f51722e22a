"""Energies of estimates along sparse perturbations, against every perturbation there is."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from costmodel.formats.roundings import RoundedPerturbation


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.75])
def test_the_energy_along_sparse_signs_is_that_of_all_of_them(sparsity):
    """Two rows of two signs: the mean of ĝ and of |ĝ|² over all masks and signs, by their probabilities."""
    perturbation, gradient = RoundedPerturbation("rademacher", 4, sparsity), (0.3, -1.0, 2.0, 0.7)
    kept, value = 1 - sparsity, perturbation.unit * perturbation.highest
    mean, energy = [0.0] * 4, 0.0
    for rows, signs in product(product((0, 1), repeat=2), product((-1, 1), repeat=4)):
        probability = prod(kept if row else sparsity for row in rows) / 2**4
        u = [value * rows[element // 2] * sign for element, sign in enumerate(signs)]
        slope = sum(a * b for a, b in zip(u, gradient, strict=True))
        mean = [m + probability * slope * a for m, a in zip(mean, u, strict=True)]
        energy += probability * slope**2 * sum(a * a for a in u)
    assert mean == pytest.approx(gradient)
    square = sum(a * a for a in gradient)
    assert energy / square == pytest.approx(perturbation.relative_energy("normalised", 4, row_elements=2))


def test_zeros_leave_second_moments_and_raise_fourths():
    dense, sparse = RoundedPerturbation("gaussian", 3), RoundedPerturbation("gaussian", 3, sparsity=0.9)
    assert sparse.moments.second == dense.moments.second
    assert sparse.moments.fourth == pytest.approx(10 * dense.moments.fourth)
    for estimator in ("normalised", "q-rge2"):
        ratio = sparse.relative_energy(estimator, 10**6) / dense.relative_energy(estimator, 10**6)
        assert 1 < ratio < 1 + 1e-4
