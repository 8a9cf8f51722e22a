"""Sample means against their theory, with an error rate that is stated for all comparisons together."""

from __future__ import annotations

import math

import torch
from scipy.stats import norm
from torch import Tensor

from proofs_checks.claims import Outcome

FALSE_ALARMS = 1e-4
"""Probability that a true claim fails for a seed, over all comparisons of one check."""


def threshold(num_tests: int) -> float:
    """Return the standard errors that a mean may be off, two-sided, Bonferroni-corrected for `num_tests`."""
    return float(norm.isf(FALSE_ALARMS / (2 * num_tests)))


def standard_errors_off(samples: Tensor, expected: Tensor) -> Tensor:
    """Return how many standard errors each column's mean lies from what is expected.

    Parameters
    ----------
    samples : torch.Tensor
        Shape (n, k), float64.
    expected : torch.Tensor
        Shape (k,).

    Notes
    -----
    A column that never varies has no standard error: it is 0 off where it equals its expectation to float64's
    rounding, and infinitely far otherwise.
    """
    off = (samples.mean(0) - expected).abs()
    error = samples.std(0) / math.sqrt(len(samples))
    rounding = 1e-9 * expected.abs().clamp(min=1.0)
    return torch.where(error > rounding, off / error, torch.where(off <= rounding, 0.0, math.inf))


def compare_means(name: str, samples: Tensor, expected: Tensor, *, num_families: int = 1) -> Outcome:
    """Return the outcome of comparing every column's mean, and the mean along `expected`, with theory.

    Parameters
    ----------
    name : str
        For the details.
    samples : torch.Tensor
        Shape (n, k).
    expected : torch.Tensor
        Shape (k,).
    num_families : int
        Comparisons like this one in the same check.

    Notes
    -----
    The direction of the expectation is a comparison of its own: an error of the whole estimate's size shows there
    long before it shows in a single component.
    """
    if len(expected) > 1:
        along = expected / expected.norm()
        samples = torch.cat([samples, (samples @ along)[:, None]], dim=1)
        expected = torch.cat([expected, expected.norm()[None]])
    off = standard_errors_off(samples, expected)
    statistic = float(off.max())
    bound = threshold(len(expected) * num_families)
    line = f"{name}: {statistic:.2f} standard errors at most, of {len(expected)} means, n = {len(samples)}"
    return Outcome(statistic, bound, "standard errors between a mean and its theory", (line,))
