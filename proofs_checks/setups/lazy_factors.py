"""Low-rank perturbations as runs draw them, step by step, and updates as increments of an adapter, beside literal loops.

The literal side draws its factors from seeds by itself, and adds matrices where the shipped adapter adds factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Generator, Tensor

from costmodel.formats.distributions import DISTRIBUTIONS, DistributionName
from executors.models.increments import AdapterState, Increments
from executors.randomness.counter import CounterKey
from executors.randomness.low_rank import _RIGHT, FactorSampler, LazyInterval, divisor_of, fill_product
from executors.steps.arithmetic import ParamPass, projected_gradient
from proofs_checks.exact import Array, at_most, equal, exceeds, is_true, normal_nodes
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted, scaled
from proofs_checks.setups.literal import chained, perturbations, sampled, seed_of

_CPU = torch.device("cpu")
_ROWS, _COLUMNS, _RANK = 7, 9, 2
_RATE = 0.125

Factors = tuple[Tensor, Tensor]
"""``U`` and ``V``."""

# -- intervals -----------------------------------------------------------------------------------------------------


def shipped_factors(rng: str, num_steps: int, lazy_steps: int, seed: int) -> list[Factors]:
    """Return the factors of a matrix in each step, as runs draw them."""
    factor_sampler = FactorSampler(
        [(_ROWS, _COLUMNS)], {"block": [0]}, lambda _perturbation: ["block"], _RANK, _CPU, torch.float64
    )
    factors = []
    for step in range(num_steps):
        first = step - step % lazy_steps
        interval, own = LazyInterval(first, (seed_of(seed, first, 0),)), seed_of(seed, step, 0)
        if rng == "counter":
            made = factor_sampler.counted("block", 0, CounterKey.of(own, step, 0), interval)
        else:
            made = factor_sampler.sequential("block", 0, step, interval, Generator().manual_seed(own))
        assert made.rights[0] is not None
        factors.append((made.lefts[0], made.rights[0]))
    return factors


def factorised(shape: tuple[int, int], rank: int, generator: Generator) -> Tensor:
    """Return a plan's ``factorised`` perturbation of a matrix, as a run draws it in the first step of an interval."""
    factor_sampler = FactorSampler(
        [shape], {"block": [0]}, lambda _perturbation: ["block"], rank, _CPU, torch.float64
    )
    made = factor_sampler.sequential("block", 0, 0, LazyInterval(0, (0,)), generator)
    assert made.rights[0] is not None
    return product_of(made.lefts[0], made.rights[0])


def product_of(left: Tensor, right: Tensor) -> Tensor:
    """Return what a run makes of given factors of such a perturbation."""
    z = left.new_empty((len(left), len(right)))
    fill_product(z, left, right, divisor_of(left.shape[1], DISTRIBUTIONS["factorised"].rank_power))
    return z


def literal_factors(rng: str, num_steps: int, lazy_steps: int, seed: int) -> list[Factors]:
    """Return the same from their description: ``V`` in an interval's first step, before ``U``; ``U`` in every step."""
    factors, right = [], torch.empty(0)
    for step in range(num_steps):
        own, opens = seed_of(seed, step, 0), step % lazy_steps == 0
        if rng == "counter":
            options = {
                "step": step,
                "perturbation": 0,
                "rng": rng,
                "distribution": "gaussian",
                "dtype": torch.float64,
            }
            (left,) = perturbations([(_ROWS, _RANK)], seed=own, **options)  # type: ignore[arg-type]
            if opens:
                (flat,) = perturbations([(_COLUMNS * _RANK,)], seed=chained(own, 0x56), **options)  # type: ignore[arg-type]
                right = flat.view(_COLUMNS, _RANK)
        else:
            generator = Generator().manual_seed(own)
            if opens:
                right = sampled((_COLUMNS, _RANK), "gaussian", generator, torch.float64)
            left = sampled((_ROWS, _RANK), "gaussian", generator, torch.float64)
        factors.append((left, right))
    return factors


def check_shipped_interval(context: Context) -> Outcome:
    """Compare the increments of shipped draws over two intervals with updates made matrix by matrix from literal draws."""
    parts = {}
    num_steps, lazy_steps = 8, 4
    for rng in ("mezo", "counter"):
        whole, increments = torch.zeros((_ROWS, _COLUMNS), dtype=torch.float64), Increments()
        shipped = shipped_factors(rng, num_steps, lazy_steps, context.seed)
        for step, (left, right) in enumerate(literal_factors(rng, num_steps, lazy_steps, context.seed)):
            coefficient = (step - 2) / 3
            whole -= _RATE * coefficient * (left @ right.T)
            increments.add(*shipped[step], -_RATE * coefficient)
        left, right = increments.joined()
        parts[f"{rng}, the sum"] = equal(left @ right.T, whole, what="ΔW")
        parts[f"{rng}, increments"] = equal(float(len(increments.lefts)), 2.0, what="one for each interval")
    return everything_holds(parts)


def check_shipped_subspace(context: Context) -> Outcome:
    """Compare the rank and the row space of shipped updates over an interval with those of its V, and the rank over two."""
    parts = {}
    for rng in ("mezo", "counter"):
        updated = np.zeros((2, _ROWS, _COLUMNS))
        factors = shipped_factors(rng, 8, 4, context.seed)
        for step, (left, right) in enumerate(factors):
            z = torch.empty((_ROWS, _COLUMNS), dtype=torch.float64)
            fill_product(z, left, right)
            updated[step // 4] += (step - 2.5) * z.numpy()
        base = factors[0][1].numpy()
        off = np.abs(updated[0] - updated[0] @ base @ np.linalg.pinv(base)).max()
        parts[f"{rng}, an interval"] = equal(
            float(np.linalg.matrix_rank(updated[0], tol=1e-9)), float(_RANK), what="rank"
        )
        parts[f"{rng}, its rows"] = is_true(off < 1e-11, what=f"off the span of V by {off:.1e}")
        parts[f"{rng}, two intervals"] = equal(
            float(np.linalg.matrix_rank(updated.sum(0), tol=1e-9)), 2.0 * _RANK, what="rank"
        )
    return everything_holds(parts)


# -- estimates ---------------------------------------------------------------------------------------------------

_SLOPE = torch.tensor([[0.8, -0.3, 0.5], [0.1, 0.9, -0.7]], dtype=torch.float64)


def shipped_factor_estimate(name: DistributionName, left: Tensor, right: Tensor) -> Tensor:
    """Return a central-difference estimate of a linear loss along given factors, scaled as a run scales perturbation and update."""
    rank, distribution = left.shape[1], DISTRIBUTIONS[name]
    z = torch.empty_like(_SLOPE)
    fill_product(z, left, right, divisor_of(rank, distribution.rank_power))
    z, param_pass, x = z.view(-1), ParamPass(), torch.zeros(_SLOPE.numel(), dtype=torch.float64)
    losses = []
    for scale in (1, -2):
        param_pass.perturb(x, z, scale, 0.5)
        losses.append(_SLOPE.view(-1) @ x)
    gradient = projected_gradient(losses[0], losses[1], 0.5, central=True).item()
    updated = torch.zeros_like(x)
    divided = gradient / divisor_of(rank, distribution.update_rank_power)
    param_pass.update(updated, z, gradient=divided, learning_rate=1.0, weight_decay=None)
    return -updated.view(_SLOPE.shape)


def check_shipped_factors_mean(context: Context) -> Outcome:  # noqa: ARG001 - exact
    """Compare the mean of estimates along each shipped low-rank distribution with ``∇F``, or ``r∇F`` where 1/r is left out."""
    parts = {}
    for name, rank in itertools.product(("factorised", "lozo", "lozo-released"), (1, 2)):
        nodes, weights = normal_nodes(5 * rank, 2)
        mean = torch.zeros_like(_SLOPE)
        for node, weight in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
            left, right = node[: 2 * rank].view(2, rank), node[2 * rank :].view(3, rank)
            mean += weight * shipped_factor_estimate(name, left, right)  # type: ignore[arg-type]
        factor = rank if name == "lozo-released" else 1
        parts[f"{name}, r = {rank}"] = equal(mean, factor * _SLOPE, what=f"E[ĝ], {factor}·∇F")
    return everything_holds(parts)


def check_shipped_mean_given_right(context: Context) -> Outcome:  # noqa: ARG001 - exact
    """Compare the mean of shipped estimates over U, one V kept, with ``GVVᵀ/r``."""
    right = torch.tensor([[0.5, -0.9], [-1.2, 0.4], [0.3, 1.1]], dtype=torch.float64)
    projected = _SLOPE.numpy() @ right.numpy() @ right.numpy().T / 2
    nodes, weights = normal_nodes(4, 2)
    parts = {}
    for name in ("factorised", "lozo"):
        mean = torch.zeros_like(_SLOPE)
        for node, weight in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
            mean += weight * shipped_factor_estimate(name, node.view(2, 2), right)
        parts[name] = equal(mean, torch.from_numpy(projected), what="E[ĝ|V]")
        parts[f"{name}: it is not G"] = exceeds(float((mean - _SLOPE).norm()), 0.5, what="‖E[ĝ|V] - G‖")
    return everything_holds(parts)


# -- increments -------------------------------------------------------------------------------------------------------


def _pair(generator: np.random.Generator, rank: int) -> tuple[Array, Array]:
    return generator.normal(size=(_ROWS, rank)), generator.normal(size=(_COLUMNS, rank))


def check_shipped_increments(context: Context) -> Outcome:
    """Compare the shipped adapter, for both signs of a probe and every order of increments, with the sum of the products."""
    generator = np.random.default_rng(context.seed)
    pairs = [(*_pair(generator, rank), factor) for rank, factor in ((1, 0.5), (2, -0.3), (2, 1.7))]
    left, right = _pair(generator, 2)
    learnt = sum(factor * a @ b.T for a, b, factor in pairs)
    off, size = 0.0, 0.0
    for sign, order in itertools.product((1, -1), itertools.permutations(pairs)):
        increments = Increments()
        for a, b, factor in order:
            increments.add(torch.from_numpy(a), torch.from_numpy(b), factor)
        probed = increments.joined((torch.from_numpy(left), torch.from_numpy(right), sign * 0.25))
        wanted = learnt + sign * 0.25 * left @ right.T
        off = max(off, float(np.abs((probed[0] @ probed[1].T).numpy() - wanted).max()))
        size = float(np.abs(wanted).max())
    increments = Increments()
    one, along = torch.ones((3, 1), dtype=torch.bfloat16), torch.ones((4, 1), dtype=torch.bfloat16)
    for factor in (1.0, *[1 / 512] * 256):
        increments.add(one, along, factor)
    return everything_holds(
        {
            "12 composed adapters": equal(1 + off / size, 1.0, what="1 + relative distance to (14)"),
            "256 small updates of factors in bfloat16": equal(
                increments.joined()[0].double(), torch.full((3, 1), 1.5), what="U"
            ),
        }
    )


def check_shipped_increment_growth(context: Context) -> Outcome:
    """Compare the rank and the numbers of the shipped adapter after k intervals with kr and kr(m + n), a probe's rank beside."""
    generator = np.random.default_rng(context.seed)
    parts = {}
    for num_intervals in (1, 2, 3):
        state = AdapterState()
        for _ in range(num_intervals):
            _, right = map(torch.from_numpy, _pair(generator, _RANK))
            for _ in range(3):
                state.add("w", torch.from_numpy(_pair(generator, _RANK)[0]), right, 0.1)
        left, right = map(torch.from_numpy, _pair(generator, _RANK))
        joined, probed = state.increments["w"].joined(), state.increments["w"].joined((left, right, 1e-3))
        whole = np.linalg.matrix_rank((joined[0] @ joined[1].T).numpy(), tol=1e-9)
        parts[f"{num_intervals} intervals"] = equal(
            [
                float(state.rank),
                float(whole),
                float(probed[0].shape[1]),
                float(joined[0].numel() + joined[1].numel()),
            ],
            [
                float(num_intervals * _RANK),
                float(num_intervals * _RANK),
                float((num_intervals + 1) * _RANK),
                float(num_intervals * _RANK * (_ROWS + _COLUMNS)),
            ],
            what="rank, of the sum, with a probe; numbers",
        )
    return everything_holds(parts)


def check_candidate(context: Context) -> Outcome:
    """Compare (20) out of shipped increments with the sum, and what serves the other slice before, beside and after a candidate bit for bit."""
    generator = np.random.default_rng(context.seed)
    increments, parts = Increments(), {}
    pairs = [(*_pair(generator, rank), factor) for rank, factor in ((2, 0.7), (1, -0.4))]
    for a, b, factor in pairs:
        increments.add(torch.from_numpy(a), torch.from_numpy(b), factor)
    left, right = map(torch.from_numpy, _pair(generator, 2))
    before = [factor.clone() for factor in increments.joined()]
    current = sum(factor * a @ b.T for a, b, factor in pairs)
    for epsilon in (0.25, 1e-3):
        served = increments.joined((left, right, epsilon))
        parts[f"the candidate, ε = {epsilon:g}"] = equal(
            served[0] @ served[1].T,
            torch.from_numpy(current + epsilon * (left @ right.T).numpy()),
            what="(20)",
        )
        unlike = sum(
            not torch.equal(held, now) for held, now in zip(before, increments.joined(), strict=True)
        )
        parts[f"the other slice, ε = {epsilon:g}"] = is_true(
            unlike == 0, what="no bit of the current adapter differs"
        )
    for _ in range(2):
        increments.add(left, right, 0.125)
    promoted = increments.joined()
    parts["promoted"] = equal(
        promoted[0] @ promoted[1].T, torch.from_numpy(current + 0.25 * (left @ right.T).numpy()), what="ΔW"
    )
    return everything_holds(parts)


def check_compacted(context: Context) -> Outcome:
    """Compare compacted increments with the nearest matrix of their rank, and what they say was lost with what was."""
    generator = np.random.default_rng(context.seed)
    parts = {}
    for rank in (1, 3, 6):
        increments, whole = Increments(), np.zeros((_ROWS, _COLUMNS))
        for turn in range(3):
            for _ in range((5, 2, 1)[turn]):  # the last is one more column than is to be left
                left, right = _pair(generator, (2, 2, 1)[turn])
                increments.add(torch.from_numpy(left), torch.from_numpy(right), 0.5)
                whole += 0.5 * left @ right.T
            left, right = (factor.numpy() for factor in increments.joined())
            parts[f"rank {rank}, turn {turn}, norm"] = equal(
                increments.norm(), float(np.linalg.norm(left @ right.T)), what="Frobenius norm"
            )
            values = np.linalg.svd(left @ right.T, compute_uv=False)
            held = left @ right.T
            increments.compact(rank)
            left, right = (factor.numpy() for factor in increments.joined())
            parts[f"rank {rank}, turn {turn}"] = equal(
                float(np.linalg.norm(held - left @ right.T)),
                float(np.linalg.norm(values[rank:])),
                what="distance against the values left out",
            )
            parts[f"rank {rank}, turn {turn}, columns"] = equal(
                float(increments.rank), float(rank), what="rank"
            )
            parts[f"rank {rank}, turn {turn}, evenly"] = equal(
                np.linalg.norm(left, axis=0),
                np.linalg.norm(right, axis=0),
                what="sizes of columns on both sides",
            )
            parts[f"rank {rank}, turn {turn}, lost"] = at_most(
                float(np.linalg.norm(whole - left @ right.T)),
                increments.lost,
                what="distance to all that was added",
            )
    layer = torch.nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.float64)
    base, state = layer.weight.detach().numpy().copy(), AdapterState(max_rank=6)
    for factor in (0.5, -0.25):
        left, right = _pair(generator, 3)
        state.add("weight", torch.from_numpy(left), torch.from_numpy(right), factor)
    left, right = (factor.numpy() for factor in state.increments["weight"].joined())
    state.merge_into(layer)
    parts["merged into the base"] = equal(
        layer.weight.detach(), torch.from_numpy(base + left @ right.T), what="W₀ + ΔW"
    )
    state.close(next_rank=2)
    parts["closed"] = equal(
        float(state.rank), 4.0, what="rank that leaves space for two below a bound of six"
    )
    values = np.linalg.svd(left @ right.T, compute_uv=False)
    parts["stated error"] = equal(
        state.relative_error,
        float(np.linalg.norm(values[4:]) / np.linalg.norm(values[:4])),
        what="lost over norm",
    )
    return everything_holds(parts)


# -- faults ------------------------------------------------------------------------------------------------------

_ADD = "executors.models.increments:Increments.add"
_JOINED = "executors.models.increments:Increments.joined"
_COMPACT = "executors.models.increments:Increments.compact"
_KEYED = "executors.randomness.low_rank:FactorSampler._counted_rights"


def in_step_of_interval(name: str, step: Callable[[LazyInterval], int]) -> Fault:
    """Return a fault for which every step is another one of its interval."""

    @planted("executors.randomness.low_rank:FactorSampler.sequential", name)
    def fault(shipped, self, group, perturbation, _step, interval, *rest):
        return shipped(self, group, perturbation, step(interval), interval, *rest)

    return fault


def with_probe(name: str, change: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, float]]) -> Fault:
    """Return a fault of increments that are joined with another probe."""

    @planted(_JOINED, name)
    def fault(shipped, self, perturbed=None):
        return shipped(self, perturbed and change(*perturbed))

    return fault


@planted("executors.randomness.rng:mixed", "V from the numbers of U")
def right_as_left(shipped, *numbers):
    return numbers[0] if numbers[1:] == (_RIGHT,) else shipped(*numbers)


@planted("executors.randomness.low_rank:product_tiles", "a millionth beside the span")
def beside_span(shipped, *given):
    for begin, tile in shipped(*given):
        yield begin, tile.add_(1e-6)


by_rank = called_with(
    "executors.randomness.low_rank:divisor_of",
    "divided by r, not by its root",
    rank_power=lambda rank_power: -1.0 if rank_power == -0.5 else rank_power,
)


@planted(_JOINED, "a probe that is not taken back")
def probe_stays(shipped, self, perturbed=None):
    joined = shipped(self, perturbed)
    if perturbed is not None:
        left, right, scale = perturbed
        self.lefts.append(left * scale)
        self.rights.append(right)
    return joined


@planted("executors.models.increments:AdapterState.merge_into", "a merge that is 3 % long")
def merged_long(shipped, self, model):
    longer = {
        name: altered(increments, lefts=[1.03 * left for left in increments.lefts])
        for name, increments in self.increments.items()
    }
    shipped(altered(self, increments=longer), model)


@planted(_COMPACT, "losses that are not added up")
def lost_not(shipped, self, rank):
    self.lost = 0.0 if self.rank > rank else self.lost
    shipped(self, rank)


@planted(_COMPACT, "values on one side alone")
def uneven_roots(shipped, self, rank):
    is_compacted = self.rank > rank
    shipped(self, rank)
    if is_compacted:
        roots = self.rights[0].norm(dim=0)
        self.lefts[0].mul_(roots)
        self.rights[0].div_(roots)


@planted(_ADD, "left factors added up in their own format")
def narrow_sum(shipped, self, left, right, factor):
    shipped(self, left, right, factor)
    self.lefts = [kept.to(left.dtype) for kept in self.lefts]


@planted(_ADD, "increments that are not told apart")
def one_increment(shipped, self, left, right, factor):
    alike = (known for known in self.rights if known.shape == right.shape)
    shipped(self, left, next(alike, right), factor)


NEW_EVERY_STEP = in_step_of_interval("V drawn anew in every step", lambda interval: interval.first)
NO_RIGHT_FIRST = in_step_of_interval(
    "an interval whose first step draws no V", lambda interval: interval.first + 1
)
STALE_RIGHT = Fault(
    "V that outlives its interval",
    _KEYED,
    lambda shipped, self, group, perturbation, _interval: shipped(
        self, group, perturbation, LazyInterval(0, (0,) * (perturbation + 1))
    ),
)
RATE_OFF = called_with(_ADD, "an update that is 3 % long", factor=lambda factor: 1.03 * factor)
BY_ROOT_OFF = scaled("executors.randomness.low_rank:divisor_of", 1.03, "a divisor that is 3 % high")
PROBE_SIGN = with_probe("a probe without its sign", lambda left, right, scale: (left, right, abs(scale)))
PROBE_TWICE = with_probe(
    "a probe scaled on both sides", lambda left, right, scale: (left, right * scale, scale)
)
FEWER_VALUES = called_with(_COMPACT, "one value fewer than the rank", rank=lambda rank: max(1, rank - 1))
NORM_OF_LEFTS = called_with(
    "executors.models.increments:Increments.norm",
    "a norm of left factors alone",
    self=lambda it: altered(it, rights=it.lefts),
)
NO_RANK_LEFT = Fault(
    "no rank left for the next interval",
    "executors.models.increments:AdapterState.close",
    lambda shipped, self, *_given, **_named: shipped(self, 0),
)
INCREMENT_EACH_STEP = called_with(_ADD, "an increment for every step", right=lambda right: right.clone())


divided_by_rank = called_with(
    "executors.randomness.low_rank:divisor_of",
    "low rank divided by r, not by √r",
    rank_power=lambda rank_power: 2 * rank_power,
)


@planted("executors.randomness.low_rank:FactorSampler.sequential", "U drawn before V")
def left_sampled_first(shipped, self, *given, **named):
    made = shipped(altered(self, _shapes=[shape[::-1] for shape in self._shapes]), *given, **named)
    return replace(made, lefts=made.rights, rights=made.lefts)
