"""What is declared without torch, held against torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from costmodel.formats import COMPUTE_FORMATS, FORMATS
from costmodel.formats.distributions import DISTRIBUTIONS
from executors.formats import TORCH_DTYPES, format_of
from executors.randomness.samplers import SAMPLERS
from topology.errors import PlanError


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_formats_are_torchs(name: str) -> None:
    declared, dtype = FORMATS[name], TORCH_DTYPES[name]
    assert declared.bits == 8 * dtype.itemsize
    assert declared.is_float == dtype.is_floating_point
    if declared.is_float:
        assert declared.smallest_normal == torch.finfo(dtype).smallest_normal


def test_every_format_that_is_computed_in_is_told_from_its_torch_name() -> None:
    names = [name for name in COMPUTE_FORMATS if name != "tf32"]
    assert [format_of(TORCH_DTYPES[name]) for name in names] == names
    with pytest.raises(PlanError, match=r"torch\.int32 is not a compute format"):
        format_of(torch.int32)


def test_every_distribution_of_plans_is_drawn() -> None:
    assert set(SAMPLERS) == {name for name, known in DISTRIBUTIONS.items() if not known.is_factored}
    assert all(sample.distribution is DISTRIBUTIONS[name] for name, sample in SAMPLERS.items())  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name, known in DISTRIBUTIONS.items() if not known.is_factored])
def test_partial_moments_are_those_of_what_is_drawn(name: str) -> None:
    """Of all elements, and of those in cells: the probability, the mean and the mean square, to five standard errors."""
    declared = DISTRIBUTIONS[name]  # type: ignore[index]
    sample = torch.empty(1 << 18, dtype=torch.float64)
    SAMPLERS[name].fill(sample, torch.Generator().manual_seed(1))
    assert declared.is_sign or declared.partial_moments is not None
    if declared.partial_moments is None:
        return
    bounds = (-float("inf"), -1.5, -0.4, 0.0, 0.7, 1.1, float("inf"))
    cells = [(bounds[0], bounds[-1]), *pairwise(bounds)]
    for low, high in cells:
        for power, expected in enumerate(declared.partial_moments(low, high)):
            values = sample**power * ((sample > low) & (sample <= high))
            error = 5 * float(values.std()) / sample.numel() ** 0.5
            assert float(values.mean()) == pytest.approx(expected, abs=error + 1e-12), (low, high, power)
    mass, mean, square = declared.partial_moments(bounds[0], bounds[-1])
    assert (mass, mean, square) == pytest.approx((1.0, declared.mean, declared.second_moment))
