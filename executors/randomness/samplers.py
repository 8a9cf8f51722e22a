"""How random perturbations are drawn; what is known of their distributions is said in :mod:`costmodel.formats.distributions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Generator, Tensor

from costmodel.formats.distributions import DISTRIBUTIONS, Distribution
from topology.errors import PlanError


class DistributionSampler(ABC):
    """How tensors of a distribution are drawn."""

    distribution: Distribution  # what is known of them without drawing any

    @abstractmethod
    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill a contiguous floating-point tensor with the generator's next numbers."""

    def fill_scaled(self, out: Tensor, generator: Generator, factor: float) -> None:
        """Fill `out` with the generator's next numbers times `factor`, rounded once more."""
        self.fill(out, generator)
        # On a CPU in chunks that torch does not share among threads: draw threads call this.
        for chunk in out.view(-1).split(_ALONE_ELEMENTS if out.device.type == "cpu" else max(1, out.numel())):
            chunk.mul_(factor)

    def skip(self, numel: int, like: Tensor, generator: Generator) -> None:
        """Leave `generator` as drawing a tensor of `numel` elements in the format of `like` would."""
        self.fill(torch.empty(numel, dtype=like.dtype, device=like.device), generator)

    def num_raw(self, numel: int, dtype: torch.dtype) -> int | None:  # noqa: ARG002 - what others need
        """Return the 32-bit raw outputs that a CPU's generator spends on a draw; None where that is not known."""
        return None

    @abstractmethod
    def energy(self, shape: Sequence[int]) -> float:
        """Return ``E[(a·z)²·|z|²]`` for a tensor `z` of this shape and a constant unit tensor `a`.

        It is the expected square of an estimate ``g·z``, in squares of the gradient, where the loss is linear.
        """


class Gaussian(DistributionSampler):
    """Standard normal elements, the numbers of ``torch.normal`` with the same generator."""

    distribution = DISTRIBUTIONS["gaussian"]

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with standard normals."""
        out.normal_(0.0, 1.0, generator=generator)

    def fill_scaled(self, out: Tensor, generator: Generator, factor: float) -> None:
        """Fill `out` with normals times `factor`; torch multiplies groups of normals by a deviation as they come."""
        if out.device.type == "cpu" and out.numel() >= _GROUP and factor > 0 and out.dtype in _EXACTLY_SCALED:
            out.normal_(0.0, factor, generator=generator)
        else:
            super().fill_scaled(out, generator, factor)

    def skip(self, numel: int, like: Tensor, generator: Generator) -> None:
        """Pass over the raw outputs of a draw; on a CPU without making normals of them.

        torch's CPU generator spends a 32-bit word on every normal of a whole group of 16, two in float64. A draw that
        ends within a group makes its last normals anew, in ways that differ between formats: that end is drawn.
        """
        end = _GROUP + numel % _GROUP if numel % _GROUP else 0
        if like.device.type != "cpu" or numel <= end:
            super().skip(numel, like, generator)
            return
        skip_raw((numel - end) * (2 if like.dtype == torch.float64 else 1), generator)
        if end:
            super().skip(end, like, generator)

    def num_raw(self, numel: int, dtype: torch.dtype) -> int | None:
        """Return a word for every normal, two in float64; a last group that is not a whole one is made anew."""
        if numel < _GROUP or (numel % _GROUP and dtype not in _EXACTLY_SCALED):
            return None
        anew = _GROUP if numel % _GROUP else 0
        return (numel + anew) * (2 if dtype == torch.float64 else 1)

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``d + 2``."""
        return prod(shape) + 2.0


class Rademacher(DistributionSampler):
    """Elements +1 or -1, each with probability 1/2: one random bit becomes the sign of a one.

    A random 64-bit word serves 64 elements: each of its bits in turn is shifted into the place of a sign, and the
    other bits are those of 1.0. The raw outputs must span the whole of int64: without bounds torch never sets the
    highest bit.
    """

    distribution = DISTRIBUTIONS["rademacher"]

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with signs."""
        flat = out.view(-1)
        length = _CHUNK_ELEMENTS if flat.device.type == "cpu" else max(1, flat.numel())
        for begin in range(0, flat.numel(), length):
            self._fill_chunk(flat[begin : begin + length], generator)

    def _fill_chunk(self, flat: Tensor, generator: Generator) -> None:
        raw = raw_signs(flat.numel(), generator)
        whole = flat.numel() // RAW_BITS
        self.spread(raw[:whole], flat[: whole * RAW_BITS])
        if whole < raw.numel():
            last = torch.empty(RAW_BITS, dtype=flat.dtype, device=flat.device)
            self.spread(raw[whole:], last)
            flat[whole * RAW_BITS :].copy_(last[: flat.numel() - whole * RAW_BITS])

    def skip(self, numel: int, like: Tensor, generator: Generator) -> None:
        """Pass over the raw outputs of a draw; on a CPU without making signs of them."""
        if like.device.type != "cpu":
            super().skip(numel, like, generator)
            return
        skip_raw(2 * -(-numel // RAW_BITS), generator)

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``d``, the least that any perturbation of unit elements can have."""
        return float(prod(shape))

    @staticmethod
    def spread(raw: Tensor, out: Tensor) -> None:
        """Turn every bit of `raw` into an element of `out`, which is contiguous and has 64 for each of them."""
        integer, width = _INTEGERS[out.element_size()], 8 * out.element_size()
        signs = out.view(integer).view(-1, width)
        shifts = _shifts(width, integer, out.device)
        torch.bitwise_left_shift(raw.view(integer).view(-1, 1), shifts, out=signs)
        signs.bitwise_and_(_bits(-0.0, out.dtype)).bitwise_or_(_bits(1.0, out.dtype))


_GROUP = 16
"""torch's CPU normals come in groups of 16."""

_EXACTLY_SCALED = (torch.float32, torch.float64)
"""Formats in which a deviation is not rounded before it multiplies: a narrower one holds it in that format."""

_ALONE_ELEMENTS = (1 << 15) - 64
"""Elements that torch passes over on the calling thread alone."""

RAW_BITS = 64
"""Signs that are made of one random number."""

_CHUNK_ELEMENTS = 1 << 19
"""Signs made at a time: their passes find them in cache, and are long against what calling them takes."""

_SKIPPED_AT_ONCE = 1 << 13
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@cache
def _shifts(width: int, integer: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(width, dtype=integer, device=device)


@cache
def _bits(value: float, dtype: torch.dtype) -> int:
    """Return the bits of `value` as a signed integer of its width."""
    return int(torch.tensor(value, dtype=dtype).view(_INTEGERS[dtype.itemsize]).item())


def raw_signs(num_signs: int, generator: Generator) -> Tensor:
    """Return the generator's next int64 numbers, of whose bits so many signs are made."""
    raw = torch.empty(-(-num_signs // RAW_BITS), dtype=torch.int64, device=generator.device)
    return raw.random_(-(2**63), None, generator=generator)


def skip_raw(num_raw: int, generator: Generator) -> None:
    """Advance a CPU generator by 32-bit raw outputs; it makes two at a time the fastest."""
    scratch = torch.empty(min(num_raw // 2, _SKIPPED_AT_ONCE), dtype=torch.int64)
    for begin in range(0, num_raw // 2, _SKIPPED_AT_ONCE):
        scratch[: num_raw // 2 - begin].random_(-(2**63), None, generator=generator)
    if num_raw % 2:
        torch.empty(1, dtype=torch.int32).random_(generator=generator)


SAMPLERS: dict[str, DistributionSampler] = {
    sampler.distribution.name: sampler for sampler in (Gaussian(), Rademacher())
}
"""How each distribution of :data:`costmodel.formats.distributions.DISTRIBUTIONS` without factors is drawn."""


def sampler_named(name: str) -> DistributionSampler:
    """Return the perturbation called `name`. Raises PlanError if there is none."""
    try:
        return SAMPLERS[name]
    except KeyError:
        raise PlanError(
            f"unknown distribution {name!r}", hint="distributions: " + ", ".join(SAMPLERS)
        ) from None
