"""The randomized gradient estimator points, on average, along the gradient of a smoothed loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proofs_checks.analytic import DIMENSION, estimates
from proofs_checks.claims import Claim, printed
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.statistics import compare_means

EPSILON = 0.3
"""Large, so that the smoothed loss is visibly another function than the loss."""


def _spread(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, DIMENSION, dtype=torch.float64)


@dataclass(frozen=True)
class SmoothedLoss:
    """A loss with the expectation of its estimator in closed form.

    Attributes
    ----------
    name : str
    loss : callable
    expected : callable
        From the direction's name to the expectation of ``g·z``, shape (d,).
    """

    name: str
    loss: Callable[[Tensor], Tensor]
    expected: Callable[[str], Tensor]


THETA = _spread(-0.4, 0.5)
_A, _B, _C = _spread(-0.6, 0.9), _spread(0.7, -0.2), _spread(0.3, 1.0)


def _quadratic(theta: Tensor) -> Tensor:
    return (_B @ theta) ** 2 / 2 + _C @ theta


def _quadratic_expected(_direction: str) -> Tensor:
    """Smoothing adds a constant to a quadratic, so its gradient is the loss's own, whatever has covariance I."""
    return (_B @ THETA) * _B + _C


def _exponential(theta: Tensor) -> Tensor:
    return torch.exp(_A @ theta)


def _exponential_expected(direction: str) -> Tensor:
    value, reach = torch.exp(_A @ THETA), EPSILON * _A
    if direction == "gaussian":
        return value * torch.exp(reach @ reach / 2) * _A
    return value * torch.cosh(reach).prod() * torch.tanh(reach) / EPSILON


LOSSES = (
    SmoothedLoss("quadratic", _quadratic, _quadratic_expected),
    SmoothedLoss("exponential", _exponential, _exponential_expected),
)


def check_unbiased(direction: str, context: Context) -> Outcome:
    """Compare the mean of what the executor applies with the smoothed loss's gradient."""
    cases = [
        (loss, difference, queries)
        for loss in LOSSES
        for difference, queries in (("central", 1), ("forward", 1), ("central", 3))
    ]
    quick = (0, 4, 5)  # every loss, difference and number of queries once
    outcomes = []
    for number, (loss, difference, queries) in enumerate(cases):
        if context.size == "quick" and number not in quick:
            continue
        sampled = estimates(
            loss.loss,
            THETA,
            context.samples(1200, 120),
            seed=context.seed + 1000 * number,
            num_queries=queries,
            direction=direction,
            difference=difference,
            epsilon=EPSILON,
            rng="mezo" if number % 2 else "counter",
        )
        name = f"{loss.name}, {difference}, {queries} {'query' if queries == 1 else 'queries'}"
        outcomes.append(compare_means(name, sampled, loss.expected(direction)))
    return worst(outcomes)


_WRONG_STEP = Mutant(
    "a central difference divided by ε",
    "executors.steps.arithmetic:projected_gradient",
    "(2 * epsilon if central else epsilon)",
    "epsilon",
)
_WRONG_SIGN = Mutant(
    "an update that climbs",
    "executors.steps.arithmetic:Sweeper.update",
    "piece.sub_(product)",
    "piece.add_(product)",
)
_SUMMED = Mutant(
    "queries summed, not averaged",
    "executors.steps.ops.sweep:Sweeps.update",
    "source.gradients[op.query] / self.num_queries",
    "source.gradients[op.query]",
)
_HALF_WAY = Mutant(
    "second perturbation by -ε, not -2ε",
    "executors.steps.arithmetic:Sweeper.perturb",
    "scale * epsilon",
    "(1 if scale > 0 else -1) * epsilon",
)

CLAIMS = (
    Claim(
        name="rge-gaussian-unbiased",
        paper="zo2",
        where=("Eq. 1", "Eq. 2", "Eq. 3", "Eq. 4", "App. C"),
        quotation="As ε approaches 0, the directional derivative provides us an unbiased gradient estimator.",
        statement=(
            "E[g·z] = ∇f_ε(θ) with f_ε(θ) = E f(θ + εz), z ~ N(0, I), for central and forward differences and for "
            "averages over queries."
        ),
        hypotheses=("f integrable against the Gaussian; exact arithmetic (float64 here)"),
        references=("ZO2 equations 1 and 2 (MeZO); Nesterov and Spokoiny (2017), section 2"),
        checks=(
            printed(
                partial(check_unbiased, "gaussian"),
                _WRONG_STEP,
                _WRONG_SIGN,
                _SUMMED,
                _HALF_WAY,
                Mutant(
                    "normals of the wrong width",
                    "executors.randomness.directions:Gaussian.fill",
                    "out.normal_(0.0, 1.0,",
                    "out.normal_(0.0, 1.5,",
                ),
            ),
        ),
    ),
    Claim(
        name="rge-rademacher-unbiased",
        paper="zosim",
        where=("executors.randomness.directions",),
        quotation="Signs in place of normals estimate the gradient of another smoothed loss.",
        statement=(
            "E[g·z]_i = ∂_i E f(θ + εu), where u_i is uniform on [-1, 1] and the other u_j are random signs. It is not "
            "the gradient of E f(θ + εz): that identity is the Gaussian's own."
        ),
        hypotheses=("f continuously differentiable; exact arithmetic (float64 here)"),
        references=(
            "ZO2 equation 1 with signs for normals; the fundamental theorem of calculus along one coordinate"
        ),
        checks=(
            printed(
                partial(check_unbiased, "rademacher"),
                _WRONG_STEP,
                Mutant(
                    "signs that are one three times in four",
                    "executors.randomness.directions:Rademacher._fill_piece",
                    "words.random_(-(2**63), None, generator=generator)",
                    "words.random_(-(2**63), None, generator=generator).bitwise_and_(0x5555555555555555)",
                ),
            ),
        ),
    ),
)
