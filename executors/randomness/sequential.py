"""``mezo`` draws: one generator serves all parameters in turn. Its sequence is split where a draw can be cut without changing a bit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from costmodel.formats.distributions import JUMP_RAW
from costmodel.formats.low_bits import SEQUENTIAL_AT_ONCE
from executors.randomness.mersenne import can_jump, jumped
from executors.randomness.rng import sample_into
from executors.randomness.samplers import DistributionSampler
from executors.threads import SamplingThreads, even_ranges

_HELD_ELEMENTS = 1 << 16
"""Numbers held at once when not all are kept; a multiple of every granularity."""

_CHEAP_ELEMENTS = 1 << 19
"""The same for perturbations that take less to draw than to choose from."""

_LONGEST_GRANULE = 64

Take = Callable[[int, int, Tensor], None]
"""Takes a tensor's position in a group, the first element of a chunk of it, and the numbers drawn for that chunk."""


class SequentialSampler:
    """One draw after another of the tensors of a group, with the generator's states at marks on the way.

    Parameters
    ----------
    numels : sequence of int
        Elements of the tensors.
    sampler : Perturbation
    num_marks : int
        Stretches, between marks, that the elements are shared among as evenly as draws can be cut.
    threads : SamplingThreads, optional
        Threads that draw stretches at once on a CPU, where its raw outputs can be counted.

    Notes
    -----
    A thread begins in the middle of a sequence by a jump of the generator (:mod:`executors.randomness.mersenne`). Drawing again begins at
    the kept states.
    """

    def __init__(
        self,
        numels: Sequence[int],
        sampler: DistributionSampler,
        num_marks: int = 1,
        threads: SamplingThreads | None = None,
    ) -> None:
        self._sampler = sampler
        self._spans = list(_spans(numels, sampler.distribution.granularity, num_marks))
        self._threads = threads or SamplingThreads()

    def fill(
        self, views: Sequence[Tensor], generator: Generator, factor: float | None = None
    ) -> list[Tensor]:
        """Fill flat `views`, advance `generator`, and return its states at the marks (`factor`: multiplies every number, which is rounded again)."""
        return self._traverse(generator, views[0], lambda span, own: self._sample(span, views, own, factor))

    def sample(self, views: Sequence[Tensor], generator: Generator, factor: float | None = None) -> None:
        """Fill flat `views` and advance `generator`, whose states nobody asks for."""
        for spans in self._spans:
            for span in spans:
                self._sample(span, views, generator, factor)

    def fill_again(
        self, views: Sequence[Tensor], states: Sequence[Tensor], factor: float | None = None
    ) -> None:
        """Fill flat `views` as the pass that left `states` did."""
        self._again(views[0], states, lambda span, own: self._sample(span, views, own, factor))

    def _again(self, like: Tensor, states: Sequence[Tensor], consume: _Consumer) -> None:
        """Visit all spans again, from the states at the marks."""
        shares = even_ranges(len(self._spans), self._num_threads)
        self._threads.run([partial(self._from, share, like, states, consume) for share in shares])

    def feed(self, take: Take, like: Tensor, generator: Generator) -> list[Tensor]:
        """Hand every number on, chunk by chunk, advance `generator`, and return its states at the marks.

        - `take`: given a tensor's place, the first element of a chunk of it, and the numbers of that chunk.
        - `like`: in whose format, and where, numbers are drawn.
        """
        begin = generator.get_state()
        shares, raw = self._shares(like)
        states: list[list[Tensor]] = [[] for _ in shares]
        own_generators = [generator, *(Generator(device=like.device) for _ in shares[1:])]

        def sample_share(number: int) -> Iterator[list[_Sampled]]:
            if number:
                own_generators[number].set_state(jumped(begin, raw[shares[number].start]))
            yield from self._sample_batches(
                shares[number], like, own_generators[number], len(shares), states[number]
            )

        self._hand_on(take, [sample_share(number) for number in range(len(shares))])
        if len(shares) > 1:
            generator.set_state(own_generators[-1].get_state())
        return [state for of_share in states for state in of_share]

    def feed_again(self, take: Take, like: Tensor, states: Sequence[Tensor]) -> None:
        """Hand every number on as the pass that left `states` did."""
        shares = even_ranges(len(self._spans), self._num_threads)

        def sample_share(share: range) -> Iterator[list[_Sampled]]:
            generator = Generator(device=like.device)
            generator.set_state(states[share.start])
            yield from self._sample_batches(share, like, generator, len(shares), [])

        self._hand_on(take, [sample_share(share) for share in shares])

    def _hand_on(self, take: Take, streams: Sequence[Iterator[list[_Sampled]]]) -> None:
        """Let each thread draw some numbers of its share, hand these on, and so forth.

        Threads make random numbers alone: what becomes of them is shared among torch's threads.
        """
        batches: list[list[_Sampled]] = [[] for _ in streams]

        def sample(number: int) -> None:
            batches[number] = next(streams[number], [])

        while True:
            self._threads.run([partial(sample, number) for number in range(len(streams))])
            if not any(batches):
                return
            for batch in batches:
                for sampled in batch:
                    take(*sampled)

    def _sample_batches(
        self, share: range, like: Tensor, generator: Generator, num_shares: int, states: list[Tensor]
    ) -> Iterator[list[_Sampled]]:
        """Yield the numbers of some stretches, and add the states at their marks to `states`; all shares hold as many at once as become quantized."""
        most = 1 << ((SEQUENTIAL_AT_ONCE // num_shares).bit_length() - 1)
        batch: list[_Sampled] = []
        for spans in self._spans[share.start : share.stop]:
            states.append(generator.get_state())
            for span in spans:
                for low, high in _chunks(span.end - span.begin, most):
                    if batch and sum(chunk.numbers.numel() for chunk in batch) + high - low > most:
                        yield batch
                        batch = []
                    numbers = torch.empty(high - low, dtype=like.dtype, device=like.device)
                    self._sampler.fill(numbers, generator)
                    batch.append(_Sampled(span.tensor, span.begin + low, numbers))
        if batch:
            yield batch

    @property
    def _num_threads(self) -> int:
        """Threads that draw again: signs are made by torch's own."""
        return self._threads.num_threads if self._sampler.distribution.is_single_threaded else 1

    def skip(self, like: Tensor, generator: Generator) -> list[Tensor]:
        """Advance `generator` as drawing in the format of `like` does, and return its state before."""
        state = generator.get_state()
        raw = self._num_raw(like)
        if raw is not None and raw[-1] >= JUMP_RAW and can_jump():
            generator.set_state(jumped(state, raw[-1]))
            return [state]
        for spans in self._spans:
            for span in spans:
                self._sampler.skip(span.end - span.begin, like, generator)
        return [state]

    def rows(self, out: Tensor, rows: Tensor, generator: Generator) -> list[Tensor]:
        """Keep some rows of a whole table's draw; the sequence is that table's alone.

        - `out`: shape (kept rows, width); filled.
        - `rows`: ascending row numbers to keep.
        - `generator`: advanced as the draw of the whole table advances it.
        """
        if out.device.type != "cpu":
            states = [generator.get_state()]
            table = torch.empty(
                (self._spans[0][0].end // out.shape[1], out.shape[1]), dtype=out.dtype, device=out.device
            )
            self._sampler.fill(table, generator)
            torch.index_select(table, 0, rows, out=out)
            return states
        wanted = rows.tolist()

        def keep(span: _Elements, own: Generator) -> None:
            keep_rows(out, wanted, span.begin, span.end, self._sampler, own)

        return self._traverse(generator, out, keep)

    def _traverse(self, generator: Generator, like: Tensor, consume: _Consumer) -> list[Tensor]:
        """Visit all spans, advance `generator`, and return its states at the marks."""
        begin = generator.get_state()
        shares, raw = self._shares(like)
        states: list[list[Tensor]] = [[] for _ in shares]
        ends: list[Tensor] = [begin] * len(shares)

        def sample_share(number: int) -> None:
            share, own = shares[number], generator
            if number:
                own = Generator(device=like.device)
                own.set_state(jumped(begin, raw[share.start]))
            for spans in self._spans[share.start : share.stop]:
                states[number].append(own.get_state())
                for span in spans:
                    consume(span, own)
            ends[number] = own.get_state()

        self._threads.run([partial(sample_share, number) for number in range(len(shares))])
        if len(shares) > 1:
            generator.set_state(ends[-1])
        return [state for of_share in states for state in of_share]

    def _shares(self, like: Tensor) -> tuple[list[range], list[int]]:
        """Return the stretches that each thread draws, and the words before each stretch, if there are several."""
        most = self._threads.num_threads
        raw = self._num_raw(like) if most > 1 else None
        if raw is None or raw[-1] < 2 * JUMP_RAW or not can_jump():
            return [range(len(self._spans))], []
        return even_ranges(len(self._spans), min(most, raw[-1] // JUMP_RAW)), raw

    def _num_raw(self, like: Tensor) -> list[int] | None:
        """Return the words spent before each stretch, and by all of them; None where they cannot be counted."""
        if like.device.type != "cpu":
            return None
        starts = [0]
        for spans in self._spans:
            spent = [self._sampler.num_raw(span.end - span.begin, like.dtype) for span in spans]
            if any(num is None for num in spent):
                return None
            starts.append(starts[-1] + sum(num for num in spent if num is not None))
        return starts

    def _from(self, share: range, like: Tensor, states: Sequence[Tensor], consume: _Consumer) -> None:
        generator = Generator(device=like.device)
        generator.set_state(states[share.start])
        for spans in self._spans[share.start : share.stop]:
            for span in spans:
                consume(span, generator)

    def _sample(
        self, span: _Elements, views: Sequence[Tensor], generator: Generator, factor: float | None
    ) -> None:
        sample_into(views[span.tensor][span.begin : span.end], self._sampler, generator, factor)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of one tensor that are drawn one after the other."""

    tensor: int
    begin: int
    end: int


_Consumer = Callable[[_Elements, Generator], None]


class _Sampled(NamedTuple):
    """Numbers of a tensor from an element of it on."""

    tensor: int
    begin: int
    numbers: Tensor


def _spans(numels: Sequence[int], granularity: int, num_marks: int) -> Iterator[list[_Elements]]:
    """Yield the spans between two marks, tensor by tensor; every chunk of a tensor can be drawn apart."""
    target = -(-sum(numels) // num_marks)
    spans: list[_Elements] = []
    left = target
    for tensor, numel in enumerate(numels):
        begin = 0
        while (length := left - left % granularity) >= granularity and numel - begin - length >= granularity:
            yield [*spans, _Elements(tensor, begin, begin + length)]
            spans, left = [], target
            begin += length
        spans.append(_Elements(tensor, begin, numel))
        left -= numel - begin
        if left < granularity:
            yield spans
            spans, left = [], target
    if spans:
        yield spans


def keep_rows(
    out: Tensor,
    wanted: Sequence[int],
    begin: int,
    end: int,
    sampler: DistributionSampler,
    generator: Generator,
    *,
    to_the_end: bool = True,
) -> None:
    """Sample what lies of some rows between two elements of a table, and skip the rest.

    - `out`: shape (kept rows, width); what lies between `begin` and `end` is filled.
    - `wanted`: ascending row numbers to keep.
    - `begin`, `end`: where one draw begins and ends, in elements; the first a multiple of the perturbation's granularity.
    - `to_the_end`: whether `generator` is advanced as the whole draw advances it; else it stops after the last row.
    """
    width = out.shape[1]
    first, last = rows_between(wanted, width, begin, end)
    for low, high, is_kept in _kept_spans(wanted[first:last], width, begin, end, sampler):
        if not is_kept:
            if high < end or to_the_end:
                sampler.skip(high - low, out, generator)
            continue
        numbers = torch.empty(high - low, dtype=out.dtype, device=out.device)
        sampler.fill(numbers, generator)
        keep_of(out, wanted, numbers, low)


def keep_of(out: Tensor, wanted: Sequence[int], numbers: Tensor, begin: int) -> None:
    """Fill what `numbers`, the elements of a table from `begin` on, hold of the wanted rows: several whole ones at once."""
    width, end = out.shape[1], begin + numbers.numel()
    above, below = -(-begin // width), end // width
    first, last = bisect_left(wanted, above), bisect_left(wanted, below)
    if last - first > 1:
        rows = numbers[above * width - begin : below * width - begin].view(-1, width)
        indices = (torch.tensor(wanted[first:last]) - above).to(out.device, non_blocking=True)
        torch.index_select(rows, 0, indices, out=out[first:last])
    else:
        last = first
    reached = rows_between(wanted, width, begin, end)
    for kept in (*range(reached[0], first), *range(last, reached[1])):
        row = wanted[kept] * width
        start, stop = max(row, begin), min(row + width, end)
        out[kept, start - row : stop - row] = numbers[start - begin : stop - begin]


def rows_between(wanted: Sequence[int], width: int, begin: int, end: int) -> tuple[int, int]:
    """Return which of the wanted rows have elements between `begin` and `end`."""
    return bisect_left(wanted, begin // width), bisect_left(wanted, -(-end // width))


def _kept_spans(
    rows: Sequence[int], width: int, begin: int, end: int, sampler: DistributionSampler
) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, kept) of one draw in chunks that can be drawn apart; without rows to keep, in one."""
    if rows and (width % sampler.distribution.granularity or not sampler.distribution.is_single_threaded):
        most = _HELD_ELEMENTS if sampler.distribution.is_single_threaded else _CHEAP_ELEMENTS
        yield from ((begin + low, begin + high, True) for low, high in _chunks(end - begin, most))
        return
    for row in rows:
        low, high = max(row * width, begin), min((row + 1) * width, end)
        if low > begin:
            yield begin, low, False
        yield low, high, True
        begin = high
    if begin < end:
        yield begin, end, False


def sample_rows(
    out: Tensor, rows: Tensor, num_rows: int, sampler: DistributionSampler, generator: Generator
) -> None:
    """Draw a whole table of `num_rows` rows and keep some: see :meth:`SequentialSampler.rows`."""
    SequentialSampler([num_rows * out.shape[1]], sampler).rows(out, rows, generator)


def skip_tensors(
    numels: Sequence[int], like: Tensor, sampler: DistributionSampler, generator: Generator
) -> None:
    """Advance `generator` as drawing tensors of `numels` elements in the format of `like` would."""
    SequentialSampler(numels, sampler).skip(like, generator)


def _chunks(numel: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of chunks that are drawn one after the other and together equal one draw."""
    begin = 0
    while begin < numel:
        length = min(most, numel - begin)
        if numel - begin - length < _LONGEST_GRANULE:
            length = numel - begin
        yield begin, begin + length
        begin += length
