"""Memory that a model's own forward takes for each segment, and how it grows with a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodel.models.model_spec import ElementsPerSequence

Lengths = tuple[int, int, int]

LENGTHS: Lengths = (5, 9, 17)
"""Tokens of the sequences whose forwards show how memory grows.

Of a code that pads sequences to a multiple of a power of two, lengths of one token more take the most for their length.
"""

LONGER: tuple[Lengths, ...] = ((65, 129, 257), (257, 513, 1025))
"""Lengths for models that pad the usual ones to one length, which shows no growth."""


def elements_per_sequence(*counts: int, lengths: Lengths = LENGTHS) -> ElementsPerSequence:
    """Return the numbers for a sequence, for each of its tokens and for each pair of them, given those at three lengths.

    >>> elements_per_sequence(*(7 + 3 * tokens + 2 * tokens**2 for tokens in LENGTHS))
    (7, 3, 2)
    """
    (first, second, third), (short, middle, long) = counts, lengths
    slope, next_slope = (second - first) / (middle - short), (third - second) / (long - middle)
    pairs = max((next_slope - slope) / (long - short), 0)
    tokens = max(slope - pairs * (short + middle), 0)
    rest = max(first - tokens * short - pairs * short**2, 0)
    return ceil(rest), ceil(tokens), ceil(pairs)


def peaks_of_segments(
    blocks: Sequence[nn.Module],
    run: Callable[[int, int], Any],
    known: Sequence[Tensor],
    lengths: Lengths = LENGTHS,
    *,
    is_suspended: bool = False,
) -> tuple[tuple[ElementsPerSequence, ...], ...]:
    """Return for each segment the bytes that are alive in it, of which the largest is its peak.

    - `blocks`: the model's blocks.
    - `run`: runs a forward of so many sequences of so many tokens.
    - `known`: tensors that are no part of it, such as parameters.
    - `lengths`: tokens of the sequences.
    - `is_suspended`: whether the forward of another evaluation point, with all that it holds, waits between two blocks meanwhile.
    """

    def moments(num_sequences: int, num_tokens: int) -> list[list[int]]:
        live = _LiveBytes(known, len(blocks))
        with live.watching(blocks):
            run(num_sequences, num_tokens)
        waiting = max(live.between, default=0) if is_suspended else 0
        return [[size + waiting for size in own] for own in live.by_segment]

    # One sequence may need no copies of what several read, and several share what one has for itself.
    series = [map(_of_a_sequence, moments(1, num), moments(2, num)) for num in lengths]
    return tuple(_largest(lengths, *segment) for segment in zip(*series, strict=True))


def is_padded(peaks: Sequence[tuple[ElementsPerSequence, ...]]) -> bool:
    """Whether what some segment takes most does not grow with a sequence: all lengths were padded to one."""
    largest = (
        max(moments, key=lambda of: of[0] + of[1] * LENGTHS[2] + of[2] * LENGTHS[2] ** 2)
        for moments in peaks
        if moments
    )
    return any(once and not (tokens or pairs) for once, tokens, pairs in largest)


def _of_a_sequence(one: list[int], two: list[int]) -> list[int]:
    """Return the bytes of each moment for a sequence, by those of one sequence and of two."""
    if len(one) != len(two):  # how many kernels run depends on numbers
        one, two = [max(one, default=0)], [max(two, default=0)]
    return [max(alone, -(-both // 2)) for alone, both in zip(one, two, strict=True)]


def _largest(lengths: Lengths, *series: list[int]) -> tuple[ElementsPerSequence, ...]:
    """Return those of the moments' polynomials that no other is above throughout."""
    if len({len(moments) for moments in series}) > 1:
        series = tuple([max(moments, default=0)] for moments in series)
    polynomials = {
        elements_per_sequence(*counts, lengths=lengths) for counts in set(zip(*series, strict=True))
    }
    return tuple(
        sorted(
            one
            for one in polynomials
            if not any(other != one and all(map(int.__ge__, other, one)) for other in polynomials)
        )
    )


class _LiveBytes(TorchDispatchMode):
    """Follows bytes of tensors from their allocation to their end."""

    def __init__(self, known: Sequence[Tensor], num_blocks: int) -> None:
        super().__init__()
        # A model without blocks of its own is a block that does nothing and a head that does all.
        self.by_segment: list[list[int]] = [[] for _ in range(max(num_blocks, 1) + 2)]
        self.between: list[int] = []
        self._segment, self._live = 0 if num_blocks else 2, 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Follow what runs for the length of the block."""
        hooks = [
            block.register_forward_pre_hook(self._entering(index + 1)) for index, block in enumerate(blocks)
        ]
        hooks += [block.register_forward_hook(self._entering(len(blocks) + 1)) for block in blocks[-1:]]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, segment: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._segment = segment
            self.between.append(self._live)

        return enter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        self.by_segment[self._segment].append(self._live)
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._alive:
            self._alive[key] = storage.nbytes()
            self._live += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live -= self._alive.pop(key)
