"""Sums of products of bytes: exact by either way, and the same way's pace decides which is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executors.low_bits import exact_products
from executors.low_bits.exact_products import exact_sums, sums_in_float32


def _bytes(seed: int, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "outputs", "width"), [(1, 1, 1), (17, 300, 96), (3, 257, 1024), (5, 9, 1025), (2, 8, 3100)]
)
def test_sums_are_those_of_integers(rows: int, outputs: int, width: int) -> None:
    inputs, weights = _bytes(1, rows, width), _bytes(2, outputs, width)
    exact = (inputs.long() @ weights.long().T).float()
    assert torch.equal(sums_in_float32(inputs, weights), exact)
    assert torch.equal(exact_sums(inputs, weights), exact)


@pytest.mark.parametrize("width", [1024, 2048, 70_000])
@pytest.mark.parametrize("ends", [(-128, -128), (127, -128), (127, 127)])
def test_largest_sums_are_exact(width: int, ends: tuple[int, int]) -> None:
    inputs, weights = (torch.full((2, width), end, dtype=torch.int8) for end in ends)
    weights[1, -1] = 1  # one product that is small beside the sum
    exact = (inputs.long() @ weights.long().T).float()
    assert torch.equal(sums_in_float32(inputs, weights), exact)


def test_bits_do_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights = _bytes(3, 40, 2000), _bytes(4, 48, 2000)
    sums = []
    for has_instructions in (True, False):
        monkeypatch.setattr(exact_products, "_has_integer_instructions", lambda has=has_instructions: has)
        sums.append(exact_sums(inputs, weights))
    assert torch.equal(*sums)
