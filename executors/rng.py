"""The two disciplines by which directions get their random numbers.

``mezo``: one generator per step and query, reset to the step's seed and walked over the trainable parameters, one
draw each. Bits equal those of ``torch.manual_seed(seed)`` followed by one ``torch.normal`` per parameter. Its
state before each group is kept, so that a group can be drawn again without walking the others.

``counter``: a parameter is cut into blocks of fixed length, and each block has a generator of its own, seeded by a
permutation of the block's number that is keyed by (seed, step, query). Any slice of any parameter is made from the
blocks that it touches, by any rank, in any order and by any number of threads. Block lengths differ between device
types, and so do torch's generators: bits agree between devices of one type.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Generator, Tensor

from executors.directions import Direction

_GROUP = 16
"""torch's CPU normals come in groups of 16; a draw split at a multiple of it equals the whole draw."""

_WALK_ELEMENTS = 1 << 16
"""Numbers held at once when they are not kept; a multiple of `_GROUP`."""

COUNTER_BLOCK_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Length of a ``counter`` block, times the direction's ``block_factor``: long enough that seeding costs little,
short enough that a row is cheap."""

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def generator_on(device: torch.device, seed: int) -> Generator:
    """Return a generator of `device` as ``torch.manual_seed(seed)`` leaves it."""
    generator = Generator(device=device)
    generator.manual_seed(seed)
    return generator


# -- mezo ------------------------------------------------------------------------------------------------------


def draw_rows(out: Tensor, rows: Tensor, num_rows: int, direction: Direction, generator: Generator) -> None:
    """Draw a whole table of `num_rows` rows and keep some.

    Parameters
    ----------
    out : torch.Tensor
        Shape (kept rows, width); filled.
    rows : torch.Tensor
        Ascending row numbers to keep.
    num_rows : int
        Rows of the table.
    direction : Direction
    generator : torch.Generator
        Advanced as one draw of the whole table advances it.
    """
    width = out.shape[1]
    if out.device.type != "cpu":
        table = torch.empty((num_rows, width), dtype=out.dtype, device=out.device)
        direction.fill(table, generator)
        torch.index_select(table, 0, rows, out=out)
        return
    wanted = rows.tolist()
    cursor = 0
    for begin, piece in _pieces(num_rows * width, out.dtype, direction, generator):
        end = begin + piece.numel()
        while cursor < len(wanted) and wanted[cursor] * width < end:
            low = max(wanted[cursor] * width, begin)
            high = min((wanted[cursor] + 1) * width, end)
            start = low - wanted[cursor] * width
            out[cursor, start : start + high - low] = piece[low - begin : high - begin]
            if (wanted[cursor] + 1) * width > end:
                break
            cursor += 1


def walk_past(numels: Sequence[int], like: Tensor, direction: Direction, generator: Generator) -> None:
    """Advance `generator` as drawing tensors of `numels` elements in the format of `like` would."""
    for numel in numels:
        if like.device.type != "cpu":
            direction.fill(torch.empty(numel, dtype=like.dtype, device=like.device), generator)
        else:
            for _ in _pieces(numel, like.dtype, direction, generator):
                pass


def _pieces(  # type: ignore[no-untyped-def]
    numel: int, dtype: torch.dtype, direction: Direction, generator: Generator
):
    """Yield (offset, numbers) of one draw, in pieces that together equal it."""
    scratch = torch.empty(min(numel, _WALK_ELEMENTS + _GROUP), dtype=dtype)
    begin = 0
    while begin < numel:
        length = min(_WALK_ELEMENTS, numel - begin)
        if numel - begin - length < _GROUP:
            length = numel - begin
        piece = scratch[:length]
        direction.fill(piece, generator)
        yield begin, piece
        begin += length


# -- counter ---------------------------------------------------------------------------------------------------


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
        second = _mix64(state)
        return cls((state & _MASK32) | 1, state >> 32, second & _MASK32)

    def seed_of(self, block: int) -> int:
        """Return the seed of block number `block`, counted over all parameters."""
        x = (block * self.multiplier + self.addend) & _MASK32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
        x ^= self.tweak
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
        return x ^ (x >> 16)


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on every bit of every number and on their order."""
    state = 0
    for number in numbers:
        state = _mix64(state ^ (number & _MASK64))
    return state


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class CounterDraws:
    """Makes slices of ``counter`` directions.

    Parameters
    ----------
    numels : sequence of int
        Elements of every trainable parameter, in registration order; the same on every rank.
    device : torch.device
    num_threads : int
        Threads that draw blocks at once on a CPU, each with a generator of its own.
    """

    def __init__(self, numels: Sequence[int], device: torch.device, *, num_threads: int = 1) -> None:
        self._device = device
        self._base_length = COUNTER_BLOCK_ELEMENTS.get(device.type, 1 << 20)
        self._numels = list(numels)
        self._first_blocks: dict[int, list[int]] = {}
        self._local = threading.local()
        threaded = num_threads > 1 and device.type == "cpu"
        self._pool = ThreadPoolExecutor(num_threads, "zosim-draw") if threaded else None
        self._num_threads = num_threads

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def fill(self, out: Tensor, parameter: int, offset: int, key: CounterKey, direction: Direction) -> None:
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
        """
        length = self._length(direction)
        blocks = range(offset // length, -(-(offset + out.numel()) // length))
        if self._pool is None or len(blocks) < 2 * self._num_threads:
            self._fill_blocks(out, parameter, offset, key, direction, blocks)
            return
        share = -(-len(blocks) // self._num_threads)
        parts = [blocks[i : i + share] for i in range(0, len(blocks), share)]
        tasks = [
            self._pool.submit(self._fill_blocks, out, parameter, offset, key, direction, part)
            for part in parts
        ]
        for task in tasks:
            task.result()

    def fill_rows(
        self, out: Tensor, rows: Tensor, parameter: int, key: CounterKey, direction: Direction
    ) -> None:
        """Fill `out` (kept rows, width) with rows of a table's direction; `rows` ascends."""
        width, length = out.shape[1], self._length(direction)
        block, numbers = -1, torch.empty(0)
        for target, row in enumerate(rows.tolist()):
            begin, end = row * width, (row + 1) * width
            while begin < end:
                if begin // length != block:
                    block = begin // length
                    numbers = self._block(out, parameter, block, key, direction)
                stop = min(end, (block + 1) * length)
                first = block * length
                out[target, begin - row * width : stop - row * width] = numbers[begin - first : stop - first]
                begin = stop

    def _fill_blocks(
        self, out: Tensor, parameter: int, offset: int, key: CounterKey, direction: Direction, blocks: range
    ) -> None:
        end, length = offset + out.numel(), self._length(direction)
        for block in blocks:
            first = block * length
            last = min(first + length, self._numels[parameter])
            if offset <= first and last <= end:
                self._draw(out[first - offset : last - offset], parameter, block, key, direction)
                continue
            numbers = self._block(out, parameter, block, key, direction)
            low, high = max(first, offset), min(last, end)
            out[low - offset : high - offset] = numbers[low - first : high - first]

    def _block(
        self, like: Tensor, parameter: int, block: int, key: CounterKey, direction: Direction
    ) -> Tensor:
        length = self._length(direction)
        length = min(length, self._numels[parameter] - block * length)
        numbers = torch.empty(length, dtype=like.dtype, device=like.device)
        self._draw(numbers, parameter, block, key, direction)
        return numbers

    def _draw(self, out: Tensor, parameter: int, block: int, key: CounterKey, direction: Direction) -> None:
        generator = getattr(self._local, "generator", None)
        if generator is None:
            generator = self._local.generator = Generator(device=self._device)
        first_block = self._first_blocks_of(self._length(direction))[parameter]
        generator.manual_seed(key.seed_of(first_block + block))
        direction.fill(out, generator)

    def _length(self, direction: Direction) -> int:
        return self._base_length * direction.block_factor

    def _first_blocks_of(self, length: int) -> list[int]:
        """Return the number of every parameter's first block, where blocks are of `length` elements."""
        if length not in self._first_blocks:
            counts = [-(-numel // length) for numel in self._numels]
            self._first_blocks[length] = [0, *accumulate(counts)]
        return self._first_blocks[length]
