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

LENGTHS = (4, 8, 16)
"""Tokens of the sequences whose forwards show how memory grows."""


def elements_per_sequence(*counts: int) -> ElementsPerSequence:
    """Return the numbers for a sequence, for each of its tokens and for each pair of them, given those at three lengths.

    Examples
    --------
    >>> elements_per_sequence(*(7 + 3 * tokens + 2 * tokens**2 for tokens in LENGTHS))
    (7, 3, 2)
    """
    (first, second, third), (short, middle, long) = counts, LENGTHS
    slope, next_slope = (second - first) / (middle - short), (third - second) / (long - middle)
    pairs = max((next_slope - slope) / (long - short), 0)
    tokens = max(slope - pairs * (short + middle), 0)
    rest = max(first - tokens * short - pairs * short**2, 0)
    return ceil(rest), ceil(tokens), ceil(pairs)


def peaks_of_segments(
    blocks: Sequence[nn.Module], run: Callable[[int, int], Any], known: Sequence[Tensor]
) -> tuple[tuple[ElementsPerSequence, ...], ...]:
    """Return for each segment the bytes that are alive in it, of which the largest is its peak.

    Parameters
    ----------
    blocks : sequence of torch.nn.Module
        The model's blocks.
    run : callable
        Runs a forward of so many sequences of so many tokens.
    known : sequence of torch.Tensor
        Tensors that are no part of it, such as parameters.
    """

    def moments(num_sequences: int, num_tokens: int) -> list[list[int]]:
        live = _LiveBytes(known, len(blocks))
        with live.watching(blocks):
            run(num_sequences, num_tokens)
        return live.by_segment

    # One sequence may need no copies of what several read, and several share what one has for itself.
    series = [map(_of_a_sequence, moments(1, num), moments(2, num)) for num in LENGTHS]
    return tuple(_largest(*segment) for segment in zip(*series, strict=True))


def _of_a_sequence(one: list[int], two: list[int]) -> list[int]:
    """Return the bytes of each moment for a sequence, by those of one sequence and of two."""
    if len(one) != len(two):  # how many kernels run depends on numbers
        one, two = [max(one, default=0)], [max(two, default=0)]
    return [max(alone, -(-both // 2)) for alone, both in zip(one, two, strict=True)]


def _largest(*lengths: list[int]) -> tuple[ElementsPerSequence, ...]:
    """Return those of the moments' polynomials that no other is above throughout."""
    if len({len(moments) for moments in lengths}) > 1:
        lengths = tuple([max(moments, default=0)] for moments in lengths)
    polynomials = {elements_per_sequence(*counts) for counts in set(zip(*lengths, strict=True))}
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
