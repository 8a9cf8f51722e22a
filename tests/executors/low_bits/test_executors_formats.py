"""What is declared without torch, held against torch."""

from __future__ import annotations

import pytest
import torch

from costmodel.formats import COMPUTE_FORMATS, FORMATS
from costmodel.formats.distributions import DISTRIBUTIONS
from executors.formats import TORCH_DTYPES, format_of
from executors.randomness.directions import DIRECTIONS
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
    with pytest.raises(PlanError, match=r"nothing is computed in torch\.int32"):
        format_of(torch.int32)


def test_every_distribution_of_plans_is_drawn() -> None:
    assert set(DIRECTIONS) == {name for name, known in DISTRIBUTIONS.items() if not known.is_factored}
    assert all(drawn.distribution is DISTRIBUTIONS[name] for name, drawn in DIRECTIONS.items())  # type: ignore[index]
