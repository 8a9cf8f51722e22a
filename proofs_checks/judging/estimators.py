"""A gradient estimator of anybody against what two-point estimates promise: mean, order of the bias, second moment, replay, ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from scipy.special import roots_gegenbauer
from scipy.stats import t as student
from torch import Tensor

from proofs_checks.exact import sign_nodes
from proofs_checks.judging.findings import (
    JudgedProperty,
    Judgement,
    Verdict,
    answer_of,
    at_most,
    called_twice,
    compared,
    exactly,
    not_applicable,
)
from proofs_checks.oracles.smoothing import smoothed_loss
from proofs_checks.outcomes import COARSEST
from proofs_checks.statistics import MISSED, batch_means, estimates_of, fitted_slope, threshold
from topology.errors import ZosimError

Loss = Callable[[Tensor], Tensor]
"""From parameters of shape (d,) to a scalar tensor, in float64."""

Distribution = Literal["normal", "signs", "sphere", "any"]
"""Of perturbations: independent normals, independent signs, uniform on the sphere of radius √d, or something else."""


class GradientEstimator(Protocol):
    """What is judged: a function of a loss, parameters, a smoothing radius and a seed that returns a gradient's estimate."""

    def __call__(self, loss: Loss, theta: Tensor, epsilon: float, seed: int) -> Tensor:
        """Return the estimate, of the shape of `theta`; all that is random follows from `seed`."""


@dataclass(frozen=True)
class Declared:
    """What an estimator is stated to do."""

    distribution: Distribution = "normal"
    num_perturbations: int = 1  # number of independent perturbations that it averages over
    # Order of its bias in ε, at least: 2 for differences along perturbations that are as likely as their opposites.
    order: float = 2.0
    # Whether the estimate of a sum of losses is the sum of estimates, on which data parallelism relies.
    is_linear: bool = True

    def second_moment(self, dimension: int) -> float:
        """Return ``E|ĝ|²/|∇f|²`` of a linear loss.

        ``d + 2`` along normals, ``d`` along signs and on the sphere, of one perturbation; of `num_perturbations`
        perturbations ``1 + (that - 1)/num_perturbations`` (Nesterov and Spokoiny 2017, theorem 4; signs and sphere: ``E|z|²(a·z)²`` with ``|z|² = d``).
        """
        one = {"normal": dimension + 2.0, "signs": float(dimension), "sphere": float(dimension)}
        return 1 + (one[self.distribution] - 1) / self.num_perturbations


def judge_estimator(
    estimator: GradientEstimator,
    *,
    name: str = "estimator",
    distribution: Distribution = "normal",
    num_perturbations: int = 1,
    order: float = 2.0,
    is_linear: bool = True,
    dimension: int = 6,
    num_samples: int = 40_000,
    seed: int = 0,
) -> Judgement:
    """Judge a gradient estimator.

    Parameters
    ----------
    estimator : callable
        ``estimator(loss, theta, epsilon, seed)`` returns an estimate of shape (d,). `loss` takes parameters in float64, and may be
        called as often as is liked.
    name : str
        Name in the report.
    distribution : {"normal", "signs", "sphere", "any"}
        Distribution of its perturbations, by which the smoothed gradient and the second moment are known. With ``"any"`` neither is compared.
    num_perturbations : int
        Number of independent perturbations that it averages over.
    order : float
        Smallest exponent of ε in its bias: 2 for an error that grows as ε², a number above 0.
    is_linear : bool
        Whether estimates of losses add up; not so where an estimate takes signs or clips.
    dimension : int
        Number of parameters, 2 to 16.
    num_samples : int
        Number of estimates per comparison; seeds are `seed`, `seed + 1` and so on.
    seed : int
        First seed.

    Returns
    -------
    Judgement

    Raises
    ------
    ZosimError
        If a number is out of range, or the estimator raises, or does not return numbers of the parameters' shape.

    References
    ----------
    .. [1] J. Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient
       Approximation", IEEE Transactions on Automatic Control 37(3), 1992.
    .. [2] A. Berahas et al., "A Theoretical and Empirical Comparison of Gradient Approximations in Derivative-Free
       Optimization", 2019, arXiv:1905.01332: bias and second moment of smoothed estimates.

    Examples
    --------
    >>> def spsa(loss, theta, epsilon, seed):
    ...     z = torch.randn(theta.shape, generator=torch.Generator().manual_seed(seed), dtype=theta.dtype)
    ...     return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) * z
    >>> judge_estimator(spsa, num_samples=1_000).failed
    ()
    """
    if distribution not in ("normal", "signs", "sphere", "any"):
        raise ZosimError(
            f"distribution={distribution!r} must be normal, signs, sphere or any",
            hint="with any, neither the smoothed gradient nor the second moment is compared",
        )
    for what, value, least, most in (
        ("dimension", dimension, 2, 16),
        ("num_perturbations", num_perturbations, 1, 10_000),
        ("num_samples", num_samples, 512, 10**8),
    ):
        if not least <= value <= most:
            raise ZosimError(f"{what}={value} must be from {least} to {most}")
    judge = _Judge(
        estimator,
        Declared(distribution, num_perturbations, order, is_linear),
        dimension,
        num_samples,
        seed,
        name,
    )
    return Judgement(name, tuple(judge.findings()))


class _Judge:
    """One estimator, and the losses that it is tried on."""

    def __init__(
        self,
        estimator: GradientEstimator,
        declared: Declared,
        dimension: int,
        num_samples: int,
        seed: int,
        name: str,
    ) -> None:
        self._estimator, self._declared, self._name = estimator, declared, name
        self._num_samples, self._seed = num_samples, seed
        generator = torch.Generator().manual_seed(2_024)
        self._theta = torch.randn(dimension, generator=generator, dtype=torch.float64)
        # Of one sign, so that skews of a perturbation's components do not cancel.
        slope = 0.5 + torch.rand(dimension, generator=generator, dtype=torch.float64)
        self._slope = slope / slope.norm()

    def findings(self) -> Iterator[JudgedProperty]:
        yield from self._replay()
        yield from self._arithmetic()
        yield self._mean()
        yield self._smoothed()
        yield self._first_order()
        yield self._order_of_bias()
        yield self._second_moment()
        yield self._adds_up()

    # -- asking ------------------------------------------------------------------------------------------------

    def _estimate(self, loss: Loss, epsilon: float, seed: int) -> Tensor:
        return self._estimate_at(self._theta.clone(), loss, epsilon, seed)

    def _estimate_at(self, theta: Tensor, loss: Loss, epsilon: float, seed: int) -> Tensor:
        """Return an estimate in float64; `theta` is the estimator's to move, and to move back."""
        return answer_of(
            self._estimator, loss, theta, epsilon, seed, name=self._name, like=self._theta,
            called="it is called as estimator(loss, theta, epsilon, seed): theta has shape (d,) in float64, loss returns a scalar tensor",
            returned="return an estimate of the gradient, a number for each parameter",
        ).double()  # fmt: skip

    def _samples(self, loss: Loss, epsilon: float) -> Tensor:
        """Return estimates of as many seeds, shape (n, d)."""
        return torch.stack([self._estimate(loss, epsilon, self._seed + n) for n in range(self._num_samples)])

    def _linear(self, theta: Tensor) -> Tensor:
        return torch.dot(self._slope, theta)

    @cached_property
    def _of_linear(self) -> Tensor:
        return self._samples(self._linear, 0.1)

    # -- findings ----------------------------------------------------------------------------------------------

    def _replay(self) -> Iterator[JudgedProperty]:
        """Yield whether an estimate follows from its seed, and leaves alone what is not its own."""
        first, num_equal, is_left_alone = called_twice(
            lambda seed: self._estimate(self._linear, 1e-2, seed), self._seed
        )
        yield exactly(
            "replay",
            "the same seed gives the same bits, whatever was asked for before and wherever torch's own generator stands",
            holds=num_equal == len(first),
            measured=f"{num_equal} of {len(first)} estimates come back",
        )
        yield exactly(
            "other numbers are left alone",
            "torch's own generator, which the training loop draws from, stands where it stood",
            holds=is_left_alone,
            measured="compared before and after eight estimates",
        )
        num_unlike = len({tuple(estimate.tolist()) for estimate in first})
        tested = "eight seeds do not give the same estimate; of few signs some may agree"
        if self._declared.distribution == "any" and num_unlike == 1:
            yield not_applicable("seeds matter", "an estimate that is not random")
        else:
            yield exactly(
                "seeds matter", tested, holds=num_unlike > 2, measured=f"{num_unlike} unlike estimates"
            )
        theta = self._theta.clone()
        self._estimate_at(theta, self._linear, 1e-2, self._seed)
        moved = float((theta - self._theta).abs().max())
        yield exactly(
            "parameters are given back",
            "an estimate leaves the parameters where they were, but for rounding of moves there and back",
            holds=moved <= 1e-12,
            measured=f"moved by {moved:.2g}",
        )

    def _arithmetic(self) -> Iterator[JudgedProperty]:
        """Yield whether a two-point estimate is the difference over its distance, along the perturbation that was measured."""
        name = "difference, distance and perturbation"
        tested = "the estimate is the difference of its losses over the distance between them, times the perturbation between them"
        epsilon, worst, ratio = 0.1, 0.0, 1.0
        for number in range(16):
            points: list[tuple[Tensor, Tensor]] = []

            def noted(theta: Tensor, points: list[tuple[Tensor, Tensor]] = points) -> Tensor:
                value = torch.sin(2 * self._slope @ theta)
                points.append((theta.detach().clone(), value))
                return value

            estimate = self._estimate(noted, epsilon, self._seed + number)
            if len(points) != 2 or self._declared.distribution == "any":
                yield not_applicable(name, "said of two losses along a perturbation of a known distribution")
                return
            (one, high), (other, low) = points
            between = one - other
            if not float(between.norm()):
                yield exactly(name, tested, holds=False, measured="both losses were taken at the same point")
                return
            # Central differences are 2·ε·z apart, forward ones ε·z, with the parameters themselves at one end.
            is_forward = min(float((point - self._theta).norm()) for point in (one, other)) < 1e-9
            z = between / (epsilon if is_forward else 2 * epsilon)
            expected = (high - low) / (epsilon if is_forward else 2 * epsilon) * z
            share = float(estimate @ expected / (expected @ expected))
            error = float((estimate - expected).norm() / expected.norm())
            if error > worst:
                worst, ratio = error, share
        yield exactly(
            name,
            tested,
            holds=worst <= 1e-6,
            measured=f"differs by {worst:.2g}, {ratio:.6g} of it along it, in the worst of 16",
        )

    def _mean(self) -> JudgedProperty:
        samples = self._of_linear
        along = estimates_of("along", (samples @ self._slope)[:, None], torch.ones(1))
        beside = estimates_of("beside", samples, self._slope, scale=1.0)
        return compared(
            "mean on a linear loss",
            "E ĝ = ∇f, component by component and along ∇f, in units of |∇f|",
            along + beside,
        )

    def _smoothed(self) -> JudgedProperty:
        """Return whether the mean is the gradient of the smoothed loss, at a radius where smoothing halves it."""
        name = "mean against the smoothed gradient"
        if self._declared.distribution == "any":
            return not_applicable(name, "the distribution of perturbations is not stated")
        epsilon, steepness = 0.8, 1.4
        slope = steepness * self._slope

        def wave(theta: Tensor) -> Tensor:
            return torch.sin(torch.dot(slope, theta - self._theta))

        expected = self._derivative_along_a_sine(slope, epsilon)
        samples = self._samples(wave, epsilon)
        unit = expected / expected.norm()
        along = estimates_of("along", (samples @ unit)[:, None], expected.norm()[None])
        beside = estimates_of("beside", samples, expected, scale=float(expected.norm()))
        return compared(
            name,
            f"E ĝ = ∇E f(θ + εz) of a sine at ε = {epsilon}, where smoothing leaves {float(expected.norm()) / steepness:.2f} of |∇f|",
            along + beside,
        )

    def _derivative_along_a_sine(self, slope: Tensor, epsilon: float) -> Tensor:
        """Return ``E[sin(ε a·z)/ε z]``, which both differences have for a mean where z and -z are as likely."""
        size = float(slope.norm())
        if self._declared.distribution == "normal":
            return smoothed_loss("sine", 0.0, epsilon * size)["derivative"] * slope
        if self._declared.distribution == "signs":
            z = torch.from_numpy(sign_nodes(len(slope))[0])
            return ((torch.sin(epsilon * (z @ slope)) / epsilon)[:, None] * z).mean(0)
        # On a sphere of radius √d the part of z along a is √d·c, with a density (1 - c²)^((d - 3)/2).
        dimension = len(slope)
        if dimension == 2:
            cosines = np.cos(np.pi * (np.arange(400) + 0.5) / 400)
            weights = np.ones_like(cosines)
        else:
            cosines, weights = roots_gegenbauer(60, (dimension - 2) / 2)
        part = math.sqrt(dimension) * cosines
        along = float((weights * np.sin(epsilon * size * part) / epsilon * part).sum() / weights.sum())
        return along / size * slope

    def _first_order(self) -> JudgedProperty:
        """Return whether an even term of the loss leaves no bias, as where a perturbation is as likely as its opposite."""
        name = "no bias of first order in ε"
        if self._declared.order < 2:
            return not_applicable(name, f"the bias is stated to be of order {self._declared.order:g}")
        rows = self._beyond_linear(lambda s: s * s, 1.0, self._num_samples)
        (estimate,) = estimates_of("bias", rows[:, None], torch.zeros(1))
        return compared(
            name, "the mean is ∇f for a quadratic loss, too, at ε = 1, in units of |∇f|", [estimate]
        )

    def _order_of_bias(self) -> JudgedProperty:
        """Return whether the bias falls with ε as fast as is stated.

        A cubic loss has a bias that is a power of ε at any ε, so that the radii may be large and the noise small. The slope's error is
        that of a jackknife over batches: radii share their seeds, and with them most of their noise.
        """
        name, radii = "order of the bias in ε", (0.5, 1.0, 2.0)
        num = max(512, self._num_samples // 4)
        means = torch.stack(
            [
                batch_means(self._beyond_linear(lambda s: s**3 / 6, radius, num)[:, None])[:, 0]
                for radius in radii
            ]
        )
        tested = f"slope of the logarithm of the bias at ε = {', '.join(f'{radius:g}' for radius in radii)} on a cubic loss"
        if float(means.abs().max()) <= 1e-9:
            return exactly(name, tested, holds=True, measured="no bias")
        count = means.shape[1]
        slope = fitted_slope(list(radii), means.mean(1).abs().tolist())
        without = (means.sum(1, keepdim=True) - means) / (count - 1)
        slopes = [fitted_slope(list(radii), column.abs().tolist()) for column in without.T]
        error = float(np.std(slopes) * math.sqrt(count - 1))
        limit = threshold(count)
        resolution = (limit + float(student.isf(MISSED, count - 1))) * error / self._declared.order
        verdict: Verdict = "holds" if resolution <= COARSEST else "not resolved"
        if slope + limit * error < self._declared.order - 1e-6:
            verdict = "fails"
        return JudgedProperty(
            name, verdict, tested, f"ε^{slope:.3g}, at least ε^{self._declared.order:g}", resolution, 1, num
        )

    def _beyond_linear(self, bend: Callable[[Tensor], Tensor], epsilon: float, num: int) -> Tensor:
        """Return what `bend` of ``s = a·(θ - θ₀)`` adds to estimates of ``s``, along ``a``, of the same seeds: shape (n,)."""

        def bent(theta: Tensor) -> Tensor:
            s = torch.dot(self._slope, theta - self._theta)
            return s + bend(s)

        return torch.stack(
            [
                (
                    self._estimate(bent, epsilon, self._seed + n)
                    - self._estimate(self._linear, epsilon, self._seed + n)
                )
                @ self._slope
                for n in range(num)
            ]
        )

    def _second_moment(self) -> JudgedProperty:
        """Return whether ``E|ĝ|²`` is within its bound.

        A mean of squares without a variance says nothing. Squares are capped at a thousand times the bound: that makes the
        mean smaller, never larger, and gives it a variance.
        """
        name = "second moment"
        if self._declared.distribution == "any":
            return not_applicable(name, "the distribution of perturbations is not stated")
        bound = self._declared.second_moment(len(self._theta))
        squares = self._of_linear.square().sum(1).clamp(max=1_000 * bound)
        return at_most(
            name,
            f"E|ĝ|² <= {bound:g}·|∇f|² on a linear loss, of {self._declared.num_perturbations} perturbations in {len(self._theta)} dimensions",
            squares,
            bound,
        )

    def _adds_up(self) -> JudgedProperty:
        name = "ranks' estimates add up"
        if not self._declared.is_linear:
            return not_applicable(name, "it is stated that estimates of losses do not add up")
        other = self._slope.roll(1) * 3

        def first(theta: Tensor) -> Tensor:
            return torch.sin(torch.dot(self._slope, theta))

        def second(theta: Tensor) -> Tensor:
            return torch.dot(other, theta).square()

        worst = 0.0
        for number in range(16):
            both, *parts = (
                self._estimate(loss, 0.1, self._seed + number)
                for loss in (lambda theta: first(theta) + second(theta), first, second)
            )
            worst = max(worst, float((both - sum(parts)).norm() / both.norm().clamp(min=1e-300)))
        return exactly(
            name,
            "with one seed, estimates of the losses of two shares of a batch add up to that of the whole: ranks exchange scalars alone",
            holds=worst <= 1e-6,
            measured=f"differ by {worst:.2g} of it, in the worst of 16",
        )
