"""``python -m studies.quzo.estimators``: three estimates of a gradient along rounded perturbations, by bits (QuZO's Figure 3a).

A block of a transformer's encoder, its loss on random tokens, and central differences along normals rounded to few bits.
``û₁`` and ``û₂`` are two roundings of one ``u``: Q-RGE1 is ``g(û₁)·û₁``, Q-RGE2 is ``g(û₁)·û₂``, and the third is the first
over ``m₂ = E[û²]``. What each is on average along the gradient, :mod:`costmodel.formats.roundings` says in closed form. Grids are of
two kinds: those whose roundings have the least mean squared error, which clamp, and wide ones, which a normal never leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from costmodel.formats.roundings import EstimatorName, RoundedPerturbation
from studies.plots import picture

ESTIMATORS: tuple[EstimatorName, ...] = ("q-rge1", "q-rge2", "normalised")
BITS = (2, 3, 4, 5, 6, 8)
EPSILON = 1e-4
WIDTH, NUM_TOKENS = 8, 6
_CHUNK = 250


class WidePerturbation(RoundedPerturbation):
    """A rounded normal whose grid reaches so far that nothing is clamped, with steps as much wider."""

    @property
    def reach(self) -> float:
        """Value of the largest quantized value."""
        return 6.0


GRIDS: dict[str, type[RoundedPerturbation]] = {"least error": RoundedPerturbation, "wide": WidePerturbation}


@dataclass(frozen=True)
class Estimate:
    """What an estimator's samples are on average."""

    grid: str
    estimator: EstimatorName
    bits: int
    # along, along_stderr: of the mean along the gradient, 1 where the two are equal, and its standard error.
    along: float
    along_stderr: float
    predicted: float  # the same in closed form
    # error, error_stderr: ``|E ĝ - ∇|² / |∇|²``, what is left of the squared error of the mean without the noise of
    # finitely many samples, and its standard error, from samples in ten parts.
    error: float
    error_stderr: float
    energy: float  # ``E|ĝ|² / |∇|²``


class Problem:
    """The loss of one encoder block with a head, in double precision, at many points at once."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            self._model = nn.Sequential(block, nn.Linear(WIDTH, 4)).double()
            self._inputs = torch.randn(2, NUM_TOKENS, WIDTH, dtype=torch.float64)
            self._labels = torch.randint(4, (2 * NUM_TOKENS,))
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self.weights = torch.cat([p.detach().flatten() for p in self._model.parameters()])

    @property
    def num_weights(self) -> int:
        """Number of weights, d."""
        return self.weights.numel()

    def loss(self, weights: Tensor) -> Tensor:
        """Return the loss at weights of shape (d,)."""
        parts = weights.split([shape.numel() for shape in self._shapes.values()])
        named = {
            name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        logits = functional_call(self._model, named, (self._inputs,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), self._labels)

    def gradient(self) -> Tensor:
        """Return the gradient, of shape (d,)."""
        weights = self.weights.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(weights), weights)
        return gradient

    def residuals(self, perturbations: Tensor) -> Tensor:
        """Return what one forward a step gives: differences of the losses at ``w + ε·u`` of a step and the step before, over ε."""
        losses = vmap(self.loss)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            values = torch.cat(
                [losses(self.weights + EPSILON * part) for part in perturbations.split(_CHUNK)]
            )
        return (values - values.roll(1)) / EPSILON

    def slopes(self, perturbations: Tensor) -> Tensor:
        """Return the projected gradients along perturbations of shape (n, d), by central differences of radius ε."""
        losses = vmap(self.loss)
        # Fused attention has no rule for many weights at once.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            chunks = [
                (losses(self.weights + EPSILON * part) - losses(self.weights - EPSILON * part))
                / (2 * EPSILON)
                for part in perturbations.split(_CHUNK)
            ]
        return torch.cat(chunks)


def rounded(values: Tensor, perturbation: RoundedPerturbation, generator: torch.Generator) -> Tensor:
    """Return values rounded at random to the grid of `perturbation`, and clamped to its ends."""
    scaled = values * perturbation.scale
    below = scaled.floor()
    is_up = torch.rand(values.shape, generator=generator, dtype=values.dtype) < scaled - below
    return (below + is_up).clamp(-perturbation.highest, perturbation.highest) / perturbation.scale


def estimates(
    num_samples: int = 4000, seed: int = 1, *, bits: Sequence[int] = BITS, grids: Sequence[str] = tuple(GRIDS)
) -> Iterator[Estimate]:
    """Yield every estimator at every width on every grid, all from the same normals.

    - `num_samples`: a multiple of ten.
    - `seed`: of the normals and of what they are rounded with.
    - `grids`: of :data:`GRIDS`.
    """
    problem = Problem()
    gradient = problem.gradient()
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(num_samples, problem.num_weights, generator=generator, dtype=torch.float64)
    for grid, width in product(grids, bits):
        perturbation = GRIDS[grid]("gaussian", width)
        first, second = rounded(normals, perturbation, generator), rounded(normals, perturbation, generator)
        slopes = problem.slopes(first)[:, None]
        for estimator in ESTIMATORS:
            samples = slopes * (second if estimator == "q-rge2" else first) / perturbation.divisor(estimator)
            yield _estimate(grid, estimator, perturbation, samples, gradient)


@dataclass(frozen=True)
class Ablation:
    """How noisy an estimate is, with something changed: ``E|ĝ|² / |∇|²``, measured and in closed form."""

    name: str
    energy: float
    stderr: float
    predicted: float


def ablations(num_samples: int = 4000, seed: int = 2) -> Iterator[Ablation]:
    """Yield the energy of 4-bit normalised estimates with several perturbations, and with perturbations that are mostly zero.

    The mean of ``n`` perturbations has ``1 + (e - 1)/n`` of an energy ``e``. A perturbation of which a part ``k`` is not zero has
    ``m₂ = k`` and a fourth moment ``k·m₄``, so that it is ``d - 1 + m₄/k`` where it was ``d - 1 + m₄``: noise hardly grows
    with sparsity, since what is not drawn neither helps nor harms. One point with residual feedback, QuZO's baseline,
    takes ``(l(w + εû) - l(w + εû'))/ε`` for the projected gradient, with the ``û'`` of the step before: one forward a step,
    the same mean, and ``d`` more in the energy, since ``E(û'·∇)²|û|² = d·m₂²·|∇|²``.
    """
    problem, perturbation = Problem(), RoundedPerturbation("gaussian", 4)
    gradient, num_weights = problem.gradient(), problem.num_weights
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(num_samples, num_weights, generator=generator, dtype=torch.float64)
    qvalues = rounded(normals, perturbation, generator)
    moments, square = perturbation.moments, gradient.dot(gradient)
    dense = perturbation.relative_energy("normalised", num_weights)
    samples = problem.slopes(qvalues)[:, None] * qvalues / moments.second
    for num_perturbations in (1, 5, 10):
        means = samples.view(-1, num_perturbations, num_weights).mean(1)
        yield _ablation(
            f"{num_perturbations} perturbations", means, square, 1 + (dense - 1) / num_perturbations
        )
    for part in (0.5, 0.2):
        kept = torch.rand(qvalues.shape, generator=generator, dtype=torch.float64) < part
        sparse = qvalues * kept
        samples = problem.slopes(sparse)[:, None] * sparse / (part * moments.second)
        predicted = num_weights - 1 + moments.fourth / moments.second**2 / part
        yield _ablation(f"{1 - part:.0%} zeros", samples, square, predicted)
    samples = problem.residuals(qvalues)[:, None] * qvalues / moments.second
    yield _ablation("one point", samples, square, dense + num_weights)


def _ablation(name: str, samples: Tensor, square: Tensor, predicted: float) -> Ablation:
    energies = samples.square().sum(1) / square
    return Ablation(name, float(energies.mean()), float(energies.std()) / math.sqrt(len(energies)), predicted)


def _estimate(
    grid: str, estimator: EstimatorName, perturbation: RoundedPerturbation, samples: Tensor, gradient: Tensor
) -> Estimate:
    number, square = len(samples), gradient.dot(gradient)
    along = samples @ gradient / square
    errors = torch.stack([_squared_error(part, gradient) for part in samples.chunk(10)]) / square
    return Estimate(
        grid,
        estimator,
        perturbation.bits,
        float(along.mean()),
        float(along.std()) / math.sqrt(number),
        perturbation.mean_of(estimator),
        float(errors.mean()),
        float(errors.std()) / math.sqrt(len(errors)),
        float(samples.square().sum(1).mean() / square),
    )


def _squared_error(samples: Tensor, gradient: Tensor) -> Tensor:
    """Return an unbiased estimate of ``|E ĝ - ∇|²``: the mean product of errors of two different samples."""
    errors, number = samples - gradient, len(samples)
    return (errors.sum(0).square().sum() - errors.square().sum()) / (number * (number - 1))


def plot(measured: Sequence[Estimate], path: Path) -> None:
    """Draw how far each estimator's mean is from the gradient, by bits, with standard errors (QuZO's Figure 3a)."""
    with picture(path, 1, len(GRIDS), dpi=100, layout="constrained", figsize=(9, 4), sharey=True) as (
        _,
        all_axes,
    ):
        for axes, grid in zip(all_axes, GRIDS, strict=True):
            for number, estimator in enumerate(ESTIMATORS):
                mine = [one for one in measured if (one.grid, one.estimator) == (grid, estimator)]
                bits = [one.bits + 0.08 * (number - 1) for one in mine]
                errors = [one.error_stderr for one in mine]
                axes.errorbar(
                    bits,
                    [one.error for one in mine],
                    yerr=errors,
                    fmt="o",
                    markersize=3,
                    label=estimator,
                    color=f"C{number}",
                )
                axes.plot(bits, [(1 - one.predicted) ** 2 for one in mine], color=f"C{number}", linewidth=0.8)
            axes.set(title=f"{grid} grid", xlabel="bits")
            axes.set_yscale("symlog", linthresh=0.1)
        all_axes[0].set_ylabel("|E ĝ - ∇|² / |∇|², lines: the bias in closed form")
        all_axes[0].legend()


def main(
    samples: Annotated[int, typer.Option(min=20, help="Perturbations, the same for all.")] = 4000,
    figure: Annotated[Path | None, typer.Option(help="Draw errors by bits, too.")] = None,
) -> None:
    """Print what each estimator is on average, along the gradient and away from it, with standard errors."""
    torch.set_num_threads(1)
    measured = []
    for one in estimates(samples // 10 * 10):
        measured.append(one)
        print(
            f"{one.grid}, {one.bits} bits, {one.estimator}: {one.along:.2f} ± {one.along_stderr:.2f} of the gradient "
            f"(predicted {one.predicted:.3f}), error² {one.error:.2f} ± {one.error_stderr:.2f} (bias² "
            f"{(1 - one.predicted) ** 2:.3f}), energy {one.energy:.0f}"
        )
    if figure is not None:
        plot(measured, figure)
    for ablation in ablations(samples // 10 * 10):
        print(
            f"4 bits, {ablation.name}: energy {ablation.energy:.0f} ± {ablation.stderr:.0f} (predicted "
            f"{ablation.predicted:.0f})"
        )


if __name__ == "__main__":
    typer.run(main)
