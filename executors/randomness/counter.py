"""``counter`` draws: every block of every parameter has a generator of its own, so that any slice can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from costmodel.formats.distributions import COUNTER_BLOCK_ELEMENTS
from costmodel.formats.low_bits import ROUNDED_AT_ONCE
from executors.randomness.rng import MASK32, mixed, sample_into
from executors.randomness.samplers import RAW_BITS, DistributionSampler, Rademacher, raw_signs
from executors.randomness.sequential import keep_rows
from executors.threads import SamplingThreads, even_ranges


@dataclass(frozen=True, slots=True)
class RowRange:
    """Part of a block that is drawn."""

    block: int
    seed: int
    begin: int  # its first element, of the table's
    # num_before, num: elements of the block that are passed over, and those that are drawn.
    num_before: int
    num: int


def touched_ranges(
    starts: NDArray[np.int64], width: int, numel: int, block_elements: int
) -> list[tuple[int, int, int]]:
    """Return (block, low, high) of each block of a table that has elements of rows: from the first of them to the last, counted in the block.

    - `starts`: ascending first elements of the rows.
    - `width`, `numel`, `block_elements`: elements of a row, of the table and of a block.

    >>> touched_ranges(np.array([8, 12, 40]), 4, 44, 14)
    [(0, 8, 14), (1, 0, 2), (2, 12, 14), (3, 0, 2)]
    """
    ends = starts + width
    steps = np.zeros(-(-numel // block_elements) + 1, dtype=np.int64)
    np.add.at(steps, starts // block_elements, 1)
    np.add.at(steps, (ends - 1) // block_elements + 1, -1)
    blocks = np.flatnonzero(np.cumsum(steps[:-1]))
    begins = blocks * block_elements
    stops = np.minimum(begins + block_elements, numel)
    lows = np.maximum(starts[np.searchsorted(ends, begins, "right")], begins) - begins
    highs = np.minimum(ends[np.searchsorted(starts, stops) - 1], stops) - begins
    return list(zip(blocks.tolist(), lows.tolist(), highs.tolist(), strict=True))


def batches_of(ranges: Sequence[RowRange]) -> Iterator[list[RowRange]]:
    """Yield row ranges that are drawn before rows are taken out of them: at least one, and as many as become quantized at once."""
    batch: list[RowRange] = []
    for row_range in ranges:
        if batch and sum(each.num for each in (*batch, row_range)) > ROUNDED_AT_ONCE:
            yield batch
            batch = []
        batch.append(row_range)
    if batch:
        yield batch


def take_rows(out: Tensor, starts: NDArray[np.int64], ranges: Sequence[RowRange], numbers: Tensor) -> None:
    """Fill `out`, shape (rows, width), with what `numbers`, the elements of some row ranges, hold of rows from the elements `starts` on."""
    width, size = out.shape[1], numbers.numel()
    begins = np.array([row_range.begin for row_range in ranges])
    offsets = np.array([*accumulate((row_range.num for row_range in ranges[:-1]), initial=0)])
    end = ranges[-1].begin + ranges[-1].num
    first, last = np.searchsorted(starts + width, begins[0], "right"), np.searchsorted(starts, end)
    # A row that goes on in the next block goes on in the next range: it is in one piece.
    here = np.maximum(np.searchsorted(begins, starts[first:last], "right") - 1, 0)
    rows = starts[first:last] - begins[here] + offsets[here]
    is_whole = (rows >= 0) & (rows + width <= size)
    if is_whole.any():
        whole = torch.from_numpy(rows[is_whole]).to(out.device, non_blocking=True)
        (kept,) = is_whole.nonzero()
        of_them = out[first + kept[0] : first + kept[-1] + 1]
        torch.index_select(numbers.unfold(0, width, 1), 0, whole, out=of_them)
    for kept in (~is_whole).nonzero()[0]:
        row = int(rows[kept])
        low, high = max(row, 0), min(row + width, size)
        out[first + kept, low - row : high - row] = numbers[low:high]


BLOCK_ELEMENTS = {"cpu": COUNTER_BLOCK_ELEMENTS, "cuda": 1 << 22}
"""Length of a ``counter`` block, on a CPU times the perturbation's ``block_factor``: long enough that seeding costs
little, short enough that a row is cheap."""


@dataclass(frozen=True, slots=True)
class CounterKey:
    """Key of one (seed, step, perturbation): a permutation of 32-bit block numbers.

    torch seeds its CPU generator from 32 bits, so hashing (key, block) to a seed would let two of a large model's
    blocks meet. A permutation cannot: within one perturbation all seeds differ.
    """

    multiplier: int
    addend: int
    tweak: int

    @classmethod
    def of(cls, seed: int, step: int, perturbation: int) -> CounterKey:
        """Return the key of one perturbation."""
        state = mixed(seed, step, perturbation)
        second = mixed(state)
        return cls((state & MASK32) | 1, state >> 32, second & MASK32)

    def seed_of(self, block: int) -> int:
        """Return the seed of block number `block`, counted over all parameters."""
        return self.seeds_of(block, 1)[0]

    def seeds_of(self, first: int, num: int) -> list[int]:
        """Return the seeds of `num` blocks from number `first` on."""
        return self.seeds_at(np.arange(first, first + num, dtype=np.uint64))

    def seeds_at(self, blocks: NDArray[np.uint64]) -> list[int]:
        """Return the seeds of blocks by their numbers."""
        mask, half = np.uint64(MASK32), np.uint64(16)
        x = blocks & mask
        x = (x * np.uint64(self.multiplier) + np.uint64(self.addend)) & mask
        x = ((x ^ (x >> half)) * np.uint64(0x85EBCA6B)) & mask
        x ^= np.uint64(self.tweak)
        x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & mask
        seeds: list[int] = (x ^ (x >> half)).tolist()
        return seeds


class CounterSampler:
    """Makes slices of ``counter`` perturbations.

    - `numels`: elements of every trainable parameter, in registration order; the same on every rank.
    - `threads`: threads that draw blocks at once on a CPU, each with a generator of its own.
    """

    def __init__(
        self, numels: Sequence[int], device: torch.device, *, threads: SamplingThreads | None = None
    ) -> None:
        self._device = device
        self._numels = list(numels)
        self._first_blocks: dict[int, list[int]] = {}
        self._threads = threads if threads is not None and device.type == "cpu" else SamplingThreads()

    def fill(
        self,
        out: Tensor,
        parameter: int,
        offset: int,
        key: CounterKey,
        sampler: DistributionSampler,
        factor: float | None = None,
    ) -> None:
        """Fill flat `out` with the elements of a parameter's perturbation from `offset` on.

        - `out`: One-dimensional, contiguous.
        - `parameter`: Position among the trainable parameters.
        - `offset`: First element wanted.
        - `factor`: Multiplies every number, which is rounded again.
        """
        self._fill_all([(out, parameter, offset)], key, sampler, factor)

    def fill_parameters(
        self,
        views: Sequence[Tensor],
        parameters: Sequence[int],
        key: CounterKey,
        sampler: DistributionSampler,
        factor: float | None = None,
    ) -> None:
        """Fill flat `views` with the whole perturbations of `parameters`."""
        wanted = [(view, parameter, 0) for view, parameter in zip(views, parameters, strict=True)]
        self._fill_all(wanted, key, sampler, factor)

    def fill_rows(
        self, out: Tensor, rows: Tensor, parameter: int, key: CounterKey, sampler: DistributionSampler
    ) -> None:
        """Fill `out` (kept rows, width) with rows of a table's perturbation; `rows`, of the host, ascends."""
        width, length = out.shape[1], self.block_elements(sampler)
        if isinstance(sampler, Rademacher) and self.has_raw_rows(width):
            sampler.spread(self.raw_rows(rows, width, parameter, key, sampler).view(-1), out)
            return
        numel, starts = self._numels[parameter], rows.numpy() * width
        parts = touched_ranges(starts, width, numel, length)
        seeds = self._seeds(parameter, [block for block, *_ in parts], key, sampler)
        if sampler.distribution.is_single_threaded:
            ranges = []
            for (block, low, high), seed in zip(parts, seeds, strict=True):
                begin, end = self._sampled_for(low, high, min(length, numel - block * length), sampler)
                ranges.append(RowRange(block, seed, block * length + begin, begin, end - begin))
            for batch in batches_of(ranges):
                take_rows(out, starts, batch, self._sampled_ranges(batch, out, sampler))
            return
        wanted, generator = rows.tolist(), Generator(device=self._device)
        for (block, *_), seed in zip(parts, seeds, strict=True):
            generator.manual_seed(seed)
            begin, end = block * length, min((block + 1) * length, numel)
            keep_rows(out, wanted, begin, end, sampler, generator, to_the_end=False)

    def has_raw_rows(self, width: int) -> bool:
        """Whether signs of rows of this width are bits of random numbers of their own."""
        return self._device.type == "cpu" and width % RAW_BITS == 0

    def raw_rows(
        self, rows: Tensor, width: int, parameter: int, key: CounterKey, sampler: Rademacher
    ) -> Tensor:
        """Return the random numbers, int64, whose bits are the signs of ascending rows of a table, shape (rows, width / 64)."""
        per_row, per_block = width // RAW_BITS, self.block_elements(sampler) // RAW_BITS
        indices = (rows[:, None] * per_row + torch.arange(per_row)).view(-1)
        raw = torch.empty_like(indices)
        blocks, counts = (
            part.tolist() for part in torch.unique_consecutive(indices // per_block, return_counts=True)
        )
        generator = Generator()
        seeds = self._seeds(parameter, blocks, key, sampler)
        for block, seed, of_block, made in zip(
            blocks, seeds, indices.split(counts), raw.split(counts), strict=True
        ):
            here = of_block - block * per_block
            whole = raw_signs((int(here[-1]) + 1) * RAW_BITS, generator.manual_seed(seed))
            torch.index_select(whole, 0, here, out=made)
        return raw.view(-1, per_row)

    def seeds(self, parameter: int, key: CounterKey, sampler: DistributionSampler) -> list[int]:
        """Return the seeds of all blocks of a parameter."""
        num_blocks = -(-self._numels[parameter] // self.block_elements(sampler))
        return self._seeds(parameter, range(num_blocks), key, sampler)

    def _sampled_ranges(
        self, ranges: Sequence[RowRange], like: Tensor, sampler: DistributionSampler
    ) -> Tensor:
        """Return the numbers of some row ranges one after the other."""
        numbers = torch.empty(
            sum(row_range.num for row_range in ranges), dtype=like.dtype, device=like.device
        )
        parts = list(zip(ranges, numbers.split([row_range.num for row_range in ranges]), strict=True))

        def sample(share: range) -> None:
            generator = Generator(device=self._device)
            for row_range, part in parts[share.start : share.stop]:
                generator.manual_seed(row_range.seed)
                if row_range.num_before:
                    sampler.skip(row_range.num_before, like, generator)
                sampler.fill(part, generator)

        self._share(sample, len(parts), sampler)
        return numbers

    def _fill_all(
        self,
        wanted: Sequence[tuple[Tensor, int, int]],
        key: CounterKey,
        sampler: DistributionSampler,
        factor: float | None,
    ) -> None:
        jobs = [job for part in wanted for job in self._jobs(*part, key, sampler)]

        def fill(share: range) -> None:
            generator = Generator(device=self._device)
            for chunk, seed, low, total in jobs[share.start : share.stop]:
                generator.manual_seed(seed)
                if chunk.numel() == total:
                    sample_into(chunk, sampler, generator, factor)
                else:
                    numbers = self._range(chunk.numel(), chunk, low, total, sampler, generator)
                    chunk.copy_(numbers if factor is None else numbers.mul_(factor))

        self._share(fill, len(jobs), sampler)

    def _share(self, work: Callable[[range], None], num_items: int, sampler: DistributionSampler) -> None:
        """Let all threads work through as many items together, where one alone would leave the others idle."""
        num_shares = self._threads.num_threads if sampler.distribution.is_single_threaded else 1
        self._threads.run([partial(work, share) for share in even_ranges(num_items, num_shares)])

    def _jobs(
        self, out: Tensor, parameter: int, offset: int, key: CounterKey, sampler: DistributionSampler
    ) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield (chunk, seed, first element in its block, elements of the block) of what is wanted."""
        length, numel = self.block_elements(sampler), self._numels[parameter]
        blocks = _blocks(offset, offset + out.numel(), length)
        before = min(-offset % length, out.numel())
        chunks = [
            chunk for part in (out[:before], out[before:]) if part.numel() for chunk in part.split(length)
        ]
        seeds = self._seeds(parameter, blocks, key, sampler)
        for block, seed, chunk in zip(blocks, seeds, chunks, strict=True):
            yield chunk, seed, max(0, offset - block * length), min(length, numel - block * length)

    def _range(
        self, num: int, like: Tensor, low: int, total: int, sampler: DistributionSampler, generator: Generator
    ) -> Tensor:
        """Return `num` elements of a block from `low` on, drawing as little of the rest as draws can be split."""
        high = low + num
        begin, end = self._sampled_for(low, high, total, sampler)
        if begin:
            sampler.skip(begin, like, generator)
        numbers = torch.empty(end - begin, dtype=like.dtype, device=like.device)
        sampler.fill(numbers, generator)
        return numbers[low - begin : high - begin]

    def _sampled_for(self, low: int, high: int, total: int, sampler: DistributionSampler) -> tuple[int, int]:
        """Return the part of a block of `total` elements that is drawn for those between `low` and `high`."""
        on_cpu = self._device.type == "cpu"
        return _apart(low, high, total, sampler.distribution.granularity) if on_cpu else (0, total)

    def _seeds(
        self, parameter: int, blocks: Sequence[int], key: CounterKey, sampler: DistributionSampler
    ) -> list[int]:
        """Return the seeds of some blocks of a parameter."""
        first_block = self._first_blocks_of(self.block_elements(sampler))[parameter]
        return key.seeds_at(np.array(blocks, dtype=np.uint64) + np.uint64(first_block))

    def block_elements(self, sampler: DistributionSampler) -> int:
        """Return the elements of a block, but for the last of a parameter."""
        on_cpu = self._device.type == "cpu"
        return BLOCK_ELEMENTS.get(self._device.type, 1 << 20) * (
            sampler.distribution.block_factor if on_cpu else 1
        )

    def _first_blocks_of(self, length: int) -> list[int]:
        """Return the number of every parameter's first block, where blocks are of `length` elements."""
        if length not in self._first_blocks:
            counts = [-(-numel // length) for numel in self._numels]
            self._first_blocks[length] = [0, *accumulate(counts)]
        return self._first_blocks[length]


def _blocks(begin: int, end: int, length: int) -> range:
    """Return the blocks that have elements between `begin` and `end`."""
    return range(begin // length, -(-end // length))


def _apart(low: int, high: int, total: int, granularity: int) -> tuple[int, int]:
    """Return the shortest part of a draw of `total` elements that holds `low` to `high` and can be drawn apart."""
    last = (total - granularity) // granularity * granularity
    begin = max(0, min(low - low % granularity, last))
    end = high + -high % granularity
    return begin, total if total - end < granularity else end
