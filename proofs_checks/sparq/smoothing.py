"""Smoothed losses: what finite differences estimate on average, and the lemmas that bound how far that is off."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from executors.steps.arithmetic import projected_gradient
from proofs_checks.claims import Checks, conditioned, counterexample, printed
from proofs_checks.exact import (
    at_most,
    equal,
    exceeds,
    mean_estimate,
    moments_of_estimate,
    normal_nodes,
    shipped_estimate,
)
from proofs_checks.faults import central_by_epsilon, climbing, forward_by_two_epsilon, second_by_epsilon
from proofs_checks.oracles.smoothing import smoothing_bounds
from proofs_checks.oracles.statements import sharp_smoothing_bounds, smoothed_gradient_bounds
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, scaled
from proofs_checks.statistics import fitted_slope

# -- losses whose smoothed gradient is known --------------------------------------------------------------------------


def _quartic(theta: Tensor) -> Tensor:
    return (theta**4).sum() / 4


def _quartic_smoothed(theta: list[float], mu: float) -> list[float]:
    """``E (x + μu)³ = x³ + 3μ²x``: ``f_μ`` has this gradient."""
    return [x**3 + 3 * mu**2 * x for x in theta]


_AT = [0.7, -1.1]
_MU = 0.4


def check_radial(radius: float, share: float, _context: Context) -> Outcome:
    """Compare the mean estimate with perturbations uniform in a disk of a radius, with a part of the gradient."""
    slope = torch.tensor([0.8, -0.3], dtype=torch.float64)
    angles = 2 * math.pi * np.arange(8) / 8
    radii, weights = np.polynomial.legendre.leggauss(4)
    radii, weights = radius * (radii + 1) / 2, weights * (radii + 1) / 2  # density 2r/R² on (0, R)
    nodes = np.array([[r * math.cos(a), r * math.sin(a)] for r in radii for a in angles])
    probabilities = np.repeat(weights / weights.sum(), len(angles)) / len(angles)
    mean = mean_estimate(lambda x: slope @ x, _AT, _MU, central=False, nodes=(nodes, probabilities))
    return equal(mean, share * slope, what=f"a disk of radius {radius:g}, d = 2, {share:g} of the gradient")


def check_bias_of_both(_context: Context) -> Outcome:
    """Compare the mean of both differences of a quartic with the gradient of its smoothed loss, which is not its own."""
    parts = {}
    smoothed, own = _quartic_smoothed(_AT, _MU), _quartic_smoothed(_AT, 0.0)
    for name, central in (("central", True), ("forward", False)):
        mean = mean_estimate(_quartic, _AT, _MU, central=central)
        parts[f"{name} difference"] = equal(mean, smoothed, what="E[g·u] against ∇f_μ")
        off = float((mean - torch.tensor(own, dtype=torch.float64)).norm())
        parts[f"{name} difference is biased"] = exceeds(off, 0.1, what="‖E[g·u] - ∇f‖")
        radii = [0.05, 0.1, 0.2, 0.4]
        biases = [
            float(
                (
                    mean_estimate(_quartic, _AT, mu, central=central) - torch.tensor(own, dtype=torch.float64)
                ).norm()
            )
            for mu in radii
        ]
        parts[f"{name} difference, order"] = equal(
            fitted_slope(radii, biases), 2.0, what="exponent of μ in the bias", tolerance=1e-6
        )
        z, theta = torch.tensor([0.8, -1.3], dtype=torch.float64), torch.tensor(_AT, dtype=torch.float64)
        slope, small = float(torch.tensor(own, dtype=torch.float64) @ z), [0.01, 0.005, 0.0025]
        apart = [
            abs(float(shipped_estimate(_quartic, theta, z, mu, central=central) @ z / (z @ z)) - slope)
            for mu in small
        ]
        parts[f"{name} difference, order of g itself"] = equal(
            fitted_slope(small, apart),
            2.0 if central else 1.0,
            what="exponent of μ in g - z·∇f",
            tolerance=0.02,
        )
    return everything_holds(parts)


def check_pathwise_orders(context: Context) -> Outcome:
    """Fit the order in ε of ``g - z·∇L``: 2 for a smooth loss, 1 where the second derivative jumps."""
    generator = np.random.default_rng(context.seed)
    z = torch.from_numpy(generator.normal(size=2))
    radii = [0.4 * 0.5**k for k in range(4, 9)]
    cases = {
        "three times differentiable": (lambda x: x.sin().sum(), _AT, lambda t: t.cos(), 2.0),
        "x|x|/2 at 0, with one second derivative on each side": (
            lambda x: (x.clamp(min=0) ** 2).sum() / 2,
            [0.0, 0.0],
            torch.zeros_like,
            1.0,
        ),
    }
    parts = {}
    for name, (loss, at, gradient, order) in cases.items():
        theta = torch.tensor(at, dtype=torch.float64)
        perturbation = z.abs() * torch.tensor([1.0, 0.5]) if order == 1.0 else z
        true = float(gradient(theta) @ perturbation)
        errors = []
        for epsilon in radii:
            estimate = shipped_estimate(loss, theta, perturbation, epsilon, central=True)
            errors.append(abs(float(estimate @ perturbation / (perturbation @ perturbation)) - true))
        parts[name] = equal(
            fitted_slope(radii, errors), order, what="exponent of ε in |g - z·∇L|", tolerance=0.02
        )
    return everything_holds(parts)


def check_shared_perturbation(_context: Context) -> Outcome:
    """Compare the mean of ``g·z'`` with the gradient where z' is z, and with 0 where it is another draw."""
    slope = torch.tensor([0.8, -0.3], dtype=torch.float64)
    theta = torch.tensor(_AT, dtype=torch.float64)
    nodes, weights = normal_nodes(2, 4)
    same, other = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for z, p in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        estimate = shipped_estimate(lambda x: slope @ x, theta, z, _MU, central=True)
        same += p * estimate
        gradient = float(estimate @ z / (z @ z))
        for fresh, q in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
            other += p * q * gradient * fresh
    return everything_holds(
        {
            "one z": equal(same, slope, what="E[g·z]"),
            "another z in the update": equal(other, [0.0, 0.0], what="E[g·z']"),
        }
    )


def check_noise_of_losses(_context: Context) -> Outcome:
    """Compare what independent noise in every loss adds to ``E|ĝ|²``, for one perturbation and two that may share a base, by enumeration."""
    noise, parts = 0.3, {}
    nodes, weights = normal_nodes(2, 2)
    pairs = list(zip(nodes, weights.tolist(), strict=True))
    for central in (False, True):
        name, theory = (
            ("central", noise**2 * 2 / (2 * _MU**2)) if central else ("forward", 2 * noise**2 * 2 / _MU**2)
        )
        for perturbations in (1, 2):
            num_losses = 2 * perturbations if central else perturbations + 1
            total = 0.0
            for signs in itertools.product((-noise, noise), repeat=num_losses):
                losses = [torch.tensor(sign, dtype=torch.float64) for sign in signs]
                for sampled in itertools.product(pairs, repeat=perturbations):
                    estimate, probability = np.zeros(2), 1.0
                    for perturbation, (u, weight) in enumerate(sampled):
                        other = losses[perturbations + perturbation] if central else losses[perturbations]
                        g = projected_gradient(losses[perturbation], other, _MU, central=central).item()
                        estimate += g * u / perturbations
                        probability *= weight
                    total += probability * float(estimate @ estimate)
            parts[f"{name}, {perturbations} perturbations"] = equal(
                total / 2**num_losses, theory / perturbations, what="E|ĝ|² of losses that are noise alone"
            )
    return everything_holds(parts)


# -- SparQ's lemmas ----------------------------------------------------------------------------------------------------


def check_descent_lemma(context: Context) -> Outcome:
    """Compare ``|f(y) - f(x) - ∇f(x)·(y - x)|`` with ``L‖y - x‖²/2``, and reach it with a quadratic."""
    generator = np.random.default_rng(context.seed)
    worst = 0.0
    for _ in range(context.samples(4000, 400)):
        x, y = generator.normal(scale=3, size=(2, 3))
        off = abs(np.sin(y).sum() - np.sin(x).sum() - np.cos(x) @ (y - x))
        worst = max(worst, off / quadratic_gap(float((y - x) @ (y - x)), 1.0))
    x, y = generator.normal(size=(2, 3))
    reached = abs(1.5 * (y @ y) - 1.5 * (x @ x) - 3 * x @ (y - x)) / quadratic_gap(
        float((y - x) @ (y - x)), 3.0
    )
    return everything_holds(
        {
            "sines, L = 1": at_most(worst, 1.0, what="largest part of the bound"),
            "3‖x‖²/2, L = 3": equal(reached, 1.0, what="part of the bound"),
        }
    )


def quadratic_gap(squared_distance: float, smoothness: float) -> float:
    """Return ``L‖y - x‖²/2`` (SparQ, equation 11).

    >>> quadratic_gap(4.0, 1.5)
    3.0
    """
    return smoothness / 2 * squared_distance


def _half_square(x: float, mu: float) -> tuple[float, float, float]:
    """Return value, gradient and second derivative of ``f_μ`` for ``f = max(x, 0)²/2``, ``L = 1``."""
    place = x / mu
    density, mass = float(norm.pdf(place)), float(norm.cdf(place))
    return ((x**2 + mu**2) * mass + x * mu * density) / 2, x * mass + mu * density, mass


def check_smoothed_gradient(_context: Context) -> Outcome:
    """Compare equation 13 with derivatives of the integral (12), and the smoothed loss's Lipschitz constant with L."""
    parts = {}
    for central in (False, True):
        mean = mean_estimate(_quartic, _AT, _MU, central=central)
        parts[f"quartic, {'central' if central else 'forward'}"] = equal(
            mean, _quartic_smoothed(_AT, _MU), what="(13)"
        )
        waves = mean_estimate(lambda x: x.sin().sum(), _AT, _MU, central=central, order=14)
        wanted = [math.exp(-(_MU**2) / 2) * math.cos(x) for x in _AT]
        parts[f"sines, {'central' if central else 'forward'}"] = equal(waves, wanted, what="(13)")
    steps = np.linspace(-4, 4, 401)
    for mu in (0.1, 1.0):
        bends = [_half_square(float(x), mu)[2] for x in steps]
        slopes = [_half_square(float(x), mu)[1] for x in steps]
        quotients = np.abs(np.diff(slopes) / np.diff(steps))
        parts[f"max(x, 0)²/2, μ = {mu:g}"] = at_most(
            max(float(quotients.max()), *bends), 1.0, what="L_μ against L = 1"
        )
    return everything_holds(parts)


def check_value_gap(_context: Context) -> Outcome:
    """Compare ``|f_μ - f|`` with ``μ²Ld/2``, which a multiple of ``‖x‖²`` reaches."""
    nodes, weights = normal_nodes(2, 4)
    x = np.array(_AT)
    parts = {}
    for smoothness in (0.5, 3.0):
        smoothed = weights @ (smoothness / 2 * ((x + _MU * nodes) ** 2).sum(1))
        gap = float(abs(smoothed - smoothness / 2 * (x @ x)))
        parts[f"L‖x‖²/2, L = {smoothness:g}"] = at_most(
            gap, smoothing_bounds(2, _MU, smoothness)["value"], what="gap, reached"
        )
        parts[f"L‖x‖²/2, L = {smoothness:g}, reached"] = equal(
            gap, smoothing_bounds(2, _MU, smoothness)["value"], what="gap"
        )
    for place in (-1.0, 0.0, 0.3):
        gap = abs(_half_square(place, _MU)[0] - max(place, 0.0) ** 2 / 2)
        parts[f"max(x, 0)²/2 at {place:g}"] = at_most(gap, smoothing_bounds(1, _MU, 1.0)["value"], what="gap")
        waves = abs(math.exp(-(_MU**2) / 2) - 1) * abs(math.sin(place)) * 3
        parts[f"three sines at {place:g}"] = at_most(
            waves, smoothing_bounds(3, _MU, 1.0)["value"], what="gap"
        )
    return everything_holds(parts)


def check_gradient_gap(_context: Context) -> Outcome:
    """Compare ``‖∇f_μ - ∇f‖`` with (15) and with a sharper bound, which ``x|x|/2`` reaches."""
    reached = _MU * math.sqrt(2 / math.pi)
    parts = {
        "x|x|/2 at 0": at_most(reached, smoothing_bounds(1, _MU, 1.0)["gradient"], what="gap"),
        "x|x|/2 at 0, sharper": equal(reached, sharp_smoothing_bounds(1, _MU, 1.0)["gradient"], what="gap"),
    }
    # The value at 0 by quadrature on each side, not by the formula that is reached.
    u = np.linspace(0, 12, 200_001)
    halves = 2 * float(np.trapezoid(_MU * u * norm.pdf(u), u))
    parts["x|x|/2 at 0, by quadrature"] = equal(halves, reached, what="∇f_μ", tolerance=1e-6)
    for dimension in (1, 2, 5, 40):
        sharp, bound = (
            bounds(dimension, _MU, 1.0)["gradient"] for bounds in (sharp_smoothing_bounds, smoothing_bounds)
        )
        parts[f"d = {dimension}"] = at_most(sharp, bound, what="the sharper bound against (15)")
        waves = (1 - math.exp(-(_MU**2) / 2)) * math.sqrt(dimension)
        parts[f"{dimension} sines"] = at_most(waves, bound, what="gap")
    for name, of, order in (
        ("(15)", smoothing_bounds, 1.5),
        ("the sharper bound", sharp_smoothing_bounds, 0.5),
    ):
        many = [10.0**k for k in range(8, 12)]
        sizes = [of(int(d), _MU, 1.0)["gradient"] for d in many]
        parts[f"{name}, order in d"] = equal(
            fitted_slope(many, sizes), order, what="exponent", tolerance=1e-6
        )
        small = [1e-3, 1e-2, 1e-1]
        radii = [of(5, mu, 1.0)["gradient"] for mu in small]
        parts[f"{name}, order in μ"] = equal(fitted_slope(small, radii), 1.0, what="exponent")
    return everything_holds(parts)


def check_second_moment(_context: Context) -> Outcome:
    """Compare ``E‖g·u‖²`` of the shipped arithmetic with (16) and with the same proof's exact moments."""
    slope = torch.tensor([0.8, -0.3], dtype=torch.float64)
    squared = float(slope @ slope)
    cases = {
        "linear": (lambda x: slope @ x, squared, 0.0),
        "3‖x‖²/2": (lambda x: 1.5 * (x @ x), 9 * sum(x * x for x in _AT), 3.0),
        "linear and ‖x‖²/2": (
            lambda x: slope @ x + (x @ x) / 2,
            sum((c + x) ** 2 for c, x in zip(slope.tolist(), _AT, strict=True)),
            1.0,
        ),
        "3‖x‖²/2 at 0": (lambda x: 1.5 * (x @ x), 0.0, 3.0),
    }
    parts = {}
    for name, (loss, squared_gradient, smoothness) in cases.items():
        at = [0.0, 0.0] if name.endswith("at 0") else _AT
        for central in (False, True):
            _, square = moments_of_estimate(loss, at, _MU, central=central, order=6)
            how = "central" if central else "forward"
            for kind, bound in (("(16)", smoothing_bounds), ("sharper", sharp_smoothing_bounds)):
                parts[f"{name}, {how}, {kind}"] = at_most(
                    square,
                    bound(2, _MU, smoothness, math.sqrt(squared_gradient))["mean_square"],
                    what="E‖g·u‖²",
                    slack=1e-7,
                )
    _, square = moments_of_estimate(lambda x: slope @ x, _AT, _MU, central=False)
    parts["linear: (d + 2)‖∇f‖²"] = equal(square, 4 * squared, what="E‖g·u‖²", tolerance=1e-7)
    _, square = moments_of_estimate(lambda x: 1.5 * (x @ x), [0.0, 0.0], _MU, central=False)
    parts["3‖x‖²/2 at 0: μ²L²d(d + 2)(d + 4)/4"] = equal(
        square, _MU**2 * 9 * 48 / 4, what="E‖g·u‖²", tolerance=1e-7
    )
    return everything_holds(parts)


def check_squared_gradients(_context: Context) -> Outcome:
    """Compare squared gradients of a loss and its smoothed loss with (17) and (18), and the inequality behind them."""
    parts = {}
    for mu in (0.1, 1.0):
        # x|x|/2 at 0: ∇f = 0, ∇f_μ = μ√(2/π).
        parts[f"(17), x|x|/2 at 0, μ = {mu:g}"] = at_most(
            mu**2 * 2 / math.pi, smoothed_gradient_bounds(1, mu, 1.0)["square"], what="‖∇f_μ‖²"
        )
        # x|x|/2 - μ√(2/π)x at 0: ∇f_μ = 0.
        parts[f"(18), the same less its slope, μ = {mu:g}"] = at_most(
            mu**2 * 2 / math.pi, smoothed_gradient_bounds(1, mu, 1.0)["square"], what="‖∇f‖²"
        )
        # At 10μ both terms count: E|x + μu| is x up to tails.
        parts[f"(17), x|x|/2 at 10μ, μ = {mu:g}"] = at_most(
            (10 * mu) ** 2, smoothed_gradient_bounds(1, mu, 1.0, 10 * mu)["square"], what="‖∇f_μ‖²"
        )
        for x in (-2.0, 0.4, 1.3):
            smoothed = math.exp(-(mu**2) / 2) * math.cos(x)
            parts[f"(18), sine at {x:g}, μ = {mu:g}"] = at_most(
                math.cos(x) ** 2, smoothed_gradient_bounds(1, mu, 1.0, abs(smoothed))["square"], what="‖∇f‖²"
            )
    # With nothing but ‖a - b‖ <= δ known, the factor 2 is needed: a = 2b, δ = ‖b‖.
    b = np.array([0.6, -0.8])
    parts["‖a‖² <= 2‖a - b‖² + 2‖b‖², reached at a = 2b"] = equal(
        float(2 * b @ (2 * b)), 2 * float(b @ b) + smoothed_gradient_bounds(2, 0.0, 1.0, float(np.linalg.norm(b)))["square"], what="‖a‖²"
    )  # fmt: skip
    return everything_holds(parts)


def check_excess_gap(_context: Context) -> Outcome:
    """Compare ``[f_μ - f_μ*] - [f - f*]`` with ``±μ²Ld``, which a cosine nearly reaches for small μ."""
    parts = {}
    x = np.linspace(-math.pi, math.pi, 801)
    for mu in (0.05, 0.5, 2.0):
        damping = math.exp(-(mu**2) / 2)
        off = (damping * (np.cos(x) + 1)) - (np.cos(x) + 1)
        bound = smoothed_gradient_bounds(1, mu, 1.0)["excess"]
        parts[f"cosine, μ = {mu:g}"] = at_most(float(np.abs(off).max()), bound, what="largest difference")
        # The gap of the minima alone: half of it.
        parts[f"cosine, μ = {mu:g}, minima"] = at_most(1 - damping, bound / 2, what="|f_μ* - f*|")
    nearly = float(2 * (1 - math.exp(-(0.05**2) / 2)))
    parts["nearly reached"] = exceeds(
        nearly, 0.99 * smoothed_gradient_bounds(1, 0.05, 1.0)["excess"], what="cosine, μ = 0.05"
    )
    for place in (-1.0, 0.0, 1.0):
        gap = abs(_half_square(place, 0.5)[0] - max(place, 0.0) ** 2 / 2)
        parts[f"max(x, 0)²/2 at {place:g}"] = at_most(
            gap, smoothed_gradient_bounds(1, 0.5, 1.0)["excess"], what="difference"
        )
    return everything_holds(parts)


# -- SparQ's assumption 2 -----------------------------------------------------------------------------------------------


def check_assumption_two(_context: Context) -> Outcome:
    """Show that a bounded, smooth loss's zeroth-order gradient is not its gradient on average, at any μ.

    ``f = sin``: gradients bounded by 1, Lipschitz with 1. ``E[g·u] = exp(-μ²/2)cos x``. More is true: if ``∇f_μ = ∇f``
    everywhere, the Fourier transform of ``∇f`` times ``1 - exp(-μ²k²/2)`` vanishes, so ``f`` is affine or its gradient is
    unbounded.
    """
    parts = {}
    for mu in (0.05, 0.4, 1.0):
        mean = mean_estimate(lambda x: x.sin().sum(), _AT, mu, central=False, order=14)
        cosines = torch.tensor(_AT, dtype=torch.float64).cos()
        parts[f"μ = {mu:g}"] = equal(mean, math.exp(-(mu**2) / 2) * cosines, what="E[g·u]", tolerance=1e-8)
        parts[f"μ = {mu:g}, off the gradient"] = exceeds(
            float((mean - cosines).norm() / cosines.norm()), mu**2 / 3, what="relative bias"
        )
    # Exact data (σ = 0 as a first-order reading has it): the spread of g·u around ∇f is that of perturbations alone.
    slope = torch.tensor([0.8, -0.3], dtype=torch.float64)
    mean, square = moments_of_estimate(lambda x: slope @ x, _AT, _MU, central=False)
    parts["one sample ξ, linear"] = equal(
        square - float(mean @ mean), 3 * float(slope @ slope), what="E‖g·u - ∇f‖² = (d + 1)‖∇f‖²", tolerance=1e-7
    )  # fmt: skip
    return everything_holds(parts)


_THREE_PERCENT = Fault(
    "perturbations three percent long",
    "executors.steps.arithmetic:ParamPass.perturb",
    lambda shipped, self, theta, z, scale, epsilon, out=None: shipped(
        self, theta, z, scale, 1.03 * epsilon, out
    ),
)
_SMOOTHING = "proofs_checks.oracles.smoothing:smoothing_bounds"
_SHARP = "proofs_checks.oracles.statements:sharp_smoothing_bounds"
_SQUARED = "proofs_checks.oracles.statements:smoothed_gradient_bounds"

CHECKS: Checks = {
    "noise-of-losses-by-difference": printed(
        check_noise_of_losses, central_by_epsilon, forward_by_two_epsilon
    ),
    "sparq-both-differences-are-biased": counterexample(
        check_bias_of_both,
        central_by_epsilon,
        forward_by_two_epsilon,
        second_by_epsilon,
        _THREE_PERCENT,
    ),
    "sparq-ball-needs-a-radius": (
        conditioned(partial(check_radial, 2.0, 1.0), forward_by_two_epsilon, climbing),
        counterexample(partial(check_radial, 1.0, 0.25), forward_by_two_epsilon),
    ),
    "distzo2-projected-gradient-orders": printed(
        check_pathwise_orders, central_by_epsilon, second_by_epsilon
    ),
    "zo2-update-needs-its-own-direction": printed(check_shared_perturbation, central_by_epsilon, climbing),
    "sparq-lemma-2-descent": printed(
        check_descent_lemma,
        scaled("proofs_checks.sparq.smoothing:quadratic_gap", 0.97, "a bound 3 % too tight"),
    ),
    "sparq-lemma-3a-smoothed-gradient": printed(
        check_smoothed_gradient, forward_by_two_epsilon, central_by_epsilon, _THREE_PERCENT
    ),
    "sparq-eq-14-value-gap": printed(
        check_value_gap, scaled(_SMOOTHING, 0.97, "a bound 3 % too tight", entry="value")
    ),
    "sparq-eq-15-gradient-gap": printed(
        check_gradient_gap,
        called_with(_SMOOTHING, "d in place of d + 3", dimension=lambda dimension: dimension - 3),
        scaled(_SHARP, 0.97, "a sharper bound 3 % off", entry="gradient"),
    ),
    "sparq-eq-16-second-moment": printed(
        check_second_moment,
        Fault(
            "d + 1 for d + 4, and no factor of 2",
            _SMOOTHING,
            lambda shipped, dimension, epsilon, smoothness, gradient_norm=0.0: shipped(
                dimension,
                epsilon,
                smoothness,
                gradient_norm * math.sqrt((dimension + 1) / (2 * dimension + 8)),
            ),
        ),
        called_with(_SHARP, "half of the radius in the bound", epsilon=lambda epsilon: epsilon / 2),
        forward_by_two_epsilon,
    ),
    "sparq-eq-17-18-squared-gradients": printed(
        check_squared_gradients,
        called_with(_SQUARED, "d in place of d + 3", dimension=lambda dimension: dimension - 3),
        Fault(
            "no factor of 2",
            _SQUARED,
            lambda shipped, dimension, epsilon, smoothness, other_norm=0.0: shipped(
                dimension, epsilon, smoothness, other_norm / math.sqrt(2)
            ),
        ),
    ),
    "sparq-eq-19-excess-gap": printed(
        check_excess_gap, scaled(_SQUARED, 0.97, "a bound 3 % too tight", entry="excess")
    ),
    "sparq-assumption-2-contradicts-smoothing": counterexample(check_assumption_two, forward_by_two_epsilon),
}
