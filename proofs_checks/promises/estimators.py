"""Gradient estimates: what the executor applies, perturbation by perturbation, and what that is on average, exactly.

Nothing here is left to chance. The executor's estimates are held against a literal loop over the same perturbations; the
loop's average over all perturbations is computed by enumeration of signs and by Gauss-Hermite quadrature. How perturbations
are distributed is another module's claim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import quad
from torch import Tensor

from executors.steps.arithmetic import projected_gradient
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import equal, normal_nodes, sign_nodes
from proofs_checks.faults import (
    central_by_epsilon,
    climbing,
    forward_by_two_epsilon,
    perturbations_summed,
    second_by_epsilon,
    wide_normals,
)
from proofs_checks.oracles.estimates import estimate_moments
from proofs_checks.oracles.smoothing import Loss, rademacher_expected_gradient, smoothed_loss
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import called_with, planted, returning, scaled
from proofs_checks.setups import literal
from proofs_checks.setups.analytic import DIMENSION, estimates
from proofs_checks.statistics import fitted_slope

EPSILON = 0.3
"""Large, so that the smoothed loss is visibly another function than the loss."""

_ROUNDING = 1e-9
"""Relative: differences of float64 losses over ε."""

Array = NDArray[np.float64]


# -- what the executor applies ---------------------------------------------------------------------------------------

_THETA = torch.linspace(-0.4, 0.5, DIMENSION, dtype=torch.float64)
_A = torch.linspace(-0.6, 0.9, DIMENSION, dtype=torch.float64)


def _uneven(theta: Tensor) -> Tensor:
    """Return a loss with neither symmetry nor a vanishing derivative."""
    along = _A @ theta
    return torch.exp(along) + (theta[0] - 2 * theta[5]) ** 3 + theta[3] * theta[6]


def literal_estimates(
    num_steps: int, seed: int, *, num_perturbations: int, distribution: str, rng: str, difference: str
) -> Tensor:
    """Return ``(1/q) Σ g·z`` of every step at ``θ``, each ``z`` made and each ``g`` computed one after the other."""
    rows = []
    for step in range(num_steps):
        total = torch.zeros(DIMENSION, dtype=torch.float64)
        for perturbation in range(num_perturbations):
            parts = literal.perturbations(
                literal.ANALYTIC_SHAPES,
                seed=literal.seed_of(seed, step, perturbation),
                step=step,
                perturbation=perturbation,
                rng=rng,
                distribution=distribution,
                dtype=torch.float64,
            )
            z = torch.cat([part.flatten() for part in parts])
            plus = _uneven(_THETA + EPSILON * z)
            if difference == "central":
                g = (plus - _uneven(_THETA - EPSILON * z)) / (2 * EPSILON)
            else:
                g = (plus - _uneven(_THETA)) / EPSILON
            total += g * z
        rows.append(total / num_perturbations)
    return torch.stack(rows)


def check_applied(distribution: str, context: Context) -> Outcome:
    """Compare what the executor subtracts from the weights with a literal loop over the same perturbations."""
    largest, lines = 0.0, []
    for difference, perturbations, rng in itertools.product(
        ("central", "forward"), (1, 3), ("mezo", "counter")
    ):
        count = context.samples(40, 3)
        options = {
            "num_perturbations": perturbations,
            "distribution": distribution,
            "rng": rng,
            "difference": difference,
        }
        applied = estimates(_uneven, _THETA, count, seed=context.seed, epsilon=EPSILON, **options)  # type: ignore[arg-type]
        wanted = literal_estimates(count, context.seed, **options)  # type: ignore[arg-type]
        off = float((applied - wanted).abs().max() / wanted.abs().max())
        largest = max(largest, off) if not math.isnan(off) else math.nan
        lines.append(
            f"{difference}, perturbations {perturbations}, {rng}: off by {off:.1e} over {count} steps"
        )
    return Outcome(largest, _ROUNDING, "largest relative distance of an applied estimate", tuple(lines))


# -- what that is on average -----------------------------------------------------------------------------------------


def projected(
    loss: Callable[[Array], Array], theta: Array, z_NP: Array, difference: str, epsilon: float = EPSILON
) -> Array:
    """Return ``g`` of each perturbation, literally."""
    plus = loss(theta + epsilon * z_NP)
    if difference == "central":
        return np.asarray((plus - loss(theta - epsilon * z_NP)) / (2 * epsilon))
    return np.asarray((plus - loss(theta[None])) / epsilon)


@dataclass(frozen=True)
class Ridge:
    """A loss ``φ(a·θ)``."""

    name: Loss
    function: Callable[[Array], Array]


RIDGES = (
    Ridge("linear", lambda t: t),
    Ridge("quadratic", lambda t: t**2 / 2),
    Ridge("cubic", lambda t: t**3 / 6),
    Ridge("quartic", lambda t: t**4 / 24),
    Ridge("exponential", np.exp),
    Ridge("sine", np.sin),
)
_SLOPE = np.array([0.7, -0.5, 1.1])
_POINT = np.array([0.4, 0.3, 0.6])


def _mean_estimates(difference: str, epsilon: float) -> Iterator[tuple[Ridge, Array]]:
    z, weights = normal_nodes(3, 14)
    for ridge in RIDGES:
        g = projected(partial(_ridge, ridge.function), _POINT, z, difference, epsilon)
        yield ridge, (weights * g) @ z


def _ridge(function: Callable[[Array], Array], x: Array) -> Array:
    return function(x @ _SLOPE)


def check_smoothing(_context: Context) -> Outcome:
    """Compare the mean of g·z along normals with the gradient of the smoothed loss, by quadrature; kinks by integration."""
    largest, lines = 0.0, []
    t, norm = float(_POINT @ _SLOPE), float(np.linalg.norm(_SLOPE))
    for difference, epsilon in itertools.product(("central", "forward"), (0.1, 0.3, 1.0)):
        for ridge, mean in _mean_estimates(difference, epsilon):
            wanted = smoothed_loss(ridge.name, t, epsilon * norm)["derivative"] * _SLOPE
            off = float(np.abs(mean - wanted).max() / np.abs(wanted).max())
            largest = max(largest, off)
            lines.append(f"{ridge.name}, {difference}, ε = {epsilon:g}: off by {off:.1e}")
    for width in (0.2, 1.0):
        kink = quad(_kink(0.3, width), -10, 10, points=(-0.3 / width, 0.3 / width), epsabs=1e-12)[0]
        off = abs(kink - smoothed_loss("absolute", 0.3, width)["derivative"])
        largest = max(largest, off)
        lines.append(f"absolute, central, w = {width:g}: off by {off:.1e}")
    return Outcome(largest, _ROUNDING, "largest relative distance of E[g·z] from ∇f_ε", tuple(lines))


def _kink(t: float, width: float) -> Callable[[float], float]:
    density = 1 / math.sqrt(2 * math.pi)
    return lambda x: (
        (abs(t + width * x) - abs(t - width * x)) / (2 * width) * x * density * math.exp(-x * x / 2)
    )


def check_order(_context: Context) -> Outcome:
    """Fit the power of ε with which E[g·z] nears the gradient: 2, for central and forward differences alike."""
    largest, lines = 0.0, []
    t = float(_POINT @ _SLOPE)
    radii = [0.02, 0.04, 0.08]
    for difference in ("central", "forward"):
        for number, ridge in enumerate(RIDGES):
            if ridge.name in ("linear", "quadratic"):
                continue
            exact = smoothed_loss(ridge.name, t, 0.0)["derivative"] * _SLOPE
            errors = []
            for epsilon in radii:
                _, mean = list(_mean_estimates(difference, epsilon))[number]
                errors.append(float(np.linalg.norm(mean - exact)))
            power = fitted_slope(radii, errors)
            largest = max(largest, abs(power - 2))
            lines.append(f"{ridge.name}, {difference}: error ~ ε^{power:.3f}")
    return Outcome(largest, 0.02, "largest distance of a fitted power from 2", tuple(lines))


def check_signs(_context: Context) -> Outcome:
    """Compare the mean of g·z over all 256 sign vectors with the half-smoothed derivative, which is not the Gaussian's."""
    z, weights = sign_nodes(DIMENSION)
    a, theta = _A.numpy(), _THETA.numpy()
    wanted = np.array(rademacher_expected_gradient(a.tolist(), float(a @ theta), EPSILON))
    largest, lines = 0.0, []
    for difference in ("central", "forward"):
        g = projected(lambda x: np.exp(x @ a), theta, z, difference)
        off = float(np.abs((weights * g) @ z - wanted).max() / np.abs(wanted).max())
        largest = max(largest, off)
        lines.append(f"exponential, {difference}: off by {off:.1e}")
    # The same by definition: E over signs of the others of the mean derivative over u_i in [-1, 1].
    for i in (0, DIMENSION - 1):
        others = np.delete(z, i, axis=1)[:: 2 if i == DIMENSION - 1 else 1]
        mean = quad(lambda u, i=i, o=others: float(_along(i, u, o, a, theta).mean()), -1, 1)[0] / 2
        off = abs(mean / wanted[i] - 1)
        largest = max(largest, off)
        lines.append(f"coordinate {i}, by its definition: off by {off:.1e}")
    gaussian = (
        smoothed_loss("exponential", float(a @ theta), EPSILON * float(np.linalg.norm(a)))["derivative"] * a
    )
    gap = float(np.abs(gaussian - wanted).max() / np.abs(wanted).max())
    lines.append(f"relative distance to the Gaussian's: {gap:.3f}")
    return Outcome(
        largest if gap > 1e-3 else math.inf, _ROUNDING, "largest relative distance of E[g·z]", tuple(lines)
    )


def _along(i: int, u: float, others: Array, a: Array, theta: Array) -> Array:
    """Return ``∂_i f(θ + εu)`` of the exponential loss for all signs of the other coordinates."""
    rest = np.delete(a, i)
    return np.asarray(a[i] * np.exp(a @ theta + EPSILON * (u * a[i] + others @ rest)))


_HESSIAN = np.array([[0.9, 0.4, -0.2], [0.4, -0.5, 0.3], [-0.2, 0.3, 1.2]])


def check_energy(distribution: str, _context: Context) -> Outcome:
    """Compare the mean square of estimates of a quadratic loss, by one and by two perturbations, with its closed form."""
    z, weights = normal_nodes(3, 4) if distribution == "gaussian" else sign_nodes(3)

    def quadratic(x: Array) -> Array:
        return np.asarray(x @ _SLOPE + np.einsum("ni,ij,nj->n", x, _HESSIAN, x) / 2)

    gradient = _SLOPE + _HESSIAN @ _POINT
    largest, lines = 0.0, []
    for difference, perturbations in itertools.product(("central", "forward"), (1, 2)):
        estimate = projected(quadratic, _POINT, z, difference)[:, None] * z
        if perturbations == 1:
            square = float(weights @ (estimate**2).sum(1))
        else:  # all pairs of independent perturbations
            pairs = ((estimate[:, None] + estimate[None]) / 2) ** 2
            square = float(weights @ pairs.sum(2) @ weights)
        wanted = estimate_moments(
            distribution,  # type: ignore[arg-type]
            difference,  # type: ignore[arg-type]
            dimension=3,
            gradient_norm=float(np.linalg.norm(gradient)),
            hessian_trace=float(np.trace(_HESSIAN)),
            hessian_square=float((_HESSIAN**2).sum()),
            hessian_diagonal_square=float((np.diag(_HESSIAN) ** 2).sum()),
            epsilon=EPSILON,
            num_perturbations=perturbations,
        )["mean_square"]
        off = abs(square / wanted - 1)
        largest = max(largest, off)
        lines.append(f"{difference}, perturbations {perturbations}: {square:.6f}, theory {wanted:.6f}")
    return Outcome(largest, _ROUNDING, "largest relative distance of E|ĝ|²", tuple(lines))


def _both(
    first: Callable[[Context], Outcome], second: Callable[[Context], Outcome]
) -> Callable[[Context], Outcome]:
    """Return a check of two assertions."""

    def check(context: Context) -> Outcome:
        return everything_holds({"applied": first(context), "on average": second(context)})

    check.__doc__ = f"{_title(first)} {_title(second)}"
    return check


def _title(function: Callable[[Context], Outcome]) -> str:
    inner = function.func if isinstance(function, partial) else function
    return (inner.__doc__ or "").partition("\n")[0]


_PROJECTED = "executors.steps.arithmetic:projected_gradient"
_SIGNS = "executors.randomness.samplers:raw_signs"
_THREE_PERCENT = scaled(_PROJECTED, 1.03, "an estimate 3 % too large")
_SHORT_STEP = called_with(
    "executors.steps.arithmetic:ParamPass.perturb",
    "perturbations 3 % short",
    epsilon=lambda epsilon: 0.97 * epsilon,
)


first_gradient = called_with(
    "executors.steps.ops.param_passes:ParamPasses.update",
    "the first perturbation's gradient for all",
    instruction=lambda instruction: replace(instruction, op=replace(instruction.op, perturbation=0)),
)


@planted(_PROJECTED, "a difference of losses rounded to float32")
def rounded_difference(shipped, loss_plus, loss_other, *rest, **named):
    return shipped((loss_plus - loss_other).float(), 0.0, *rest, **named)


@planted(_PROJECTED, "a central difference that leaves out its second loss")
def one_loss(shipped, loss_plus, loss_other, epsilon, *, central):
    return shipped(loss_plus, 0.0 if central else loss_other, epsilon, central=central)


def check_loss_noise(_context: Context) -> Outcome:
    """Compare E|g·z|² of losses that are noise alone, every sign of it and of z in turn, with 2s²d/ε² and s²d/2ε²."""
    dimension, noise = 4, 0.7
    lengths = sum(z @ z for z in sign_nodes(dimension)[0]) / 2**dimension
    parts = {}
    for epsilon, (central, factor) in itertools.product((1e-3, 0.3), ((False, 2.0), (True, 0.5))):
        squares = [
            projected_gradient(
                torch.tensor(first, dtype=torch.float64),
                torch.tensor(other, dtype=torch.float64),
                epsilon,
                central=central,
            ).item()
            ** 2
            for first, other in itertools.product((-noise, noise), repeat=2)
        ]
        theory = factor * noise**2 * dimension / epsilon**2
        parts[f"{'central' if central else 'forward'}, ε = {epsilon:g}"] = equal(
            float(lengths) * sum(squares) / len(squares) / theory, 1.0, what="E|g·z|² over theory"
        )
    return everything_holds(parts)


CHECKS: Checks = {
    "loss-noise-central-is-a-fourth": printed(check_loss_noise, central_by_epsilon, forward_by_two_epsilon),
    "rge-gaussian-unbiased": (
        printed(
            partial(check_applied, "gaussian"),
            central_by_epsilon,
            forward_by_two_epsilon,
            _THREE_PERCENT,
            climbing,
            perturbations_summed,
            first_gradient,
            second_by_epsilon,
            _SHORT_STEP,
            rounded_difference,
            wide_normals,
        ),
        printed(check_smoothing),
        printed(check_order),
    ),
    "rge-rademacher-unbiased": (
        printed(
            partial(check_applied, "rademacher"),
            central_by_epsilon,
            returning(
                _SIGNS,
                "signs that are one three times in four",
                lambda it: it.bitwise_and_(0x5555555555555555),
            ),
            returning(_SIGNS, "one sign of a word turned over", lambda it: it.bitwise_xor_(1 << 62)),
            called_with(
                "executors.steps.arithmetic:ParamPass.update_signs",
                "updates along signs twice as long",
                learning_rate=lambda learning_rate: 2 * learning_rate,
            ),
        ),
        printed(check_signs),
    ),
    "rge-gaussian-second-moment": printed(
        _both(partial(check_applied, "gaussian"), partial(check_energy, "gaussian")),
        wide_normals,
        one_loss,
        _THREE_PERCENT,
    ),
    "rge-rademacher-second-moment": printed(
        _both(partial(check_applied, "rademacher"), partial(check_energy, "rademacher")),
        called_with(
            "executors.randomness.samplers:Rademacher.spread",
            "one sign for all of a raw output",
            raw=lambda raw: raw >> 63,
        ),
    ),
}
