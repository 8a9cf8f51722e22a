"""``mezo`` draws: one generator walked over parameters, cut where a draw can be cut without changing a bit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from executors.crew import Crew, shared
from executors.directions import Direction
from executors.rng import drawn

_WALK_ELEMENTS = 1 << 16
"""Numbers held at once when not all are kept; a multiple of every granularity."""

_LONGEST_GRANULE = 64


class Walk:
    """One draw after another of the tensors of a group, with the generator's states at marks on the way.

    Parameters
    ----------
    numels : sequence of int
        Elements of the tensors.
    direction : Direction
    num_marks : int
        Stretches, between marks, that the elements are shared among as evenly as draws can be cut.

    Notes
    -----
    A generator cannot be put forward to the middle of a draw, but where it has once passed, its state can be kept.
    Drawing again then starts at every mark at once, with a generator each.
    """

    def __init__(self, numels: Sequence[int], direction: Direction, num_marks: int = 1) -> None:
        self._direction = direction
        self._spans = list(_spans(numels, direction.granularity, num_marks))

    def fill(
        self, views: Sequence[Tensor], generator: Generator, factor: float | None = None
    ) -> list[Tensor]:
        """Fill flat `views`, advance `generator`, and return its states at the marks.

        Parameters
        ----------
        factor : float, optional
            Multiplies every number, which is rounded again.
        """
        states = []
        for spans in self._spans:
            states.append(generator.get_state())
            self._fill(spans, views, generator, factor)
        return states

    def fill_again(
        self, views: Sequence[Tensor], states: Sequence[Tensor], crew: Crew, factor: float | None = None
    ) -> None:
        """Fill flat `views` as the walk that left `states` did."""
        if not self._direction.is_drawn_alone:
            self._from(0, len(self._spans), views, states, factor)
            return
        shares = shared(len(self._spans), crew.num_threads)
        crew.run([partial(self._from, share.start, share.stop, views, states, factor) for share in shares])

    def skip(self, like: Tensor, generator: Generator) -> list[Tensor]:
        """Advance `generator` as drawing in the format of `like` does, and return its states at the marks."""
        states = []
        for spans in self._spans:
            states.append(generator.get_state())
            for span in spans:
                self._direction.skip(span.end - span.begin, like, generator)
        return states

    def rows(self, out: Tensor, rows: Tensor, generator: Generator) -> list[Tensor]:
        """Keep some rows of a whole table's draw; the walk is over that table alone.

        Parameters
        ----------
        out : torch.Tensor
            Shape (kept rows, width); filled.
        rows : torch.Tensor
            Ascending row numbers to keep.
        generator : torch.Generator
            Advanced as the draw of the whole table advances it.
        """
        if out.device.type != "cpu":
            states = [generator.get_state()]
            table = torch.empty(
                (self._spans[0][0].end // out.shape[1], out.shape[1]), dtype=out.dtype, device=out.device
            )
            self._direction.fill(table, generator)
            torch.index_select(table, 0, rows, out=out)
            return states
        states = []
        wanted = rows.tolist()
        for spans in self._spans:
            states.append(generator.get_state())
            for span in spans:
                _keep_rows(out, wanted, span, self._direction, generator)
        return states

    def _from(
        self, begin: int, end: int, views: Sequence[Tensor], states: Sequence[Tensor], factor: float | None
    ) -> None:
        generator = Generator(device=views[0].device)
        generator.set_state(states[begin])
        for spans in self._spans[begin:end]:
            self._fill(spans, views, generator, factor)

    def _fill(
        self, spans: Sequence[_Span], views: Sequence[Tensor], generator: Generator, factor: float | None
    ) -> None:
        for span in spans:
            drawn(views[span.tensor][span.begin : span.end], self._direction, generator, factor)


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements of one tensor that are drawn one after the other."""

    tensor: int
    begin: int
    end: int


def _spans(numels: Sequence[int], granularity: int, num_marks: int) -> Iterator[list[_Span]]:
    """Yield the spans between two marks, tensor by tensor; every piece of a tensor can be drawn apart."""
    target = -(-sum(numels) // num_marks)
    found: list[_Span] = []
    left = target
    for tensor, numel in enumerate(numels):
        begin = 0
        while (length := left - left % granularity) >= granularity and numel - begin - length >= granularity:
            yield [*found, _Span(tensor, begin, begin + length)]
            found, left = [], target
            begin += length
        found.append(_Span(tensor, begin, numel))
        left -= numel - begin
        if left < granularity:
            yield found
            found, left = [], target
    if found:
        yield found


def _keep_rows(
    out: Tensor, wanted: Sequence[int], span: _Span, direction: Direction, generator: Generator
) -> None:
    """Draw what lies in `span` of the wanted rows of a table, and skip the rest."""
    width = out.shape[1]
    for begin, end, is_kept in _stretches(wanted, width, span, direction.granularity):
        if not is_kept:
            direction.skip(end - begin, out, generator)
            continue
        numbers = torch.empty(end - begin, dtype=out.dtype, device=out.device)
        direction.fill(numbers, generator)
        for kept in range(bisect_left(wanted, begin // width), bisect_left(wanted, -(-end // width))):
            first = wanted[kept] * width
            low, high = max(first, begin), min(first + width, end)
            out[kept, low - first : high - first] = numbers[low - begin : high - begin]


def _stretches(
    wanted: Sequence[int], width: int, span: _Span, granularity: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, kept) of a span in pieces that can be drawn apart; without rows to keep, in one."""
    begin, end = span.begin, span.end
    rows = wanted[bisect_left(wanted, begin // width) : bisect_left(wanted, -(-end // width))]
    if rows and width % granularity:
        yield from (
            (begin + offset, begin + offset + length, True) for offset, length in _pieces(end - begin)
        )
        return
    for row in rows:
        low, high = max(row * width, begin), min((row + 1) * width, end)
        if low > begin:
            yield begin, low, False
        yield low, high, True
        begin = high
    if begin < end:
        yield begin, end, False


def draw_rows(out: Tensor, rows: Tensor, num_rows: int, direction: Direction, generator: Generator) -> None:
    """Draw a whole table of `num_rows` rows and keep some: see :meth:`Walk.rows`."""
    Walk([num_rows * out.shape[1]], direction).rows(out, rows, generator)


def walk_past(numels: Sequence[int], like: Tensor, direction: Direction, generator: Generator) -> None:
    """Advance `generator` as drawing tensors of `numels` elements in the format of `like` would."""
    Walk(numels, direction).skip(like, generator)


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of pieces that are drawn one after the other and together equal one draw."""
    begin = 0
    while begin < numel:
        length = min(_WALK_ELEMENTS, numel - begin)
        if numel - begin - length < _LONGEST_GRANULE:
            length = numel - begin
        yield begin, length
        begin += length
