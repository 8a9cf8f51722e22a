"""How directions are distributed: literally, number by number, and what is declared of them; the random numbers themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from executors.randomness.counter import CounterDraws, CounterKey
from executors.randomness.directions import DIRECTIONS, Direction, Gaussian, Rademacher
from executors.randomness.families import LowRank, QuantisedGaussian
from executors.randomness.quantisers import StochasticRounding
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, printed
from proofs_checks.faults import wide_normals
from proofs_checks.mutation import Fault, planted
from proofs_checks.oracles.directions import direction_moments
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.setups import literal
from proofs_checks.statistics import compare_means

_CPU = torch.device("cpu")
SHAPE = (6, 7)
"""Of the tensors drawn: a matrix, so that a low rank is one, of more elements than torch's groups of 16."""

_ROUNDING = 1e-12


def _families() -> Iterator[tuple[Direction, dict[str, float]]]:
    """Yield one member of every family, with what its closed forms say of tensors of :data:`SHAPE`."""
    numel = math.prod(SHAPE)
    rows, columns = SHAPE
    for direction in (Gaussian(), Rademacher()):
        yield direction, direction_moments(direction.distribution.name, dimension=numel)  # type: ignore[arg-type]
    for rank in (1, 3):
        yield LowRank(rank), direction_moments("low-rank", rows=rows, columns=columns, rank=rank)
    for bits, scale in ((3, 1.5), (2, 0.5), (8, 127 / 6)):
        quantised = QuantisedGaussian(StochasticRounding(bits, scale))
        yield quantised, direction_moments("quantised-gaussian", dimension=numel, bits=bits, scale=scale)


def _literal(direction: Direction, seed: int) -> Tensor:
    """Return what a direction is by its definition, from the same generator's numbers."""
    generator = torch.Generator().manual_seed(seed)

    def normals(shape: tuple[int, ...]) -> Tensor:
        return literal.drawn(shape, "gaussian", generator, torch.float64)

    if isinstance(direction, LowRank):
        left, right = normals((SHAPE[0], direction.rank)), normals((SHAPE[1], direction.rank))
        return (left[:, None] * right[None]).sum(2) / math.sqrt(direction.rank)
    if isinstance(direction, Rademacher):
        return literal.drawn(SHAPE, "rademacher", generator, torch.float64)
    z = normals(SHAPE)
    if isinstance(direction, QuantisedGaussian):
        cells = z * direction.rounding.scale
        limit = 2 ** (direction.rounding.bits - 1) - 1
        chance = torch.rand(SHAPE, generator=generator, dtype=torch.float64)
        cells = torch.where(chance < cells - cells.floor(), cells.floor() + 1, cells.floor())
        return cells.clamp(-limit, limit) / direction.rounding.scale
    return z


def check_families(context: Context) -> Outcome:
    """Compare draws of every family with its definition, and what it declares with closed forms."""
    largest, lines = 0.0, []
    for direction, theory in _families():
        errors = []
        for seed in range(context.seed, context.seed + context.samples(40, 6)):
            out = torch.empty(SHAPE, dtype=torch.float64)
            direction.fill(out, generator_on(_CPU, seed))
            errors.append(float((out - _literal(direction, seed)).abs().max()))
        distribution = direction.distribution
        declared = max(
            abs(distribution.mean),
            abs(distribution.second_moment / theory["second_moment"] - 1),
            abs(direction.energy(SHAPE) / theory["energy"] - 1),
        )
        off = max(errors) if not any(map(math.isnan, errors)) else math.nan
        largest = max(largest, off, declared) if not math.isnan(off) else math.nan
        lines.append(
            f"{distribution.name}: draws off by {off:.1e}, energy {direction.energy(SHAPE):.4f}, closed form {theory['energy']:.4f}"
        )
    return Outcome(
        largest, _ROUNDING, "largest distance of a draw, or relative of a declared moment", tuple(lines)
    )


def check_numbers(context: Context) -> Outcome:
    """Compare moments of many numbers, and products across elements, parameters, queries, steps and runs, with theory."""
    outcomes = []
    length = context.samples(1 << 22, 1 << 20)
    for name, direction in DIRECTIONS.items():
        fourth = direction_moments(name)["fourth_moment"]  # type: ignore[arg-type]
        for rng in ("mezo", "counter"):
            z = _numbers(direction, rng, length, context.seed)
            lags = [z[:-lag] * z[lag:] for lag in (1, 2, 16, 32, 64)]
            apart = [z * _numbers(direction, rng, length, context.seed, **other) for other in _OTHERS]
            short = min(len(product) for product in lags)
            columns = [z[:short], z[:short] ** 2, z[:short] ** 4, z[:short] ** 3]
            columns += [product[:short] for product in (*lags, *apart)]
            if name == "rademacher":  # a sign's square never varies
                columns = [columns[0], *columns[4:]]
                expected = [0.0] * len(columns)
            else:
                expected = [0.0, 1.0, fourth, 0.0, *[0.0] * (len(lags) + len(apart))]
            outcomes.append(
                compare_means(
                    f"{name}, {rng}",
                    torch.stack(columns, dim=1),
                    torch.tensor(expected, dtype=torch.float64),
                    along=False,
                )
            )
    return worst(outcomes)


_OTHERS = ({"parameter": 1}, {"query": 1}, {"step": 1}, {"run": 1})


def _numbers(
    direction: Direction,
    rng: str,
    length: int,
    seed: int,
    *,
    parameter: int = 0,
    query: int = 0,
    step: int = 0,
    run: int = 0,
) -> Tensor:
    """Return a parameter's numbers as the shipped pieces draw them, in float64."""
    from executors.runs.records import seed_of

    of_query = seed_of(seed + run, step, query)
    out = torch.empty(length)
    if rng == "counter":
        draws = CounterDraws([length, length], _CPU)
        draws.fill(out, parameter, 0, CounterKey.of(of_query, step, query), direction)
    else:
        generator = generator_on(_CPU, of_query)
        for _ in range(parameter + 1):
            direction.fill(out, generator)
    return out.double()


_UNSET = Fault(
    "a sign bit that is never set",
    "executors.randomness.directions:sign_words",
    lambda shipped, *given: shipped(*given).bitwise_and_(2**63 - 1),
)


@planted("executors.randomness.directions:Gaussian.fill", "uniform numbers of variance 1 for normals")
def uniform(shipped, self, out, generator):
    shipped(self, out, generator)
    out.mul_(0.5**0.5).erf_().mul_(3**0.5)


@planted("executors.randomness.families:LowRank.fill", "low rank without its scale")
def low_rank_without_scale(shipped, self, out, generator):
    shipped(self, out, generator)
    out.mul_(self.rank**0.5 if out.dim() == 2 else 1)


@planted(
    "costmodel.formats.roundings:moments_of", "a second moment of rounded normals that forgets the tails"
)
def tails_forgotten(shipped, distribution, levels):
    def between(low, high):
        return (0.0, 0.0, 0.0) if math.isinf(high) else distribution.partial_moments(low, high)

    return shipped(replace(distribution, partial_moments=between), levels)


CHECKS: Checks = {
    "direction-moments": printed(
        check_families,
        wide_normals,
        low_rank_without_scale,
        uniform,
        _UNSET,
        Fault(
            "an energy of normals without its 2",
            "executors.randomness.directions:Gaussian.energy",
            lambda shipped, self, shape: shipped(self, shape) - 2,
        ),
        tails_forgotten,
    ),
    "directions-are-independent": printed(
        check_numbers,
        uniform,
        _UNSET,
        Fault(
            "a key of the query alone",
            "executors.randomness.counter:CounterKey.of",
            lambda shipped, cls, _seed, _step, query: shipped(cls, 0, 0, query),
        ),
        Fault(
            "every block with one seed",
            "executors.randomness.counter:CounterDraws._seeds",
            lambda shipped, self, _parameter, blocks, *rest: shipped(self, 0, [0] * len(blocks), *rest),
        ),
        Fault(
            "a seed of a run without its query",
            "executors.runs.records:seed_of",
            lambda shipped, seed, step, _query: shipped(seed, step, 0),
        ),
    ),
}
