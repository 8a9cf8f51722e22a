"""Statements of several papers at once: what an estimate is of when meshes, split points, codecs and quantized weights meet."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from executors.steps.micro_batches import accumulated
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import equal, exceeds, mean_estimate, normal_nodes
from proofs_checks.faults import central_by_epsilon, losses_added, nearest
from proofs_checks.oracles.statements import perturbation_error, rounded_square_excess
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with
from proofs_checks.setups.roundings import Reaching, qvalues_and_probabilities
from proofs_checks.statistics import compare_means, fitted_slope

_CPU = torch.device("cpu")
_STEP = 0.25
"""Of the grid that activations are rounded to."""

_BASE = received(torch.tensor([0.93, -0.41], dtype=torch.float64), CodecSpec(4))
"""Quantized weights: one before the split point, one behind it."""

_DATA = torch.tensor([0.8, -1.3, 2.1, 0.4], dtype=torch.float64)
"""A sample for each sequence; two shards of two."""


def interpolated(values: Tensor, rest: str) -> Tensor:
    """Return ``E[F(C(a))]`` for rounding at random: ``F`` at the two quantized values around ``a``, weighed by how near they are."""
    scaled = values / _STEP
    below = scaled.floor()
    up = scaled - below
    return (1 - up) * _behind(below * _STEP, rest) + up * _behind((below + 1) * _STEP, rest)


def _behind(activation: Tensor, rest: str) -> Tensor:
    return activation if rest == "linear" else activation**2 / 2


def _mesh_loss(theta: Tensor, rest: str, *, encoded: bool) -> Tensor:
    """Return the loss that two shards of two sequences make: weights ``w̄ + θ``, a split point, a rest, the mean over labels."""
    weights = _BASE + theta
    shards = []
    for samples in _DATA.split(2):
        activation = weights[0] * samples
        behind = interpolated(activation, rest) if encoded else _behind(activation, rest)
        shards.append((behind * weights[1]).mean())
    return accumulated(shards, [2, 2])


def _gradient(rest: str, *, at_base: Tensor) -> Tensor:
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    activation = (at_base[0] + theta[0]) * _DATA
    loss = (_behind(activation, rest) * (at_base[1] + theta[1])).mean()
    return torch.autograd.grad(loss, theta)[0]


def check_mesh_of_quantized_halves(_context: Context) -> Outcome:
    """Compare the mean estimate of a 2D mesh through a split point and quantized weights with the gradient at these weights."""
    plain = torch.tensor([0.93, -0.41], dtype=torch.float64)
    mean = mean_estimate(
        lambda theta: _mesh_loss(theta, "linear", encoded=True), [0.0, 0.0], 0.3, central=True, order=6
    )
    here, there = _gradient("linear", at_base=_BASE), _gradient("linear", at_base=plain)
    return everything_holds(
        {
            "E[g·z], a rest that is linear in the activation": equal(
                mean, here, what="∇L(w̄)", tolerance=1e-7
            ),
            "it is not the gradient at w": exceeds(
                float((here - there).norm()), 0.003, what="‖∇L(w̄) - ∇L(w)‖"
            ),
        }
    )


def check_curved_rest(_context: Context) -> Outcome:
    """Compare the loss behind a split point that is half a square with its interpolation, whose gradient is another one."""
    places = [0.05, 0.31, -0.62]
    made = interpolated(torch.tensor(places, dtype=torch.float64), "curved")
    wanted = [a * a / 2 + rounded_square_excess(_STEP, a) for a in places]
    # Where perturbations stay within one cell the estimate is the chord's slope, whatever ε.
    nodes = (np.array([[-1.0], [1.0]]), np.array([0.5, 0.5]))
    slope = mean_estimate(
        lambda theta: interpolated(0.3 + theta, "curved")[0], [0.0], 0.01, central=True, nodes=nodes
    )
    chord = (0.5**2 - 0.25**2) / 2 / _STEP
    smooth = mean_estimate(
        lambda theta: interpolated(0.3 + theta, "curved")[0], [0.0], 1.0, central=True, order=60
    )
    return everything_holds(
        {
            "E[F(C(a))]": equal(made, wanted, what="a²/2 + f(1 - f)s²/2"),
            "within a cell": equal(slope, [chord], what="the chord's slope", tolerance=1e-7),
            "it is not F'": exceeds(abs(float(slope[0]) - 0.3), 0.05, what="|chord - F'(a)|"),
            "μ of four steps": equal(smooth, [0.3], what="E[g·z] against F'(a)", tolerance=0.02),
        }
    )


def check_shipped_interpolation(context: Context) -> Outcome:
    """Compare means of losses through the shipped rounding with the interpolation, a largest value setting its step."""
    spec = CodecSpec(4, rounding="stochastic")
    scale = torch.tensor([7 * _STEP], dtype=torch.float64)
    given = torch.tensor([0.05, 0.31, -0.62], dtype=torch.float64)
    count = context.samples(200_000, 36_000)
    sent = torch.cat([scale, given.repeat(count)])
    arrived = received(sent, spec, generator_on(_CPU, context.seed))[1:].view(count, 3)
    return compare_means("C(a)²/2", arrived**2 / 2, interpolated(given, "curved"))


def check_rounded_forward(_context: Context) -> Outcome:
    """Compare the mean of two roundings under a forward difference with the gradient of a quadratic, by enumeration."""
    rounding = Reaching("gaussian", 3, limit=6.0)
    nodes, weights = normal_nodes(1, 40)
    slope, bend, epsilon = 0.7, 1.9, 0.3
    mean = product = 0.0
    for u, probability in zip(nodes[:, 0].tolist(), weights.tolist(), strict=True):
        outcomes = [(qvalue * rounding.unit, p) for qvalue, p in qvalues_and_probabilities(u, rounding)]
        for first, p in outcomes:
            change = slope * epsilon * first + bend * (epsilon * first) ** 2 / 2
            for second, q in outcomes:
                mean += probability * p * q * change / epsilon * second
                product += probability * p * q * first * second
    return everything_holds(
        {
            "E[g·u₂], forward difference of a quadratic": equal(
                mean, slope * product, what="E[Q₁Q₂]·∇L", tolerance=1e-9
            )
        }
    )


def rounded_difference_variance(
    plus: Tensor, minus: Tensor, scale: float, epsilon: float, *, shared: bool
) -> float:
    """Return the variance of ``Σ(Q(w⁺) - Q(w⁻))/2ε``: both rounded with the same random numbers, or each with its own.

    ``v⁺ + v⁻ - 2c`` an element over ``4ε²s²``, ``v = f(1 - f)``, ``c = min(f⁺, f⁻) - f⁺f⁻`` for shared numbers, else 0.
    """
    up = [values * scale - (values * scale).floor() for values in (plus, minus)]
    each = sum(f * (1 - f) for f in up)
    together = torch.minimum(*up) - up[0] * up[1] if shared else torch.zeros_like(up[0])
    return float((each - 2 * together).sum()) / (2 * epsilon * scale) ** 2


def check_noise_of_rounded_weights(context: Context) -> Outcome:
    """Fit the order in ε of the variance of g, and compare it with samples of the shipped rounding."""
    scale, spec = 7.3, CodecSpec(8, rounding="stochastic")
    largest = torch.tensor([127 / scale], dtype=torch.float64)  # beside the weights, it sets their step
    weights = torch.linspace(-0.8, 0.9, 64, dtype=torch.float64)
    z = torch.randn(64, generator=generator_on(_CPU, 1), dtype=torch.float64)
    count = context.samples(200_000, 20_000)
    parts = {}
    for shared, order in ((False, -2.0), (True, -1.0)):
        radii = [1e-7, 1e-6, 1e-5]
        variances = [
            rounded_difference_variance(weights + e * z, weights - e * z, scale, e, shared=shared)
            for e in radii
        ]
        name = "the same random numbers" if shared else "numbers of its own for each evaluation"
        parts[name] = equal(
            fitted_slope(radii, variances), order, what="exponent of ε in the variance of g", tolerance=0.01
        )
        epsilon = 0.02
        points = [weights + sign * epsilon * z for sign in (1, -1)]
        seeds = (context.seed, context.seed if shared else context.seed + 1)
        rounded = [
            received(torch.cat([largest, point.repeat(count)]), spec, generator_on(_CPU, seed))[1:].view(
                count, 64
            )
            for point, seed in zip(points, seeds, strict=True)
        ]
        errors = (rounded[0] - rounded[1]) / (2 * epsilon) - z
        # Elements alone, whose sum hardly varies, and pairs of them, which do not vary together.
        alone = errors.square().sum(1)
        columns = torch.stack([alone, errors.sum(1) ** 2 - alone], 1)
        variance = rounded_difference_variance(points[0], points[1], scale, epsilon, shared=shared)
        parts[f"{name}, shipped"] = compare_means(
            "squared error of g, of elements and of pairs",
            columns,
            torch.tensor([variance, 0.0], dtype=torch.float64),
            scale=variance,
            along=False,
        )
    return everything_holds(parts)


def check_perturbations_and_shards(_context: Context) -> Outcome:
    """Compare the squared error of perturbations and shards with its closed form, data and perturbations enumerated."""
    slope = np.array([0.6, -0.8])
    noise = np.array([[0.3, 0.1], [-0.3, -0.1], [0.2, -0.5], [-0.2, 0.5]])
    spread = float((noise**2).sum(1).mean())
    nodes, weights = normal_nodes(2, 4)
    parts = {}
    for shards in (1, 2):
        samples = noise if shards == 1 else np.array([(a + b) / 2 for a in noise for b in noise])
        error = 0.0
        for off in samples:
            estimates = (nodes @ (slope + off))[:, None] * nodes
            error += float(weights @ ((estimates - slope) ** 2).sum(1)) / len(samples)
        parts[f"{shards} shards"] = equal(
            error, perturbation_error(1, 2, shards, spread), what="E‖ĝ - ∇L‖²/‖∇L‖²"
        )
    return everything_holds(parts)


one_qvalue_lower = called_with(
    "executors.low_bits.grids:Integers.at_random",
    "grid values that are not symmetric",
    self=lambda it: altered(it, low=it.low - 1),
)


CHECKS: Checks = {
    "mesh-boundary-and-quantized-weights": printed(
        check_mesh_of_quantized_halves, central_by_epsilon, losses_added
    ),
    "rounded-boundary-interpolates": (
        printed(
            check_curved_rest,
            central_by_epsilon,
            Fault(
                "a step that is not squared",
                "proofs_checks.oracles.statements:rounded_square_excess",
                lambda shipped, step, value: shipped(step, value) / step,
            ),
        ),
        printed(check_shipped_interpolation, nearest),
    ),
    "two-roundings-under-a-forward-difference": printed(
        check_rounded_forward,
        one_qvalue_lower,
    ),
    "rounded-weights-need-shared-numbers": printed(check_noise_of_rounded_weights, nearest),
    "queries-and-shards": printed(
        check_perturbations_and_shards,
        called_with(
            "proofs_checks.oracles.statements:perturbation_error", "shards that lower both", num_shards=1
        ),
    ),
}
