"""A quantizer of anybody against what rounding promises: no bias, a grid that is ordered and reached, range, independence, replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np
import torch
from scipy.stats import binom
from scipy.stats import t as student
from torch import Tensor

from proofs_checks.judging.findings import (
    JudgedProperty,
    Judgement,
    Verdict,
    answer_of,
    called_twice,
    compared,
    exactly,
    not_applicable,
)
from proofs_checks.outcomes import COARSEST
from proofs_checks.statistics import LEVEL, MISSED, NUM_BATCHES, estimates_of, threshold
from topology.errors import ZosimError

Rounding = Literal["stochastic", "nearest"]


class Quantizer(Protocol):
    """What is judged: a function of numbers and a seed that returns the numbers that their grid values stand for."""

    def __call__(self, numbers: Tensor, seed: int) -> Tensor:
        """Return numbers of the same shape; all that is random follows from `seed`."""


def judge_quantizer(
    quantizer: Quantizer,
    *,
    name: str = "quantizer",
    rounding: Rounding = "stochastic",
    group_size: int | None = None,
    largest: float = 1.0,
    num_samples: int = 2_000,
    seed: int = 0,
) -> Judgement:
    """Judge a quantizer.

    Parameters
    ----------
    quantizer : callable
        ``quantizer(numbers, seed)`` returns what the grid values of `numbers` stand for; numbers have shape (256,), in float32.
    name : str
        Name in the report.
    rounding : {"stochastic", "nearest"}
        Whether a number is rounded at random, right on average, or to the nearest number of the grid.
    group_size : int, optional
        Number of neighbours that share a scale, a divisor of 256; by default all.
    largest : float
        Largest ratio of a magnitude that comes out to the largest that went in: more than 1 for grids whose scales are powers of two.
    num_samples : int
        Number of seeds to try, if the quantizer rounds at random.
    seed : int
        First seed.

    Returns
    -------
    Judgement

    Raises
    ------
    ZosimError
        If a parameter is out of range, or the quantizer raises, or does not return numbers of the shape that it was given.

    Examples
    --------
    >>> def nearest(numbers, seed):
    ...     scale = numbers.abs().max() / 127
    ...     return torch.round(numbers / scale) * scale if scale else numbers
    >>> judge_quantizer(nearest, rounding="nearest").failed
    ()
    """
    if rounding not in ("stochastic", "nearest"):
        raise ZosimError(f"rounding={rounding!r} must be stochastic or nearest")
    group = _COUNT if group_size is None else group_size
    if group < 2 or _COUNT % group:
        raise ZosimError(
            f"group_size={group_size} must divide the {_COUNT} numbers that a quantizer is given",
            hint="use a power of two, such as 32",
        )
    if not 256 <= num_samples <= 10**7:
        raise ZosimError(f"num_samples={num_samples} must be from 256 to 10,000,000")
    judge = _Judge(quantizer, rounding, group, largest, num_samples, seed, name)
    return Judgement(name, tuple(judge.findings()))


_COUNT = 256


class _Judge:
    """One quantizer, and the numbers that it is tried on."""

    def __init__(
        self,
        quantizer: Quantizer,
        rounding: Rounding,
        group: int,
        largest: float,
        num_samples: int,
        seed: int,
        name: str,
    ) -> None:
        self._quantizer, self._rounding, self._group, self._name = quantizer, rounding, group, name
        self._largest, self._num_samples, self._seed = largest, num_samples, seed
        generator = torch.Generator().manual_seed(2_024)
        self._inputs = {
            "normals": torch.randn(_COUNT, generator=generator),
            "small numbers of one sign": 1e-3 * torch.rand(_COUNT, generator=generator) + 1e-5,
            "an evenly spaced range": torch.linspace(-1.0, 0.7, _COUNT)[
                torch.randperm(_COUNT, generator=generator)
            ],
        }
        for numbers in self._inputs.values():
            # Whatever the group, each has a number of its range's end, so that all groups have one scale.
            numbers[::group] = numbers.abs().max()

    def findings(self) -> Iterator[JudgedProperty]:
        yield from self._replay()
        yield self._range()
        yield self._special()
        if self._rounding == "stochastic":
            samples = {name: self._samples(numbers) for name, numbers in self._inputs.items()}
            yield self._neighbours(samples)
            yield self._unbiased(samples)
            yield self._unbiased_together(samples)
            yield self._independent(samples)
            yield self._ordered({name: (rows.amin(0), rows.amax(0)) for name, rows in samples.items()})
        else:
            once = {name: self._quantized(numbers, self._seed) for name, numbers in self._inputs.items()}
            yield self._ordered({name: (rounded, rounded) for name, rounded in once.items()})
            yield self._nearest()
        yield self._stays()

    # -- asking ------------------------------------------------------------------------------------------------

    def _quantized(self, numbers: Tensor, seed: int) -> Tensor:
        return answer_of(
            self._quantizer, numbers.clone(), seed, name=self._name, like=numbers,
            called="it is called as quantizer(numbers, seed): numbers have shape (256,) in float32",
            returned="return what the grid values stand for, a number for each",
        )  # fmt: skip

    def _samples(self, numbers: Tensor) -> Tensor:
        """Return roundings by as many seeds, shape (n, 256)."""
        return torch.stack(
            [self._quantized(numbers, self._seed + n) for n in range(self._num_samples)]
        ).double()

    # -- findings ----------------------------------------------------------------------------------------------

    def _replay(self) -> Iterator[JudgedProperty]:
        numbers = self._inputs["normals"]
        first, num_equal, is_left_alone = called_twice(
            lambda seed: self._quantized(numbers, seed), self._seed
        )
        yield exactly(
            "replay",
            "the same seed gives the same bits, whatever was asked for before and wherever torch's own generator stands",
            holds=num_equal == len(first) and is_left_alone,
            measured=f"{num_equal} of {len(first)} come back",
        )
        num_unlike = len({tuple(rounded.tolist()) for rounded in first})
        is_random = self._rounding == "stochastic"
        yield exactly(
            "seeds matter" if is_random else "seeds do not matter",
            f"eight seeds give {'eight roundings' if is_random else 'one rounding'} of the same normals",
            holds=num_unlike == (8 if is_random else 1),
            measured=f"{num_unlike} unlike",
        )

    def _range(self) -> JudgedProperty:
        over = max(
            float(self._quantized(numbers, self._seed + n).abs().max() / numbers.abs().max())
            for numbers in self._inputs.values()
            for n in range(16)
        )
        return exactly(
            "range",
            f"no number comes out larger than {self._largest:g} times the largest that went in",
            holds=over <= self._largest * (1 + 1e-5),
            measured=f"at most {over:.6g} times",
        )

    def _special(self) -> JudgedProperty:
        """Return whether inputs without a range, and of extreme ones, give finite numbers."""
        extreme = {
            "zeros": torch.zeros(_COUNT),
            "one number 256 times": torch.full((_COUNT,), 0.3),
            "numbers about 1e-30": 1e-30 * self._inputs["normals"],
            "numbers about 1e30": 1e30 * self._inputs["normals"],
        }
        wrong = []
        for name, numbers in extreme.items():
            rounded = self._quantized(numbers, self._seed)
            if not rounded.isfinite().all() or (name == "zeros" and bool(rounded.any())):
                wrong.append(name)
        return exactly(
            "zeros, constants and extremes",
            f"{', '.join(extreme)} give finite numbers, and zeros zeros",
            holds=not wrong,
            measured=f"not so for {', '.join(wrong)}" if wrong else "all do",
        )

    def _neighbours(self, samples: dict[str, Tensor]) -> JudgedProperty:
        """Return whether a number is rounded to no more than two numbers, between which it lies."""
        wrong = 0
        for name, rows in samples.items():
            numbers = self._inputs[name].double()
            low, high = rows.amin(0), rows.amax(0)
            strays = ((rows != low) & (rows != high)).any(0)
            # One that never went the other way lies less than a step from where it went.
            slack = torch.where(high > low, 1e-6 * numbers.abs().max(), (high - low).max())
            wrong += int((strays | (numbers < low - slack) | (numbers > high + slack)).sum())
        return exactly(
            "two neighbours",
            "each number becomes one of two, and lies between them",
            holds=not wrong,
            measured=f"not so for {wrong} of {_COUNT * len(samples)}",
        )

    def _unbiased(self, samples: dict[str, Tensor]) -> JudgedProperty:
        """Return whether every number is right on average.

        How often a number goes up, of two that it lies between, has a binomial distribution if it is right on average. One that never
        went the other way is so near to where it went that it need not have.
        """
        num_compared, least, worst = 0, 1.0, 0.0
        for name, rows in samples.items():
            numbers, count = self._inputs[name].double(), len(rows)
            low, high = rows.amin(0), rows.amax(0)
            step = (high - low).max().clamp(min=1e-300)
            both = high > low
            probability = ((numbers - low) / (high - low))[both].clamp(0, 1).numpy()
            num_up = (rows == high).sum(0)[both].numpy()
            tails = np.minimum(
                binom.cdf(num_up, count, probability), binom.sf(num_up - 1, count, probability)
            )
            # Numbers in float32, and the bounds of a clamped range, are a rounding off.
            away = (((numbers - low).abs() - 1e-6 * numbers.abs().max()).clamp(min=0) / step)[~both].numpy()
            never = (1 - np.minimum(away, 1.0)) ** count
            num_compared += len(numbers)
            least = min(least, *(2 * tails), *never)
            worst = max(worst, *np.abs(num_up / count - probability), *away)
        resolution = (threshold() + float(student.isf(MISSED, NUM_BATCHES - 1))) / 2 / self._num_samples**0.5
        verdict: Verdict = "fails" if least < LEVEL else "holds" if resolution <= COARSEST else "not resolved"
        return JudgedProperty(
            "unbiased, number by number",
            verdict,
            "E Q(x) = x, by the binomial distribution of how often a number goes up",
            f"off by {worst:.2g} of a step, in the worst of {num_compared} numbers",
            resolution,
            num_compared,
            self._num_samples,
        )

    def _unbiased_together(self, samples: dict[str, Tensor]) -> JudgedProperty:
        """Return whether errors have no mean over all numbers, in steps: a small bias of each shows here."""
        errors = torch.cat([self._errors_in_steps(name, rows) for name, rows in samples.items()], 1)
        (estimate,) = estimates_of("error", errors.mean(1)[:, None], torch.zeros(1))
        return compared(
            "unbiased, over all numbers", "the mean of (Q(x) - x)/step is 0", [estimate], " steps"
        )

    def _errors_in_steps(self, name: str, rows: Tensor) -> Tensor:
        """Return ``(Q(x) - x)/step`` of the numbers that are rounded both ways, shape (n, k)."""
        low, high = rows.amin(0), rows.amax(0)
        both = high > low
        return ((rows - self._inputs[name].double()) / (high - low).clamp(min=1e-300))[:, both]

    def _independent(self, samples: dict[str, Tensor]) -> JudgedProperty:
        """Return whether errors of neighbours have nothing in common."""
        products = []
        for name, rows in samples.items():
            errors = self._errors_in_steps(name, rows)
            if errors.shape[1] > 1:
                products.append((errors[:, 1:] * errors[:, :-1]).mean(1) / errors.var(0).mean())
        if not products:
            return not_applicable("independent", "no number is rounded both ways")
        (estimate,) = estimates_of("correlation", torch.stack(products).mean(0)[:, None], torch.zeros(1))
        return compared("independent", "errors of neighbouring numbers are not correlated", [estimate])

    def _ordered(self, bounds: dict[str, tuple[Tensor, Tensor]]) -> JudgedProperty:
        """Return whether a larger number never becomes less, within a group: of random roundings the lower and the upper ends."""
        wrong = 0
        for name, ends in bounds.items():
            numbers = self._inputs[name]
            for rounded in ends:
                for part, values in zip(numbers.split(self._group), rounded.split(self._group), strict=True):
                    sorted_values = values[part.argsort()].double()
                    wrong += int((sorted_values.diff() < -1e-6 * float(numbers.abs().max())).sum())
        which = "both neighbours of" if self._rounding == "stochastic" else "what becomes of"
        return exactly(
            "ordered", f"{which} a larger number are no less, within a group of {self._group}",
            holds=not wrong, measured=f"{wrong} pairs are the other way round",
        )  # fmt: skip

    def _nearest(self) -> JudgedProperty:
        """Return whether no number of the grid that came out lies nearer than the one that was chosen."""
        worst = 0.0
        for numbers in self._inputs.values():
            rounded = self._quantized(numbers, self._seed).double()
            grid = rounded.unique()
            if len(grid) < 2:
                continue
            distance = (numbers.double()[:, None] - grid).abs().amin(1)
            gap = grid.diff().min()
            worst = max(worst, float(((numbers.double() - rounded).abs() - distance).max() / gap))
        return exactly(
            "nearest",
            "no number that came out for another lies nearer",
            holds=worst <= 1e-3,
            measured=f"another lies nearer by {worst:.3g} steps at most",
        )

    def _stays(self) -> JudgedProperty:
        """Return whether numbers of the grid stay where they are."""
        name, moved, num_tried = "numbers of the grid stay", 0.0, 0
        for numbers in self._inputs.values():
            rounded = self._quantized(numbers, self._seed)
            if not torch.equal(
                rounded.reshape(-1, self._group).abs().amax(1), numbers.reshape(-1, self._group).abs().amax(1)
            ):
                continue  # another scale, and so another grid
            num_tried += 1
            for n in range(8):
                again = self._quantized(rounded, self._seed + n)
                moved = max(moved, float((again - rounded).abs().max() / numbers.abs().max()))
        if not num_tried:
            return not_applicable(name, "the largest number changed, and with it perhaps the grid")
        return exactly(
            name,
            "what was rounded is rounded to itself, by any seed",
            holds=moved <= 1e-5,
            measured=f"moved by {moved:.2g} of the largest number",
        )
