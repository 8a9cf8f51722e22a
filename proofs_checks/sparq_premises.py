"""What SparQ assumes before any proof begins, two single lines of its proofs, and what it says of messages by their number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from executors.steps.arithmetic import projected_gradient
from proofs_checks.claims import Claim, conditioned, counterexample, printed
from proofs_checks.exact import at_most, equal, exceeds, is_true
from proofs_checks.faults import SHORT_GRID
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.stages import staged
from proofs_checks.statistics import fitted_slope
from zosim.analysis.counts import StepCounts, step_counts
from zosim.lowering import lower_all
from zosim.plans import Estimator

_CPU = torch.device("cpu")

# -- assumption 1 -----------------------------------------------------------------------------------------------------


def check_mean_over_samples(context: Context) -> Outcome:
    """Compare the mean over samples of losses, and of projected gradients along one direction, with those of the mean loss."""
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
        drawn = torch.randn(24, generator=generator_on(_CPU, seed), dtype=torch.float64)
        activation = drawn.clamp(min=0)
        activation[0] = 2**bits * 3.0  # the others vanish: κ‖a‖ is what is lost
        activation *= 3.0 / activation.norm()
        most, beside = 3.0, drawn
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


def _counts(hidden_factor: int, difference: str, num_queries: int) -> StepCounts:
    """Return what a step of two stages sends, with blocks that are so many times as wide."""
    estimator = Estimator.model_validate({"difference": difference, "num_queries": num_queries})
    plan = staged(("block.0",), "sweep", estimator=estimator)
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


def _activations(num_queries: int) -> tuple[int, int]:
    """Return activations a step of shipped programs with forward and with central differences."""
    forward, central = (
        _counts(1, difference, num_queries).num_activations for difference in ("forward", "central")
    )
    return forward, central  # fmt: skip


def check_forward_sends_less(_context: Context) -> Outcome:
    """Compare activations of both differences for two and more perturbations."""
    parts = {}
    for queries in (2, 3, 5):
        forward, central = _activations(queries)
        parts[f"P = {queries}"] = equal([forward, central], [queries + 1, 2 * queries], what="activations")
        parts[f"P = {queries}, less"] = exceeds(central, forward, what="central against forward")
    return everything_holds(parts)


def check_one_perturbation(_context: Context) -> Outcome:
    """Count activations of one perturbation, as the algorithms have it: two, with either difference."""
    return equal([float(count) for count in _activations(1)], [2.0, 2.0], what="forward, central")


def _own(name: str, function: Callable[..., object], old: str, new: str) -> Mutant:
    return Mutant(name, f"proofs_checks.sparq_premises:{function.__name__}", old, new)


_QUARTERED = Mutant(
    "differences over twice their distance",
    "executors.steps.arithmetic:projected_gradient",
    "(2 * epsilon if central else epsilon)",
    "(4 * epsilon if central else 2 * epsilon)",
)
_BASE_EVERY_TIME = Mutant(
    "a base that every query forwards again",
    "proofs_checks.sparq_premises:_activations",
    "return forward, central",
    "return forward + num_queries - 1, central",
)

CLAIMS = (
    Claim(
        name="sparq-assumption-1",
        paper="sparq",
        where=("Sec. 2", "Asm. 1"),
        quotation="f(x) := E_{ξ~D}[f(ξ; x)] ... Assumption 1 (Unbiased Function Estimation) E[f(ξ_t; x)] = f(x).",
        statement="Section 2 defines f as this mean, so the assumption holds of any ξ_t that is drawn from D and does not depend on x_t. Projected gradients are linear in losses: their mean over ξ along one u is that of f.",
        hypotheses="six samples, enumerated; both differences, the shipped arithmetic",
        checks=(printed(check_mean_over_samples, _QUARTERED),),
        derivation="sparq-assumptions-1-3-6.md",
    ),
    Claim(
        name="sparq-assumption-3-kinks",
        paper="sparq",
        where=("Asm. 3", "Asm. 6"),
        quotation="For the loss function and each composition function, their gradients are Lipschitz-continuous ... ‖∇(S₁|x)(ξ_t) - ∇(S₁|y)(ξ_t)‖ ≤ L₁‖x - y‖",
        statement="Behind GELU, SiLU or tanh and for bounded data, gradients are bounded and Lipschitz, with L₁ = sup|φ''|·‖ξ‖² for one layer. Behind ReLU, where the paper cuts OPT, the gradient jumps by ‖ξ‖ at x·ξ = 0: there is no L₁.",
        hypotheses="one layer φ(x·ξ) before the cut",
        checks=(
            conditioned(
                check_smooth_layers, _own("a kink", _gradients, "function((at", "functional.relu((at")
            ),
            counterexample(
                check_kinks, _own("a smooth function", _gradients, "function((at", "functional.silu((at")
            ),
        ),
        amendment="The activation function has a bounded second derivative, and data are bounded.",
        breaks="Two of the three kinds of models of the experiments are smooth; OPT's ReLU is not.",
        consequence="For OPT the theorems say nothing as they stand; E[f(x + μu)] is smooth all the same, with constants that grow as 1/μ.",
        derivation="sparq-assumptions-1-3-6.md",
    ),
    Claim(
        name="sparq-eq-20-last-lines",
        paper="sparq",
        where=("Eq. 20",),
        quotation="= (1 + C²_S₁)L₂²‖(C(S₁), x⁽²⁾) - (S₁, x⁽²⁾)‖² ≤ (1 + C²_S₁)L₂²κ²‖S₁‖² ≤ (1 + C²_S₁)L₂²κ²L²_S₁, where we get (20) by assumption 4",
        statement="The parameters drop out of the difference, assumption 5 bounds the rest by κ‖S₁‖ and assumption 4 that by κL_S₁. What is before them is lemma-4-needs-the-activation.",
        hypotheses="activations of norm at most 3, rounded to the nearest by the shipped codec; κ² = 1 - max²/‖a‖²",
        checks=(printed(check_last_lines_of_lemma_4, SHORT_GRID),),
        derivation="sparq-lemma-4.md",
    ),
    Claim(
        name="sparq-dimension-free",
        paper="sparq",
        where=("Sec. 3",),
        quotation="our ZO method eliminates gradient tensors entirely and instead communicates only a single scalar per iteration ... This design not only reduces the per-iteration communication complexity from dimension-dependent to dimension-free",
        statement="What goes back is a number of scalars that no width changes, and no gradients. What goes forward grows in proportion to the width, as in first-order methods: a step's communication is not free of dimension.",
        hypotheses="two stages, forward and central differences, programs as lowered; no codec",
        checks=(
            conditioned(
                check_back_is_free_of_dimension,
                Mutant(
                    "gradients counted with losses",
                    "zosim.analysis.counts:_counted",
                    '{"scalar_bytes": size}',
                    '{"scalar_bytes": size, "gradient_bytes": size}',
                ),
            ),
            counterexample(
                check_forth_grows_with_dimension,
                Mutant(
                    "messages that grow as a root",
                    "zosim.analysis.counts:_counted",
                    'f"{kind}_bytes": size}',
                    'f"{kind}_bytes": round(1000 * size**0.5)}',
                ),
            ),
        ),
        amendment="Of what goes back alone.",
        breaks="The sentence counts the backward pass; 2P or P + 1 activations of a cut's width go forward.",
        consequence="Codecs and the choice of the cut decide what a step costs, not the scalars: `zosim predict` counts both.",
        derivation="sparq-codecs.md#what-grows-with-the-width",
    ),
    Claim(
        name="sparq-forward-sends-less",
        paper="sparq",
        where=("App. C.2", "App. C.3"),
        quotation="Overall, central difference incurs higher communication cost compared to forward difference ... in general, the communication overhead of using the forward difference method is lower",
        statement="P + 1 < 2P for P of at least 2. For P = 1, as algorithms 1 to 3 are written, both send two activations across each cut.",
        hypotheses="programs as lowered, two stages",
        checks=(
            conditioned(check_forward_sends_less, _BASE_EVERY_TIME),
            counterexample(
                check_one_perturbation,
                Mutant(
                    "a third activation",
                    "proofs_checks.sparq_premises:_activations",
                    "return forward, central",
                    "return forward, central + 1",
                ),
            ),
        ),
        amendment="P is at least 2.",
        breaks="P + 1 = 2P at P = 1.",
        consequence="With one query choose central differences: they cost the same and their error is of a higher order in ε.",
        derivation="sparq-differences.md#messages",
    ),
)
