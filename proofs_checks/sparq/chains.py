"""SparQ's lines (34) and (43): how far compressed stages take the smoothed gradient, and what bounds that distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.stats import norm
from torch import Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, corrected, counterexample
from proofs_checks.exact import at_most, equal, exceeds
from proofs_checks.faults import rounding_up
from proofs_checks.oracles.smoothing import smoothing_bounds
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, planted, scaled
from proofs_checks.statistics import fitted_slope

_CPU = torch.device("cpu")
Function = Callable[[Tensor], Tensor]

# -- chains, and the constants of their stages --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Constants of a stage ``S(a; x)`` that takes an activation and its own parameters."""

    output: float  # bound of ``‖S‖``
    # gain, slope: bounds of ``‖∂S/∂a‖`` and ``‖∂S/∂x‖``.
    gain: float
    slope: float
    # bend, twist: Lipschitz constants of ``∂S/∂a`` and ``∂S/∂x`` in the activation.
    bend: float = 0.0
    twist: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Stages of one number and one parameter each, ``f(x) = F(S_M(... S_2(S_1(x_1); x_2) ...; x_M))``."""

    stages: tuple[Stage, ...]
    first: Function  # ``S_1``
    later: Callable[[Tensor, Tensor], Tensor]  # ``S_i`` for i > 1, from activation and parameter
    criterion: Function = torch.sin  # ``F``
    # steep, bent: bound of ``|F'|`` and its Lipschitz constant.
    steep: float = 1.0
    bent: float = 1.0

    def gradient(self, x: Tensor, compress: Function) -> Tensor:
        """Return the gradient at rows of x, shape (n, M), with every activation that crosses compressed."""
        x = x.clone().requires_grad_()
        activation = self.first(x[:, 0])
        for number in range(1, len(self.stages)):
            activation = self.later(compress(activation), x[:, number])
        return torch.autograd.grad(self.criterion(activation).sum(), x)[0]


_LEVEL = 10.5 * math.pi
"""``K``, where a sine's slope changes fastest."""


def passing(num_nodes: int) -> Chain:
    """Return ``sin x_1``, handed on unchanged: every constant is 1 or 0."""
    stages = (Stage(1, 0, 1), *(Stage(1, 1, 0) for _ in range(num_nodes - 1)))
    return Chain(stages, torch.sin, lambda a, _x: a, lambda a: a, 1.0, 0.0)


def adding(num_nodes: int, gain: float) -> Chain:
    """Return the sine of ``S_1 = K + sin x_1/M`` and stages ``gain·a + sin x_i/M``."""
    share, stages = 1 / num_nodes, [Stage(_LEVEL + 1 / num_nodes, 0, 1 / num_nodes)]
    for _ in range(num_nodes - 1):
        stages.append(Stage(gain * stages[-1].output + share, gain, share))
    return Chain(tuple(stages), lambda x: _LEVEL + share * x.sin(), lambda a, x: gain * a + share * x.sin())


def bending(num_nodes: int) -> Chain:
    """Return stages ``sin(a + x_i)`` behind ``sin x_1``: second derivatives in every place."""
    stages = (Stage(1, 0, 1), *(Stage(1, 1, 1, 1, 1) for _ in range(num_nodes - 1)))
    return Chain(stages, torch.sin, lambda a, x: (a + x).sin(), lambda a: a, 1.0, 0.0)


def behind() -> Chain:
    """Return the sine of ``K + sin x_1``: what enters the second stage decides its slope."""
    stages = Stage(_LEVEL + 1, 0, 1), Stage(1, 1, 0, 1)
    return Chain(stages, lambda x: _LEVEL + x.sin(), lambda a, _x: a.sin(), lambda a: a, 1.0, 0.0)


def multiplied() -> Chain:
    """Return ``(K + sin x_1)·sin x_2``: what enters the second stage is the slope of its parameter."""
    most = _LEVEL + 1
    stages = Stage(most, 0, 1), Stage(most, 1, most, 0, 1)
    return Chain(stages, lambda x: _LEVEL + x.sin(), lambda a, x: a * x.sin(), lambda a: a, 1.0, 0.0)


def shrinking(kappa: float) -> Function:
    """Return ``C(a) = (1 - κ)a``."""
    return lambda a: (1 - kappa) * a


def waving(kappa: float) -> Function:
    """Return ``C(a) = a - κ·sin a``, which is off by at most ``κ|a|`` and whose derivative is off by at most κ."""
    return lambda a: a - kappa * a.sin()


def straight(compress: Function) -> Function:
    """Return a compressor that derivatives pass as if it were not there: the ``∇f̂`` of lemmas 4 and 5."""
    return lambda a: a + (compress(a) - a).detach()


def distance(chain: Chain, compress: Function, mu: float, seed: int) -> float:
    """Return the largest ``‖∇f_μ - ∇f̂_μ‖²`` over 65 points, each the square of a mean of ``(∇f - ∇f̂)(x + μu)`` over 16 normals u."""
    generator, size = generator_on(_CPU, seed), len(chain.stages)
    x = 2 * torch.randn((65, 1, size), generator=generator, dtype=torch.float64)
    x[0] = 0.0
    u = torch.randn((16, size), generator=generator, dtype=torch.float64)
    at = (x + mu * u).reshape(-1, size)
    off = chain.gradient(at, lambda a: a) - chain.gradient(at, compress)
    return float(off.reshape(65, 16, size).mean(1).square().sum(1).max())


# -- what bounds the distance -------------------------------------------------------------------------------------------


def distance_bound(chain: Chain, kappa: float, tilt: float) -> float:
    """Return a bound of ``‖∇f - ∇f̂‖²`` everywhere, and so of ``‖∇f_μ - ∇f̂_μ‖²`` for any μ.

    `kappa`, `tilt`: ``‖C(a) - a‖ <= κ‖a‖`` and ``‖DC(a) - I‖ <= κ₁``.

    Errors pass on: what enters stage i + 1 is off by ``e_i = κ·output_i + gain_i·e_{i-1}``, which is
    ``κ Σ_j (Π_l gain_l) output_j`` over j <= i and the stages l after j. Slopes of the rest are off by ``δ``, from the last stage to the first.
    """
    errors = [0.0]
    for stage in chain.stages[:-1]:
        errors.append(kappa * stage.output + stage.gain * errors[-1])
    rest, off, total = chain.steep, chain.bent * chain.stages[-1].gain * errors[-1], 0.0
    for stage, error in zip(reversed(chain.stages), reversed(errors), strict=True):
        total += (rest * stage.twist * error + off * stage.slope) ** 2
        off = (off * stage.gain + rest * stage.bend * error) * (1 + tilt) + rest * stage.gain * tilt
        rest *= stage.gain
    return total


def corrected_34(
    kappa: float, tilt: float, slope: float, output: float, smoothness: float, steep: float
) -> float:
    """Return ``L₂²κ²L_S₁² + C²_S₁((1 + κ₁)L₂κL_S₁ + κ₁C_R)²``, the bound for two nodes in SparQ's constants.

    Parameters
    ----------
    kappa, tilt : float
        ``κ`` and ``κ₁``.
    slope, output : float
        ``C_S₁`` and ``L_S₁``, bounds of the first stage's gradient and output.
    smoothness, steep : float
        ``L₂`` in activation and parameters together, and ``C_R``, the bound of ``∇_a(F∘S₂)``.
    """  # fmt: skip
    arrived = smoothness * kappa * output
    return arrived**2 + slope**2 * ((1 + tilt) * arrived + tilt * steep) ** 2


def printed_34(mu: float, dimension: int, smoothness: float, compression: float) -> float:
    """Return ``(3/2)μ²L²(d + 3)³ + 3B``, as (35) sums (34) up."""
    return 6 * smoothing_bounds(dimension, mu, smoothness)["gradient"] ** 2 + 3 * compression


def check_line_43(context: Context) -> Outcome:
    """Compare ``‖∇f_μ - ∇f̂_μ‖²`` of chains of 2 to 20 nodes with the bound whose errors pass through stages."""
    cases = {
        "x₁ handed on": (passing, ((2, 0.1), (3, 0.05), (12, 0.01), (20, 0.001))),
        "a sum": (lambda nodes: adding(nodes, 1.0), ((3, 0.01), (12, 0.001), (20, 0.0005))),
        "a sum, growing": (lambda nodes: adding(nodes, 1.1), ((3, 0.01), (12, 0.0005))),
        "a sum, falling": (lambda nodes: adding(nodes, 0.8), ((3, 0.01), (12, 0.005))),
        "sines of sines": (bending, ((2, 0.1), (3, 0.05))),
        "a sine": (lambda _nodes: behind(), ((2, 0.001), (2, 0.01))),
        "a product": (lambda _nodes: multiplied(), ((2, 0.001), (2, 0.01))),
    }
    parts = {}
    for (name, (build, sizes)), (how, compressor) in itertools.product(
        cases.items(), (("(1 - κ)a", shrinking), ("a - κ sin a", waving))
    ):
        for (nodes, kappa), mu in itertools.product(sizes, (1e-4, 0.3)):
            chain = build(nodes)
            parts[f"{name}, C = {how}, M = {nodes}, κ = {kappa:g}, μ = {mu:g}"] = at_most(
                distance(chain, compressor(kappa), mu, context.seed),
                distance_bound(chain, kappa, kappa),
                what=f"A₁ of {name}",
            )
    return everything_holds(parts)


def check_errors_pass(context: Context) -> Outcome:
    """Show that outputs of at most L_S and a smooth compressor do not make (43) true: errors of every split point add up."""
    parts = {}
    for nodes, kappa in ((12, 0.01), (20, 0.001)):
        chain, mu = passing(nodes), 1e-6
        # Ψ = max{(1 + 2C²)·0·κ², C²·0 + C²_F·L_S²} = 1, and L_S = L = 1.
        allowed = printed_34(mu, nodes, 1.0, 2 * nodes * kappa**2)
        name = f"M = {nodes}, κ = {kappa:g}"
        far = distance(chain, shrinking(kappa), mu, context.seed)
        parts[name] = exceeds(far, allowed, what="A₁ against (43)")
        parts[f"{name}, in closed form"] = equal(
            far, (1 - (1 - kappa) ** (nodes - 1)) ** 2, what="(1 - (1 - κ)^(M-1))²", tolerance=1e-6
        )
        parts[f"{name}, lemma 5's own ∇f̂"] = equal(
            distance(chain, straight(shrinking(kappa)), mu, context.seed), 0.0, what="‖∇f - ∇f̂‖²"
        )
    return everything_holds(parts)


_TURNED = math.pi
_UNBOUNDED_KAPPA = 0.01
_CONSTANT = _TURNED / (1 - (1 - _UNBOUNDED_KAPPA) ** 2)
"""``K`` such that what is left of it, ``(1 - κ)²K``, is half a turn from K."""


def check_line_43_unbounded(context: Context) -> Outcome:
    """Show that a constant in the first stage takes the distance past (43), of which no constant of assumption 6 knows."""
    kappa, mu, parts = _UNBOUNDED_KAPPA, 1e-6, {}
    turned = Chain((Stage(_CONSTANT, 0, 1),) * 3, lambda x: _CONSTANT + x, lambda a, x: a + x, torch.cos)
    far = distance(turned, shrinking(kappa), mu, context.seed)
    for squared in (2.0, 4.0):  # L_S² as a Lipschitz constant, and that of a chain with |x_i| <= 1
        # C = √2, and L = 2 and 3 for the cosine of two and of three numbers.
        psi = max((1 + 2 * 2) * 2**2 * kappa**2, 2 * 3**2 + 2 * 2)
        allowed = printed_34(mu, 3, 3.0, 6 * kappa**2 * squared * psi)
        parts[f"L_S² = {squared:g}"] = exceeds(far, allowed, what="A₁ against (43)", factor=3)
    return everything_holds(parts)


# -- (34) -------------------------------------------------------------------------------------------------------------


def check_line_34(context: Context) -> Outcome:
    """Compare ``‖∇f_μ - ∇f̂_μ‖²`` of two nodes with the corrected (34), in which no μ is left."""
    parts = {}
    # (chain, C_S₁, L_S₁, L₂, C_R)
    cases = {
        "x₁ handed on": (passing(2), 1.0, 1.0, 0.0, 1.0),
        "a sine": (behind(), 1.0, _LEVEL + 1, 1.0, 1.0),
    }
    for (name, (chain, *constants)), (how, compressor), kappa, mu in itertools.product(
        cases.items(), (("(1 - κ)a", shrinking), ("a - κ sin a", waving)), (0.001, 0.01, 0.5), (1e-4, 0.3)
    ):
        parts[f"{name}, C = {how}, κ = {kappa:g}, μ = {mu:g}"] = at_most(
            distance(chain, compressor(kappa), mu, context.seed),
            corrected_34(kappa, kappa, *constants),
            what=f"A₁ of {name}",
        )
    return everything_holds(parts)


def check_two_gradients(context: Context) -> Outcome:
    """Show that a smooth compressor does not make (34) true: its second term takes lemma 4's ``∇f̂``, its third the true one."""
    kappa, mu, chain = 0.1, 1e-4, passing(2)
    far = distance(chain, shrinking(kappa), mu, context.seed)
    return everything_holds(
        {
            "A₁": exceeds(far, printed_34(mu, 2, 1.0, 0.0), what="A₁ against (34), L₂ = 0", factor=1000),
            "A₁ = κ²": equal(far, kappa**2, what="measured", tolerance=1e-6),
            "lemma 4's own ∇f̂": equal(
                distance(chain, straight(shrinking(kappa)), mu, context.seed), 0.0, what="‖∇f - ∇f̂‖²"
            ),
        }
    )


_SPEC = CodecSpec(4)
_LARGEST = 1.0


def _arrived(values: Tensor) -> Tensor:
    """Return activations behind the shipped codec, beside one that is larger than all of them."""
    return received(torch.cat([torch.tensor([_LARGEST], dtype=torch.float64), values]), _SPEC)[1:]


def check_rounded_gap(_context: Context) -> Outcome:
    """Compare ``|∇f̂ - ∇f̂_μ|`` at the border of two grid values, for f the second activation itself, with (15) for it.

    There ``f̂`` jumps by a step ``s``, so ``∇f̂_μ = s/(μ√2π)`` up to the tails; the proof's ``∇f̂`` is 1. ``κ < 1`` for two
    activations, whatever they are.
    """
    border = 0.5 / 7
    below, above = _arrived(torch.tensor([border - 1e-9, border + 1e-9], dtype=torch.float64)).tolist()
    jump = above - below
    parts = {"a step of the shipped codec": equal(jump, 1 / 7, what="jump")}
    for mu in (1e-2, 1e-3, 1e-4):
        smoothed = jump / mu * float(norm.pdf(0.0))
        parts[f"μ = {mu:g}"] = exceeds(
            abs(smoothed - 1.0), smoothing_bounds(1, mu, 1.0)["gradient"], what="|∇f̂_μ - ∇f̂|", factor=10
        )
    radii = [1e-3, 5e-4, 2.5e-4]
    u = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    weights = torch.exp(-u * u / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    slopes = [float(weights @ (u * _arrived(border + mu * u))) / mu for mu in radii]
    parts["order"] = equal(fitted_slope(radii, slopes), -1.0, what="exponent of μ in ∇f̂_μ", tolerance=1e-3)
    return everything_holds(parts)


# -- faults -----------------------------------------------------------------------------------------------------------

_CHAINS = "proofs_checks.sparq.chains"
_BOUND = f"{_CHAINS}:distance_bound"


def _stages(name: str, change: Callable[[Stage], Stage]) -> Fault:
    """Return a fault by which the bound is that of stages with other constants."""
    return called_with(
        _BOUND, name, chain=lambda chain: replace(chain, stages=tuple(map(change, chain.stages)))
    )


@planted(_BOUND, "errors that do not pass on")
def _errors_that_stay(shipped, chain, kappa, tilt):
    before, stages = 0.0, []
    for stage in chain.stages:  # what passes on is taken off the output that an error comes of
        stages.append(replace(stage, output=stage.output - stage.gain * before))
        before = stage.output
    return shipped(replace(chain, stages=tuple(stages)), kappa, tilt)


@planted(f"{_CHAINS}:Chain.gradient", "one split point for all")
def _first_only(shipped, self, x, compress):
    calls = itertools.count()
    return shipped(self, x, lambda a: a if next(calls) else compress(a))


CHECKS: Checks = {
    "sparq-eq-34-needs-a-smooth-compressor": (
        corrected(
            check_line_34,
            called_with(
                f"{_CHAINS}:corrected_34", "a compressor's slope left out", tilt=lambda tilt: 0 * tilt
            ),
            called_with(f"{_CHAINS}:corrected_34", "an exact activation", kappa=lambda kappa: 0 * kappa),
            scaled(f"{_CHAINS}:corrected_34", 100, "a hundred times the bound"),
        ),
        counterexample(
            check_two_gradients,
            Fault(
                "an uncompressed chain",
                f"{_CHAINS}:Chain.gradient",
                lambda shipped, self, x, *_: shipped(self, x, lambda a: a),
            ),
        ),
        counterexample(check_rounded_gap, rounding_up),
    ),
    "sparq-eq-43-premises": (
        corrected(
            check_line_43,
            _errors_that_stay,
            called_with(
                _BOUND,
                "a criterion's slope at the exact activation",
                chain=lambda chain: replace(chain, bent=0.0),
            ),
            called_with(_BOUND, "a compressor's slope left out", tilt=lambda tilt: 0 * tilt),
            _stages("stages' slopes at the exact activation", lambda stage: replace(stage, bend=0.0)),
            _stages("parameters' slopes at the exact activation", lambda stage: replace(stage, twist=0.0)),
            scaled(_BOUND, 20, "twenty times the bound"),
        ),
        counterexample(check_errors_pass, _first_only),
        counterexample(
            check_line_43_unbounded,
            called_with(
                f"{_CHAINS}:shrinking", "a compressor ten times as good", kappa=lambda kappa: kappa / 10
            ),
        ),
    ),
}
