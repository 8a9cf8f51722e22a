"""How large estimates are on average: second moments of directions, and of estimates made with them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from executors.randomness.directions import Direction, Gaussian, Rademacher
from executors.randomness.families import LowRank, QuantisedGaussian, Sphere
from executors.randomness.quantisers import StochasticRounding
from executors.randomness.rng import generator_on
from proofs_checks.analytic import DIMENSION, estimates
from proofs_checks.claims import Claim, printed
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.statistics import compare_means

SHAPE = (3, 4)
"""Of the tensors drawn: a matrix, so that a low rank is one."""

EPSILON = 0.5
_FORM = torch.linspace(0.9, -0.5, DIMENSION, dtype=torch.float64)
_SLOPE = torch.linspace(0.2, 0.7, DIMENSION, dtype=torch.float64)


def families() -> tuple[Direction, ...]:
    """Return one member of every family of directions."""
    coarse = QuantisedGaussian(StochasticRounding(bits=3, scale=1.5))
    return Gaussian(), Rademacher(), Sphere(), LowRank(1), LowRank(3), coarse


def drawn(direction: Direction, count: int, seed: int) -> Tensor:
    """Return independent directions of `SHAPE`, as shape (count, elements), in float64."""
    generator = generator_on(torch.device("cpu"), seed)
    draws = torch.empty((count, *SHAPE), dtype=torch.float64)
    for tensor in draws:
        direction.fill(tensor, generator)
    return draws.view(count, -1)


def check_families(context: Context) -> Outcome:
    """Compare what every direction declares with draws of it."""
    outcomes = []
    unit = torch.linspace(-1.0, 2.0, math.prod(SHAPE), dtype=torch.float64)
    unit /= unit.norm()
    members = families()
    for direction in members:
        z = drawn(direction, context.samples(40_000, 6000), context.seed)
        products = torch.stack([z[:, 0] * z[:, 1], z[:, 0] * z[:, -1], z[:, 1] * z[:, 5]], dim=1)
        energy = ((z @ unit) ** 2 * (z**2).sum(1))[:, None]
        columns = torch.cat([z, z**2, products, energy], dim=1)
        expected = torch.cat(
            [
                torch.full((z.shape[1],), direction.distribution.mean, dtype=torch.float64),
                torch.full((z.shape[1],), direction.distribution.second_moment, dtype=torch.float64),
                torch.zeros(3, dtype=torch.float64),
                torch.tensor([direction.energy(SHAPE)], dtype=torch.float64),
            ]
        )
        outcomes.append(compare_means(direction.distribution.name, columns, expected))
    return worst(outcomes)


def _quadratic(theta: Tensor) -> Tensor:
    return _SLOPE @ theta + (_FORM @ theta) ** 2 / 2


def expected_square(direction: str, difference: str) -> float:
    """Return ``E|g·z|²`` at θ = 0 of the loss ``c·θ + (b·θ)²/2``, with ``H = b·bᵀ`` its Hessian.

    Notes
    -----
    Central: ``g = c·z``. Forward: ``g = c·z + (ε/2)·zᵀHz``; the product of the two terms is odd and vanishes, so
    ``(ε²/4)·E[(zᵀHz)²·|z|²]`` is added: ``(d + 4)·((tr H)² + 2·tr H²)`` for normals, where a form of degree 4 times
    ``|z|²`` is on average ``d + 4`` times the form; ``d·((tr H)² + 2·Σ_{i≠j} H_ij²)`` for signs.
    """
    energy = {"gaussian": Gaussian(), "rademacher": Rademacher()}[direction].energy((DIMENSION,))
    square = energy * float(_SLOPE @ _SLOPE)
    if difference == "central":
        return square
    trace = float(_FORM @ _FORM)
    if direction == "gaussian":
        fourth = (DIMENSION + 4) * 3 * trace**2
    else:
        fourth = DIMENSION * (3 * trace**2 - 2 * float((_FORM**4).sum()))
    return square + EPSILON**2 / 4 * fourth


def check_estimates(direction: str, context: Context) -> Outcome:
    """Compare the mean square of what the executor applies with theory."""
    outcomes = []
    for difference in ("central", "forward"):
        theta = torch.zeros(DIMENSION, dtype=torch.float64)
        applied = estimates(
            _quadratic,
            theta,
            context.samples(2500, 400),
            seed=context.seed,
            direction=direction,
            difference=difference,
            epsilon=EPSILON,
        )
        expected = torch.tensor([expected_square(direction, difference)], dtype=torch.float64)
        squares = (applied**2).sum(1, keepdim=True)
        outcome = compare_means(f"{difference} difference", squares, expected)
        line = f"{outcome.details[0]}; mean {squares.mean():.3f}, theory {expected.item():.3f}"
        outcomes.append(replace(outcome, details=(line,)))
    return worst(outcomes)


_WIDE = Mutant(
    "normals of the wrong width",
    "executors.randomness.directions:Gaussian.fill",
    "out.normal_(0.0, 1.0,",
    "out.normal_(0.0, 1.2,",
)
_CLAIM_OF_ESTIMATES = (
    "At a linear loss E|g·z|² = {energy}·|∇f|² in d dimensions; a forward difference adds {added}, with H the "
    "Hessian of a quadratic loss."
)

CLAIMS = (
    Claim(
        name="direction-moments",
        paper="zosim",
        where=("executors.randomness.families",),
        quotation="Every family of directions has the moments that it declares.",
        statement=(
            "Every family of directions has the mean, the second moment, the vanishing correlations and the energy "
            "E[(a·z)²|z|²] that it declares: d + 2 for normals, d for signs and the sphere, mn + 2 + 2(m + n + 1)/r "
            "for UVᵀ/√r, and what rounding makes of normals."
        ),
        hypotheses=("float64 draws of 3 × 4 tensors"),
        references=(
            "MeZO, ZO2 equation 3 (normals); QuZO equation 5 (rounded); moments of Wishart matrices (low rank)"
        ),
        checks=(
            printed(
                check_families,
                _WIDE,
                Mutant(
                    "a sphere of radius 1",
                    "executors.randomness.families:Sphere.fill",
                    "math.sqrt(out.numel())",
                    "1.0",
                ),
                Mutant(
                    "low rank without its scale",
                    "executors.randomness.families:LowRank.fill",
                    "out.div_(math.sqrt(self.rank))",
                    "out.div_(self.rank)",
                ),
                Mutant(
                    "uniform numbers of variance 1 for normals",
                    "executors.randomness.directions:Gaussian.fill",
                    "out.normal_(0.0, 1.0, generator=generator)",
                    "out.uniform_(-(3.0**0.5), 3.0**0.5, generator=generator)",
                ),
                Mutant(
                    "a sign bit that is never set",
                    "executors.randomness.directions:Rademacher._fill_piece",
                    "words.random_(-(2**63), None, generator=generator)",
                    "words.random_(generator=generator)",
                ),
            ),
        ),
    ),
    Claim(
        name="rge-gaussian-second-moment",
        paper="zosim",
        where=("executors.steps.arithmetic",),
        quotation="The second moment of an estimate with normals is known.",
        statement=(_CLAIM_OF_ESTIMATES.format(energy="(d + 2)", added="(ε²/4)(d + 4)((tr H)² + 2 tr H²)")),
        hypotheses=("quadratic loss, exact arithmetic (float64 here)"),
        references=(
            "ZO2 equation 3; Nesterov and Spokoiny (2017), section 3 (bounds d + 4 where this is exact)"
        ),
        checks=(
            printed(
                partial(check_estimates, "gaussian"),
                _WIDE,
                Mutant(
                    "a central difference divided by ε",
                    "executors.steps.arithmetic:projected_gradient",
                    "(2 * epsilon if central else epsilon)",
                    "epsilon",
                ),
                Mutant(
                    "a central difference that leaves out its second loss",
                    "executors.steps.arithmetic:projected_gradient",
                    "(loss_plus - loss_other)",
                    "(loss_plus - (0.0 if central else loss_other))",
                ),
            ),
        ),
    ),
    Claim(
        name="rge-rademacher-second-moment",
        paper="zosim",
        where=("executors.steps.arithmetic",),
        quotation="The second moment of an estimate with signs is known.",
        statement=(_CLAIM_OF_ESTIMATES.format(energy="d", added="(ε²/4)·d·((tr H)² + 2 Σ_{i≠j} H_ij²)")),
        hypotheses=("quadratic loss, exact arithmetic (float64 here)"),
        references=("ZO2 equation 3 with signs for normals"),
        checks=(
            printed(
                partial(check_estimates, "rademacher"),
                Mutant(
                    "signs of one word for all",
                    "executors.randomness.directions:Rademacher._spread",
                    "torch.bitwise_left_shift(words.view(integer).view(-1, 1), shifts, out=signs)",
                    "torch.bitwise_left_shift(words.view(integer).view(-1, 1), shifts * 0, out=signs)",
                ),
            ),
        ),
    ),
)
