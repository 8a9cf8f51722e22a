"""What SparQ assumes before any proof begins, two single lines of its proofs, and what it says of messages by their number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from executors.steps.arithmetic import projected_gradient
from proofs_checks.claims import Checks, conditioned, counterexample, printed
from proofs_checks.exact import at_most, equal, exceeds, is_true
from proofs_checks.faults import short_grid
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, scaled
from proofs_checks.promises.stages import staged
from proofs_checks.statistics import fitted_slope
from zosim.analysis.counts import StepCounts, step_counts
from zosim.lowering import lower_all
from zosim.plans import Estimator
from zosim.program.program_set import ProgramSet

_CPU = torch.device("cpu")

# -- assumption 1 -----------------------------------------------------------------------------------------------------


def check_mean_over_samples(context: Context) -> Outcome:
    """Compare the mean over samples of losses, and of projected gradients along one perturbation, with those of the mean loss."""
    generator = generator_on(_CPU, context.seed)
    data, x, u = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (4,), (4,))
    )

    def losses(at: Tensor) -> Tensor:
        """Return ``f(ξ; x)`` of every sample."""
        return (data @ at).sin() + (data @ at) ** 2

    mu, parts = 0.1, {}
    for name, central in (("forward", False), ("central", True)):
        plus, other = losses(x + mu * u), losses(x - mu * u if central else x)
        by_sample = torch.tensor(
            [projected_gradient(p, o, mu, central=central) for p, o in zip(plus, other, strict=True)],
            dtype=torch.float64,
        )
        wanted = float(plus.mean() - other.mean()) / (2 * mu if central else mu)
        parts[f"{name} difference"] = equal(by_sample.mean(), wanted, what="E_ξ[g] along one u")
        parts[f"{name} difference, by samples"] = exceeds(
            float(by_sample.std()), 0.1, what="spread over samples"
        )
    return everything_holds(parts)  # fmt: skip


# -- assumptions 3 and 6 ----------------------------------------------------------------------------------------------

_CURVATURES: Mapping[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "tanh": (torch.tanh, 4 / (3 * math.sqrt(3)), 1.0),
    "GELU": (functional.gelu, math.sqrt(2 / math.pi), 1.13),
    "SiLU": (functional.silu, 0.5, 1.1),
}
"""Smooth activation functions, the largest ``|φ''|``, and a bound of ``|φ'|``."""


def _gradients(function: Callable[[Tensor], Tensor], at: Tensor, data: Tensor) -> Tensor:
    """Return ``∇ₓ φ(x·ξ)`` for rows x and ξ."""
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function((at * data).sum(1)).sum(), at)[0]


def check_smooth_layers(context: Context) -> Outcome:
    """Compare gradients of layers behind smooth functions, at points near and far, with ``sup|φ''|·‖ξ‖²`` and ``sup|φ'|·‖ξ‖``."""
    generator = generator_on(_CPU, context.seed)
    x, y, data = (torch.randn((4000, 3), generator=generator, dtype=torch.float64) for _ in range(3))
    parts = {}
    for name, (function, bent, steep) in _CURVATURES.items():
        for distance in (1.0, 1e-4):
            other = x + distance * y
            moved = (_gradients(function, x, data) - _gradients(function, other, data)).norm(dim=1)
            allowed = bent * data.square().sum(1) * (distance * y).norm(dim=1)
            parts[f"{name}, {distance:g} apart"] = at_most(
                float((moved / allowed).max()), 1.0, what="‖∇S₁(x) - ∇S₁(y)‖ against L₁‖x - y‖", slack=1e-6
            )
        size = (_gradients(function, x, data).norm(dim=1) / data.norm(dim=1)).max()
        parts[f"{name}, size"] = at_most(float(size), steep, what="‖∇S₁‖ against C‖ξ‖")
        # The bound is not idle: somewhere the second derivative is nearly that large.
        parts[f"{name}, sharp"] = exceeds(
            _steepest_change(function), bent, what="largest change of φ' per unit", factor=0.95
        )
    return everything_holds(parts)


def _steepest_change(function: Callable[[Tensor], Tensor]) -> float:
    at = torch.linspace(-4, 4, 4001, dtype=torch.float64)[:, None]
    slopes = _gradients(function, at, torch.ones_like(at))[:, 0]
    return float((slopes.diff() / at[:, 0].diff()).abs().max())


def check_kinks(_context: Context) -> Outcome:
    """Fit how ``‖∇S₁(x) - ∇S₁(y)‖/‖x - y‖`` of a layer behind ReLU grows as two points near its kink approach each other."""
    data = torch.tensor([[0.6, -0.8]], dtype=torch.float64)
    distances = [10.0**-k for k in range(1, 8)]
    quotients = []
    for distance in distances:
        off = distance / 2 * data  # on both sides of x·ξ = 0
        jump = _gradients(functional.relu, off, data) - _gradients(functional.relu, -off, data)
        quotients.append(float(jump.norm()) / distance)
    return everything_holds(
        {
            "order": equal(-fitted_slope(distances, quotients), 1.0, what="exponent of 1/‖x - y‖"),
            "the jump": equal(quotients[-1] * distances[-1], 1.0, what="‖ξ‖, however near"),
        }
    )


# -- equation 20 ----------------------------------------------------------------------------------------------


def check_last_lines_of_lemma_4(context: Context) -> Outcome:
    """Compare ``‖(C(a), x) - (a, x)‖``, ``κ‖a‖`` and ``κL_S₁`` of shipped codecs, for activations of at most ``L_S₁``."""
    parts = {}
    for seed, bits in itertools.product(range(context.seed, context.seed + 10), (2, 4, 8)):
        sampled = torch.randn(24, generator=generator_on(_CPU, seed), dtype=torch.float64)
        activation = sampled.clamp(min=0)
        activation[0] = 2**bits * 3.0  # the others vanish: κ‖a‖ is what is lost
        activation *= 3.0 / activation.norm()
        most, beside = 3.0, sampled
        arrived = received(activation, CodecSpec(bits))
        both = torch.cat([arrived, beside]) - torch.cat([activation, beside])
        kappa = math.sqrt(1 - float(activation.max() ** 2 / activation.square().sum()))
        size = float(activation.norm())
        parts[f"{bits} bits, seed {seed}, κ‖a‖"] = at_most(
            float(both.norm()), kappa * size, what="‖C(a) - a‖"
        )
        parts[f"{bits} bits, seed {seed}, κL"] = at_most(kappa * size, kappa * most, what="κ‖a‖")
    return everything_holds(parts)


# -- messages ----------------------------------------------------------------------------------------------------------


def _counts(hidden_factor: int, difference: str, num_perturbations: int) -> StepCounts:
    """Return what a step of two stages sends, with blocks that are so many times as wide."""
    estimator = Estimator.model_validate({"difference": difference, "num_perturbations": num_perturbations})
    plan = staged(("block.0",), "full", estimator=estimator)
    spec = plan.model.model_dump(mode="json")
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
        if spec.get(name):
            spec[name] *= hidden_factor
    wide = plan.model_validate(plan.model_dump(mode="json") | {"model": spec})
    return step_counts(lower_all(wide))


def check_back_is_free_of_dimension(_context: Context) -> Outcome:
    """Compare what a step sends back, and its exchange of losses, between models of one, two and four times the width."""
    parts = {}
    for difference in ("forward", "central"):
        one, two, four = (_counts(factor, difference, 2) for factor in (1, 2, 4))
        parts[difference] = equal(
            [two.scalar_bytes, four.scalar_bytes], [one.scalar_bytes] * 2, what="bytes of losses"
        )
        parts[f"{difference}, gradients"] = is_true(
            not any(c.gradient_bytes + c.reduced_bytes for c in (one, two, four)), what="none, of any size"
        )
    return everything_holds(parts)


def check_forth_grows_with_dimension(_context: Context) -> Outcome:
    """Fit how the bytes that a step sends forward grow with the width: in proportion, as those of first-order methods do."""
    factors = [1, 2, 4, 8]
    sizes = [float(_counts(factor, "forward", 2).activation_bytes) for factor in factors]
    added = [after - before for before, after in itertools.pairwise(sizes)]  # without what every message has
    return everything_holds(
        {
            "order": equal(fitted_slope([1.0, 2.0, 4.0], added), 1.0, what="exponent of the width"),
            "most of it": exceeds(added[0], sizes[0] / 2, what="bytes of a width more"),
        }
    )


def _activations(num_perturbations: int) -> tuple[int, int]:
    """Return activations a step of shipped programs with forward and with central differences."""
    forward, central = (
        _counts(1, difference, num_perturbations).num_activations for difference in ("forward", "central")
    )
    return forward, central


def check_forward_sends_less(_context: Context) -> Outcome:
    """Compare activations of both differences for two and more perturbations."""
    parts = {}
    for perturbations in (2, 3, 5):
        forward, central = _activations(perturbations)
        parts[f"P = {perturbations}"] = equal(
            [forward, central], [perturbations + 1, 2 * perturbations], what="activations"
        )
        parts[f"P = {perturbations}, less"] = exceeds(central, forward, what="central against forward")
    return everything_holds(parts)


def check_one_perturbation(_context: Context) -> Outcome:
    """Count activations of one perturbation, as the algorithms have it: two, with either difference."""
    return equal([float(count) for count in _activations(1)], [2.0, 2.0], what="forward, central")


def _behind(function: Callable[[Tensor], Tensor], name: str) -> Fault:
    """Return a fault by which layers stand behind another function."""
    return Fault(name, f"{__name__}:_gradients", lambda shipped, *args: shipped(function, *args[1:]))


def _counting(name: str, change: Callable[[StepCounts], dict[str, int]]) -> Fault:
    """Return a fault by which a step's counts are others."""

    def counted(shipped: Callable[..., StepCounts], programs: ProgramSet) -> StepCounts:
        counts = shipped(programs)
        return replace(counts, **change(counts))

    return Fault(name, "zosim.analysis.counts:step_counts", counted)


_COUNTED_TWICE = _counting(
    "activations counted where they go and where they come",
    lambda counts: {"num_activations": 2 * counts.num_activations},
)

CHECKS: Checks = {
    "sparq-assumption-1": printed(
        check_mean_over_samples,
        scaled("executors.steps.arithmetic:projected_gradient", 0.5, "differences over twice their distance"),
    ),
    "sparq-assumption-3-kinks": (
        conditioned(check_smooth_layers, _behind(functional.relu, "a kink")),
        counterexample(check_kinks, _behind(functional.silu, "a smooth function")),
    ),
    "sparq-eq-20-last-lines": printed(check_last_lines_of_lemma_4, short_grid),
    "sparq-dimension-free": (
        conditioned(
            check_back_is_free_of_dimension,
            _counting(
                "losses counted as gradients, too", lambda counts: {"gradient_bytes": counts.scalar_bytes}
            ),
        ),
        counterexample(
            check_forth_grows_with_dimension,
            _counting(
                "messages that grow as a root",
                lambda counts: {"activation_bytes": round(1000 * counts.activation_bytes**0.5)},
            ),
        ),
    ),
    "sparq-forward-sends-less": (
        conditioned(check_forward_sends_less, _COUNTED_TWICE),
        counterexample(check_one_perturbation, _COUNTED_TWICE),
    ),
}
