"""What SparQ assumes of a compressor, of the codecs that are really used, and what they do to a projected gradient."""

from __future__ import annotations

import itertools
import math
from copy import copy
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from costmodel.formats.codecs import ENCODINGS, CodecSpec, Grid, Scope
from executors.codecs import codec_of, decode
from executors.codecs.encodings import Symbols
from executors.codecs.fidelity import received, relative_error
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import at_most, equal
from proofs_checks.faults import nearest, short_grid
from proofs_checks.oracles.boundaries import codec_gradient_variance
from proofs_checks.outcomes import Context, Outcome, everything_holds, worst
from proofs_checks.planting import Fault, called_with, planted, returning
from proofs_checks.statistics import compare_means, compare_two_points, fitted_slope

BITS = tuple(range(1, 9))
GRIDS: tuple[Grid, ...] = ("symmetric", "affine-zero", "affine")
SCOPES: tuple[Scope, ...] = ("tensor", "token", "channel")
_CPU = torch.device("cpu")

Array32 = npt.NDArray[np.float32]


def _activation(rows: int, columns: int, seed: int, *, gate: float = 0.5) -> Tensor:
    """Return normals, of which those below `gate` are 0, as after a biased ReLU."""
    values = torch.randn((rows, columns), generator=generator_on(_CPU, seed), dtype=torch.float64)
    return values * (values > gate)


def check_stochastic(context: Context) -> Outcome:
    """Compare the mean of what messages are decoded to with the tensor, for every grid, scope and number of bits."""
    outcomes = []
    given = torch.linspace(0.05, 1.7, 12, dtype=torch.float64).view(3, 4) ** 1.5
    given[0, 0] = 0.0
    # Repeated rows share their grids, whatever the scope: one message holds all samples.
    repeated = given.repeat(context.samples(60_000, 10_000), 1)
    cases = list(itertools.product(BITS, GRIDS, SCOPES))
    for number, (bits, grid, scope) in enumerate(cases):
        spec = CodecSpec(bits, grid, "stochastic", scope)
        message = codec_of(spec).encode(repeated, generator_on(_CPU, context.seed + number))
        sampled = decode(message, shape=repeated.shape).reshape(-1, given.numel())
        outcomes.append(compare_two_points(spec.name, sampled, given.reshape(-1)))
    return worst(outcomes)


def check_contraction(context: Context) -> Outcome:
    """Compare the error of rounding to the nearest with ``‖x‖² - Σ max²``, for tensors that are hard on it."""
    ratio, name = 0.0, ""
    for seed in range(context.seed, context.seed + context.samples(60, 8)):
        for bits, scope in itertools.product(BITS[1:], SCOPES):
            for kind, tensor in _hard_tensors(seed):
                spec = CodecSpec(bits, "symmetric", scope=scope)
                squared = (received(tensor, spec) - tensor).square().sum()
                largest = _largest_by_group(tensor, scope)
                bound = tensor.square().sum() - largest.square().sum()
                share = float(squared / bound) if float(bound) else float(squared > 0)
                if share > ratio:
                    ratio, name = share, f"{spec.name}, {kind}"
    return at_most(ratio, 1.0, what=f"‖x - C(x)‖² against its bound, closest with {name}", slack=1e-6)


def _hard_tensors(seed: int) -> list[tuple[str, Tensor]]:
    normals = torch.randn((6, 9), generator=generator_on(_CPU, seed), dtype=torch.float64)
    one_large = normals.clone()
    one_large[2, 3] = 1e4
    return [
        ("normals", normals),
        ("cubes", normals**3),
        ("an outlier", one_large),
        ("a ReLU", normals.clamp(min=0)),
    ]


def _largest_by_group(tensor: Tensor, scope: Scope) -> Tensor:
    if scope == "tensor":
        return tensor.abs().amax()
    return tensor.abs().amax(dim=1 if scope == "token" else 0)


def check_expansion(context: Context) -> Outcome:
    """Compare the squared error of stochastic rounding with ``Σ f(1 - f)s²``; with 2 bits, also κ with 1."""
    outcomes, lines, kappas = [], [], []
    given = torch.randn((16, 64), generator=generator_on(_CPU, context.seed), dtype=torch.float64)
    count = context.samples(4000, 600)
    for number, bits in enumerate(BITS[1:]):
        spec = CodecSpec(bits, rounding="stochastic")
        step = given.abs().max() / (2 ** (bits - 1) - 1)
        cells = given / step
        fraction = cells - cells.floor()
        expected = (fraction * (1 - fraction)).sum() * step**2
        generator = generator_on(_CPU, context.seed + number)
        # Repeated rows share their grid: one message holds all samples.
        errors = received(given.repeat(count, 1), spec, generator) - given.repeat(count, 1)
        squared = errors.view(count, -1).square().sum(1, keepdim=True)
        outcomes.append(compare_means(spec.name, squared, expected[None]))
        random, nearest = (
            float((expected / given.square().sum()).sqrt()),
            relative_error(given, CodecSpec(bits)),
        )
        kappas.append(random)
        lines.append(
            f"{bits} bits: κ = {random:.3f} at random, {nearest:.3f} to the nearest, of {given.numel()} normals"
        )
    outcome = worst(outcomes)
    statistic = outcome.statistic if kappas[0] > 1 else math.inf
    return replace(outcome, statistic=statistic, details=(*outcome.details, *lines))


def literal_values(tensor: Array32, bits: int) -> Array32:
    """Return what is left of a matrix on ``2^bits`` values in even steps from its least to its largest."""
    wide = np.float32
    least = tensor.min()
    step = max((tensor.max() - least) / wide(2**bits - 1), np.finfo(wide).tiny)
    return np.asarray(np.rint((tensor - least) / step) * step + least)


def check_lossless(context: Context) -> Outcome:
    """Count elements that an encoding brings back otherwise than they are quantized with NumPy, bit for bit."""
    wrong = 0
    for seed in range(context.seed, context.seed + context.samples(20, 3)):
        for bits, encoding, gate in itertools.product(BITS, ENCODINGS, (-9.0, 0.0, 1.5, 9.0)):
            spec = CodecSpec(bits, "affine-zero" if gate >= 0 else "affine", encoding=encoding)
            tensor = _activation(7, 37, seed, gate=gate).float()
            came = decode(codec_of(spec).encode(tensor)).numpy()
            wrong += int((came.view(np.uint32) != literal_values(tensor.numpy(), bits).view(np.uint32)).sum())
    return Outcome(float(wrong), 0.0, "elements that differ")


class _BoundaryLayer:
    """A layer before a split point, ``a(θ) = relu(θx)``, and a linear rest ``w·a`` after it, along one perturbation."""

    def __init__(self, seed: int) -> None:
        generator = generator_on(_CPU, seed)
        weights, z, x, self.w = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((256, 16), (256, 16), (16,), (256,))
        )
        self.activation, self.slope = weights @ x, z @ x

    def at(self, shift: float) -> Tensor:
        """Return the activation at ``θ + shift·z``, as one row."""
        return (self.activation + shift * self.slope).clamp(min=0)[None]


_RADII = ((False, 1e-3), (False, 0.5), (True, 0.03), (True, 0.5))
"""Whether both points use the same random numbers, and ε: then their grid values differ rarely at the usual 1e-3, too rarely to know by how much."""


def check_gradient_noise(context: Context) -> Outcome:
    """Compare mean and variance of a projected gradient through stochastic rounding with theory, by random numbers.

    The variance in two parts: what single elements vary by, whose sum hardly varies from message to message, and what pairs of them
    vary together by, which is nothing.
    """
    outcomes, lines = [], []
    layer, count = _BoundaryLayer(context.seed), context.samples(60_000, 8_000)
    for (shared, epsilon), bits in itertools.product(_RADII, (2, 4, 8)):
        plus, minus = layer.at(epsilon), layer.at(-epsilon)
        true = float((plus - minus)[0] @ layer.w) / (2 * epsilon)
        spec = CodecSpec(bits, rounding="stochastic")
        variance = codec_gradient_variance(
            layer.w.tolist(),
            plus[0].tolist(),
            minus[0].tolist(),
            step_plus=float(plus.max()) / (2 ** (bits - 1) - 1),
            step_minus=float(minus.max()) / (2 ** (bits - 1) - 1),
            epsilon=epsilon,
            random_numbers="shared" if shared else "independent",
        )
        errors = _gradient_errors(layer, plus, minus, spec, context.seed, count, shared=shared) / (
            2 * epsilon
        )
        alone, off = errors.square().sum(1), errors.sum(1)
        columns = torch.stack([off, alone, off**2 - alone], dim=1)
        how = f"ε = {epsilon:g}, {bits} bits, {'the same random numbers' if shared else 'independent ones'}"
        expected = torch.tensor([0.0, variance, 0.0], dtype=torch.float64)
        scale = torch.tensor([variance**0.5, variance, variance], dtype=torch.float64)
        outcomes.append(compare_means(how, columns, expected, scale=scale, along=False))
        lines.append(f"{how}: deviation {variance**0.5:.3g} of a gradient of {true:.3g}")
    outcome = worst(outcomes)
    return replace(outcome, details=(*outcome.details, *lines))


def check_gradient_noise_orders(_context: Context) -> Outcome:
    """Fit how the deviation that samples are compared with grows as ε falls: as 1/ε, or as 1/√ε with the same numbers."""
    layer, parts, radii = _BoundaryLayer(0), {}, [1e-6, 1e-5, 1e-4]
    cases: tuple[tuple[Literal["independent", "shared"], float], ...] = (
        ("independent", -1.0),
        ("shared", -0.5),
    )
    for numbers, order in cases:
        deviations = []
        for epsilon in radii:
            plus, minus = layer.at(epsilon)[0], layer.at(-epsilon)[0]
            variance = codec_gradient_variance(
                layer.w.tolist(),
                plus.tolist(),
                minus.tolist(),
                step_plus=float(plus.max()),
                step_minus=float(minus.max()),
                epsilon=epsilon,
                random_numbers=numbers,
            )
            deviations.append(variance**0.5)
        parts[str(numbers)] = equal(
            fitted_slope(radii, deviations), order, what="exponent of ε", tolerance=1e-3
        )
    return everything_holds(parts)


def _gradient_errors(
    layer: _BoundaryLayer,
    plus: Tensor,
    minus: Tensor,
    spec: CodecSpec,
    seed: int,
    count: int,
    *,
    shared: bool,
) -> Tensor:
    """Return what roundings add to ``w·(a⁺ - a⁻)``, by sample and element, shape (count, elements); all rows of a message share a grid."""
    first, second = (
        received(a.repeat(count, 1), spec, generator_on(_CPU, number)) - a
        for a, number in ((plus, seed), (minus, seed if shared else seed + 1))
    )
    return (first - second) * layer.w


def check_blindness(context: Context) -> Outcome:
    """Compare a projected gradient through the nearest grid values, at a tiny ε, with what is left of it: the grid's own."""
    outcomes, lines = [], []
    epsilon = 1e-10
    for seed, bits in itertools.product(range(context.seed, context.seed + context.samples(20, 4)), (2, 4)):
        layer = _BoundaryLayer(seed)
        first, second = (received(layer.at(sign * epsilon), CodecSpec(bits)) for sign in (1, -1))
        measured = float((first - second)[0] @ layer.w) / (2 * epsilon)
        largest = int(layer.activation.argmax())
        levels = 2 ** (bits - 1) - 1
        step = layer.at(0.0).max() / levels
        left = float(layer.w @ (layer.at(0.0)[0] / step).round() * layer.slope[largest] / levels)
        true = float(layer.w @ (layer.slope * (layer.activation > 0)))
        lines.append(
            f"seed {seed}, {bits} bits: {measured:.4g}, of the grid alone {left:.4g}, the gradient is {true:.4g}"
        )
        outcomes.append(abs(measured - left) / abs(left))
    return Outcome(
        max(outcomes), 1e-4, "relative distance to the gradient of the grid alone", tuple(lines[:4])
    )


# -- faults -----------------------------------------------------------------------------------------------------------

_SCALED = "executors.codecs.grids:Fitted.scaled"


@planted("executors.codecs.grids:fitted", "a zero point that is off by one")
def _other_zero_point(shipped, parameters, spec):
    grids = shipped(parameters, spec)
    return replace(grids, low=grids.low - 1, high=grids.high - 1) if spec.grid == "affine-zero" else grids


@planted("executors.codecs.grids:fitted", "grid values of which the highest is cut off")
def _narrowed(shipped, parameters, spec):
    grids = shipped(parameters, spec)
    return replace(grids, low=grids.low + 1, high=grids.high - 1)


@planted("executors.codecs.grids:fit", "values quantized a step too fine")
def _finer(shipped, rows, spec, *rest):
    parameters = shipped(rows, spec, *rest)
    if spec.grid != "affine":
        return parameters
    assert spec.bits is not None
    return parameters[0], parameters[1] * (2**spec.bits - 1) / 2**spec.bits


@planted("executors.codecs.encodings:Bitmap.decode", "a bitmap's symbols from the last to the first")
def _backwards(shipped, self, payload, layout):
    out = shipped(self, payload, layout)
    kept = out != payload.background
    out[kept] = out[kept][::-1]
    return out


@planted("executors.codecs.encodings:RunLength.encode", "long runs that lose an element")
def _shortened(shipped, self, symbols):
    shorter = copy(symbols)
    shorter.gaps = symbols.gaps - (symbols.gaps > 1)
    return shipped(self, shorter)


@planted("proofs_checks.oracles.boundaries:codec_gradient_variance", "what both roundings share counted once")
def _shared_once(shipped, *args, random_numbers, **rest):
    alone = shipped(*args, **rest, random_numbers="independent")
    return (alone + shipped(*args, **rest, random_numbers=random_numbers)) / 2


CHECKS: Checks = {
    "codec-stochastic-unbiased": printed(
        check_stochastic,
        nearest,
        called_with(
            _SCALED, "an affine grid that starts at 0", self=lambda it: replace(it, offset=0 * it.offset)
        ),
        _other_zero_point,
        short_grid,
    ),
    "codec-nearest-contracts": printed(
        check_contraction,
        short_grid,
        _narrowed,
        returning(_SCALED, "rounding away from zero", lambda it: it.sign() * it.abs().ceil()),
    ),
    "codec-stochastic-expands": printed(check_expansion, nearest, short_grid),
    "codec-encodings-lossless": printed(
        check_lossless,
        _finer,
        returning(_SCALED, "grid values rounded down", lambda it: it.floor()),
        Fault(
            "packed symbols without their highest",
            "executors.codecs.encodings:Dense.decode",
            lambda shipped, self, payload, layout: np.minimum(
                shipped(self, payload, layout), 2**layout.bits - 2
            ),
        ),
        returning(
            "executors.codecs.encodings:Index.decode", "places counted one too far", lambda it: np.roll(it, 1)
        ),
        _backwards,
        _shortened,
        called_with(
            "executors.codecs.encodings:Entropy.encode",
            "entropy-coded symbols one place on",
            symbols=lambda symbols: Symbols(np.roll(symbols.values, 1), symbols.num_columns, symbols.bits),
        ),
    ),
    "codec-gradient-noise": (
        printed(check_gradient_noise, nearest, short_grid),
        printed(check_gradient_noise_orders, _shared_once),
    ),
    "codec-nearest-blind": printed(check_blindness, short_grid),
}
