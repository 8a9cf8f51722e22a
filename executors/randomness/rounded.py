"""Rounded perturbations, and the uniform random numbers of every stochastic rounding of a step.

Uniforms are keyed by seed, step, perturbation, parameter and element, in either discipline. So the rounding of one rank does not depend on
other ranks or instructions. The first copy of a perturbation, its second copy, the update and the choice of nonzero rows have keys of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from costmodel.formats.distributions import COUNTER_BLOCK_ELEMENTS, Distribution
from costmodel.formats.low_bits import PASSED_ELEMENTS, ROUNDED_AT_ONCE, SHARED_UNIFORMS
from costmodel.formats.roundings import RoundedPerturbation
from executors.low_bits.grids import Integers
from executors.low_bits.packed import QValues
from executors.low_bits.stored import ChosenRows
from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.rng import mixed
from executors.randomness.samplers import (
    RAW_BITS,
    DistributionSampler,
    Rademacher,
    raw_signs,
    sampler_named,
    skip_raw,
)
from executors.randomness.sequential import SequentialSampler
from executors.threads import SamplingThreads, even_ranges

Purpose = Literal["perturbation", "second perturbation", "update", "rows"]
"""What the random numbers round or choose."""

_KEYS: dict[Purpose, int] = {"perturbation": 1, "second perturbation": 2, "update": 3, "rows": 4}


class Uniform(DistributionSampler):
    """Numbers uniform on [0, 1): multiples of 2^-24."""

    distribution = Distribution("uniform", granularity=1)

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out`."""
        out.uniform_(generator=generator)

    def skip(self, numel: int, like: Tensor, generator: Generator) -> None:
        """Skip numbers, each of which takes one raw output on a CPU."""
        if like.device.type == "cpu" and like.dtype == torch.float32:
            skip_raw(numel, generator)
        else:
            super().skip(numel, like, generator)

    def energy(self, shape: Sequence[int]) -> float:
        """Raise: uniform numbers are not used as perturbations."""
        raise NotImplementedError


_UNIFORM = Uniform()
_SIGNS_AT_ONCE, _ALONE_SIGNS = 1 << 17, 1 << 14
"""On a CPU, multiples of the signs that one random number makes: looked up where they go, and copied there. Sampling threads do both."""

_EIGHT = 8

_PASSED_BLOCKS = PASSED_ELEMENTS // COUNTER_BLOCK_ELEMENTS


@cache
def _sign_table(highest: int) -> Tensor:
    """Return a table from a byte to eight int8 signs in one int64, highest bit first; a set bit gives ``-highest``."""
    bits = torch.arange(256)[:, None] >> torch.arange(7, -1, -1) & 1
    return (highest * (1 - 2 * bits)).to(torch.int8).view(torch.int64).view(-1)


_ROW_ELEMENTS_AT_ONCE = 1 << 18
"""Numbers of a sparse perturbation's rows that are sampled at a time before they are rounded."""


class RoundingUniforms:
    """Samples the uniform numbers of stochastic roundings.

    - `numels`: elements of every trainable parameter, in registration order; the same on every rank.
    - `threads`: threads that share long ranges on a CPU.
    """

    def __init__(
        self, numels: Sequence[int], device: torch.device, threads: SamplingThreads | None = None
    ) -> None:
        self._counter = CounterSampler(numels, device)
        self._shared = CounterSampler(numels, device, threads=threads)
        self._device = device

    def between(self, begin: int, end: int, parameter: int, key: CounterKey) -> Tensor:
        """Return the uniforms of elements `begin` to `end` of a parameter: float32, shape (end - begin,)."""
        uniforms = torch.empty(end - begin, dtype=torch.float32, device=self._device)
        counter = self._shared if end - begin >= SHARED_UNIFORMS else self._counter
        counter.fill(uniforms, parameter, begin, key, _UNIFORM)
        return uniforms

    def rows(self, rows: Tensor, width: int, parameter: int, key: CounterKey) -> Tensor:
        """Return the uniforms of some ascending rows of a table: float32, shape (rows, width)."""
        uniforms = torch.empty((rows.numel(), width), dtype=torch.float32, device=self._device)
        self._shared.fill_rows(uniforms, rows, parameter, key, _UNIFORM)
        return uniforms


def rounding_key(seed: int, step: int, perturbation: int, purpose: Purpose) -> CounterKey:
    """Return the key of one rounding."""
    return CounterKey.of(mixed(seed, _KEYS[purpose]), step, perturbation)


class SamplingKeys(NamedTuple):
    """Keys of one perturbation: of its rounding, and of the choice of nonzero rows."""

    rounding: CounterKey
    rows: CounterKey

    @classmethod
    def of(cls, seed: int, step: int, perturbation: int, *, is_second: bool = False) -> SamplingKeys:
        """Return the keys of a perturbation, or of its second copy, which has the same nonzero rows."""
        purpose: Purpose = "second perturbation" if is_second else "perturbation"
        return cls(
            rounding_key(seed, step, perturbation, purpose), rounding_key(seed, step, perturbation, "rows")
        )


class NonzeroRows:
    """Chooses the nonzero rows of sparse perturbations: some of each quantized matrix, all of other parameters.

    The stream that draws a perturbation asks first, and that of forwards later; neither may find what the other asked for since.

    - `sparsity`: probability that a row is 0.
    - `shapes`: of every trainable parameter, in registration order; the same on every rank.
    - `quantized`: indices of the quantized parameters.
    - `num_kept`: perturbations whose rows are kept, of each parameter.
    - `borrow`: as :meth:`executors.steps.streams.Backend.borrow`.
    """

    def __init__(
        self,
        sparsity: float,
        shapes: Sequence[torch.Size],
        quantized: Collection[int],
        device: torch.device,
        *,
        num_kept: int = 1,
        borrow: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._sparsity = sparsity
        self._num_rows = {parameter: shapes[parameter][0] for parameter in quantized} if sparsity else {}
        self._uniforms = RoundingUniforms([shape.numel() for shape in shapes], device)
        self._num_kept, self._borrow = num_kept, borrow
        self._kept: dict[int, dict[CounterKey, ChosenRows]] = {parameter: {} for parameter in self._num_rows}

    def of(self, parameter: int, key: CounterKey) -> ChosenRows | None:
        """Return the nonzero rows of a parameter, for use by the running task; None for all."""
        if parameter not in self._num_rows:
            return None
        kept = self._kept[parameter]
        if (chosen := kept.get(key)) is not None:
            self._borrow(chosen.there)
            return chosen
        uniforms = self._uniforms.between(0, self._num_rows[parameter], parameter, key)
        # How many they are has to be waited for; so the host learns which, and tells the device.
        on_host = (uniforms >= self._sparsity).cpu().nonzero().view(-1)
        chosen = kept[key] = ChosenRows(on_host.to(uniforms.device, non_blocking=True), on_host)
        for oldest in list(kept)[: -self._num_kept]:
            kept.pop(oldest, None)
        return chosen


class _Block(NamedTuple):
    """Part of a perturbation that has a generator of its own, and the seeds of its numbers and of their rounding, if there is any."""

    chunk: QValues
    seed: int
    uniform_seed: int | None


class RoundedSampler:
    """Draws rounded perturbations.

    `shapes`: of every trainable parameter, in registration order; the same on every rank.
    """

    def __init__(
        self,
        rounding: RoundedPerturbation,
        shapes: Sequence[torch.Size],
        nonzero: NonzeroRows,
        device: torch.device,
        threads: SamplingThreads,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        self._rounding = rounding
        self._shapes = shapes
        self.nonzero = nonzero
        self._grid = Integers(-rounding.highest, rounding.highest)
        self._sampler = sampler_named(rounding.distribution)
        self._numbers = CounterSampler(numels, device, threads=threads)
        self._uniforms = RoundingUniforms(numels, device, threads)
        self._device = device
        self._threads = threads

    def qvalues(self, numbers: Tensor, uniforms: Tensor | None) -> Tensor:
        """Round numbers to int8; `numbers` is overwritten."""
        return self._levels(numbers, uniforms).to(torch.int8)

    def _levels(self, numbers: Tensor, uniforms: Tensor | None) -> Tensor:
        """Round numbers, and leave them floating point; `numbers` is overwritten, and signs need no uniforms."""
        scaled = numbers.mul_(self._rounding.scale)
        if self._sampler.distribution.is_sign:
            return scaled
        assert uniforms is not None
        return self._grid.at_random(scaled, uniforms)

    def fill_counted(
        self, views: Sequence[QValues], parameters: Sequence[int], key: CounterKey, keys: SamplingKeys
    ) -> None:
        """Fill flat `views`, int8 or packed, with whole parameters' perturbations of the ``counter`` discipline."""
        jobs: list[Callable[[Generator], None]] = []
        blocks: list[_Block] = []
        is_sign, is_whole = isinstance(self._sampler, Rademacher), True
        for view, parameter in zip(views, parameters, strict=True):
            if (rows := self.nonzero.of(parameter, keys.rows)) is not None:
                jobs.append(partial(self._fill_rows, view, rows, parameter, key, keys))
                is_whole = False
                continue
            # Seeds of all blocks at once: asking for them block by block takes as long as drawing.
            chunks = view.split(self._numbers.block_elements(self._sampler))
            seeds = self._numbers.seeds(parameter, key, self._sampler)
            uniforms = [] if is_sign else self._numbers.seeds(parameter, keys.rounding, _UNIFORM)
            blocks += [_Block(*of) for of in zip_longest(chunks, seeds, uniforms)]
        if is_sign and self._device.type == "cpu":
            jobs += [partial(self._fill_signs, block.chunk, block.seed) for block in blocks]
            blocks = []

        def fill(share: range) -> None:
            generator = Generator(device=self._device)
            for job in jobs[share.start : share.stop]:
                job(generator)

        # What is drawn of some rows shares its random numbers among threads; signs of a few take less than that.
        is_shared = is_sign and is_whole and self._device.type == "cpu"
        shares = even_ranges(len(jobs), self._threads.num_threads if is_shared else 1)
        self._threads.run([partial(fill, share) for share in shares])
        for batch in self._batches(blocks):
            self._fill_blocks(batch)

    def _batches(self, blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
        """Yield blocks that are drawn before they are passed over: on an accelerator as many as are no more than a whole one."""
        on_cpu = self._device.type == "cpu"
        most = ROUNDED_AT_ONCE if on_cpu else self._numbers.block_elements(self._sampler)
        batch: list[_Block] = []
        for block in blocks:
            if batch and sum(each.chunk.numel() for each in (*batch, block)) > most:
                yield batch
                batch = []
            batch.append(block)
        if batch:
            yield batch

    def _fill_blocks(self, blocks: Sequence[_Block]) -> None:
        """Fill blocks, the roundings of each being a block of uniforms as long.

        Sampling threads make random numbers alone: passes are shared among torch's threads, since those of Python's hand the
        interpreter to each other between any two passes, which takes longer than short ones.
        """
        sizes = [block.chunk.numel() for block in blocks]
        total, on_cpu = sum(sizes), self._device.type == "cpu"
        numbers, uniforms = torch.empty((2, total), dtype=torch.float32, device=self._device)
        parts = list(zip(blocks, numbers.split(sizes), uniforms.split(sizes), strict=True))

        def sample(share: range) -> None:
            generator = Generator(device=self._device)
            for block, own, uniform in parts[share.start : share.stop]:
                self._sampler.fill(own, generator.manual_seed(block.seed))
                if block.uniform_seed is not None:
                    _UNIFORM.fill(uniform, generator.manual_seed(block.uniform_seed))

        is_shared = on_cpu and total >= SHARED_UNIFORMS
        shares = even_ranges(len(blocks), self._threads.num_threads if is_shared else 1)
        self._threads.run([partial(sample, share) for share in shares])
        length, begin = _PASSED_BLOCKS if on_cpu else len(blocks), 0
        for first in range(0, len(blocks), length):
            here = blocks[first : first + length]
            of_here = sizes[first : first + length]
            end = begin + sum(of_here)
            levels = self._levels(numbers[begin:end], uniforms[begin:end]).split(of_here)
            begin = end
            if tensors := [block.chunk for block in here if isinstance(block.chunk, Tensor)]:
                torch._foreach_copy_(tensors, list(levels))
                continue
            for block, level in zip(here, levels, strict=True):
                block.chunk[:] = level

    def _fill_signs(self, chunk: QValues, seed: int, generator: Generator) -> None:
        """Fill a block with signs on a CPU, whose generator goes on from part to part, in parts that stay in cache."""
        generator.manual_seed(seed)
        whole = 0
        if isinstance(chunk, Tensor) and chunk.storage_offset() % _EIGHT == 0:
            whole = chunk.numel() // RAW_BITS * RAW_BITS
            for part in chunk[:whole].split(_SIGNS_AT_ONCE) if whole else ():
                self._sign_qvalues(raw_signs(part.numel(), generator), out=part.view(torch.int64))
        for begin in range(whole, chunk.numel(), _ALONE_SIGNS):
            end = min(begin + _ALONE_SIGNS, chunk.numel())
            chunk[begin:end] = self._sign_qvalues(raw_signs(end - begin, generator))[: end - begin]

    def _sign_qvalues(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the quantized values of the signs that :class:`Rademacher` makes of random numbers on a CPU.

        Eight are one number of 64 bits, which is looked up in a table; `out` is of as many.
        """
        # A number of 32 bits is a sign for each bit, from its highest one down.
        highest_first = raw.view(torch.uint8).view(-1, 4).flip(1).view(-1)
        qvalues = torch.index_select(_sign_table(self._rounding.highest), 0, highest_first.int(), out=out)
        return qvalues.view(torch.int8)

    def _fill_rows(
        self,
        view: QValues,
        rows: ChosenRows,
        parameter: int,
        key: CounterKey,
        keys: SamplingKeys,
        _generator: Generator,
    ) -> None:
        """Fill a matrix that is 0 but in some rows, for which alone numbers are drawn."""
        view.zero_()
        matrix = view.view(*self._shapes[parameter])
        # Of a token table the numbers of all nonzero rows would be larger than its quantized values.
        num = max(1, _ROW_ELEMENTS_AT_ONCE // matrix.shape[1])
        for there, here in zip(*(part.split(num) for part in rows), strict=True):
            matrix[there] = self._rows_of(here, parameter, key, keys)

    def _rows_of(self, rows: Tensor, parameter: int, key: CounterKey, keys: SamplingKeys) -> Tensor:
        """Return some rounded rows of a matrix in the ``counter`` discipline; `rows` lie on the host."""
        width = self._shapes[parameter][1]
        if isinstance(self._sampler, Rademacher) and self._numbers.has_raw_rows(width):
            raw = self._numbers.raw_rows(rows, width, parameter, key, self._sampler)
            return self._sign_qvalues(raw.view(-1)).view(len(rows), width)
        numbers = torch.empty((len(rows), width), device=self._device)
        if len(rows):
            self._numbers.fill_rows(numbers, rows, parameter, key, self._sampler)
        return self._quantized_rows(numbers, rows, parameter, keys)

    def fill_sequential(
        self,
        sequential: SequentialSampler,
        views: Sequence[QValues],
        parameters: Sequence[int],
        source: Generator | Sequence[Tensor],
        keys: SamplingKeys,
    ) -> list[Tensor]:
        """Fill flat `views`, int8 or packed, in sequence: from a generator, or again from its states. Return the states at the marks."""

        def take(tensor: int, begin: int, numbers: Tensor) -> None:
            for chunk in numbers.split(at_once):
                end, uniforms = begin + chunk.numel(), None
                if not self._sampler.distribution.is_sign:
                    uniforms = self._uniforms.between(begin, end, parameters[tensor], keys.rounding)
                views[tensor][begin:end] = self._levels(chunk, uniforms)
                begin = end

        at_once = PASSED_ELEMENTS if self._device.type == "cpu" else ROUNDED_AT_ONCE
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        states: list[Tensor] = []
        if isinstance(source, Generator):
            states = sequential.feed(take, like, source)
        else:
            sequential.feed_again(take, like, source)
        for view, parameter in zip(views, parameters, strict=True):
            if (rows := self.nonzero.of(parameter, keys.rows)) is not None:
                matrix = view.view(*self._shapes[parameter])
                kept = matrix[rows.there]
                matrix.zero_()[rows.there] = kept
        return states

    def rows(self, numbers: Tensor, rows: Tensor, parameter: int, keys: SamplingKeys) -> Tensor:
        """Round some rows of a table, 0 where a sparse perturbation is; `numbers` is overwritten.

        `rows` are of the host.
        """
        qvalues = self._quantized_rows(numbers, rows, parameter, keys)
        if (nonzero := self.nonzero.of(parameter, keys.rows)) is not None:
            qvalues.mul_(torch.isin(rows, nonzero.on_host).unsqueeze(1).to(qvalues.device, non_blocking=True))
        return qvalues

    def _quantized_rows(self, numbers: Tensor, rows: Tensor, parameter: int, keys: SamplingKeys) -> Tensor:
        width = numbers.shape[1]
        is_sign = self._sampler.distribution.is_sign
        uniforms = None if is_sign else self._uniforms.rows(rows, width, parameter, keys.rounding)
        return self.qvalues(numbers, uniforms)
