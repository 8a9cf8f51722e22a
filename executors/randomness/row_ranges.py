"""Rows of a table that is drawn block by block: the parts of blocks that are drawn for them, and where they are in these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from costmodel.formats.low_bits import ROUNDED_AT_ONCE


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

    Parameters
    ----------
    starts : array of int
        Ascending first elements of the rows.
    width, numel, block_elements : int
        Elements of a row, of the table and of a block.

    Examples
    --------
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
