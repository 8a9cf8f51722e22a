"""Quantized weights: what training in low bits does to them, beside roundings written out with NumPy.

Uniforms are handed to the shipped update in even steps, so that a mean over them is exact where changes are multiples of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from costmodel.formats import QuantFormat
from costmodel.formats.low_bits import QuantConfig
from executors.low_bits.grids import grid_of
from executors.low_bits.linear import QuantizedLinear, quantize_layers
from executors.low_bits.quantized import QuantizedTensor, SidePath
from executors.low_bits.stored import UpdateCounts
from executors.randomness.rounded import RoundingUniforms, rounding_key
from proofs_checks.exact import equal, exceeds, is_true, within
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted
from proofs_checks.statistics import compare_means
from zosim.plans import LowBits

_CPU = torch.device("cpu")
_NUM_UNIFORMS = 256


def weights_of(levels: Tensor, scale: float, bits: int) -> QuantizedTensor:
    """Return quantized weights of 4 or 8 bits with one scale; `levels` are the quantized values as whole numbers, shape (outputs, inputs)."""
    quantized = QuantizedTensor.empty(
        QuantConfig("int4" if bits == 4 else "int8", "tensor"), levels.shape, _CPU
    )
    quantized.scales.fill_(scale)
    whole = levels.to(torch.int64)
    if bits == 4:  # the first half of a row in the low bits of its bytes, the rest in the high ones
        half = -(-whole.shape[1] // 2)
        whole = torch.nn.functional.pad(whole, (0, 2 * half - whole.shape[1])) & 15
        whole = whole[:, :half] | (whole[:, half:] << 4)
    quantized.qvalues.copy_(whole & 255)
    return quantized


def levels_of(quantized: QuantizedTensor) -> Tensor:
    """Return the quantized values of such weights as signed numbers."""
    qvalues, bits = quantized.qvalues.to(torch.int64), quantized.quant_config.container_bits
    if bits == 4:
        qvalues = torch.cat([qvalues & 15, qvalues >> 4], 1)[:, : quantized.shape[1]]
    return torch.where(qvalues >= 2 ** (bits - 1), qvalues - 2**bits, qvalues).double()


def moves(
    levels: Sequence[int],
    perturbation: Sequence[float],
    *,
    scale: float,
    factor: float,
    bits: int,
    counted: UpdateCounts | None = None,
) -> Tensor:
    """Return how the shipped update changes quantized values, shape (uniforms, elements), over uniforms in even steps."""
    before = torch.tensor(levels, dtype=torch.float64).expand(_NUM_UNIFORMS, -1)
    quantized = weights_of(before, scale, bits)
    steps = (torch.arange(_NUM_UNIFORMS, dtype=torch.float32) + 0.5) / _NUM_UNIFORMS
    uniforms = steps[:, None].expand(before.shape).reshape(-1)
    along = torch.tensor(perturbation, dtype=torch.float32).expand(before.shape).contiguous()
    quantized.apply(along, factor, lambda begin, end: uniforms[begin:end].clone(), counted=counted)
    return levels_of(quantized) - before


FLOATS: Mapping[QuantFormat, tuple[int, int, int]] = {
    "float8_e4m3": (4, 3, 0x7E),
    "float8_e5m2": (5, 2, 0x7B),
    "float4_e2m1": (2, 1, 0x7),
}
"""Bits of exponent and mantissa, and the stored largest number, by format."""


def literal_levels(name: QuantFormat) -> list[float]:
    """Return what quantized values stand for, in ascending order: two's complement, or sign, exponent and mantissa with subnormal numbers."""
    if name not in FLOATS:
        highest = 2 ** (int(name.removeprefix("int")) - 1) - 1
        return [float(qvalue) for qvalue in range(-highest, highest + 1)]
    exponent_bits, mantissa_bits, largest = FLOATS[name]
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for qvalue in range(largest + 1):
        exponent, mantissa = divmod(qvalue, 2**mantissa_bits)
        part = mantissa / 2**mantissa_bits
        values.append(2.0 ** (exponent - bias) * (1 + part) if exponent else 2.0 ** (1 - bias) * part)
    return sorted({*values, *(-value for value in values)})


def check_grids(context: Context) -> Outcome:
    """Compare roundings of every format with a list of its values: the nearest, both neighbours on average, their variance, bytes and back."""
    generator, parts = np.random.default_rng(context.seed), {}
    for name in (*(f"int{bits}" for bits in range(2, 9)), *FLOATS):
        levels = np.array(literal_levels(name), dtype=np.float64)  # type: ignore[arg-type]
        grid = grid_of(name)
        high = levels[-1]
        between = (levels[:-1] + levels[1:]) / 2
        numbers = np.concatenate(
            [levels, between[::3], generator.normal(size=60) * high / 3, [1.4 * high, -2 * high]]
        )
        clamped = numbers.clip(-high, high)
        above = np.searchsorted(levels, clamped).clip(1, len(levels) - 1)
        low, up = levels[above - 1], levels[above]
        given = torch.from_numpy(numbers)
        steps = ((torch.arange(_NUM_UNIFORMS, dtype=torch.float64) + 0.5) / _NUM_UNIFORMS)[:, None]
        uniforms = steps.repeat(1, len(numbers))
        sampled = grid.at_random(given.expand(_NUM_UNIFORMS, -1).clone(), uniforms).double().numpy()
        far = np.abs(sampled - clamped)[np.abs(sampled - low) * np.abs(sampled - up) > 0]
        gap = up - low
        parts[f"{name}, neighbours"] = is_true(
            not far.size, what="no number between or beyond two neighbours"
        )
        off = np.abs(sampled.mean(0) - clamped) / gap
        parts[f"{name}, mean"] = within(float(off.max()), 0.5 / _NUM_UNIFORMS, what="of a step", slack=1e-6)
        declared = grid.variance(given).double().numpy()
        parts[f"{name}, variance"] = equal(
            declared / gap**2, (clamped - low) * (up - clamped) / gap**2, what="of a step"
        )
        nearest = grid.nearest(given.clone()).double()
        wanted = np.where(clamped - low < up - clamped, low, up)
        ties = np.isclose(clamped - low, up - clamped, rtol=1e-12)
        parts[f"{name}, nearest"] = is_true(
            bool((nearest.numpy() == wanted)[~ties].all())
            and bool(np.isin(nearest.numpy()[ties], levels).all()),
            what=f"of {len(numbers)} numbers",
        )
        again = grid.values(grid.symbols(torch.from_numpy(levels).float())).double()
        parts[f"{name}, bytes and back"] = equal(
            again, torch.from_numpy(levels), what="values", tolerance=0.0
        )
    return everything_holds(parts)


def _between(uniforms: Tensor, begin: int, end: int) -> Tensor:
    """Return the uniforms of some elements."""
    return uniforms[begin:end]


def check_moves_on_a_lattice(context: Context) -> Outcome:
    """Run equation 15 on shipped quantized values, w* between two: the gradient stays at half a grid step, value by value as by hand."""
    d, num_steps = 4, context.samples(1500, 300)
    generator, target = np.random.default_rng(context.seed), np.full(4, 0.5)
    quantized = weights_of(torch.full((1, d), 3.0), 1.0, 8)
    by_hand, free = np.full(d, 3.0), np.full(d, 3.0)
    smallest, unlike = math.inf, 0
    for step in range(num_steps):
        rate, u = 1 / (8 + step / 4), generator.normal(size=d).astype(np.float32)
        uniform = generator.random(size=d, dtype=np.float32)
        factor = rate * float((by_hand - target) @ u)
        given = torch.from_numpy(uniform.copy())
        quantized.apply(torch.from_numpy(u)[None], factor, partial(_between, given))
        change = u * np.float32(factor)
        by_hand -= np.copysign(np.floor(np.abs(change) + uniform), change)
        by_hand = by_hand.clip(-127, 127)
        free -= rate * float((free - target) @ u) * u
        qvalues = levels_of(quantized)[0].numpy()
        unlike += int((qvalues != by_hand).sum())
        smallest = min(smallest, float(np.abs(qvalues - target).min()))
    return everything_holds(
        {
            "grid values, step by step": equal(float(unlike), 0.0, what="unlike those by hand"),
            "least |∂L/∂w_i| of any step": equal(smallest, 0.5, what="at a scale of 1"),
            "full precision": is_true(
                float(np.abs(free - target).max()) < 0.2,
                what=f"nearer than half a grid step after {num_steps} steps",
            ),
        }
    )


def check_step_by_weights(_context: Context) -> Outcome:
    """Compare the mean change of shipped quantized values, a step by weights, with ``(η/s_w²)·∇_w̄L``, the derivative by quantized values."""
    parts = {}
    qvalues, slope, curvature, rate = np.array([3.0, -5.0]), np.array([0.75, -1.25]), 1.5, 1 / 32
    for scale in (0.25, 0.5, 2.0):
        target = scale * qvalues - slope / curvature

        def loss(at: np.ndarray, scale: float = scale, target: np.ndarray = target) -> float:
            return float(curvature * ((scale * at - target) ** 2).sum() / 2)

        by_qvalues = [(loss(qvalues + e) - loss(qvalues - e)) / 2 for e in np.eye(2)]
        wanted = [-rate / scale**2 * each for each in by_qvalues]
        updated = moves([3, -5], slope.tolist(), scale=scale, factor=rate, bits=8)
        parts[f"s_w = {scale:g}"] = equal(updated.mean(0), wanted, what="E[w̄₁ - w̄₀]")
    return everything_holds(parts)


def check_moves_within(_context: Context) -> Outcome:
    """Compare the mean change of shipped quantized values of 4 bits with the update in quantized values, where no value reaches the end."""
    counted = UpdateCounts()
    updates = (0.25, -1 / 256, 2.75, -5.25)
    updated = moves([0, 1, -2, 1], updates, scale=0.5, factor=0.5, bits=4, counted=counted)
    return everything_holds(
        {
            "mean": equal(updated.mean(0), [-update for update in updates], what="E[w̄₁ - w̄₀]"),
            "spread": is_true(
                bool(((updated + torch.tensor(updates)).abs() < 1).all()), what="every change is a neighbour"
            ),
            "counted": equal(float(counted.saturated), 0.0, what="held back at the end"),
        }
    )


def check_moves_at_the_ends(_context: Context) -> Outcome:
    """Show that shipped quantized values at the ends of 4 bits stay there on average, and move inwards alone."""
    counted = UpdateCounts()
    outwards = moves([7, -7], (-0.5, 0.5), scale=0.5, factor=0.5, bits=4, counted=counted)
    inwards = moves([7, -7], (0.5, -0.5), scale=0.5, factor=0.5, bits=4)
    return everything_holds(
        {
            "outwards": equal(outwards.mean(0), [0.0, 0.0], what="E[w̄₁ - w̄₀]"),
            "inwards": equal(inwards.mean(0), [-0.5, 0.5], what="E[w̄₁ - w̄₀]"),
            "held back": equal(float(counted.saturated), float(_NUM_UNIFORMS), what="of two by 256 uniforms"),
        }
    )


def check_moves_by_perturbation(context: Context) -> Outcome:
    """Compare mean and variance of shipped updates, rounded once and for each of three perturbations, with theory."""
    pieces, count = (19 / 64, -29 / 64, 9 / 64), context.samples(1_000_000, 380_000)
    uniforms = RoundingUniforms([count], _CPU)

    def updated(updates: Sequence[float]) -> Tensor:
        quantized = weights_of(torch.zeros((count, 1)), 1.0, 8)
        for perturbation, update in enumerate(updates):
            key = rounding_key(context.seed, 0, perturbation, "update")
            along = torch.full((count, 1), update)
            quantized.apply(along, 1.0, partial(uniforms.between, parameter=0, key=key))
        return levels_of(quantized)

    def spread(value: float) -> float:
        part = value - math.floor(value)
        return part * (1 - part)

    total = sum(pieces)
    once, each = updated([total]), updated(pieces)
    columns = torch.cat([once, (once + total) ** 2, each, (each + total) ** 2], 1)
    expected = [-total, spread(total), -total, sum(map(spread, pieces))]
    in_steps = torch.tensor([1.0, expected[1], 1.0, expected[3]], dtype=torch.float64)
    return compare_means(
        "once; for every perturbation",
        columns,
        torch.tensor(expected, dtype=torch.float64),
        scale=in_steps,
        along=False,
    )


def check_side_path_quantized(_context: Context) -> Outcome:
    """Compare outputs of a shipped layer of 4 bits, a perturbation beside its quantized values, with the sum in float64; quantized values stay.

    The smallest multiple is that of ε = 1e-5 beside a scale of 0.02; the largest takes every weight beyond the range of quantized values.
    """
    scale, layer = 0.02, torch.nn.Linear(6, 4, bias=False)
    quantize_layers([torch.nn.Sequential(layer)], LowBits(weights="int4"), _CPU)
    assert isinstance(layer, QuantizedLinear)
    generator = np.random.default_rng(6)
    levels = generator.integers(-7, 8, size=(4, 6))
    levels[0, :2] = 7, -7
    qvalues, inputs = generator.integers(-7, 8, size=(4, 6)), generator.normal(size=(5, 6)).astype(np.float32)
    layer.quantized = weights_of(torch.from_numpy(levels), scale, 4)
    kept = layer.quantized.qvalues.clone()
    base, along = inputs @ (scale * levels).T, inputs @ qvalues.T
    parts = {}
    for multiple in (1e-5, 1e-3, 0.3):
        outputs = []
        for sign in (1, -1):
            layer.side_path = SidePath(torch.from_numpy(qvalues).to(torch.int8), sign * multiple)
            with torch.no_grad():
                outputs.append(layer(torch.from_numpy(inputs)).double())
        parts[f"difference at {multiple:g}"] = equal(
            (outputs[0] - outputs[1]) / (2 * multiple), torch.from_numpy(along), what="û·x", tolerance=5e-3
        )
        parts[f"mean at {multiple:g}"] = equal(
            (outputs[0] + outputs[1]) / 2, torch.from_numpy(base), what="Q(W)·x", tolerance=1e-5
        )
        parts[f"grid values after {multiple:g}"] = is_true(
            torch.equal(layer.quantized.qvalues, kept) and float(layer.quantized.scales) == np.float32(scale),
            what="as they were, the ends among them",
        )
    parts["it acts"] = exceeds(float(np.abs(along).max()), 1.0, what="|û·x|")
    return everything_holds(parts)


# -- faults ------------------------------------------------------------------------------------------------------

_APPLY = "executors.low_bits.quantized:QuantizedTensor.apply"


def updated_by_uniforms(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes what decides about each quantized value."""

    @planted(_APPLY, name)
    def fault(shipped, self, perturbation, factor, uniforms, **named):
        shipped(self, perturbation, factor, lambda *ends: change(uniforms(*ends)), **named)

    return fault


def updated_by_factor(name: str, multiple: float) -> Fault:
    """Return a fault that multiplies a step."""

    @planted(_APPLY, name)
    def fault(shipped, self, perturbation, factor, uniforms, **named):
        shipped(self, perturbation, multiple * factor, uniforms, **named)

    return fault


def perturbed_then(name: str, change: Callable[[Tensor, QuantizedTensor], object]) -> Fault:
    """Return a fault that does something with perturbed weights, and the quantized values that they were made of."""

    @planted("executors.low_bits.linear:QuantizedLinear.forward", name)
    def fault(shipped, self, input):  # noqa: A002 - torch's name
        def add_to(weight):
            self.side_path.add_to(weight)
            change(weight, self.quantized)

        side_path = self.side_path and SimpleNamespace(add_to=add_to)
        return shipped(altered(self, side_path=side_path), input)

    return fault


UPDATE_NEAREST = updated_by_uniforms(
    "updates rounded to the nearest quantized value", lambda uniforms: torch.full_like(uniforms, 0.5)
)
UPDATE_UNIFORMS = updated_by_uniforms("uniforms 3 % high", lambda uniforms: 1.03 * uniforms)
MOVE_AWAY = updated_by_factor("an update away from the minimum", -1)
MOVE_AS_PRINTED = called_with(
    _APPLY,
    "the paper's equation 12: a step by quantized values, not by weights",
    self=lambda it: altered(it, scales=it.scales.reciprocal()),
)
MOVE_LONG = updated_by_factor("a step that is 3 % long", 1.03)
CLAMP_WIDE = called_with(
    "executors.low_bits.grids:Grid.clamped",
    "a clamp one value too far",
    self=lambda it: altered(it, high=it.high + 1),
)
ONE_UNIFORM = called_with(
    "executors.randomness.rounded:rounding_key", "one uniform number for all perturbations", perturbation=0
)
STORED = perturbed_then(
    "perturbed weights stored in their own few bits",
    lambda weight, quantized: weight.div_(quantized.scales).round_().clamp_(-7, 7).mul_(quantized.scales),
)
STORED_BACK = perturbed_then(
    "a perturbation that is written back", lambda weight, quantized: quantized.encode(weight)
)
SIDE_PATH_LONG = called_with(
    "executors.low_bits.quantized:SidePath.add_to",
    "a perturbation that is 3 % long",
    self=lambda it: it._replace(factor=1.03 * it.factor),
)
SAME_KEY = Fault(
    "one rounding for both copies of a perturbation",
    "executors.randomness.rounded:_KEYS",
    lambda keys: {**keys, "second perturbation": keys["perturbation"]},
)
SAMPLED_LONG = called_with(
    "executors.randomness.rounded:RoundedSampler._levels",
    "a perturbation that is 3 % long",
    numbers=lambda numbers: numbers.mul_(1.03),
)
SAMPLED_NEAREST = called_with(
    "executors.low_bits.grids:Integers.at_random",
    "perturbations rounded to the nearest",
    uniforms=lambda uniforms: uniforms.fill_(0.5),
)
ROUNDED_DOWN = Fault(
    "grid values rounded down",
    "executors.low_bits.grids:Grid.nearest",
    lambda _shipped, self, numbers: self.below(self.clamped(numbers)),
)
UNIFORMS_BETWEEN = called_with(
    "executors.low_bits.grids:Grid.at_random",
    "uniforms 3 % high between floats",
    uniforms=lambda uniforms: 1.03 * uniforms,
)
