"""What is kept in few bits: formats of least error, outliers, sparse perturbations, updates on every grid, on any rank.

The other side of each comparison lists a format's values, and rounds, splits and moves with NumPy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from costmodel.formats import QuantFormat, ScaleScope
from costmodel.formats.low_bits import QuantConfig
from costmodel.formats.roundings import RoundedPerturbation
from executors.low_bits.linear import QuantizedLinear, quantize_layers
from executors.low_bits.quantized import QuantizedTensor, SidePath
from executors.low_bits.stored import UpdateCounts
from executors.randomness.counter import CounterKey
from executors.randomness.rounded import (
    NonzeroRows,
    RoundedSampler,
    RoundingUniforms,
    SamplingKeys,
    rounding_key,
)
from executors.ranks.communicator import Communicator
from executors.runs.records import StepRecord
from executors.runs.session import Session
from executors.threads import SamplingThreads
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import Array, at_most, equal, exceeds, is_true, within
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted, returning, scaled
from proofs_checks.quzo.statements import enumerated_moments
from proofs_checks.setups import quantized_weights as quantized
from proofs_checks.setups.executed import Case, learning_rate
from proofs_checks.setups.placements import same_bits, tiny_batches, tiny_model
from proofs_checks.setups.ranks import on_all_ranks
from proofs_checks.setups.roundings import sampled_pair
from proofs_checks.statistics import compare_means
from zosim.plans import LowBits, Plan

_CPU = torch.device("cpu")
_GROUP = 8

# -- formats ---------------------------------------------------------------------------------------------------------

_FACTORS = tuple(1 - step / 30 for step in range(20))
"""Of the scale that spans the largest weight: what is tried for the least error, down to about a third."""


def grouped_by(weights: Array, scope: ScaleScope) -> Array:
    """Return weights with those that share a scale in a row."""
    width = {"tensor": weights.size, "channel": weights.shape[1], "group": _GROUP}[scope]
    return weights.reshape(-1, width)


def literal_values(
    weights: Array,
    name: QuantFormat,
    scope: ScaleScope,
    *,
    has_zero_point: bool = False,
    factors: Sequence[float] = (1.0,),
) -> Array:
    """Return what weights are in a format: the nearest of its values, under the scale that errs least among those given.

    - `weights`: shape (outputs, inputs).
    - `has_zero_point`: quantized values then run from 0 to the largest, and a whole number is taken off.
    - `factors`: of the scale that spans the largest weight.
    """
    grouped = grouped_by(weights, scope)
    if has_zero_point:
        levels = np.arange(2.0 ** int(name.removeprefix("int")))
        least, most = np.minimum(grouped.min(1), 0), np.maximum(grouped.max(1), 0)
        span = (most - least) / levels[-1]
        zero = np.rint(-least / span).clip(0, levels[-1])[:, None]
    else:
        levels = np.array(quantized.literal_levels(name))
        span, zero = np.abs(grouped).max(1) / levels[-1], np.zeros((len(grouped), 1))
    borders = (levels[1:] + levels[:-1]) / 2
    best, least_error = np.empty_like(grouped), np.full(len(grouped), np.inf)
    for factor in factors:
        scale = (span * factor)[:, None]
        values = (levels[np.searchsorted(borders, grouped / scale + zero)] - zero) * scale
        errors = ((values - grouped) ** 2).sum(1)
        best = np.where((errors < least_error)[:, None], values, best)
        least_error = np.minimum(errors, least_error)
    return best.reshape(weights.shape)


def shipped(weights: Array, quant_config: QuantConfig) -> QuantizedTensor:
    """Return quantized weights."""
    held = QuantizedTensor.empty(quant_config, torch.Size(weights.shape), _CPU)
    held.encode(torch.from_numpy(weights).float())
    return held


def values_of(held: QuantizedTensor) -> Array:
    """Return what quantized values stand for."""
    return held.values(torch.float32).double().numpy()


def _squared_error(values: Array, weights: Array) -> float:
    return float(((values - weights) ** 2).sum())


def _weights(seed: int) -> dict[str, Array]:
    """Return matrices of unlike shapes of distribution, each right for another format."""
    generator, shape = np.random.default_rng(seed), (24, 64)
    normal = generator.normal(size=shape)
    spiked, tiny = normal.copy(), 1e-6 * generator.normal(size=shape)
    spiked[:, 5] = 10.5
    tiny[:, 7] = 1.0
    sampled = {
        "uniform": generator.uniform(-1, 1, shape),
        "normal": normal,
        "normal, one of 10.5 deviations in a row": spiked,
        "Student's t of 2 degrees": generator.standard_t(2, shape),
        "a millionth beside 1": tiny,
    }
    # float32, as weights are read.
    return {name: values.astype(np.float32).astype(np.float64) for name, values in sampled.items()}


_CANDIDATES: Mapping[str, tuple[QuantFormat, ...]] = {
    "8 bits": ("int8", "float8_e4m3", "float8_e5m2"),
    "4 bits": ("int4", "float4_e2m1"),
}

_EXPECTED: Mapping[tuple[str, str, ScaleScope], QuantFormat] = {
    ("8 bits", "normal", "channel"): "int8",
    ("8 bits", "Student's t of 2 degrees", "tensor"): "float8_e4m3",
    ("8 bits", "a millionth beside 1", "channel"): "float8_e5m2",
    ("4 bits", "uniform", "channel"): "int4",
    ("4 bits", "normal", "tensor"): "float4_e2m1",
    ("4 bits", "normal", "group"): "int4",
}


def check_format_of_least_error(context: Context) -> Outcome:
    """Compare errors of shipped quantized values with those of lists of values, and the format of least error with that expected."""
    parts = {}
    for name, weights in _weights(context.seed).items():
        scopes: tuple[ScaleScope, ...] = ("channel", "tensor", "group")
        for scope in scopes:
            for bits, candidates in _CANDIDATES.items():
                title, errors = f"{bits}, {name}, a scale per {scope}", {}
                for each in candidates:
                    held = shipped(weights, QuantConfig(each, scope, group_elements=_GROUP))
                    errors[each] = _squared_error(values_of(held), weights)
                    literal = _squared_error(literal_values(weights, each, scope), weights)
                    parts[f"{title}, {each}"] = equal(
                        errors[each], literal, what="Σ(w - Q(w))²", tolerance=1e-3
                    )
                least = min(errors, key=lambda each: errors[each])
                if kind := _EXPECTED.get((bits, name, scope)):
                    parts[title] = is_true(least == kind, what=f"{least}, {kind} expected")
    return everything_holds(parts)


def check_scales_of_least_error(context: Context) -> Outcome:
    """Compare errors under shipped scales, those that span all and those of least error, with a search over 20 scales."""
    parts = {}
    weights = _weights(context.seed)["Student's t of 2 degrees"]
    cases: tuple[tuple[QuantFormat, bool], ...] = (
        *(("int4", False), ("int3", True), ("int8", True)),
        *(("float8_e4m3", False), ("float4_e2m1", False)),
    )
    scopes: tuple[ScaleScope, ...] = ("tensor", "channel", "group")
    for name, has_zero in cases:
        for scope in scopes:
            title, errors = f"{name}{' with a zero point' if has_zero else ''}, a scale per {scope}", []
            for fit, factors in (("range", (1.0,)), ("least-error", _FACTORS)):
                quant_config = QuantConfig(name, scope, _GROUP, has_zero, fit=fit)  # type: ignore[arg-type]
                literal = literal_values(weights, name, scope, has_zero_point=has_zero, factors=factors)
                errors.append(_squared_error(values_of(shipped(weights, quant_config)), weights))
                parts[f"{title}, {fit}"] = equal(
                    errors[-1], _squared_error(literal, weights), what="Σ(w - Q(w))²", tolerance=1e-3
                )
            parts[f"{title}, never more"] = at_most(errors[1], errors[0], what="least error against range")
    return everything_holds(parts)


# -- outliers --------------------------------------------------------------------------------------------------------


def split_errors(weights: Array, kept: Callable[[Array, QuantFormat], Array]) -> tuple[float, float]:
    """Return squared errors of int8, alone and beside the largest hundredth of each row in e4m3; `kept` says what a format keeps."""
    places = np.argsort(-np.abs(weights), axis=1)[:, : weights.shape[1] // 100]
    largest, rest = np.take_along_axis(weights, places, 1), weights.copy()
    np.put_along_axis(rest, places, 0.0, 1)
    values = kept(rest, "int8")
    np.put_along_axis(values, places, kept(largest, "float8_e4m3"), 1)
    return _squared_error(kept(weights, "int8"), weights), _squared_error(values, weights)


def check_outlier_split(context: Context) -> Outcome:
    """Compare errors of shipped quantized values, alone and beside outliers, with those of lists of values, and with each other."""
    generator, shape = np.random.default_rng(context.seed), (64, 200)
    matrices = {"normals": generator.normal(size=shape), "heavy tails": generator.standard_t(2, shape)}
    parts, ratios = {}, {}
    for name, sampled in matrices.items():
        weights = sampled.astype(np.float32).astype(np.float64)
        errors = split_errors(weights, lambda part, name: values_of(shipped(part, QuantConfig(name))))
        literal = split_errors(weights, lambda part, name: literal_values(part, name, "channel"))
        parts[f"{name}, written out"] = equal(errors, literal, what="Σ(w - Q(w))²", tolerance=1e-3)
        ratios[name] = errors[0] / errors[1]
    parts["heavy tails"] = exceeds(ratios["heavy tails"], 1.0, what="error alone, over that beside", factor=2)
    parts["normals"] = exceeds(1 / ratios["normals"], 1.0, what="error beside outliers, over that alone")
    return everything_holds(parts)


_NUM_UNIFORMS = 256


def _even_uniforms(width: int) -> Array:
    """Return uniforms in even steps, shape (256, width): those of one row are alike."""
    steps = (np.arange(_NUM_UNIFORMS, dtype=np.float32) + 0.5) / _NUM_UNIFORMS
    return np.repeat(steps[:, None], width, axis=1)


def _handed(uniforms: Array) -> Callable[[int, int], Tensor]:
    flat = torch.from_numpy(np.ascontiguousarray(uniforms)).view(-1)
    return lambda begin, end: flat[begin:end].clone()


# -- sparse perturbations -----------------------------------------------------------------------------------------------


class Sparse:
    """Perturbations of one matrix as a run draws them, in values, beside which rows are not 0.

    `shape`: outputs, which a row of zeros is one of, and inputs.
    """

    def __init__(self, rounding: RoundedPerturbation, shape: tuple[int, int], seed: int) -> None:
        shapes = [torch.Size(shape)]
        updated = NonzeroRows(rounding.sparsity, shapes, (0,), _CPU)
        rounded_sampler = RoundedSampler(rounding, shapes, updated, _CPU, SamplingThreads(1))
        self.copies = []
        for is_second in (False, True):
            qvalues = torch.empty(shapes[0].numel(), dtype=torch.int8)
            rounded_sampler.fill_counted(
                [qvalues], [0], CounterKey.of(seed, 0, 0), SamplingKeys.of(seed, 0, 0, is_second=is_second)
            )
            self.copies.append(qvalues.view(shape))
        chosen = updated.of(0, SamplingKeys.of(seed, 0, 0).rows)
        self.rows = None if chosen is None else chosen.there
        self.values = [copy.double() * rounding.unit for copy in self.copies]


def check_sparse_moments(context: Context) -> Outcome:
    """Compare moments of sparse perturbations with those of dense ones and the share of rows; elements, pairs, copies and whole estimates.

    Six elements in two rows of three make a perturbation; all are of one matrix whose rows are drawn independently.
    """
    parts = {}
    for number, (bits, kept) in enumerate(((3, 0.5), (8, 0.25))):
        rounding = RoundedPerturbation("gaussian", bits, 1 - kept)
        dense = RoundedPerturbation("gaussian", bits)
        once, product, squares = enumerated_moments(dense)
        count = context.samples(300_000, 100_000)
        sampled = Sparse(rounding, (2 * count, 3), context.seed + number)
        first, second = (values.view(count, 2, 3) for values in sampled.values)
        is_moved = (first != 0).any(2) | (second != 0).any(2)
        one, other, below = first[:, 0, 0], first[:, 0, 1], first[:, 1, 0]
        squared = first**2
        pairs = torch.stack([squared[:, :, i] * squared[:, :, j] for i, j in ((0, 1), (0, 2), (1, 2))]).mean(
            (0, 2)
        )
        along = first.sum((1, 2)) / math.sqrt(6)
        energy = along**2 * first.square().sum((1, 2))
        columns = {
            "û": (first.mean((1, 2)), 0.0),
            "û²": ((first**2).mean((1, 2)), once),
            "û₁û₂ of two roundings": ((first * second).mean((1, 2)), product),
            "û₁²û₂² of two roundings": ((first * second).square().mean((1, 2)), squares / kept),
            "products of unlike elements of a row": (one * other, 0.0),
            "products across rows": (one * below, 0.0),
            "squares of a row together": (pairs, once**2 / kept),
            "squares of unlike rows": (squared[:, 0].mean(1) * squared[:, 1].mean(1), once**2),
            "E(û·∇)û along ∇": (along**2, once),
        }
        samples = torch.stack([column for column, _ in columns.values()], 1)
        theory = torch.tensor([expected for _, expected in columns.values()], dtype=torch.float64)
        title = f"{bits} bits, {kept:.0%} of the rows"
        parts[title] = compare_means(", ".join(columns), samples, theory, along=False)
        declared = rounding.relative_energy("normalised", 6, 3) * once**2
        parts[f"{title}, E|ĝ|²"] = compare_means(
            "E|ĝ|²", energy[:, None], torch.tensor([declared], dtype=torch.float64)
        )
        shares = torch.stack([is_moved[:, 0], is_moved[:, 0] & is_moved[:, 1]], 1).double()
        # Of quantized values of 3 bits a row that is drawn may be 0 all the same; of 8 bits hardly ever.
        if bits == 8:
            parts[f"{title}, rows"] = compare_means(
                "nonzero rows, and both rows",
                shares,
                torch.tensor([kept, kept**2], dtype=torch.float64),
                along=False,
            )
        assert sampled.rows is not None
        parts[f"{title}, others are 0"] = equal(
            float(np.delete(sampled.copies[0].numpy(), sampled.rows.numpy(), 0).any()),
            0.0,
            what="not chosen, not 0",
        )
        # The uniform number that keeps a row decides no element's rounding: those of one number meet only by chance.
        kept_rows = torch.zeros(2 * count, dtype=torch.bool)
        kept_rows[sampled.rows] = True
        same = first.reshape(-1)[: 2 * count][kept_rows]
        parts[f"{title}, uniforms of their own"] = compare_means(
            "û where the row of its number is kept", same[:, None], torch.zeros(1, dtype=torch.float64)
        )
    return everything_holds(parts)


def check_sparse_updates(context: Context) -> Outcome:
    """Compare progress and noise of updates of int8 quantized values along dense and sparse perturbations: as much, and √q of it.

    A change that is small against a step moves a quantized value by one with probability of its size, so the mean square of moves is E|δ|.
    """
    parts, factor = {}, 0.2
    u = np.linspace(-9, 9, 200_001)
    for kept in (1.0, 1 / 16):
        rounding = RoundedPerturbation("gaussian", 2, 1 - kept)
        x = np.clip(u * rounding.scale, -1, 1)
        below = np.floor(x)
        mean_size = (below + 1 - x) * np.abs(below) + (x - below) * np.abs(below + 1)
        density = np.exp(-u * u / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
        size = float(density @ mean_size) / rounding.scale  # E|Q(u)| of a dense perturbation
        once, _, _ = enumerated_moments(RoundedPerturbation("gaussian", 2))
        count = context.samples(500_000, 80_000)
        sampled = Sparse(rounding, (count, 2), context.seed)
        held = quantized.weights_of(torch.zeros(count, 2), 1.0, 8)
        uniforms, key = RoundingUniforms([2 * count], _CPU), rounding_key(context.seed, 0, 0, "update")
        held.apply(
            sampled.copies[0],
            factor * rounding.unit,
            lambda begin, end, uniforms=uniforms, key=key: uniforms.between(begin, end, 0, key),  # type: ignore[misc]
            rows=sampled.rows,
        )
        updated = quantized.levels_of(held)
        columns = torch.stack(
            [(updated * sampled.values[0]).mean(1), updated.square().mean(1), updated.mean(1)], 1
        )
        expected = torch.tensor([-factor * once, factor * size * math.sqrt(kept), 0.0], dtype=torch.float64)
        parts[f"{kept:.4g} of the rows"] = compare_means(
            "progress -E[δû], noise E|δ|, mean",
            columns,
            expected,
            scale=torch.stack(
                [*expected[:2].abs(), expected[0].abs()]
            ),  # a drift is held against the progress
            along=False,
        )
    return everything_holds(parts)


# -- perturbations ------------------------------------------------------------------------------------------------------


def check_reaches(_context: Context) -> Outcome:
    """Compare the range of rounded normals, by bits, with that of least squared error of a rounding, by quadrature and search."""
    parts = {}
    u = np.linspace(-9, 9, 40_001)
    probability = np.exp(-u * u / 2) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    for bits in range(2, 9):
        highest = 2 ** (bits - 1) - 1

        def error(reach: float, highest: int = highest) -> float:
            x = np.clip(u * highest / reach, -highest, highest)
            part = x - np.floor(x)
            off = (x * reach / highest - u) ** 2 + part * (1 - part) * (reach / highest) ** 2
            return float(probability @ off)

        best = minimize_scalar(error, bounds=(0.5, 6.0), method="bounded", options={"xatol": 1e-4}).x
        parts[f"{bits} bits"] = within(
            abs(RoundedPerturbation("gaussian", bits).reach - float(best)), 0.015, what=f"from {best:.3f}"
        )
    return everything_holds(parts)


def check_moments_of_samples(context: Context) -> Outcome:
    """Compare moments of two roundings of 2 to 8 bits, as runs draw them, with quadrature over normals."""
    parts = {}
    for bits in range(2, 9):
        first, second = sampled_pair(
            RoundedPerturbation("gaussian", bits), (context.samples(1_000_000, 200_000),), context.seed + bits
        )
        columns = torch.stack([first, first**2, second**2, first * second, first**2 * second**2], 1)
        once, product, squares = enumerated_moments(RoundedPerturbation("gaussian", bits))
        expected = torch.tensor([0.0, once, once, product, squares], dtype=torch.float64)
        parts[f"{bits} bits"] = compare_means("û₁, û₁², û₂², û₁û₂, û₁²û₂²", columns, expected)
    return everything_holds(parts)


# -- updates on every grid -------------------------------------------------------------------------------------------

_QUANT_CONFIGS: tuple[tuple[QuantFormat, ScaleScope, bool], ...] = (
    ("int8", "channel", False),
    ("int8", "tensor", True),
    ("int7", "group", True),
    ("int6", "group", False),
    ("int5", "tensor", True),
    ("int4", "group", True),
    ("int4", "channel", False),
    ("int3", "channel", True),
    ("int2", "tensor", False),
    ("float8_e4m3", "channel", False),
    ("float8_e5m2", "group", False),
    ("float4_e2m1", "tensor", False),
)
_CHANGES = np.array([0.3, -0.3, 0.45, -1.25, 0.004, -0.2, 2.6, -0.7])
"""In steps of the grid where a weight lies."""

_SCALE, _DECAY = 0.37, 0.002


def check_moves_on_grids(_context: Context) -> Outcome:
    """Compare mean and variance of updates of every format with theory, over even uniforms: scales and zero points unlike 1 and 0."""
    parts = {}
    for name, scope, has_zero in _QUANT_CONFIGS:
        if has_zero:
            top = 2 ** int(name.removeprefix("int")) - 1
            levels = np.arange(top + 1.0) - round(top / 3)
        else:
            levels = np.array(quantized.literal_levels(name))
        index = np.rint(np.linspace(0, len(levels) - 1, _GROUP)).astype(int)
        scales = _SCALE * np.repeat([1.0, 3.0 if scope == "group" else 1.0], _GROUP)
        index = np.concatenate([index, index])
        num_blocks = 1 if scope == "tensor" else 2
        rows = np.repeat([1.0, 2.5][:num_blocks], _NUM_UNIFORMS)[:, None] * scales
        gaps = np.diff(levels)[np.minimum(index, len(levels) - 2)]
        start = levels[index] * rows
        held, counted = shipped(start, QuantConfig(name, scope, _GROUP, has_zero)), UpdateCounts()
        title = f"{name}, a scale per {scope}{', zero point' if has_zero else ''}"
        size = float(np.abs(start).max())
        parts[f"{title}, as read"] = within(
            float(np.abs(values_of(held) - start).max()), 1e-5 * size, what="distance of weights on the grid"
        )
        change = np.tile(_CHANGES, 2) * gaps
        uniforms = np.tile(_even_uniforms(2 * _GROUP), (num_blocks, 1))
        perturbation = torch.from_numpy(change * rows / 0.5).float()
        held.apply(perturbation, 0.5, _handed(uniforms), decay=_DECAY, counted=counted)
        wanted = levels[index] * (1 - _DECAY) - change
        inside = wanted.clip(levels[0], levels[-1])
        above = np.searchsorted(levels, inside).clip(1, len(levels) - 1)
        low, up = levels[above - 1], levels[above]
        after = (values_of(held) / rows).reshape(num_blocks, _NUM_UNIFORMS, -1)
        tolerance = 1e-3 * (up - low)
        is_neighbour = np.minimum(np.abs(after - low), np.abs(after - up)) <= tolerance
        parts[f"{title}, neighbours"] = is_true(
            bool(is_neighbour.all()), what="each quantized value goes to one of two"
        )
        off = np.abs(after.mean(1) - inside) / (up - low + tolerance)
        parts[f"{title}, mean"] = within(float(off.max()), 0.5 / _NUM_UNIFORMS, what="of a step", slack=0.1)
        spread = np.abs(after.var(1) - (inside - low) * (up - inside)) / (up - low + tolerance) ** 2
        parts[f"{title}, variance"] = within(
            float(spread.max()), 1 / _NUM_UNIFORMS, what="of a step", slack=0.1
        )
        # Whole numbers are rounded before they are held back, others after.
        excess = np.maximum(wanted - levels[-1], levels[0] - wanted)
        probability = np.clip(excess, 0, 1) if name not in quantized.FLOATS else (excess > 1e-6).astype(float)
        parts[f"{title}, counted"] = within(
            abs(counted.saturated - num_blocks * _NUM_UNIFORMS * float(probability.sum())),
            num_blocks * 2.0 * _GROUP,
            what=f"off, of {counted.saturated} held back",
        )
        parts[f"{title}, some are"] = is_true(counted.saturated > 0, what=f"{counted.saturated} held back")
    return everything_holds(parts)


# -- products of bytes -----------------------------------------------------------------------------------------------


def check_products_of_bytes(context: Context) -> Outcome:
    """Compare outputs of int8 inputs by int8 quantized values, a perturbation beside them, with exact sums of whole numbers, scaled once."""
    parts = {}
    generator = np.random.default_rng(context.seed)
    inputs = (generator.normal(size=(5, 24)) * np.array([[1], [30], [0.01], [2], [5]])).astype(np.float32)
    along = generator.integers(-127, 128, size=(16, 24)).astype(np.int8)
    weights = generator.normal(size=(16, 24))
    for scope in ("token", "tensor"):
        layer = torch.nn.Linear(24, 16, bias=False)
        low_bits = LowBits.model_validate({"weights": "int8", "activations": f"int8-{scope}"})
        quantize_layers([torch.nn.Sequential(layer)], low_bits, _CPU)
        assert isinstance(layer, QuantizedLinear)
        layer.quantized = shipped(weights, QuantConfig("int8", "channel"))
        layer.side_path = SidePath(torch.from_numpy(along), 1e-3)
        with torch.no_grad():
            output = layer(torch.from_numpy(inputs)).double().numpy()
        largest = np.abs(inputs).max(1, keepdims=True) if scope == "token" else np.abs(inputs).max()
        scales = largest.astype(np.float64) / 127
        qvalues = np.rint(inputs / scales).astype(np.int64)
        levels = layer.quantized.levels().numpy().astype(np.int64)
        by_qvalues = (qvalues @ levels.T) * layer.quantized.scales.double().numpy().T
        wanted = scales * (by_qvalues + 1e-3 * (qvalues @ along.astype(np.int64).T))
        size = np.abs(wanted).max(1, keepdims=True) if scope == "token" else np.abs(wanted).max()
        parts[f"a scale per {scope}"] = within(
            float((np.abs(output - wanted) / size).max()), 1e-5, what="of the largest under a scale"
        )
        read = np.abs(qvalues * scales - inputs) / scales
        parts[f"a scale per {scope}, inputs"] = at_most(float(read.max()), 0.5, what="of a step", slack=1e-4)
    return everything_holds(parts)


# -- ranks and replays -----------------------------------------------------------------------------------------------


def _run(
    case: Case, low_bits: LowBits, seed: int, log: Sequence[StepRecord] = ()
) -> list[tuple[list[StepRecord], dict[str, Tensor]]]:
    """Return records and weights of every rank of a run with quantized weights; steps that a log has are replayed from it."""
    plan = Plan.model_validate(
        case.plan().model_dump(mode="json") | {"low_bits": low_bits.model_dump(mode="json")}
    )
    models = [tiny_model(case.model) for _ in range(plan.placement.world_size)]
    options: dict[str, Any] = {
        "learning_rate": learning_rate,
        "seed": seed,
        "num_timed_steps": 0,
        "num_micro_batches": case.num_micro_batches,
    }

    def rank(number: int, communicator: Communicator | None) -> tuple[list[StepRecord], dict[str, Tensor]]:
        with Session(plan, models[number], communicator=communicator, **options) as session:
            for record in log:
                session.replay(record)
            records = [session.step(batch) for batch in tiny_batches(case.num_steps)[len(log) :]]
            return records, dict(session.state_dict())

    return list(on_all_ranks(plan, rank)) if plan.placement.world_size > 1 else [rank(0, None)]


def check_qvalues_on_ranks(context: Context) -> Outcome:
    """Compare runs of int8, rows left alone, two roundings, on one device, on meshes, in stages and replayed, bit for bit."""
    low_bits = LowBits(weights="int8", perturbation_bits=3, estimator="q-rge2", sparsity=0.5)
    usual: dict[str, Any] = {"num_perturbations": 2, "num_steps": 2}
    sliced: dict[str, Any] = {"blocks": "offloaded", "transfers": "sliced", "update": "delayed"}
    whole = _run(Case(**usual), low_bits, context.seed)[0]
    others = {
        "a perturbation on each of 2 ranks, blocks sliced": (whole, Case(**usual, perturb=2, **sliced), ()),
        "the first step replayed": (whole, Case(**usual), whole[0][:1]),
    }
    if context.size == "full":
        halves = _run(Case(**usual, num_micro_batches=2), low_bits, context.seed)[0]
        others |= {
            "two stages": (whole, Case(**usual, split_points=("block.1",)), ()),
            "data and perturbations over 4 ranks": (halves, Case(**usual, data=2, perturb=2, **sliced), ()),
            "replayed": (whole, Case(**usual), whole[0]),
        }
    unlike: list[str] = []
    start = _run(Case(num_perturbations=2, num_steps=0), low_bits, context.seed)[0][1]
    num_changed = sum(not torch.equal(value, start[name]) for name, value in whole[1].items())
    for name, (wanted, case, log) in others.items():
        for number, (records, weights) in enumerate(_run(case, low_bits, context.seed, log)):
            for record, known in zip(records, wanted[0][len(log) :], strict=True):
                if record.projected_gradients != known.projected_gradients:
                    unlike.append(f"{name}, rank {number}: projected gradients of step {record.step}")
            unlike += [
                f"{name}, rank {number}: {key}"
                for key, value in weights.items()
                if not same_bits(value, wanted[1][key])
            ]
    return everything_holds(
        {
            "bits": Outcome(
                float(len(unlike)),
                0.0,
                "weights and projected gradients that differ in a bit",
                tuple(unlike[:5]),
            ),
            "it trains": exceeds(float(num_changed), 10.0, what="parameters that are not as they were"),
        }
    )


# -- claims ----------------------------------------------------------------------------------------------------------

_ROUNDED = "executors.randomness.rounded"
_LINEAR = "executors.low_bits.linear"

_TENSOR = "executors.low_bits.quantized:QuantizedTensor"


def without_zeros(name: str, method: str) -> Fault:
    """Return a fault of quantized weights, of which a method forgets the zero points."""

    @planted(f"{_TENSOR}.{method}", name)
    def fault(shipped, self, *given, **named):
        return shipped(altered(self, zeros=None), *given, **named)

    return fault


@planted(f"{_TENSOR}._fit_least_error", "half as far down")
def half_as_far_down(shipped, self, part, rows):
    widest = self.scales[rows].clone()
    shipped(self, part, rows)
    self.scales[rows] = (widest + self.scales[rows]) / 2


@planted(f"{_TENSOR}._fit_least_error", "scales 5 % below those of the least error")
def scales_below(shipped, self, part, rows):
    shipped(self, part, rows)
    self.scales[rows] *= 0.95


@planted(f"{_ROUNDED}:SamplingKeys.of", "rows of a second rounding's own")
def rows_of_a_second_rounding(shipped, *given, **named):
    keys = shipped(*given, **named)
    return keys._replace(rows=keys.rounding)


@planted(f"{_LINEAR}:quantized_inputs", "inputs cut off towards 0")
def inputs_cut_off(shipped, inputs, *rest):
    qvalues, scales = shipped(inputs, *rest)
    return (inputs / scales).trunc().to(qvalues.dtype), scales


@planted(
    "executors.steps.ops.param_passes:ParamPasses._update_by_qvalues",
    "uniforms of the step that applies a late update",
)
def late_uniforms(shipped, *given):
    update = shipped(*given)

    def action(frame):
        late = frame.previous and replace(frame.previous, step=frame.step)
        update(replace(frame, previous=late))

    return action


_LONGER_BY_ROWS = Fault(
    "as much longer as rows are fewer",
    "costmodel.formats.roundings:RoundedPerturbation.unit",
    lambda shipped, self: shipped(self) / math.sqrt(1 - self.sparsity),
)

_WIDE_SCALES = called_with(f"{_TENSOR}._fit", "scales 3 % wide", part=lambda part: 1.03 * part)

CHECKS: Checks = {
    "quzo-format-of-least-error": (
        printed(
            check_format_of_least_error,
            quantized.ROUNDED_DOWN,
            scaled("executors.low_bits.grids:Floats.step", 2, "a floating-point grid of one digit less"),
            _WIDE_SCALES,
        ),
        printed(
            check_scales_of_least_error,
            Fault("scales that are never shrunk", f"{_TENSOR}._fit_least_error", lambda *_given: None),
            half_as_far_down,
            scales_below,
            without_zeros("a zero point that is forgotten", "_fit_least_error"),
        ),
    ),
    "quzo-outlier-split": printed(
        check_outlier_split,
        quantized.ROUNDED_DOWN,
        _WIDE_SCALES,
    ),
    "sparse-directions-are-as-long": (
        printed(
            check_sparse_moments,
            called_with(
                f"{_ROUNDED}:NonzeroRows.of",
                "rows kept 3 % too seldom",
                self=lambda it: altered(it, _sparsity=1.03 * it._sparsity),
            ),
            _LONGER_BY_ROWS,
            rows_of_a_second_rounding,
            Fault(
                "rows by the uniforms of elements",
                f"{_ROUNDED}:_KEYS",
                lambda keys: {**keys, "rows": keys["perturbation"]},
            ),
            called_with(
                "costmodel.formats.roundings:RoundedPerturbation.relative_energy",
                "rows forgotten in the energy",
                self=lambda it: altered(it, sparsity=0.0),
            ),
            quantized.SAME_KEY,
        ),
        printed(
            check_sparse_updates,
            _LONGER_BY_ROWS,
            Fault(
                "updates by the uniforms of the perturbation",
                f"{_ROUNDED}:_KEYS",
                lambda keys: {**keys, "update": keys["perturbation"]},
            ),
            quantized.UPDATE_NEAREST,
            quantized.UPDATE_UNIFORMS,
            quantized.MOVE_AWAY,
        ),
    ),
    "rounded-directions-at-every-width": (
        printed(
            check_moments_of_samples, quantized.SAME_KEY, quantized.SAMPLED_LONG, quantized.SAMPLED_NEAREST
        ),
        printed(
            check_reaches,
            scaled("costmodel.formats.roundings:RoundedPerturbation.reach", 1.03, "a range that is 3 % wide"),
        ),
    ),
    "updates-are-unbiased-on-every-grid": printed(
        check_moves_on_grids,
        quantized.UPDATE_NEAREST,
        quantized.UPDATE_UNIFORMS,
        quantized.MOVE_AS_PRINTED,
        quantized.UNIFORMS_BETWEEN,
        without_zeros("decay towards code 0, not the number 0", "apply"),
        without_zeros("a zero point that is forgotten", "values"),
        returning(f"{_TENSOR}._of", "the first group's scale for all", lambda it: it[:, :1]),
        called_with(
            "executors.low_bits.stored:UpdateCounts.add",
            "what is held back is not counted",
            saturated=lambda saturated: 0 * saturated,
        ),
    ),
    "products-of-bytes-are-exact": printed(
        check_products_of_bytes,
        inputs_cut_off,
        scaled(f"{_LINEAR}:_scales_of", 1.03, "scales 3 % wide"),
        called_with(f"{_LINEAR}:quantized_inputs", "one scale for all tokens", scope="tensor"),
        called_with(
            f"{_LINEAR}:_PerturbationProduct.__init__",
            "a perturbation that is 3 % long",
            scales=lambda scales: 1.03 * scales,
        ),
    ),
    "quantized-weights-are-alike-on-all-ranks": printed(
        check_qvalues_on_ranks,
        called_with(
            f"{_ROUNDED}:rounding_key",
            "uniforms of a rank's own",
            seed=lambda seed: seed + len(threading.current_thread().name),
        ),
        late_uniforms,
        called_with(
            "executors.runs.session:Session.replay",
            "scalars replayed in another order",
            record=lambda record: replace(record, projected_gradients=record.projected_gradients[::-1]),
        ),
    ),
}
