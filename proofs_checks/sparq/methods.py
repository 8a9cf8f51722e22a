"""SparQ's algorithms as printed, what it assumes of activations and compressors, and what it says of sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from costmodel.formats.codecs import CodecSpec, bitmap_bytes, dense_bytes, index_bytes, packed_bytes
from costmodel.formats.symbols import SymbolStatistics
from executors.codecs import codec_of
from executors.codecs.fidelity import received, relative_error
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, conditioned, corrected, counterexample, printed, reading
from proofs_checks.exact import at_most, equal, exceeds, is_true, normal_nodes, shipped_estimate
from proofs_checks.faults import (
    central_by_epsilon,
    forward_by_two_epsilon,
    perturbations_summed,
    rounding_up,
)
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, planted, returning, scaled
from proofs_checks.setups.executed import Case, differences
from proofs_checks.statistics import fitted_slope

_CPU = torch.device("cpu")

# -- algorithms 1 to 3: one seed for every node ---------------------------------------------------------------------

_SLOPES = torch.tensor([0.9, -0.4, 0.3, 1.1], dtype=torch.float64)
"""``∇f`` of a linear loss: two parameters on each of two nodes."""


def _mean_over(perturbations: Tensor, weights: list[float]) -> Tensor:
    theta = torch.tensor([0.5, 1.0, -0.2, 0.1], dtype=torch.float64)
    mean = torch.zeros_like(theta)
    for z, weight in zip(perturbations, weights, strict=True):
        mean += weight * shipped_estimate(lambda x: _SLOPES @ x, theta, z.contiguous(), 1e-3, central=False)
    return mean


def check_same_seed(_context: Context) -> Outcome:
    """Compare the mean update where each node resets one seed, with ``∇₁f + ∇₂f`` on both nodes."""
    streams = [torch.Generator().manual_seed(7).initial_seed() for _ in range(2)]
    sampled = [torch.normal(0.0, 1.0, (2,), generator=torch.Generator().manual_seed(s)) for s in streams]
    nodes, weights = normal_nodes(2, 4)
    pairs = torch.from_numpy(nodes)
    mean = _mean_over(torch.cat([pairs, pairs], dim=1), weights.tolist())
    together = (_SLOPES[:2] + _SLOPES[2:]).repeat(2)
    return everything_holds(
        {
            "lines 21 to 24: both nodes draw the same numbers": is_true(
                torch.equal(*sampled), what=f"{sampled[0].tolist()} and {sampled[1].tolist()}"
            ),
            "E[ĝ·u] is the sum of both nodes' gradients": equal(
                mean, together, what="measured", tolerance=1e-7
            ),
            "it is not the gradient": exceeds(float((mean - _SLOPES).norm()), 0.1, what="‖E[ĝ·u] - ∇f‖"),
        }
    )


def check_one_perturbation_each(_context: Context) -> Outcome:
    """Compare the mean update where nodes draw one perturbation between them, with the gradient."""
    nodes, weights = normal_nodes(4, 3)
    mean = _mean_over(torch.from_numpy(nodes), weights.tolist())
    return equal(mean, _SLOPES, what="E[ĝ·u]", tolerance=1e-7)


# -- equations 1 to 9: the loss of two nodes is the loss -----------------------------------------------------------------


def check_split_evaluations(difference: str, context: Context) -> Outcome:
    """Compare two shipped nodes that pass activations on with a literal loop over the whole model, with one difference."""
    unlike = differences(
        Case(
            split_points=("block.1",),
            traversal="full",
            difference=difference,
            num_perturbations=2,
            num_steps=1,
        ),
        context.seed,
    )
    return is_true(not unlike, what=f"{difference}: {unlike[:3] or 'no bit differs'}")


# -- assumption 4 -----------------------------------------------------------------------------------------------------


def _activation(kind: str, scale: float) -> float:
    """Return ``‖S₁(ξ; x)‖`` of a layer with its activation function behind it, weights scaled."""
    generator = generator_on(_CPU, 3)
    weights, gate = (torch.randn((64, 8), generator=generator, dtype=torch.float64) for _ in range(2))
    data = torch.randn(8, generator=generator, dtype=torch.float64)
    before, beside = scale * (weights @ data), scale * (gate @ data)
    after = {
        "ReLU": lambda: functional.relu(before),
        "GELU": lambda: functional.gelu(before),
        "SwiGLU": lambda: functional.silu(beside) * before,
    }[kind]()
    return float(after.norm())


_KINDS = ("ReLU", "GELU", "SwiGLU")


def check_unbounded_outputs(_context: Context) -> Outcome:
    """Fit how outputs of a split layer grow with its weights: without bound."""
    parts = {}
    for kind, order in zip(_KINDS, (1.0, 1.0, 2.0), strict=True):
        scales = [10.0**k for k in range(3, 8)]
        sizes = [_activation(kind, scale) for scale in scales]
        parts[kind] = equal(
            fitted_slope(scales, sizes), order, what="exponent of the weights", tolerance=1e-3
        )
    return everything_holds(parts)


def check_bounded_outputs(_context: Context) -> Outcome:
    """Compare outputs at bounded weights and data with a bound: ‖W‖‖ξ‖, and its square for a gated layer."""
    generator = generator_on(_CPU, 3)
    weights, gate = (torch.randn((64, 8), generator=generator, dtype=torch.float64) for _ in range(2))
    data = torch.randn(8, generator=generator, dtype=torch.float64)
    one, other = (float(torch.linalg.matrix_norm(w, 2) * data.norm()) for w in (weights, gate))
    parts = {}
    for kind in _KINDS:
        for scale in (0.1, 1.0, 10.0):
            bound = scale**2 * one * other if kind == "SwiGLU" else scale * one
            parts[f"{kind}, ‖W‖ = {scale * one:.3g}"] = at_most(_activation(kind, scale), bound, what="‖S₁‖")
    return everything_holds(parts)


# -- assumption 5 -----------------------------------------------------------------------------------------------------


def check_contracts(_context: Context) -> Outcome:
    """Compare κ of rounding to the nearest, 4 bits as in the experiments, with 1, and errors with half a step."""
    largest = farthest = 0.0
    for seed in range(20):
        values = torch.randn(40, generator=generator_on(_CPU, seed), dtype=torch.float64).relu()
        largest = max(largest, relative_error(values, CodecSpec(4)))
        off = (received(values, CodecSpec(4)) - values).abs().max() / (values.max() / 7)
        farthest = max(farthest, float(off))
    return everything_holds(
        {
            "κ < 1": at_most(largest, 0.999, what="largest κ of 20 activations"),
            "half a step": at_most(farthest, 0.5, what="largest error in steps"),
        }
    )


def check_is_unbiased(_context: Context) -> Outcome:
    """Compare what arrives through rounding to the nearest, 4 bits, with what was sent, on average."""
    values = torch.tensor([1.0, 0.03, 0.05, 0.31], dtype=torch.float64)
    arrived = torch.stack(
        [received(values, CodecSpec(4), generator_on(_CPU, seed)) for seed in range(32)]
    ).mean(0)
    return equal(arrived, values, what="E[C(x)]", tolerance=1e-3)


# -- sizes -------------------------------------------------------------------------------------------------------------


def _statistics(rows: int, columns: int, density: float, bits: int = 4) -> SymbolStatistics:
    return SymbolStatistics(rows * columns, columns, bits, round(density * rows * columns))


def check_index_cost(_context: Context) -> Outcome:
    """Compare index messages of rows of one length with ρd times the bits of a value and an index."""
    parts = {}
    rows, columns, bits = 64, 4096, 4
    for density in (0.01, 0.05, 0.2):
        stats = _statistics(rows, columns, density, bits)
        wanted = density * rows * columns * (bits + 12) / 8 + rows * 13 / 8
        parts[f"ρ = {density:g}"] = equal(
            index_bytes(stats), wanted, what="bytes: ρd(b + log₂n)/8 and a count a row", tolerance=1e-3
        )
    # The same of a message that is really written.
    generator = generator_on(_CPU, 0)
    dense = torch.randn((rows, columns), generator=generator, dtype=torch.float64)
    sent = {}
    for density in (0.05, 0.2):
        values = dense * (torch.rand(dense.shape, generator=generator, dtype=torch.float64) < density)
        spec = CodecSpec(8, encoding="index")
        sent[density] = codec_of(spec).encode(values).numel()
    fixed = 40 + 16 + 8 + rows * 13 / 8
    parts["written messages"] = equal(
        (sent[0.2] - fixed) / (sent[0.05] - fixed), 4.0, what="bytes at ρ = 0.2 over those at 0.05", tolerance=0.05
    )  # fmt: skip
    return everything_holds(parts)


def check_index_width(_context: Context) -> Outcome:
    """Show that a kept value costs more in a longer row, that bitmaps cost d bits, and where sparse is larger than dense."""
    short, long = (_statistics(2**24 // n, n, 0.01) for n in (2**4, 2**16))
    per_value = [index_bytes(stats) * 8 / stats.num_kept for stats in (short, long)]
    counts = [stats.num_rows * stats.num_columns.bit_length() / stats.num_kept for stats in (short, long)]
    empty = _statistics(64, 4096, 0.0)
    crowded = _statistics(64, 2**17, 0.2)
    return everything_holds(
        {
            "bits of a kept value, rows of 16 and of 65,536": equal(
                [per_value[0] - counts[0], per_value[1] - counts[1]],
                [8.0, 20.0],
                what="4 and log₂n",
                tolerance=1e-3,
            ),
            "a bitmap of nothing": equal(bitmap_bytes(empty), 64 * 4096 / 8, what="bytes: d bits"),
            "ρ = 0.2 in rows of 131,072 at 4 bits": exceeds(
                index_bytes(crowded), dense_bytes(crowded), what="bytes sparse against dense"
            ),
        }
    )


def _nonzero(values: Tensor, spec: CodecSpec) -> int:
    return int((received(values, spec) != 0).sum())


def check_zeros_stay(context: Context) -> Outcome:
    """Count values that are 0 before a codec with 0 among its values and not after it, at 2 to 8 bits."""
    woken = fewer = cases = 0
    for seed in range(context.samples(20, 4)):
        for bits in range(2, 9):
            for grid in ("symmetric", "affine-zero"):
                values = torch.randn((16, 64), generator=generator_on(_CPU, seed), dtype=torch.float64).relu()
                spec = CodecSpec(bits, grid=grid)
                arrived = received(values, spec)
                woken += int((arrived[values == 0] != 0).sum())
                fewer += int((arrived != 0).sum()) < int((values != 0).sum())
                cases += 1
    return everything_holds(
        {
            "zeros stay": is_true(woken == 0, what=f"{woken} zeros woken in {cases} tensors"),
            "others become zero": exceeds(float(fewer), 0.7 * cases, what="tensors that are sparser"),
        }
    )


def check_zeros_woken(_context: Context) -> Outcome:
    """Count what is not 0 behind grids without a 0: one bit of both signs, and an affine grid."""
    values = torch.randn((16, 64), generator=generator_on(_CPU, 5), dtype=torch.float64).relu()
    values[0, 0] = -0.37
    before = int((values != 0).sum())
    return everything_holds(
        {
            "1 bit, ±s": equal(_nonzero(values, CodecSpec(1)), values.numel(), what="not zero"),
            "4 bits, affine": exceeds(
                _nonzero(values, CodecSpec(4, grid="affine")), before, what=f"not zero, of {before} before"
            ),
        }
    )


def check_gelu(_context: Context) -> Outcome:
    """Compare how much of GELU and SwiGLU is not 0 without a codec, and behind 4 bits."""
    generator = generator_on(_CPU, 1)
    before, gate = (torch.randn((64, 256), generator=generator, dtype=torch.float64) for _ in range(2))
    parts = {}
    for name, values, most in (
        ("GELU", functional.gelu(before), 0.4),
        ("SwiGLU", functional.silu(gate) * before, 0.2),
    ):
        share = _nonzero(values, CodecSpec(4)) / values.numel()
        parts[f"{name}, as it is"] = exceeds(
            float((values != 0).double().mean()), 0.99, what="part that is not 0"
        )
        parts[f"{name}, 4 bits"] = at_most(share, most, what="part that is not 0, of normals")
    return everything_holds(parts)


def check_feedback(_context: Context) -> Outcome:
    """Send what is left over again and again: an activation that does not move is known to κ^t after t messages."""
    values = torch.randn(64, generator=generator_on(_CPU, 2), dtype=torch.float64)
    known, kappa, parts = torch.zeros_like(values), 0.0, {}
    for step in range(1, 7):
        left = values - known
        arrived = received(left, CodecSpec(3))
        kappa = max(kappa, float((arrived - left).norm() / left.norm()))
        known = known + arrived
        parts[f"{step} messages"] = at_most(
            float((values - known).norm()), kappa**step * float(values.norm()), what="‖a - m‖ against κ^t‖a‖"
        )
    direct = float((received(values, CodecSpec(3)) - values).norm())
    parts["without feedback it stays"] = exceeds(
        direct, float((values - known).norm()), what="‖a - C(a)‖ against what six messages leave", factor=1000
    )
    return everything_holds(parts)


@planted("costmodel.formats.codecs:index_bits", "indices of one bit less")
def _short_indices(shipped, num_columns):
    width, count = shipped(num_columns)
    return max(0, width - 1), count


@planted("executors.codecs.grids:fitted", "one bit with a zero")
def _with_a_zero(shipped, parameters, spec):
    grids = shipped(parameters, spec)
    return replace(grids, offset=0 * grids.offset) if spec.bits == 1 else grids


CHECKS: Checks = {
    "sparq-one-seed-on-every-node": (
        corrected(check_one_perturbation_each, forward_by_two_epsilon),
        counterexample(check_same_seed, forward_by_two_epsilon),
    ),
    "sparq-split-loss-is-the-loss": printed(
        partial(check_split_evaluations, "forward"), forward_by_two_epsilon, perturbations_summed
    ),
    "sparq-split-central-difference": printed(
        partial(check_split_evaluations, "central"), central_by_epsilon, perturbations_summed
    ),
    "sparq-assumption-4-unbounded-layers": (
        conditioned(
            check_bounded_outputs,
            scaled("proofs_checks.sparq.methods:_activation", 40, "outputs forty times as large"),
        ),
        counterexample(
            check_unbounded_outputs,
            returning("proofs_checks.sparq.methods:_activation", "outputs behind tanh", math.tanh),
        ),
    ),
    "sparq-assumption-5-title": (
        reading("a contraction, as the formula says", check_contracts, rounding_up),
        reading("unbiased, as the title says", check_is_unbiased),
    ),
    "sparq-sparse-cost-of-indices": (
        conditioned(check_index_cost, _short_indices),
        counterexample(
            check_index_width,
            _short_indices,
            Fault(
                "a bitmap without its bits",
                "costmodel.formats.codecs:bitmap_bytes",
                lambda _shipped, stats: packed_bytes(stats.num_kept, stats.bits),
            ),
        ),
    ),
    "sparq-quantization-and-zeros": (
        conditioned(check_zeros_stay, rounding_up),
        counterexample(check_zeros_woken, _with_a_zero),
    ),
    "sparq-smooth-activations-are-dense": printed(check_gelu, rounding_up),
    "sparq-remark-1-error-feedback": printed(check_feedback, rounding_up),
}
