"""Directions rounded to codes of a byte, and the random numbers of every rounding of a step.

The numbers that decide a rounding are keyed by seed, step, query, parameter and element, under either discipline: what a rank
rounds does not depend on what other ranks, or other instructions, round. Each of a step's roundings has a key of its own:
the direction's first copy, its second one, the update, and which rows of a sparse direction are not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from costmodel.distributions import Distribution
from costmodel.roundings import RoundedDirection
from executors.low_bits.grids import Integers
from executors.randomness.counter import CounterDraws, CounterKey
from executors.randomness.directions import Direction, direction_named
from executors.randomness.rng import mixed
from executors.randomness.walks import Walk
from executors.threads import DrawThreads, even_ranges

Purpose = Literal["direction", "second direction", "update", "rows"]
"""What is rounded, or chosen."""

_KEYS: dict[Purpose, int] = {"direction": 1, "second direction": 2, "update": 3, "rows": 4}

_PIECE_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Elements rounded at a time; on a CPU few enough that torch leaves them to the thread that asks."""


class Uniform(Direction):
    """Numbers uniform on [0, 1): multiples of 2^-24."""

    distribution = Distribution("uniform")

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out`."""
        out.uniform_(generator=generator)

    def energy(self, shape: Sequence[int]) -> float:
        """Refuse: these numbers are no direction."""
        raise NotImplementedError


_UNIFORM = Uniform()


class Chances:
    """Makes the random numbers that roundings are decided by.

    Parameters
    ----------
    numels : sequence of int
        Elements of every trainable parameter, in registration order; the same on every rank.
    device : torch.device
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self._draws = CounterDraws(numels, device)
        self._device = device

    def between(self, begin: int, end: int, parameter: int, key: CounterKey) -> Tensor:
        """Return those of elements `begin` to `end` of a parameter, in float32."""
        chances = torch.empty(end - begin, dtype=torch.float32, device=self._device)
        self._draws.fill(chances, parameter, begin, key, _UNIFORM)
        return chances

    def rows(self, rows: Tensor, width: int, parameter: int, key: CounterKey) -> Tensor:
        """Return those of some ascending rows of a table."""
        chances = torch.empty((rows.numel(), width), dtype=torch.float32, device=self._device)
        self._draws.fill_rows(chances, rows, parameter, key, _UNIFORM)
        return chances


def rounding_key(seed: int, step: int, query: int, purpose: Purpose) -> CounterKey:
    """Return the key of one rounding."""
    return CounterKey.of(mixed(seed, _KEYS[purpose]), step, query)


class DrawKeys(NamedTuple):
    """Keys of what makes codes of one direction's numbers: of their rounding, and of the rows that are not 0."""

    rounding: CounterKey
    rows: CounterKey

    @classmethod
    def of(cls, seed: int, step: int, query: int, *, is_second: bool = False) -> DrawKeys:
        """Return those of a direction, or of its second copy, whose rows are the same."""
        purpose: Purpose = "second direction" if is_second else "direction"
        return cls(rounding_key(seed, step, query, purpose), rounding_key(seed, step, query, "rows"))


class MovedRows:
    """Says which rows of a sparse direction are not 0.

    Parameters
    ----------
    shapes : sequence of torch.Size
        Of every trainable parameter, in registration order; the same on every rank. A row is an index of the first dimension.
    device : torch.device
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._num_rows = [shape[0] if shape else 1 for shape in shapes]
        self._chances = Chances([shape.numel() for shape in shapes], device)
        self._last: dict[int, tuple[CounterKey, float, Tensor]] = {}

    def of(self, parameter: int, sparsity: float, key: CounterKey) -> Tensor:
        """Return the ascending numbers of such rows of a parameter."""
        if (last := self._last.get(parameter)) is not None and last[:2] == (key, sparsity):
            return last[2]
        chances = self._chances.between(0, self._num_rows[parameter], parameter, key)
        rows = (chances >= sparsity).nonzero().view(-1)
        self._last[parameter] = key, sparsity, rows
        return rows


class RoundedDraws:
    """Draws directions as codes.

    Parameters
    ----------
    rounding : RoundedDirection
    shapes : sequence of torch.Size
        As of :class:`MovedRows`.
    device : torch.device
    threads : DrawThreads
    """

    def __init__(
        self,
        rounding: RoundedDirection,
        shapes: Sequence[torch.Size],
        device: torch.device,
        threads: DrawThreads,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        self._rounding = rounding
        self._widths = [shape[1:].numel() for shape in shapes]
        self._moved = MovedRows(shapes, device)
        self._grid = Integers(-rounding.highest, rounding.highest)
        self._direction = direction_named(rounding.distribution)
        self._numbers = CounterDraws(numels, device)
        self._chances = Chances(numels, device)
        self._device = device
        self._threads = threads

    def codes(self, numbers: Tensor, chances: Callable[[], Tensor]) -> Tensor:
        """Return the codes of numbers, which are lost; signs need no chance."""
        return self._levels(numbers, chances).to(torch.int8)

    def _levels(self, numbers: Tensor, chances: Callable[[], Tensor]) -> Tensor:
        scaled = numbers.mul_(self._rounding.scale)
        return scaled if self._direction.distribution.is_sign else self._grid.at_random(scaled, chances())

    def fill_counted(
        self, views: Sequence[Tensor], parameters: Sequence[int], key: CounterKey, keys: DrawKeys
    ) -> None:
        """Fill flat int8 `views` with whole parameters' directions of the ``counter`` discipline."""
        size = max(
            _PIECE_ELEMENTS.get(self._device.type, 1 << 20), self._direction.distribution.counter_elements
        )
        jobs: list[Callable[[], None]] = []
        for view, parameter in zip(views, parameters, strict=True):
            if self._is_sparse_matrix(parameter):
                jobs.append(partial(self._fill_moved_rows, view, parameter, key, keys))
                continue
            jobs += [
                partial(self._fill_piece, view[begin : begin + size], parameter, begin, key, keys.rounding)
                for begin in range(0, view.numel(), size)
            ]

        def fill(share: range) -> None:
            for job in jobs[share.start : share.stop]:
                job()

        is_shared = self._direction.distribution.is_drawn_alone
        shares = even_ranges(len(jobs), self._threads.num_threads if is_shared else 1)
        self._threads.run([partial(fill, share) for share in shares])
        vectors = [parameter for parameter in parameters if not self._is_sparse_matrix(parameter)]
        self._leave_rows(
            [view for view, parameter in zip(views, parameters, strict=True) if parameter in vectors],
            vectors,
            keys.rows,
        )

    def _fill_piece(
        self, piece: Tensor, parameter: int, begin: int, key: CounterKey, rounding: CounterKey
    ) -> None:
        numbers = torch.empty(piece.numel(), dtype=torch.float32, device=self._device)
        self._numbers.fill(numbers, parameter, begin, key, self._direction)
        self._round(piece, numbers, parameter, begin, rounding)

    def _fill_moved_rows(self, view: Tensor, parameter: int, key: CounterKey, keys: DrawKeys) -> None:
        """Fill a matrix that is 0 but in some rows, for which alone numbers are drawn."""
        rows, width = self._moved.of(parameter, self._rounding.sparsity, keys.rows), self._widths[parameter]
        view.zero_()
        if rows.numel():
            numbers = torch.empty((rows.numel(), width), dtype=torch.float32, device=self._device)
            self._numbers.fill_rows(numbers, rows, parameter, key, self._direction)
            chances = partial(self._chances.rows, rows, width, parameter, keys.rounding)
            view.view(-1, width)[rows] = self.codes(numbers, chances)

    def _is_sparse_matrix(self, parameter: int) -> bool:
        """Whether rows are drawn one by one; of vectors it would take longer than to draw all."""
        return self._rounding.sparsity > 0 and self._widths[parameter] > 1

    def _leave_rows(self, views: Sequence[Tensor], parameters: Sequence[int], key: CounterKey) -> None:
        """Set what a sparse direction leaves alone of `views` to 0."""
        if not self._rounding.sparsity:
            return
        for view, parameter in zip(views, parameters, strict=True):
            table = view.view(-1, self._widths[parameter])
            left = torch.ones(len(table), dtype=torch.bool, device=self._device)
            left[self._moved.of(parameter, self._rounding.sparsity, key)] = False
            table[left] = 0

    def fill_walked(
        self,
        walk: Walk,
        views: Sequence[Tensor],
        parameters: Sequence[int],
        source: Generator | Sequence[Tensor],
        keys: DrawKeys,
    ) -> list[Tensor]:
        """Fill flat int8 `views` as a walk goes, from a generator or again from its states; return the states at the marks."""

        def take(tensor: int, begin: int, numbers: Tensor) -> None:
            piece = views[tensor][begin : begin + numbers.numel()]
            self._round(piece, numbers, parameters[tensor], begin, keys.rounding)

        like = torch.empty(0, dtype=torch.float32, device=self._device)
        states: list[Tensor] = []
        if isinstance(source, Generator):
            states = walk.feed(take, like, source)
        else:
            walk.feed_again(take, like, source)
        self._leave_rows(views, parameters, keys.rows)
        return states

    def rows(self, numbers: Tensor, rows: Tensor, parameter: int, keys: DrawKeys) -> Tensor:
        """Return the codes of some rows of a table, whose float32 numbers are lost."""
        width = numbers.shape[1]
        codes = self.codes(numbers, lambda: self._chances.rows(rows, width, parameter, keys.rounding))
        if self._rounding.sparsity:
            codes[~torch.isin(rows, self._moved.of(parameter, self._rounding.sparsity, keys.rows))] = 0
        return codes

    def _round(self, piece: Tensor, numbers: Tensor, parameter: int, begin: int, key: CounterKey) -> None:
        end = begin + numbers.numel()
        piece.copy_(self._levels(numbers, lambda: self._chances.between(begin, end, parameter, key)))
