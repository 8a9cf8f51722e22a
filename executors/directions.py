"""Families of random directions: how a flat tensor is filled, and what is known about its distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Generator, Tensor

from topology.errors import PlanError


class Direction(ABC):
    """A distribution whose elements are independent and alike.

    Attributes
    ----------
    name : str
    mean : float
        Expectation of an element.
    second_moment : float
        Expectation of an element's square.
    """

    name: str
    mean: float
    second_moment: float

    @abstractmethod
    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill a contiguous floating-point tensor with the generator's next numbers."""


class Gaussian(Direction):
    """Standard normal elements, the numbers of ``torch.normal`` with the same generator."""

    name = "gaussian"
    mean = 0.0
    second_moment = 1.0

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with standard normals."""
        out.normal_(0.0, 1.0, generator=generator)


class Rademacher(Direction):
    """Elements +1 or -1, each with probability 1/2: one random bit becomes the sign of a one.

    Notes
    -----
    Random 64-bit words are written over the tensor, and every bit but the signs' is then replaced by the bits of
    1.0. The words must span the whole of int64: without bounds torch never sets the highest bit.
    """

    name = "rademacher"
    mean = 0.0
    second_moment = 1.0

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with signs."""
        per_word = 8 // out.element_size()
        flat = out.view(-1)
        num_whole = flat.numel() // per_word * per_word
        aligned = flat.data_ptr() % 8 == 0 and flat.storage_offset() % per_word == 0
        if aligned and num_whole:
            self._fill_words(flat[:num_whole].view(torch.int64), out.dtype, generator)
        begin = num_whole if aligned else 0
        if begin < flat.numel():
            num_words = -(-(flat.numel() - begin) // per_word)
            words = torch.empty(num_words, dtype=torch.int64, device=out.device)
            self._fill_words(words, out.dtype, generator)
            flat[begin:].copy_(words.view(out.dtype)[: flat.numel() - begin])

    @staticmethod
    def _fill_words(words: Tensor, dtype: torch.dtype, generator: Generator) -> None:
        words.random_(-(2**63), None, generator=generator)
        words.bitwise_and_(_word_of(-0.0, dtype)).bitwise_or_(_word_of(1.0, dtype))


@cache
def _word_of(value: float, dtype: torch.dtype) -> int:
    """Return the 64-bit word that repeats `value`."""
    count = 8 // torch.empty(0, dtype=dtype).element_size()
    return int(torch.full((count,), value, dtype=dtype).view(torch.int64).item())


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
