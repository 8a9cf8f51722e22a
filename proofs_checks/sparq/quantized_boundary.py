"""What SparQ's lemma 4 and theorem 1 promise, against models small enough to know exactly."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from executors.runs.session import Session
from proofs_checks.claims import Checks, corrected, counterexample, printed
from proofs_checks.exact import at_most, normal_nodes, within
from proofs_checks.faults import nearest, rounding_up, short_grid
from proofs_checks.oracles.boundaries import straight_through
from proofs_checks.oracles.bounds import sparq_stationarity_bound
from proofs_checks.oracles.estimates import quadratic_contraction
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import scaled
from proofs_checks.setups.analytic import BATCH, DIMENSION, PER_SEGMENT, AnalyticModel, estimates, plan_of
from proofs_checks.setups.literal import perturbations_of_steps
from proofs_checks.statistics import compare_means
from zosim.plans import Estimator

_CPU = torch.device("cpu")


_RATE = 1 / (32 * (DIMENSION + 4))
"""The largest that theorem 1 allows at ``L = 1``."""


def _radius(horizon: int) -> float:
    """Return the largest ``μ`` that theorem 1 allows."""
    return 1 / ((DIMENSION + 6) * math.sqrt(horizon))


# -- lemma 4 -----------------------------------------------------------------------------------------------------


def check_lemma(context: Context) -> Outcome:
    """Compare ``‖∇f - ∇f̂‖²`` with lemma 4's bound, ``L₂`` taken in activation and parameters; and alone in these.

    ``S₁(x) = C·Qx`` with an orthogonal ``Q``, ``F∘S₂(a; y) = ½(a; y)ᵀH(a; y)``: ``C`` and ``L₂ = ‖H‖`` are exact. All
    values but one are below half a step, so that the codec's ``κ² = 1 - max²/‖a‖²`` is reached.
    """
    ratio, name = 0.0, ""
    for seed, bits in itertools.product(
        range(context.seed, context.seed + context.samples(40, 6)), (2, 3, 4)
    ):
        for kind, hessian in _hessians(seed):
            off, compressed, bound = _lemma(seed, bits, hessian, slope=8.0)
            assert compressed > 0
            if off / bound > ratio:
                ratio, name = off / bound, f"{bits} bits, {kind}"
    return at_most(ratio, 1.0, what=f"‖∇f - ∇f̂‖² over lemma 4's bound, closest with {name}")


def check_lemma_without_activation(context: Context) -> Outcome:
    """Compare ``‖∇f - ∇f̂‖²`` of a rest that is linear in its parameters with ``‖a - C(a)‖²``; the bound is 0.

    ``F∘S₂(a; y) = a·y``: its gradient in ``y`` is ``a``, the same for all ``y``, so that ``L₂ = 0`` as assumption 3
    defines it. Compression changes that gradient from ``a`` to ``C(a)``. ``S₁``'s gradient is ``Qᵀy``, unchanged.
    """
    linear = torch.zeros((2 * _WIDTH, 2 * _WIDTH), dtype=torch.float64)
    linear[:_WIDTH, _WIDTH:] = linear[_WIDTH:, :_WIDTH] = torch.eye(_WIDTH, dtype=torch.float64)
    largest, lines = 0.0, []
    for bits in (2, 3, 4):
        off, compressed, _ = _lemma(context.seed, bits, linear, slope=0.5)
        error = abs(off / compressed - 1) if compressed > 0 else math.inf
        largest = max(largest, error)
        lines.append(f"{bits} bits: ‖∇f - ∇f̂‖² is {off:.3g} = ‖a - C(a)‖², the bound is 0")
    return Outcome(largest, 1e-9, "‖∇f - ∇f̂‖² against ‖a - C(a)‖², relative", tuple(lines))


_WIDTH = 6


def _hessians(seed: int) -> list[tuple[str, Tensor]]:
    generator = generator_on(_CPU, seed + 1)
    half = torch.randn((2 * _WIDTH, 2 * _WIDTH), generator=generator, dtype=torch.float64)
    alone = torch.zeros_like(half)
    alone[:_WIDTH, :_WIDTH] = 3 * torch.eye(_WIDTH, dtype=torch.float64)
    return [("any", half + half.T), ("of the activation alone", alone)]


def _lemma(seed: int, bits: int, hessian: Tensor, *, slope: float) -> tuple[float, float, float]:
    """Return ``‖∇f - ∇f̂‖²``, ``‖a - C(a)‖²`` and the bound with ``L₂ = ‖H‖`` and the codec's own ``κ``."""
    generator = generator_on(_CPU, seed)
    turn, _ = torch.linalg.qr(torch.randn((_WIDTH, _WIDTH), generator=generator, dtype=torch.float64))
    step = 1.0 / (2 ** (bits - 1) - 1)
    activation = (torch.rand(_WIDTH, generator=generator, dtype=torch.float64) - 0.5) * step
    activation[seed % _WIDTH] = 1.0
    x = (turn.T @ activation / slope).requires_grad_()
    y = torch.randn(_WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    def rest(a: Tensor) -> Tensor:
        both = torch.cat([a, y])
        return both @ hessian @ both / 2

    def gradient(shift: Tensor) -> Tensor:
        parts = torch.autograd.grad(rest(slope * (turn @ x) + shift), (x, y))
        return torch.cat(parts)

    error = received(activation, CodecSpec(bits)) - activation
    off = float((gradient(error) - gradient(torch.zeros_like(error))).square().sum())
    kappa_squared = 1 - float(activation.max() ** 2 / activation.square().sum())
    lipschitz = float(torch.linalg.matrix_norm(hessian, 2))
    bound = (1 + slope**2) * lipschitz**2 * kappa_squared * float(activation.square().sum())
    return off, float(error.square().sum()), bound


# -- theorem 1 ---------------------------------------------------------------------------------------------------


def check_quadratic(context: Context) -> Outcome:
    """Compare steps on ``½‖θ - t‖²`` with ``(δ·z)z``, their mean contraction with theory, and the mean over T with theorem 1's bound.

    ``E‖δ - η(δ·z)z‖²`` over normals ``z`` is a polynomial's mean: three nodes in each dimension give it exactly.
    """
    generator = generator_on(_CPU, context.seed)
    target = torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
    theta = torch.zeros(DIMENSION, dtype=torch.float64)
    off = theta - target

    def loss(x: Tensor) -> Tensor:
        return (x - target).square().sum() / 2

    count = context.samples(100, 6)
    applied = estimates(loss, theta, count, seed=context.seed, epsilon=_radius(100), rng="counter")
    wanted = torch.stack([(off @ z) * z for z in perturbations_of_steps(count, context.seed)])
    error = float((applied - wanted).abs().max() / wanted.abs().max())
    nodes, weights = normal_nodes(DIMENSION, 3)
    moved = off.numpy() - _RATE * (nodes @ off.numpy())[:, None] * nodes
    factor = float(weights @ (moved**2).sum(1)) / float(off @ off)
    theory = quadratic_contraction(DIMENSION, _RATE)
    error = max(error, abs(factor / theory - 1)) if not math.isnan(error) else math.nan
    parts = {
        "a step": within(error, 1e-6, what=f"relative distance of a step, and of {factor:.9f}, from theory")
    }
    gap = float(off @ off) / 2
    for horizon in (1, 100, 10_000, 1_000_000):
        mean = 2 * gap * (1 - theory**horizon) / (horizon * (1 - theory))
        allowed = sparq_stationarity_bound(horizon, DIMENSION, gap, _RATE, _radius(horizon), 1.0)
        parts[f"T = {horizon}"] = at_most(mean, allowed, what="mean ‖∇f‖² against (41)")
    return everything_holds(parts)


_SPEC = CodecSpec(4)
_HORIZON = 10_000_000


def check_stall(context: Context) -> Outcome:
    """Measure how far weights move from a point that is no minimum, where all grid values but the largest are 0.

    The first half of ``θ`` is the activation, the second the rest's parameters, ``f = ½‖θ - t‖²``, and ``f̂`` has the
    activation through the codec. The largest activation is at its target, the others are 0 and short of theirs by 0.4
    steps. Nothing that theorem 1's radius can do changes a grid value.
    """
    half, levels = DIMENSION // 2, 2 ** (4 - 1) - 1
    target = torch.zeros(DIMENSION, dtype=torch.float64)
    target[:half] = 0.4 / levels
    theta = torch.zeros_like(target)
    theta[0] = target[0] = 1.0

    def loss(x: Tensor) -> Tensor:
        arrived = received(x[:half], _SPEC)
        return (torch.cat([arrived, x[half:]]) - target).square().sum() / 2

    radius, steps = _radius(_HORIZON), context.samples(200, 25)
    moved, kappa = _moved(loss, theta, radius, steps, context.seed)
    gap = float((theta - target).square().sum()) / 2
    compression = 2 * kappa**2 * float(theta[:half].square().sum())
    allowed = sparq_stationarity_bound(_HORIZON, DIMENSION, gap, _RATE, radius, 1.0, compression=compression)
    vacuous = sparq_stationarity_bound(_HORIZON, DIMENSION, gap, _RATE, radius, 1.0, compression=2.0)
    # What rounding of losses leaves of g: u·f/2μ, along z, over all steps.
    rounding = steps * _RATE * DIMENSION * 2**-52 * max(gap, 1.0) / radius * 8
    statistic = moved / rounding if 2 * gap > allowed else math.inf
    return Outcome(
        statistic,
        1.0,
        f"how far weights move in {steps} steps, over what float64's rounding of losses makes of 0",
        (
            f"mean ‖∇f‖² stays {2 * gap:.3g}; (41) allows {allowed:.3g} after T = {_HORIZON:g} steps, κ = {kappa:.2g}",
            f"with κ = 1, which assumption 5 comes close to, it allows {vacuous:.3g}",
        ),
    )


def _moved(loss: object, theta: Tensor, radius: float, steps: int, seed: int) -> tuple[float, float]:
    """Return how far the shipped executor moves the weights, and the largest ``κ`` of an activation that it forwards."""
    seen: list[float] = []

    def watched(x: Tensor) -> Tensor:
        activation = x[: DIMENSION // 2]
        error = received(activation, _SPEC) - activation
        seen.append(float(error.norm() / activation.norm()))
        return loss(x)  # type: ignore[operator,no-any-return]

    model = AnalyticModel(watched)
    plan = plan_of(model, estimator=Estimator(epsilon=radius))
    with Session(plan, model, learning_rate=_RATE, seed=seed, num_timed_steps=0) as session:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), theta.split(PER_SEGMENT), strict=True):
                parameter.view(-1).copy_(values)
        seen.clear()  # what was forwarded while the session looked at the model
        for _ in range(steps):
            session.step(BATCH)
        session.flush()
        left = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        return float((left - theta).norm()), max(seen)


# -- the smoothing radius ----------------------------------------------------------------------------------------

_RADII = (0.15, 0.2, 0.3, 0.5, 1.0)
"""``μ`` in steps of the grid."""

_PLACES = (0.0, 0.25, 0.45)
"""Where in its cell a number is, in steps from its grid value."""


def check_radius(context: Context) -> Outcome:
    """Compare the mean estimate through a codec, at several radii and places in a cell, with theory.

    Rounding to the nearest leaves nothing to chance: its mean over normals is summed on a fine grid. Rounding at random is sampled.
    """
    outcomes: dict[str, Outcome] = {}
    count = context.samples(1_000_000, 500_000)
    u = torch.linspace(-9, 9, 180_001, dtype=torch.float64)
    weights = torch.exp(-u * u / 2) * (u[1] - u[0]) / math.sqrt(2 * math.pi)
    for number, (radius, place) in enumerate(itertools.product(_RADII, _PLACES)):
        name = f"μ = {radius:g} steps, {place:g} off a grid value"
        expected = straight_through(radius, place)
        mean = float((weights * _estimates_through("nearest", u, radius, place, 0)).sum())
        outcomes[f"{name}, nearest"] = Outcome(
            abs(mean - expected),
            1e-3,
            "distance of a mean",
            (f"{mean:.4f} of the gradient, theory {expected:.4f}",),
        )
        if radius >= _RADII[2]:  # the variance of rounding grows as 1/μ²
            normals = torch.randn(
                count, generator=generator_on(_CPU, context.seed + number), dtype=torch.float64
            )
            sampled = _estimates_through("stochastic", normals, radius, place, context.seed + 1000 + number)
            outcomes[f"{name}, at random"] = compare_means(name, sampled[:, None], torch.ones(1))
    return everything_holds(outcomes)


def _estimates_through(
    rounding: Literal["nearest", "stochastic"], u: Tensor, radius: float, place: float, seed: int
) -> Tensor:
    """Return ``(C(x + μu) - C(x - μu))·u/2μ`` for a grid of step 1."""
    spec, generator = CodecSpec(8, rounding=rounding), generator_on(_CPU, seed)
    scale = torch.tensor([127.0], dtype=torch.float64)
    plus, minus = (
        received(torch.cat([3 + place + sign * radius * u, scale]), spec, generator)[:-1] for sign in (1, -1)
    )
    return (plus - minus) * u / (2 * radius)


CHECKS: Checks = {
    "lemma-4-needs-the-activation": (
        corrected(check_lemma, short_grid, rounding_up),
        counterexample(check_lemma_without_activation),
    ),
    "theorem-1-without-codec": printed(
        check_quadratic,
        scaled("executors.steps.arithmetic:projected_gradient", 0.5, "a difference over 4ε"),
    ),
    "theorem-1-stalls-on-the-grid": counterexample(check_stall, short_grid, rounding_up),
    "quantized-gradient-by-radius": printed(check_radius, rounding_up, nearest),
}
