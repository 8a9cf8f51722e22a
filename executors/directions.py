"""Families of random directions: how a flat tensor is filled, and what is known about its distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Generator, Tensor

from topology.errors import PlanError


class Direction(ABC):
    """A distribution of tensors whose elements are alike and uncorrelated.

    Attributes
    ----------
    name : str
    mean : float
        Expectation of an element.
    second_moment : float
        Expectation of an element's square.
    block_factor : int
        How many times longer than others its ``counter`` blocks are: more where an element costs less.
    """

    name: str
    mean: float
    second_moment: float
    block_factor: int = 1

    @abstractmethod
    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill a contiguous floating-point tensor with the generator's next numbers."""

    @abstractmethod
    def energy(self, shape: Sequence[int]) -> float:
        """Return ``E[(a·z)²·|z|²]`` for a tensor `z` of this shape and a constant unit tensor `a`.

        It is the expected square of an estimate ``g·z``, in squares of the gradient, where the loss is linear.
        """


class Gaussian(Direction):
    """Standard normal elements, the numbers of ``torch.normal`` with the same generator."""

    name = "gaussian"
    mean = 0.0
    second_moment = 1.0

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with standard normals."""
        out.normal_(0.0, 1.0, generator=generator)

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``d + 2``."""
        return prod(shape) + 2.0


class Rademacher(Direction):
    """Elements +1 or -1, each with probability 1/2: one random bit becomes the sign of a one.

    Notes
    -----
    A random 64-bit word serves 64 elements: each of its bits in turn is shifted into the place of a sign, and the
    other bits are those of 1.0. The words must span the whole of int64: without bounds torch never sets the
    highest bit.
    """

    name = "rademacher"
    mean = 0.0
    second_moment = 1.0
    block_factor = 8

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with signs."""
        flat = out.view(-1)
        words = torch.empty(-(-flat.numel() // _WORD_BITS), dtype=torch.int64, device=out.device)
        words.random_(-(2**63), None, generator=generator)
        whole = flat.numel() // _WORD_BITS
        self._spread(words[:whole], flat[: whole * _WORD_BITS])
        if whole < words.numel():
            last = torch.empty(_WORD_BITS, dtype=out.dtype, device=out.device)
            self._spread(words[whole:], last)
            flat[whole * _WORD_BITS :].copy_(last[: flat.numel() - whole * _WORD_BITS])

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``d``, the least that any direction of unit elements can have."""
        return float(prod(shape))

    @staticmethod
    def _spread(words: Tensor, out: Tensor) -> None:
        """Turn every bit of `words` into an element of `out`."""
        integer, width = _INTEGERS[out.element_size()], 8 * out.element_size()
        signs = out.view(integer).view(-1, width)
        shifts = torch.arange(width, dtype=integer, device=out.device)
        torch.bitwise_left_shift(words.view(integer).view(-1, 1), shifts, out=signs)
        signs.bitwise_and_(_bits(-0.0, out.dtype)).bitwise_or_(_bits(1.0, out.dtype))


_WORD_BITS = 64
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@cache
def _bits(value: float, dtype: torch.dtype) -> int:
    """Return the bits of `value` as a signed integer of its width."""
    return int(torch.tensor(value, dtype=dtype).view(_INTEGERS[dtype.itemsize]).item())


DIRECTIONS: dict[str, Direction] = {direction.name: direction for direction in (Gaussian(), Rademacher())}


def direction_named(name: str) -> Direction:
    """Return the direction called `name`.

    Raises
    ------
    PlanError
        If there is none.
    """
    try:
        return DIRECTIONS[name]
    except KeyError:
        raise PlanError(
            f"there is no direction {name!r}", hint="directions are " + ", ".join(DIRECTIONS)
        ) from None
