"""``counter`` draws: every block of every parameter has a generator of its own, so that any slice can be made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Generator, Tensor

from executors.crew import Crew, shared
from executors.directions import Direction
from executors.rng import MASK32, drawn, mixed

COUNTER_BLOCK_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Length of a ``counter`` block, on a CPU times the direction's ``block_factor``: long enough that seeding costs
little, short enough that a row is cheap."""


@dataclass(frozen=True, slots=True)
class CounterKey:
    """Key of one (seed, step, query): a permutation of 32-bit block numbers.

    Notes
    -----
    torch seeds its CPU generator from 32 bits, so hashing (key, block) to a seed would let two of a large model's
    blocks meet. A permutation cannot: within one direction all seeds differ.
    """

    multiplier: int
    addend: int
    tweak: int

    @classmethod
    def of(cls, seed: int, step: int, query: int) -> CounterKey:
        """Return the key of one direction."""
        state = mixed(seed, step, query)
        second = mixed(state)
        return cls((state & MASK32) | 1, state >> 32, second & MASK32)

    def seed_of(self, block: int) -> int:
        """Return the seed of block number `block`, counted over all parameters."""
        x = (block * self.multiplier + self.addend) & MASK32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
        x ^= self.tweak
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
        return x ^ (x >> 16)


class CounterDraws:
    """Makes slices of ``counter`` directions.

    Parameters
    ----------
    numels : sequence of int
        Elements of every trainable parameter, in registration order; the same on every rank.
    device : torch.device
    crew : Crew, optional
        Threads that draw blocks at once on a CPU, each with a generator of its own.
    """

    def __init__(self, numels: Sequence[int], device: torch.device, *, crew: Crew | None = None) -> None:
        self._device = device
        self._numels = list(numels)
        self._first_blocks: dict[int, list[int]] = {}
        self._local = threading.local()
        self._crew = crew if crew is not None and device.type == "cpu" else Crew()

    def fill(
        self,
        out: Tensor,
        parameter: int,
        offset: int,
        key: CounterKey,
        direction: Direction,
        factor: float | None = None,
    ) -> None:
        """Fill flat `out` with the elements of a parameter's direction from `offset` on.

        Parameters
        ----------
        out : torch.Tensor
            One-dimensional, contiguous.
        parameter : int
            Position among the trainable parameters.
        offset : int
            First element wanted.
        key : CounterKey
        direction : Direction
        factor : float, optional
            Multiplies every number, which is rounded again.
        """
        self._fill_all([(out, parameter, offset)], key, direction, factor)

    def fill_parameters(
        self,
        views: Sequence[Tensor],
        parameters: Sequence[int],
        key: CounterKey,
        direction: Direction,
        factor: float | None = None,
    ) -> None:
        """Fill flat `views` with the whole directions of `parameters`."""
        wanted = [(view, parameter, 0) for view, parameter in zip(views, parameters, strict=True)]
        self._fill_all(wanted, key, direction, factor)

    def fill_rows(
        self, out: Tensor, rows: Tensor, parameter: int, key: CounterKey, direction: Direction
    ) -> None:
        """Fill `out` (kept rows, width) with rows of a table's direction; `rows` ascends."""
        wanted = rows.tolist()

        def fill(share: range) -> None:
            for kept in share:
                self._fill_row(out[kept], wanted[kept], parameter, key, direction)

        shares = shared(len(wanted), self._crew.num_threads)
        self._crew.run([partial(fill, share) for share in shares])

    def _fill_row(self, out: Tensor, row: int, parameter: int, key: CounterKey, direction: Direction) -> None:
        width, length = out.numel(), self._length(direction)
        begin, end = row * width, (row + 1) * width
        for block in range(begin // length, -(-end // length)):
            first = block * length
            low, high = max(begin, first), min(end, first + length)
            out[low - begin : high - begin] = self._window(
                out, parameter, block, low - first, high - first, key, direction
            )

    def _fill_all(
        self,
        wanted: Sequence[tuple[Tensor, int, int]],
        key: CounterKey,
        direction: Direction,
        factor: float | None,
    ) -> None:
        length = self._length(direction)
        jobs = [
            (out, parameter, offset, block)
            for out, parameter, offset in wanted
            for block in range(offset // length, -(-(offset + out.numel()) // length))
        ]

        def fill(share: range) -> None:
            for out, parameter, offset, block in jobs[share.start : share.stop]:
                self._fill_block(out, parameter, offset, block, key, direction, factor)

        num_shares = self._crew.num_threads if direction.is_drawn_alone else 1
        self._crew.run([partial(fill, share) for share in shared(len(jobs), num_shares)])

    def _fill_block(
        self,
        out: Tensor,
        parameter: int,
        offset: int,
        block: int,
        key: CounterKey,
        direction: Direction,
        factor: float | None,
    ) -> None:
        """Fill what lies in `block` of a parameter's elements from `offset` on."""
        end, length = offset + out.numel(), self._length(direction)
        first = block * length
        last = min(first + length, self._numels[parameter])
        if offset <= first and last <= end:
            generator = self._generator(parameter, block, key, direction)
            drawn(out[first - offset : last - offset], direction, generator, factor)
            return
        low, high = max(first, offset), min(last, end)
        numbers = self._window(out, parameter, block, low - first, high - first, key, direction)
        out[low - offset : high - offset] = numbers if factor is None else numbers.mul_(factor)

    def _window(
        self,
        like: Tensor,
        parameter: int,
        block: int,
        low: int,
        high: int,
        key: CounterKey,
        direction: Direction,
    ) -> Tensor:
        """Return elements `low` to `high` of a block, drawing as little of the rest as draws can be split."""
        length = self._length(direction)
        total = min(length, self._numels[parameter] - block * length)
        on_cpu = self._device.type == "cpu"
        begin, end = _apart(low, high, total, direction.granularity) if on_cpu else (0, total)
        generator = self._generator(parameter, block, key, direction)
        if begin:
            direction.skip(begin, like, generator)
        numbers = torch.empty(end - begin, dtype=like.dtype, device=like.device)
        direction.fill(numbers, generator)
        return numbers[low - begin : high - begin]

    def _generator(self, parameter: int, block: int, key: CounterKey, direction: Direction) -> Generator:
        """Return this thread's generator at the start of a block."""
        generator = getattr(self._local, "generator", None)
        if generator is None:
            generator = self._local.generator = Generator(device=self._device)
        first_block = self._first_blocks_of(self._length(direction))[parameter]
        generator.manual_seed(key.seed_of(first_block + block))
        found: Generator = generator
        return found

    def _length(self, direction: Direction) -> int:
        on_cpu = self._device.type == "cpu"
        return COUNTER_BLOCK_ELEMENTS.get(self._device.type, 1 << 20) * (
            direction.block_factor if on_cpu else 1
        )

    def _first_blocks_of(self, length: int) -> list[int]:
        """Return the number of every parameter's first block, where blocks are of `length` elements."""
        if length not in self._first_blocks:
            counts = [-(-numel // length) for numel in self._numels]
            self._first_blocks[length] = [0, *accumulate(counts)]
        return self._first_blocks[length]


def _apart(low: int, high: int, total: int, granularity: int) -> tuple[int, int]:
    """Return the shortest part of a draw of `total` elements that holds `low` to `high` and can be drawn apart."""
    last = (total - granularity) // granularity * granularity
    begin = max(0, min(low - low % granularity, last))
    end = high + -high % granularity
    return begin, total if total - end < granularity else end
