"""Low-rank perturbations, lazy factors and adapter increments: what "LLM Zeroth-Order Fine-Tuning is an Inference Workload" states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from scipy.integrate import quad
from scipy.stats import chi2, norm
from torch import Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.fidelity import received
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import (
    Array,
    equal,
    exceeds,
    is_true,
    mean_estimate,
    normal_nodes,
    shipped_estimate,
    within,
)
from proofs_checks.faults import central_by_epsilon, updates_without_rank
from proofs_checks.oracles.statements import low_rank_entry_moments
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, planted, returning
from proofs_checks.setups import lazy_factors as lazy
from proofs_checks.setups import quantized_weights as quantized
from proofs_checks.statistics import fitted_slope

_CPU = torch.device("cpu")
_ROWS, _COLUMNS = 2, 3
_SLOPE = torch.tensor([[0.8, -0.3, 0.5], [0.1, 0.9, -0.7]], dtype=torch.float64)

# -- the low-rank estimator -----------------------------------------------------------------------------------------


def _loss(x: Tensor) -> Tensor:
    """Return a loss of a matrix, given flat, that is neither linear nor quadratic."""
    return (x * _SLOPE.reshape(-1)).sin().sum() + (x**2).sum() * x[0]


def literal_estimate(x: Tensor, left: Tensor, right: Tensor, epsilon: float) -> Tensor:
    """Return equation 3: a central difference along ``UVᵀ``, times ``UVᵀ/r``; all flat."""
    along = (left @ right.T).reshape(-1)
    difference = float(_loss(x + epsilon * along) - _loss(x - epsilon * along)) / (2 * epsilon)
    return difference * along / left.shape[1]


def check_same_estimator(context: Context) -> Outcome:
    """Compare equation 3 at ε with the shipped family and arithmetic at ``ε√r``, draw by draw."""
    parts = {}
    x = torch.linspace(-0.5, 0.6, _ROWS * _COLUMNS, dtype=torch.float64)
    for rank in (1, 2, 4):
        generator, again = (generator_on(_CPU, context.seed + rank) for _ in range(2))
        z = lazy.factorised((_ROWS, _COLUMNS), rank, generator)
        right, left = (
            torch.normal(0.0, 1.0, (length, rank), generator=again, dtype=torch.float64)
            for length in (_COLUMNS, _ROWS)
        )
        parts[f"r = {rank}, perturbation"] = equal(z, left @ right.T / math.sqrt(rank), what="UVᵀ/√r")
        shipped = shipped_estimate(_loss, x, z.reshape(-1), 0.1 * math.sqrt(rank), central=True)
        parts[f"r = {rank}, estimate"] = equal(shipped, literal_estimate(x, left, right, 0.1), what="ĝ")
    return everything_holds(parts)


def check_two_points(_context: Context) -> Outcome:
    """Compare ``c`` of (2) at the shipped points with ``z·∇L``: exactly for a quadratic, of order ε² for a sine; and the step it makes."""
    z, theta = (torch.tensor(values, dtype=torch.float64) for values in ([0.8, -1.3, 0.4], [0.3, -0.7, 1.1]))
    bend, parts, radii = torch.tensor([1.5, 0.5, 2.0], dtype=torch.float64), {}, [0.2, 0.1, 0.05]
    for epsilon in radii:
        shipped = shipped_estimate(lambda x: (bend * x * x).sum() / 2, theta, z, epsilon, central=True)
        parts[f"quadratic, ε = {epsilon:g}"] = equal(shipped, float(z @ (bend * theta)) * z, what="c·z")
    apart = [
        float(
            (
                shipped_estimate(lambda x: x.sin().sum(), theta, z, e, central=True) - (z @ theta.cos()) * z
            ).norm()
        )
        for e in radii
    ]
    parts["sine, order"] = equal(fitted_slope(radii, apart), 2.0, what="exponent of ε", tolerance=0.02)
    return everything_holds(parts)


def _factor_nodes(rank: int) -> tuple[Array, Array, Array]:
    """Return nodes for 2 × r and 3 × r factors of normals, and weights; exact to degree 5 in each number."""
    nodes, weights = normal_nodes((_ROWS + _COLUMNS) * rank, 3)
    split = _ROWS * rank
    return (
        nodes[:, :split].reshape(-1, _ROWS, rank),
        nodes[:, split:].reshape(-1, _COLUMNS, rank),
        weights,
    )


def low_rank_mean(slope: Array, rank: int, divisor: float) -> Array:
    """Return ``E[⟨G, UVᵀ⟩UVᵀ]`` over a divisor, by quadrature."""
    left, right, weights = _factor_nodes(rank)
    along = np.einsum("nik,njk->nij", left, right)
    return np.asarray(np.einsum("n,n,nij->ij", weights, (along * slope).sum((1, 2)), along) / divisor)


def check_low_rank_mean(divided: bool, _context: Context) -> Outcome:
    """Compare the mean of ``c·UVᵀ``, divided by r or not, with ``∇F`` or ``r∇F``."""
    slope = _SLOPE.numpy()
    parts = {}
    for rank in (1, 2):
        mean = low_rank_mean(slope, rank, rank if divided else 1)
        factor = 1 if divided else rank
        parts[f"r = {rank}"] = equal(
            torch.from_numpy(mean), torch.from_numpy(factor * slope), what=f"{factor}·∇F"
        )
    return everything_holds(parts)


def check_unscaled_update(_context: Context) -> Outcome:
    """Show that the update without 1/r, at the learning rate of (5), has r times the mean; r = 2."""
    slope = _SLOPE.numpy()
    mean = low_rank_mean(slope, 2, 1)
    return everything_holds(
        {
            "r = 2": equal(
                torch.from_numpy(mean), torch.from_numpy(2 * slope), what="mean of (7) over (5)'s η"
            ),
            "it is not ∇F": exceeds(float(np.linalg.norm(mean - slope)), 0.5, what="‖mean - ∇F‖"),
        }
    )


def check_bias_order(_context: Context) -> Outcome:
    """Compare the mean of (3) with the gradient for a quadratic, exactly, and fit the order of its bias for a quartic."""
    nodes, weights = normal_nodes(4, 5)  # r = 1, 2 × 2
    x = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    along = torch.from_numpy(np.einsum("ni,nj->nij", nodes[:, :2], nodes[:, 2:]).reshape(-1, 4))
    pairs = (along.numpy(), weights)
    bend = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    quadratic = mean_estimate(
        lambda t: (bend * t**2).sum() / 2 + t[0] * t[3], x.tolist(), 0.3, central=True, nodes=pairs
    )
    gradient = bend * x + torch.tensor([0.1, 0.0, 0.0, 0.3], dtype=torch.float64)
    radii, biases = [0.05, 0.1, 0.2], []
    for epsilon in radii:
        mean = mean_estimate(lambda t: (t**4).sum() / 4, x.tolist(), epsilon, central=True, nodes=pairs)
        biases.append(float((mean - x**3).norm()))
    return everything_holds(
        {
            "quadratic": equal(quadratic, gradient, what="E[ĝ] = ∇F", tolerance=1e-7),
            "quartic": equal(
                fitted_slope(radii, biases), 2.0, what="exponent of ε in the bias", tolerance=1e-5
            ),
        }
    )


# -- normals of high rank ---------------------------------------------------------------------------------------------


def check_entry_moments(_context: Context) -> Outcome:
    """Compare moments of ``Σu_kv_k/√r`` by quadrature with closed forms, and those of two entries of a row."""
    parts = {}
    for rank in (1, 2, 3):
        nodes, weights = normal_nodes(2 * rank, 3)
        entry = (nodes[:, :rank] * nodes[:, rank:]).sum(1) / math.sqrt(rank)
        measured = [float(weights @ entry**power) for power in (1, 2, 4)]
        declared = low_rank_entry_moments(rank)
        parts[f"r = {rank}"] = equal(
            measured,
            [0.0, declared["variance"], declared["fourth_moment"]],
            what="mean, variance, fourth moment",
        )
    nodes, weights = normal_nodes(3, 3)
    first, second = nodes[:, 0] * nodes[:, 1], nodes[:, 0] * nodes[:, 2]
    parts["two entries of a row, r = 1"] = equal(
        [float(weights @ (first * second)), float(weights @ (first**2 * second**2))],
        [0.0, low_rank_entry_moments(1)["row_product"]],
        what="uncorrelated, but E z²z'² = 1 + 2/r",
    )
    return everything_holds(parts)


def distance_to_normal(rank: int) -> float:
    """Return Kolmogorov's distance of an entry of ``UVᵀ/√r`` from N(0, 1); given U it is normal with variance χ²_r/r."""

    def cumulative(x: float) -> float:
        if rank > 40:  # the mixture is narrow
            low, high = chi2.ppf([1e-12, 1 - 1e-12], rank)
        else:
            low, high = 0.0, chi2.ppf(1 - 1e-13, rank)
        value, _ = quad(
            lambda s: norm.cdf(x / math.sqrt(s / rank)) * chi2.pdf(s, rank),
            low,
            high,
            limit=200,
            epsabs=1e-11,
        )
        return float(value)

    return max(abs(cumulative(x) - float(norm.cdf(x))) for x in np.linspace(0.1, 2.5, 13))


def check_normal_limit(context: Context) -> Outcome:
    """Fit the order in r of the distance of an entry's law from the normal one."""
    ranks = [8, 16, 32, 64, 128, 256] if context.size == "full" else [8, 32, 128]
    distances = [distance_to_normal(rank) for rank in ranks]
    places = np.linspace(0.1, 2.5, 13)
    laplace = float(np.abs(1 - np.exp(-math.sqrt(2) * places) / 2 - norm.cdf(places)).max())
    return everything_holds(
        {
            "order": equal(
                fitted_slope([float(r) for r in ranks], distances), -1.0, what="exponent of r", tolerance=0.05
            ),
            "r = 128": within(distances[ranks.index(128)], 2e-3, what="distance"),
            "r = 2, which is Laplace's law": equal(
                distance_to_normal(2), laplace, what="distance", tolerance=1e-6
            ),
        }
    )


# -- lazy factors and increments ----------------------------------------------------------------------------------------------


def _rationals(rows: int, columns: int, seed: int) -> list[list[Fraction]]:
    generator = np.random.default_rng(seed)
    return [
        [Fraction(int(n), int(d)) for n, d in generator.integers(1, 30, size=(columns, 2))]
        for _ in range(rows)
    ]


Matrix = Sequence[Sequence[Fraction]]


def product(left: Matrix, right: Matrix) -> list[list[Fraction]]:
    """Return ``L·Rᵀ`` in rationals."""
    return [[sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0)) for y in right] for x in left]


def plus(left: Matrix, right: Matrix, factor: Fraction = Fraction(1)) -> list[list[Fraction]]:
    """Return ``L + factor·R``."""
    return [[a + factor * b for a, b in zip(x, y, strict=True)] for x, y in zip(left, right, strict=True)]


def check_interval(_context: Context) -> Outcome:
    """Compare an interval's updates with one V, one by one and on the U factor, in rationals."""
    right = _rationals(4, 2, 9)
    start = _rationals(3, 2, 8)
    rate = Fraction(1, 7)
    whole, left = product(start, right), start
    wrong = 0
    for step in range(5):
        sampled, coefficient = _rationals(3, 2, step), Fraction(step - 2, 3)
        whole = plus(whole, product(sampled, right), -rate * coefficient)  # (5) without 1/r, materialised
        left = plus(left, sampled, -rate * coefficient)  # (7)
        wrong += product(left, right) != whole
    summed = start
    for step in range(5):
        summed = plus(summed, _rationals(3, 2, step), -rate * Fraction(step - 2, 3))
    wrong += product(summed, right) != whole  # (8), (18)
    return is_true(wrong == 0, what=f"{wrong} of 6 matrices differ")


def check_subspace(_context: Context) -> Outcome:
    """Compare the rank and the row space of an interval's updates with those of V, and of two intervals with both."""
    generator = np.random.default_rng(3)
    rank, rows, columns = 2, 7, 9
    intervals = []
    for _ in range(2):
        right = generator.normal(size=(columns, rank))
        moved = sum(
            float(generator.normal()) * generator.normal(size=(rows, rank)) @ right.T for _ in range(6)
        )
        off = moved - moved @ right @ np.linalg.pinv(right)
        intervals.append((np.asarray(moved), float(np.abs(off).max())))
    both = intervals[0][0] + intervals[1][0]
    return everything_holds(
        {
            "one interval": equal(float(np.linalg.matrix_rank(intervals[0][0])), float(rank), what="rank"),
            "one interval, rows in the span of V": is_true(
                intervals[0][1] < 1e-12, what=f"off by {intervals[0][1]:.1e}"
            ),
            "two intervals": equal(float(np.linalg.matrix_rank(both)), 2.0 * rank, what="rank"),
        }
    )


def check_conditional_mean(_context: Context) -> Outcome:
    """Compare the mean of an estimate given V with ``GVVᵀ/r``, and its mean over V with ``G``."""
    slope = _SLOPE.numpy()
    nodes, weights = normal_nodes(_ROWS, 3)  # U of rank 1
    right = np.array([[0.5], [-1.2], [0.3]])
    given = np.zeros((_ROWS, _COLUMNS))
    for u, weight in zip(nodes, weights, strict=True):
        along = u[:, None] @ right.T
        given += weight * float((along * slope).sum()) * along
    over, probabilities = normal_nodes(_COLUMNS, 3)
    total = sum(weight * slope @ np.outer(v, v) for v, weight in zip(over, probabilities, strict=True))
    return everything_holds(
        {
            "given V": equal(
                torch.from_numpy(given), torch.from_numpy(conditional_mean(slope, right)), what="E[ĝ|V]"
            ),
            "over V": equal(torch.from_numpy(np.asarray(total)), _SLOPE, what="E[GVVᵀ/r]"),
            "given V it is not G": exceeds(float(np.linalg.norm(given - slope)), 0.5, what="‖E[ĝ|V] - G‖"),
        }
    )


def conditional_mean(slope: Array, right: Array) -> Array:
    """Return ``G·V·Vᵀ/r``, the mean of a low-rank estimate while ``V`` is kept.

    >>> conditional_mean(np.eye(2), np.array([[1.0], [0.0]])).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    return np.asarray(slope @ right @ right.T / right.shape[1])


def composed(base: Matrix, increments: Sequence[tuple[Matrix, Matrix]]) -> list[list[Fraction]]:
    """Return ``W₀ + A·Bᵀ`` with the increments' factors side by side in one ``A`` and one ``B`` (equations 13, 15 and 16)."""
    lefts, rights = (
        [list(itertools.chain(*rows)) for rows in zip(*side, strict=True)]
        for side in zip(*increments, strict=True)
    )
    return plus(base, product(lefts, rights))


def check_increments(_context: Context) -> Outcome:
    """Compare one adapter of all increments with the sum of increments and the probe's two signs, and any order with any other."""
    base = _rationals(3, 4, 20)
    increments = [(_rationals(3, rank, 30 + rank), _rationals(4, rank, 40 + rank)) for rank in (1, 2, 3)]
    left, right = _rationals(3, 2, 50), _rationals(4, 2, 51)
    epsilon = Fraction(1, 1000)
    wrong = 0
    for sign in (1, -1):
        by_hand: list[list[Fraction]] = [list(row) for row in base]
        for a, b in increments:
            by_hand = plus(by_hand, product(a, b))
        by_hand = plus(by_hand, product(left, right), sign * epsilon)  # (14)
        scaled = [[sign * epsilon * x for x in row] for row in left]
        for order in itertools.permutations([*increments, (scaled, right)]):
            wrong += composed(base, order) != by_hand
    return is_true(wrong == 0, what=f"{wrong} of 48 composed adapters differ from (14)")


def check_increments_in_float(_context: Context) -> Outcome:
    """Compare a probe through a side path with the sum in rationals, in float32, for any order of increments."""
    parts = {}
    base = _rationals(3, 4, 20)
    increments = [(_rationals(3, rank, 30 + rank), _rationals(4, rank, 40 + rank)) for rank in (1, 2, 3)]
    exact = torch.tensor([[float(x) for x in row] for row in composed(base, increments)], dtype=torch.float64)
    sums = []
    for order in itertools.permutations(increments):
        total = torch.tensor([[float(x) for x in row] for row in base])
        for a, b in order:
            total = (
                total
                + torch.tensor([[float(x) for x in row] for row in a])
                @ torch.tensor([[float(x) for x in row] for row in b]).T
            )
        sums.append(total)
    off = max(float((s.double() - exact).abs().max() / exact.abs().max()) for s in sums)
    parts["float32, six orders"] = within(off, 1e-6, what="relative distance to the sum")
    return everything_holds(parts)


def largest_interval_count(rows: int, columns: int, rank: int) -> int:
    """Return how many intervals' increments weigh as much as the matrix itself: ``⌈mn/(r(m + n))⌉``.

    >>> largest_interval_count(5120, 5120, 2)
    1280
    """
    return -(-rows * columns // (rank * (rows + columns)))


def check_increment_growth(_context: Context) -> Outcome:
    """Compare the rank of a composed adapter with r for each interval and one probe, and its size with the matrix's."""
    generator = np.random.default_rng(11)
    rows, columns, rank = 12, 12, 2
    parts = {}
    for intervals in (1, 3, 5):
        adapter = sum(
            generator.normal(size=(rows, rank)) @ generator.normal(size=(rank, columns))
            for _ in range(intervals + 1)
        )
        parts[f"{intervals} intervals and a probe"] = equal(
            float(np.linalg.matrix_rank(np.asarray(adapter))), float(rank * (intervals + 1)), what="rank"
        )
    intervals = largest_interval_count(rows, columns, rank)
    parts["as large as the matrix"] = equal(
        float(intervals * rank * (rows + columns)), float(rows * columns), what="numbers in all increments"
    )
    steps = largest_interval_count(5120, 5120, 2) * 50
    parts["OPT-13B, r = 2, ν = 50"] = equal(
        float(steps), 64_000.0, what="steps until increments weigh as much as a matrix"
    )
    return everything_holds(parts)


# -- a quantized base --------------------------------------------------------------------------------------------------------


def check_quantized_base(_context: Context) -> Outcome:
    """Compare the mean estimate around ``Q(W₀) + ΔW`` with the gradient there, the base's quantized values being left alone."""
    base = torch.tensor([0.93, -0.41, 0.22, 0.05], dtype=torch.float64)
    quantized = received(base, CodecSpec(4))
    qvalues = quantized.clone()
    update = torch.tensor([0.001, -0.002, 0.0005, 0.003], dtype=torch.float64)
    bend = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    mean = mean_estimate(
        lambda adapter: (bend * (quantized + adapter) ** 2).sum() / 2 + (quantized + adapter)[0],
        update.tolist(),
        1e-3,
        central=True,
        order=3,
    )
    at = quantized + update
    gradient = bend * at + torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    own = bend * (base + update) + torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    return everything_holds(
        {
            "E[ĝ] at Q(W₀) + ΔW": equal(mean, gradient, what="∇L there", tolerance=1e-6),
            "it is not the gradient at W₀ + ΔW": exceeds(
                float((gradient - own).norm()), 0.05, what="‖∇L(Q(W₀)) - ∇L(W₀)‖"
            ),
            "the base's quantized values": is_true(torch.equal(qvalues, quantized), what="unchanged"),
            "summed into bfloat16 the probe is lost": is_true(
                torch.equal((quantized + 1e-3).bfloat16(), quantized.bfloat16())
                or bool(((quantized + 1e-3).bfloat16() == quantized.bfloat16()).any()),
                what="some weights do not move by ε = 1e-3",
            ),
        }
    )


@planted("proofs_checks.zoinfer.statements:_factor_nodes", "factors of width 1/√r")
def widths_by_root(shipped, rank):
    lefts, rights, weights = shipped(rank)
    return lefts / rank**0.25, rights / rank**0.25, weights


CHECKS: Checks = {
    "zoinfer-two-points": printed(
        check_two_points,
        central_by_epsilon,
        Fault(
            "a step against the sign of c",
            "executors.steps.arithmetic:projected_gradient",
            lambda shipped, loss_plus, loss_other, *rest, **named: shipped(
                loss_other, loss_plus, *rest, **named
            ),
        ),
    ),
    "zoinfer-candidate-beside-the-current": printed(
        lazy.check_candidate, lazy.PROBE_TWICE, lazy.probe_stays, lazy.RATE_OFF
    ),
    "compacted-increments-are-nearest": printed(
        lazy.check_compacted,
        lazy.FEWER_VALUES,
        lazy.lost_not,
        lazy.uneven_roots,
        lazy.merged_long,
        lazy.NORM_OF_LEFTS,
        lazy.NO_RANK_LEFT,
    ),
    "zoinfer-low-rank-estimator": (
        printed(check_same_estimator, lazy.divided_by_rank, lazy.left_sampled_first, central_by_epsilon),
        printed(partial(check_low_rank_mean, True), widths_by_root),
        printed(check_bias_order, central_by_epsilon),
    ),
    "zoinfer-one-over-r": (
        printed(partial(check_low_rank_mean, False)),
        printed(lazy.check_shipped_factors_mean, lazy.by_rank, updates_without_rank, lazy.BY_ROOT_OFF),
        printed(check_unscaled_update, widths_by_root),
    ),
    "zoinfer-window-on-one-factor": (
        printed(check_interval),
        printed(
            lazy.check_shipped_interval,
            lazy.NEW_EVERY_STEP,
            lazy.NO_RIGHT_FIRST,
            lazy.STALE_RIGHT,
            lazy.right_as_left,
            lazy.RATE_OFF,
            lazy.INCREMENT_EACH_STEP,
        ),
    ),
    "zoinfer-window-subspace": (
        printed(check_subspace),
        printed(lazy.check_shipped_subspace, lazy.NEW_EVERY_STEP, lazy.STALE_RIGHT, lazy.beside_span),
    ),
    "lazy-estimates-are-biased-within-a-window": (
        printed(
            check_conditional_mean,
            called_with(
                "proofs_checks.zoinfer.statements:conditional_mean",
                "V normalised",
                right=lambda right: right * np.sqrt(right.shape[1] / (right**2).sum()),
            ),
        ),
        printed(lazy.check_shipped_mean_given_right, lazy.by_rank, updates_without_rank, lazy.BY_ROOT_OFF),
    ),
    "zoinfer-entry-moments": (
        printed(
            check_entry_moments,
            returning(
                "proofs_checks.oracles.statements:low_rank_entry_moments",
                "a normal's fourth moment",
                lambda it: {**it, "fourth_moment": 3.0},
            ),
        ),
        printed(check_same_estimator, lazy.divided_by_rank),
    ),
    "zoinfer-central-limit": printed(
        check_normal_limit,
        called_with(
            "proofs_checks.zoinfer.statements:distance_to_normal",
            "a rank too many",
            rank=lambda rank: rank + 1,
        ),
    ),
    "zoinfer-one-larger-adapter": (
        printed(
            check_increments,
            Fault(
                "a sum that forgets its factor",
                "proofs_checks.zoinfer.statements:plus",
                lambda shipped, left, right, *_factor: shipped(left, right),
            ),
        ),
        printed(check_increments_in_float),
        printed(
            lazy.check_shipped_increments,
            lazy.PROBE_SIGN,
            lazy.PROBE_TWICE,
            lazy.narrow_sum,
            lazy.one_increment,
        ),
    ),
    "increments-grow-with-windows": (
        printed(
            check_increment_growth,
            Fault(
                "one side alone",
                "proofs_checks.zoinfer.statements:largest_interval_count",
                lambda _shipped, _rows, columns, rank: -(-columns // rank),
            ),
        ),
        printed(lazy.check_shipped_increment_growth, lazy.one_increment, lazy.INCREMENT_EACH_STEP),
    ),
    "zoinfer-quantized-base": (
        printed(check_quantized_base, central_by_epsilon),
        printed(
            quantized.check_side_path_quantized,
            quantized.STORED,
            quantized.STORED_BACK,
            quantized.SIDE_PATH_LONG,
        ),
    ),
}
