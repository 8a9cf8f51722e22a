"""Products of int8 matrices with exact sums, on processors with instructions for integers and on those without."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from costmodel.formats.low_bits import EXACT_TERMS, FLOAT_TILE_COLUMNS


def exact_sums(inputs: Tensor, weights: Tensor) -> Tensor:
    """Return ``inputs @ weights.T`` of int8 matrices: exact integers, rounded once to float32.

    - `inputs`: (rows, width), int8.
    - `weights`: (outputs, width), int8.

    Returns
    -------
    torch.Tensor
        (rows, outputs), float32.

    Notes
    -----
    torch's own product of int8 matrices is fast where the processor has instructions for it. On an x86-64 CPU without AVX-512
    torch 2.13 multiplies one number after the other, at a thirtieth of float32's pace. There :func:`sums_in_float32` takes its
    place: the same bits.

    Examples
    --------
    >>> left, right = (
    ...     torch.tensor([[1, -2]], dtype=torch.int8),
    ...     torch.tensor([[3, 4], [-128, 127]], dtype=torch.int8),
    ... )
    >>> exact_sums(left, right).tolist()
    [[-5.0, -382.0]]
    """
    if inputs.device.type == "cpu" and not _has_integer_instructions():
        return sums_in_float32(inputs, weights)
    return torch._int_mm(inputs, weights.T).float()


def sums_in_float32(inputs: Tensor, weights: Tensor) -> Tensor:
    """Return what :func:`exact_sums` does, by products of float32 numbers.

    A product of two bytes is 2¹⁴ at most, and float32 holds every integer up to 2²⁴: sums of 1,024 of them are exact, in any
    order. Longer ones are added up as integers. A few outputs are made at a time, so that the numbers made of their weights stay in
    cache.
    """
    (num_rows, width), outputs = inputs.shape, len(weights)
    terms = [slice(begin, begin + EXACT_TERMS) for begin in range(0, width, EXACT_TERMS)]
    tiles = [slice(begin, begin + FLOAT_TILE_COLUMNS) for begin in range(0, outputs, FLOAT_TILE_COLUMNS)]
    is_short = len(terms) == 1
    kind = torch.float32 if is_short else torch.int32
    sums = torch.zeros((num_rows, outputs), dtype=kind, device=inputs.device)
    for span in terms:
        numbers = inputs[:, span].float()
        for tile in tiles:
            factors = weights[tile, span].float().T
            if is_short:  # exact as it is: no sum of integers is needed
                torch.mm(numbers, factors, out=sums[:, tile])
            else:
                sums[:, tile] += torch.mm(numbers, factors).to(torch.int32)
        del numbers  # before the next ones are made
    return sums.float()


@cache
def _has_integer_instructions() -> bool:
    """Whether torch multiplies int8 matrices at a pace that only instructions for integers reach, as one product shows.

    Which of the two it is changes no bit. torch does not say by which instructions it multiplies, so this is measured.
    """
    inputs, weights = torch.ones((64, 512), dtype=torch.int8), torch.ones((512, 512), dtype=torch.int8)

    def seconds(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        begin = perf_counter()
        product(inputs, weights)
        return perf_counter() - begin

    # The quickest of three: the first compiles, and others may be at work on the same cores.
    own = min(seconds(lambda left, right: torch._int_mm(left, right.T)) for _ in range(3))
    return own < min(seconds(sums_in_float32) for _ in range(3))
