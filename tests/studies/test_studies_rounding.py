"""Rounding of weights: the drift of a restore grows as a random walk; updates below half a step leave no trace."""

from __future__ import annotations

import math

import pytest
import torch

from studies.rounding.__main__ import EPSILON, WEIGHT_STD, drift, surviving


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drift_is_a_random_walk_below_one_rounding_a_pass(dtype: torch.dtype) -> None:
    changed, found = drift(dtype)
    assert 0 < changed < 1
    # Three sums are rounded, each by half a step of the largest weight or less.
    assert found[1] < 3 * torch.finfo(dtype).eps * (5 * WEIGHT_STD + 5 * EPSILON)
    assert found[100] / found[1] == pytest.approx(math.sqrt(100), rel=0.15)
    assert found[1000] / found[100] == pytest.approx(math.sqrt(10), rel=0.15)


def test_larger_updates_and_finer_formats_leave_more_traces() -> None:
    for size in (1e-6, 1e-5, 1e-4):
        assert surviving(torch.float16, size) > surviving(torch.bfloat16, size)
    for dtype in (torch.float16, torch.bfloat16):
        assert surviving(dtype, 1e-6) < surviving(dtype, 1e-5) < surviving(dtype, 1e-4)


def test_expected_share_of_surviving_updates_follows_from_the_format_s_steps() -> None:
    size = 1e-5
    torch.manual_seed(1)
    kept = (torch.randn(200_000, dtype=torch.float64) * WEIGHT_STD).to(torch.float16).double()
    exponents = torch.floor(torch.log2(kept.abs().clamp(min=2.0**-14)))
    half_step = torch.exp2(exponents - 11)
    expected = float(torch.erfc(half_step / size / math.sqrt(2)).mean())
    # Standard error of a share among 100,000 weights: 0.0016; steps that differ below a power of two add as much.
    assert surviving(torch.float16, size) == pytest.approx(expected, abs=0.01)
