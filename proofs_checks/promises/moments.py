"""How perturbations are distributed: literally, number by number, and what is declared of them; the random numbers themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.rng import generator_on
from executors.randomness.samplers import SAMPLERS, DistributionSampler
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import normal_nodes
from proofs_checks.faults import wide_normals
from proofs_checks.oracles.perturbations import perturbation_moments
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.planting import called_with, planted, returning
from proofs_checks.setups import literal
from proofs_checks.setups.lazy_factors import divided_by_rank, factorised, product_of
from proofs_checks.setups.roundings import Reaching, qvalues_of, towards_zero
from proofs_checks.statistics import compare_means

_CPU = torch.device("cpu")
SHAPE = (6, 7)
"""Of the tensors drawn: a matrix, so that a low rank is one, of more elements than torch's groups of 16."""

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Family:
    """Perturbations as runs draw them, beside their definition."""

    name: str
    # shipped, literal: draw a tensor of :data:`SHAPE` from a generator.
    shipped: Callable[[Generator], Tensor]
    literal: Callable[[Generator], Tensor]
    # declared, theory: mean, second moment and energy: as the code states them, of a product of low rank by quadrature;
    # and in closed form.
    declared: tuple[float, ...]
    theory: tuple[float, ...]


def _families() -> Iterator[Family]:
    """Yield one member of every family."""
    numel = math.prod(SHAPE)
    for name, sampler in SAMPLERS.items():
        distribution = sampler.distribution
        yield Family(
            name,
            partial(_filled, sampler),
            partial(literal.sampled, SHAPE, name, dtype=torch.float64),
            (distribution.mean, distribution.second_moment, sampler.energy(SHAPE)),
            _moments(perturbation_moments(name, dimension=numel)),  # type: ignore[arg-type]
        )
    for rank, (rows, columns) in ((1, (2, 3)), (2, (2, 2))):
        yield Family(
            f"rank {rank}",
            partial(factorised, SHAPE, rank),
            partial(_literal_product, rank),
            _enumerated_product(rows, columns, rank),
            _moments(perturbation_moments("low-rank", rows=rows, columns=columns, rank=rank)),
        )
    for bits, limit in ((3, 2.0), (2, 2.0), (8, 6.0)):
        rounding = Reaching("gaussian", bits, limit=limit)
        second = rounding.moments.second
        yield Family(
            f"{bits} bits up to ±{limit:g}",
            partial(_rounded, rounding),
            partial(_literal_rounded, bits, limit),
            (0.0, second, rounding.relative_energy("q-rge1", numel) * second**2),
            _moments(
                perturbation_moments(
                    "quantized-gaussian", dimension=numel, bits=bits, scale=(2 ** (bits - 1) - 1) / limit
                )
            ),
        )


def _moments(theory: Mapping[str, float]) -> tuple[float, ...]:
    return theory["mean"], theory["second_moment"], theory["energy"]


def _filled(sampler: DistributionSampler, generator: Generator) -> Tensor:
    out = torch.empty(SHAPE, dtype=torch.float64)
    sampler.fill(out, generator)
    return out


def _literal_product(rank: int, generator: Generator) -> Tensor:
    right, left = (
        literal.sampled((length, rank), "gaussian", generator, torch.float64) for length in reversed(SHAPE)
    )
    return (left[:, None] * right[None]).sum(2) / math.sqrt(rank)


def _enumerated_product(rows: int, columns: int, rank: int) -> tuple[float, ...]:
    """Return the moments of shipped products of normal factors, by quadrature that is exact to degree 5 in each number."""
    nodes, weights = normal_nodes((rows + columns) * rank, 3)
    slope = torch.linspace(-1.0, 2.0, rows * columns, dtype=torch.float64)
    slope /= slope.norm()
    mean = second = energy = 0.0
    for numbers, weight in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        left, right = numbers.split([rows * rank, columns * rank])
        z = product_of(left.view(rows, rank), right.view(columns, rank)).view(-1)
        mean += weight * float(z.mean())
        second += weight * float(z[0] ** 2)
        energy += weight * float((slope @ z) ** 2 * (z @ z))
    return mean, second, energy


def _normals_and_uniforms(generator: Generator) -> tuple[Tensor, Tensor]:
    normals = literal.sampled(SHAPE, "gaussian", generator, torch.float32)
    return normals, torch.rand(SHAPE, generator=generator)


def _rounded(rounding: Reaching, generator: Generator) -> Tensor:
    normals, uniforms = _normals_and_uniforms(generator)
    return qvalues_of(normals, rounding, uniforms).double() * rounding.unit


def _literal_rounded(bits: int, limit: float, generator: Generator) -> Tensor:
    z, uniforms = (numbers.double() for numbers in _normals_and_uniforms(generator))
    highest = 2 ** (bits - 1) - 1
    cells = z * (highest / limit)
    up = cells - cells.floor()
    rounded: Tensor = (cells.floor() + (uniforms >= 1 - up)).clamp(-highest, highest) * limit / highest
    return rounded


def check_families(context: Context) -> Outcome:
    """Compare draws of every family with its definition, and what it states, or has by quadrature, with closed forms."""
    largest, lines = 0.0, []
    for family in _families():
        errors = [
            float(
                (family.shipped(generator_on(_CPU, seed)) - family.literal(generator_on(_CPU, seed)))
                .abs()
                .max()
            )
            for seed in range(context.seed, context.seed + context.samples(40, 6))
        ]
        off = max(abs(a - b) / (b or 1.0) for a, b in zip(family.declared, family.theory, strict=True))
        largest = math.nan if any(map(math.isnan, [largest, *errors])) else max(largest, off, *errors)
        lines.append(
            f"{family.name}: draws off by {max(errors):.1e}, energy {family.declared[2]:.4f}, closed form {family.theory[2]:.4f}"
        )
    return Outcome(
        largest, _ROUNDING, "largest distance of a draw, or relative of a declared moment", tuple(lines)
    )


def check_numbers(context: Context) -> Outcome:
    """Compare moments of many numbers, and products across elements, parameters, perturbations, steps and runs, with theory."""
    outcomes = []
    length = context.samples(1 << 22, 1 << 20)
    for name, sampler in SAMPLERS.items():
        fourth = perturbation_moments(name)["fourth_moment"]  # type: ignore[arg-type]
        for rng in ("mezo", "counter"):
            z = _numbers(sampler, rng, length, context.seed)
            lags = [z[:-lag] * z[lag:] for lag in (1, 2, 16, 32, 64)]
            apart = [z * _numbers(sampler, rng, length, context.seed, **other) for other in _OTHERS]
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


_OTHERS = ({"parameter": 1}, {"perturbation": 1}, {"step": 1}, {"run": 1})


def _numbers(
    sampler: DistributionSampler,
    rng: str,
    length: int,
    seed: int,
    *,
    parameter: int = 0,
    perturbation: int = 0,
    step: int = 0,
    run: int = 0,
) -> Tensor:
    """Return a parameter's numbers as the shipped pieces draw them, in float64."""
    from executors.runs.records import seed_of

    of_perturbation = seed_of(seed + run, step, perturbation)
    out = torch.empty(length)
    if rng == "counter":
        counter = CounterSampler([length, length], _CPU)
        counter.fill(out, parameter, 0, CounterKey.of(of_perturbation, step, perturbation), sampler)
    else:
        generator = generator_on(_CPU, of_perturbation)
        for _ in range(parameter + 1):
            sampler.fill(out, generator)
    return out.double()


_UNSET = returning(
    "executors.randomness.samplers:raw_signs",
    "a sign bit that is never set",
    lambda it: it.bitwise_and_(2**63 - 1),
)


@planted("executors.randomness.samplers:Gaussian.fill", "uniform numbers of variance 1 for normals")
def uniform(shipped, self, out, generator):
    shipped(self, out, generator)
    out.mul_(0.5**0.5).erf_().mul_(3**0.5)


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
        divided_by_rank,
        uniform,
        _UNSET,
        returning(
            "executors.randomness.samplers:Gaussian.energy",
            "an energy of normals without its 2",
            lambda it: it - 2,
        ),
        tails_forgotten,
        towards_zero,
    ),
    "directions-are-independent": printed(
        check_numbers,
        uniform,
        _UNSET,
        called_with(
            "executors.randomness.counter:CounterKey.of", "a key of the perturbation alone", seed=0, step=0
        ),
        called_with(
            "executors.randomness.counter:CounterSampler._seeds",
            "every block with one seed",
            parameter=0,
            blocks=lambda blocks: [0] * len(blocks),
        ),
        called_with(
            "executors.runs.records:seed_of", "a seed of a run without its perturbation", perturbation=0
        ),
    ),
}
