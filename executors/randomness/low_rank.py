"""Perturbations whose matrices are products of two drawn factors, ``U·Vᵀ``, the second of which stays for an interval of steps.

Both factors are functions of seeds. ``V`` is kept between steps because it is needed in every one, and made again where
nobody kept it: in a run that goes on in the middle of an interval, or that replays one.

``mezo``: the step's generator serves the parameters in turn; a matrix takes ``V``, in the first step of an interval alone, then ``U``.
These are the numbers of the released LoZO loop. ``counter``: ``U`` is keyed as any perturbation, ``V`` by the interval's first
step and a number of its own.

.. [1] Y. Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures", 2024,
   arXiv:2410.07698, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Generator, Tensor

from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.rng import generator_on, mixed
from executors.randomness.samplers import Gaussian
from executors.threads import SamplingThreads

Outputs = Sequence[Tensor] | None
"""Of every tensor of a group where its perturbation is to be: what has no factors is drawn there."""

_NORMALS = Gaussian()
_RIGHT = 0x56
"""Part of the key of every ``V``, which tells it from the key of the ``U`` of the same step."""

_TILE_ELEMENTS = 1 << 18
"""Of a product that are made at once, in whole rows: rows alone and with all others then have the same bits."""


@dataclass(frozen=True, slots=True)
class LazyInterval:
    """Steps that share their factors ``V``."""

    first: int  # number of the first of them
    seeds: tuple[int, ...]  # its seeds, one per perturbation


@dataclass(frozen=True, slots=True)
class Factors:
    """A perturbation of several tensors."""

    # Of a matrix ``U``, of shape (rows, rank); any other tensor's whole perturbation, in its shape.
    lefts: tuple[Tensor, ...]
    rights: tuple[Tensor | None, ...]  # of a matrix ``V``, of shape (columns, rank)


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor's perturbation has factors."""
    return len(shape) == 2


def _left_shape(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    return (shape[0], rank) if is_matrix(shape) else tuple(shape)


def _right_numel(shape: Sequence[int], rank: int) -> int:
    return shape[1] * rank if is_matrix(shape) else 0


def fill_product(out: Tensor, left: Tensor, right: Tensor, divisor: float = 1.0) -> None:
    """Fill a matrix with ``U·Vᵀ``, divided by `divisor`."""
    for _ in product_tiles(left, right, divisor, out):
        pass


def fill_product_rows(out: Tensor, rows: Tensor, left: Tensor, right: Tensor, divisor: float = 1.0) -> None:
    """Fill `out` with some rows of ``U·Vᵀ``, divided by `divisor`; `rows`, of the host, ascends. Bits are the whole product's."""
    wanted = rows.tolist()
    for begin, tile in product_tiles(left, right, divisor):
        kept = [index for index, row in enumerate(wanted) if begin <= row < begin + tile.shape[0]]
        if kept:
            chosen = (rows[kept] - begin).to(tile.device, non_blocking=True)
            torch.index_select(tile, 0, chosen, out=out[kept[0] : kept[-1] + 1])


def product_tiles(
    left: Tensor, right: Tensor, divisor: float, out: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``U·Vᵀ``, divided by `divisor`, as rows from some row on: of `out`, or else of memory of their own."""
    across, num_rows = right.T, max(16, _TILE_ELEMENTS // right.shape[0])
    for begin in range(0, left.shape[0], num_rows):
        rows = slice(begin, begin + num_rows)
        tile = torch.mm(left[rows], across, out=None if out is None else out[rows])
        yield begin, tile if divisor == 1 else tile.div_(divisor)


def divisor_of(rank: int, rank_power: float) -> float:
    """Return ``r^-rank_power``."""
    return sqrt(rank) if rank_power == -0.5 else float(rank) ** -rank_power


class FactorSampler:
    """Draws factors of groups of tensors, and keeps each ``V`` for its interval.

    - `shapes`: Of every trainable parameter in registration order; the same on every rank.
    - `groups`: The trainable parameters of each group.
    - `sampling_order`: From a perturbation to the groups in the order in which its ``mezo`` generator visits them, as far as
      this rank needs them.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        groups: Mapping[str, Sequence[int]],
        sampling_order: Callable[[int], Sequence[str]],
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        threads: SamplingThreads | None = None,
    ) -> None:
        self._shapes = shapes
        self._groups = groups
        self._sampling_order = sampling_order
        self._rank = rank
        self._like = torch.empty(0, dtype=dtype, device=device)
        left_numels = [prod(_left_shape(shape, rank)) for shape in shapes]
        right_numels = [_right_numel(shape, rank) for shape in shapes]
        self._left_counter = CounterSampler(left_numels, device, threads=threads)
        self._right_counter = CounterSampler(right_numels, device, threads=threads)
        self._kept: dict[tuple[str, int], dict[LazyInterval, tuple[Tensor | None, ...]]] = {}

    # -- mezo --------------------------------------------------------------------------------------------------

    def sequential(
        self,
        group: str,
        perturbation: int,
        step: int,
        interval: LazyInterval,
        generator: Generator,
        outputs: Outputs = None,
    ) -> Factors:
        """Return the factors that the generator's next numbers make of `group`, in `step` of `interval`."""
        opens = step == interval.first
        lefts, rights = self._sample(group, generator, with_rights=opens, outputs=outputs)
        if opens:
            self._keep(group, perturbation, interval, rights)
        return Factors(lefts, self._rights(group, perturbation, interval))

    def resampled(
        self, group: str, perturbation: int, seed: int, interval: LazyInterval, outputs: Outputs = None
    ) -> Factors:
        """Return factors as the released loop draws them for an update: from the seed on, without any ``V``."""
        generator = generator_on(self._like.device, seed)
        self._skip_to(group, perturbation, generator, with_rights=False)
        lefts, _ = self._sample(group, generator, with_rights=False, outputs=outputs)
        return Factors(lefts, self._rights(group, perturbation, interval))

    def pass_over(self, group: str, step: int, interval: LazyInterval, generator: Generator) -> None:
        """Advance `generator` as drawing `group` does."""
        self._skip(group, generator, with_rights=step == interval.first)

    def _rights(self, group: str, perturbation: int, interval: LazyInterval) -> tuple[Tensor | None, ...]:
        kept = self._kept.get((group, perturbation), {}).get(interval)
        if kept is None:
            generator = generator_on(self._like.device, interval.seeds[perturbation])
            self._skip_to(group, perturbation, generator, with_rights=True)
            _, kept = self._sample(group, generator, with_rights=True)
            self._keep(group, perturbation, interval, kept)
        return kept

    def _sample(
        self, group: str, generator: Generator, *, with_rights: bool, outputs: Outputs = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        lefts = self._lefts(group, outputs)
        rights: list[Tensor | None] = []
        for shape, left in zip(self._shapes_of(group), lefts, strict=True):
            has_right = with_rights and is_matrix(shape)
            rights.append(self._like.new_empty((shape[1], self._rank)) if has_right else None)
            for out in (rights[-1], left):
                if out is not None:
                    _NORMALS.fill(out, generator)
        return lefts, tuple(rights)

    def _lefts(self, group: str, outputs: Outputs) -> tuple[Tensor, ...]:
        """Return memory for what is drawn in every step: of matrices for ``U``, of others where they are wanted."""
        shapes = self._shapes_of(group)
        wanted: Sequence[Tensor | None] = outputs or [None] * len(shapes)
        return tuple(
            output
            if output is not None and not is_matrix(shape)
            else self._like.new_empty(_left_shape(shape, self._rank))
            for shape, output in zip(shapes, wanted, strict=True)
        )

    def _skip_to(self, group: str, perturbation: int, generator: Generator, *, with_rights: bool) -> None:
        order = self._sampling_order(perturbation)
        for before in order[: order.index(group)]:
            self._skip(before, generator, with_rights=with_rights)

    def _skip(self, group: str, generator: Generator, *, with_rights: bool) -> None:
        for shape in self._shapes_of(group):
            if with_rights and is_matrix(shape):
                _NORMALS.skip(_right_numel(shape, self._rank), self._like, generator)
            _NORMALS.skip(prod(_left_shape(shape, self._rank)), self._like, generator)

    # -- counter -----------------------------------------------------------------------------------------------

    def counted(
        self, group: str, perturbation: int, key: CounterKey, interval: LazyInterval, outputs: Outputs = None
    ) -> Factors:
        """Return the factors of `group` under a step's key."""
        lefts = self._lefts(group, outputs)
        views = [left.view(-1) for left in lefts]
        self._left_counter.fill_parameters(views, self._groups[group], key, _NORMALS)
        kept = self._kept.get((group, perturbation), {}).get(interval)
        if kept is None:
            kept = self._counted_rights(group, perturbation, interval)
            self._keep(group, perturbation, interval, kept)
        return Factors(lefts, kept)

    def _counted_rights(
        self, group: str, perturbation: int, interval: LazyInterval
    ) -> tuple[Tensor | None, ...]:
        key = CounterKey.of(mixed(interval.seeds[perturbation], _RIGHT), interval.first, perturbation)
        rights: list[Tensor | None] = []
        for index, shape in zip(self._groups[group], self._shapes_of(group), strict=True):
            right = self._like.new_empty((shape[1], self._rank)) if is_matrix(shape) else None
            if right is not None:
                self._right_counter.fill_parameters([right.view(-1)], [index], key, _NORMALS)
            rights.append(right)
        return tuple(rights)

    # -- both --------------------------------------------------------------------------------------------------

    def _shapes_of(self, group: str) -> list[Sequence[int]]:
        return [self._shapes[index] for index in self._groups[group]]

    def _keep(
        self, group: str, perturbation: int, interval: LazyInterval, rights: tuple[Tensor | None, ...]
    ) -> None:
        """Keep the ``V`` of an interval, and that of the interval before, which a delayed update may still need."""
        kept = self._kept.setdefault((group, perturbation), {})
        kept[interval] = rights
        for old in sorted(kept, key=lambda of: of.first)[:-2]:
            del kept[old]
