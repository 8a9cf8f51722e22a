"""``python -m studies.quzo.training``: the embedded task trained in few bits, against 16 bits and first order (QuZO's Figure 3b).

Zeroth-order runs are plans like any other, with linear layers in a format and one estimator. First-order ones keep the
weights that plain numbers stand for and round them at every forward, with gradients passed through the rounding as if it
were not there (the straight-through estimator). Each run is a row of a file; rows that are there are not run again. Another
file has the mean training losses of every few steps.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from costmodel.models.configs import LoRA
from executors.low_bits.grids import grid_of
from executors.models.blocks import find_blocks
from executors.models.loading import load_model
from executors.models.lora import attach_lora, block_linears
from executors.models.pretrain import Pretrained, TaskSettings, pretrained_model
from executors.runs.evaluate import evaluate_choices
from executors.runs.evaluations import EvaluatedWeights
from executors.runs.records import seed_of
from executors.runs.session import Session
from studies.plots import picture
from studies.records import append_records, records_in
from studies.sparq.training import batches_of, data_of, plan_of, tensors_of
from zosim.console import stderr, stdout
from zosim.plans import LowBits
from zosim.report import Table

RESULTS = Path("docs/benchmarks/quzo/training.csv")
CURVES = "_curves"
"""What is put behind the name of the file of rows, for that of curves."""
SPARSITIES = {"int8": 0.9375, "int4": 0.996, "fp8": 0.984375}
"""Shares of output channels that a step leaves alone: such that roundings add little to the noise of the estimate itself."""

_FIRST_ORDER_RATE = 1e-4
_ADAPTER_RATE = 20.0
"""Multiple of the task's rate for the few parameters of adapters."""
_CURVE_STEPS = 25


@dataclass(frozen=True)
class TrainingCase:
    """One way to train."""

    name: str
    low_bits: Mapping[str, Any] = field(default_factory=dict)  # fields of the axis
    dtype: str = "float32"  # of what is not quantized
    num_perturbations: int = 1
    rate: float = 1.0  # multiple of the task's learning rate
    is_first_order: bool = False  # whether a gradient is computed, straight through roundings
    # Whether the projected gradient is of one forward a step, less that of the step before.
    is_one_point: bool = False
    adapter_rank: int = 0  # of adapters that are tuned in place of the model's own parameters; 0 for none


def _cases() -> Iterator[TrainingCase]:
    """Yield the cases, those first that matter most."""
    yield TrainingCase("bfloat16", dtype="bfloat16")
    yield TrainingCase("float32")
    yield TrainingCase("float32, one point", is_one_point=True)
    formats: dict[str, dict[str, Any]] = {
        "int8": {"weights": "int8"},
        "int4": {"weights": "int4", "scales": "group", "group_elements": 32},
        "fp8": {"weights": "float8_e4m3"},
    }
    for name, sparsity in SPARSITIES.items():
        yield TrainingCase(f"{name}, sparse", formats[name] | {"sparsity": sparsity})
    for name, low_bits in formats.items():
        yield TrainingCase(name, low_bits)
    for name, low_bits in formats.items():
        yield TrainingCase(f"{name}, first order", low_bits, is_first_order=True)
    for sparsity in (0.75, 0.9375):
        yield TrainingCase(f"int4, {sparsity:.2%} zeros", formats["int4"] | {"sparsity": sparsity})
    sparse = {name: formats[name] | {"sparsity": sparsity} for name, sparsity in SPARSITIES.items()}
    for bits in (2, 4):
        yield TrainingCase(
            f"int8, sparse, perturbations of {bits} bits", sparse["int8"] | {"perturbation_bits": bits}
        )
    for estimator in ("normalised", "q-rge1", "q-rge2"):
        yield TrainingCase(
            f"int4, sparse, perturbations of 2 bits, {estimator}",
            sparse["int4"] | {"estimator": estimator, "perturbation_bits": 2},
        )
    for perturbations in (5, 10):
        yield TrainingCase(
            f"int8, sparse, {perturbations} perturbations", sparse["int8"], num_perturbations=perturbations
        )
        yield TrainingCase(
            f"int8, sparse, {perturbations} perturbations, {perturbations} times the rate",
            sparse["int8"],
            num_perturbations=perturbations,
            rate=perturbations,
        )
    for base, adapters in (("int8", "none"), ("int8", "int8"), ("int4", "none"), ("int4", "int4")):
        kept = "" if adapters == "none" else f" in {adapters}"
        low_bits = formats[base] | {"adapters": adapters}
        yield TrainingCase(f"{base}, adapters{kept}", low_bits, rate=_ADAPTER_RATE, adapter_rank=8)


CASES = {case.name: case for case in _cases()}


@dataclass(frozen=True)
class TrainingRow:
    """What one run came to: mean losses of its first and last steps, and accuracy and loss on held-out questions."""

    case: str
    seed: int
    num_steps: int
    loss_first: float
    loss_last: float
    accuracy: float
    loss: float


def train(
    pretrained: Pretrained, case: TrainingCase, seed: int, num_steps: int, num_evaluated: int
) -> tuple[TrainingRow, list[float]]:
    """Train once, and return what came of it and the loss of every step."""
    model = load_model(str(pretrained.model), dtype=case.dtype)
    batches = batches_of(pretrained, model, seed)
    if case.is_first_order or case.is_one_point:
        inputs = [tensors_of(batches, number) for number in range(num_steps)]
        losses = _first_order(model, case, inputs) if case.is_first_order else _one_point(model, inputs, seed)
        tuned: Any = model
        result = evaluate_choices(tuned, data_of(pretrained.validation, model), num_examples=num_evaluated)
    else:
        if case.adapter_rank:
            targets = tuple(dict.fromkeys(name for name, *_ in block_linears(model)))
            lora = LoRA(rank=case.adapter_rank, target_modules=targets, seed=seed)
            attach_lora(
                model, lora, quant_config=LowBits.model_validate(case.low_bits).quant_config("float32")
            )
        with Session(
            plan_of(
                model,
                weights={"dtype": case.dtype},
                estimator={"epsilon": TaskSettings().epsilon, "num_perturbations": case.num_perturbations},
                low_bits=case.low_bits,
                perturbations={"rng": "counter"},
            ),
            model,
            learning_rate=case.rate * TaskSettings().learning_rate,
            seed=seed,
            num_timed_steps=0,
        ) as session:
            losses = [session.step(tensors_of(batches, number)).loss for number in range(num_steps)]
            result = evaluate_choices(
                EvaluatedWeights(session), data_of(pretrained.validation, model), num_examples=num_evaluated
            )
    ends = losses[:_CURVE_STEPS], losses[-_CURVE_STEPS:]
    row = TrainingRow(
        case.name, seed, num_steps, fmean(ends[0]), fmean(ends[1]), result.accuracy, result.loss
    )
    return row, losses


class _StraightThrough(nn.Module):
    """Rounds a weight to the nearest quantized value of a format, a scale per output channel or group; its gradient passes."""

    def __init__(self, low_bits: LowBits) -> None:
        super().__init__()
        assert low_bits.weights != "none"
        self._grid = grid_of(low_bits.weights)
        self._group = low_bits.group_elements if low_bits.scales == "group" else -1

    def forward(self, weight: Tensor) -> Tensor:
        """Return what the weight is rounded to."""
        with torch.no_grad():
            grouped = weight.view(len(weight), -1, weight.shape[1] if self._group < 0 else self._group)
            scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / self._grid.high
            rounded = (self._grid.nearest(grouped / scale) * scale).view(weight.shape)
        return weight + (rounded - weight).detach()


def _first_order(model: nn.Module, case: TrainingCase, batches: list[Mapping[str, Tensor]]) -> list[float]:
    for block in find_blocks(model):
        for module in list(block.modules()):
            if isinstance(module, nn.Linear):
                rounded = _StraightThrough(LowBits.model_validate(case.low_bits))
                parametrize.register_parametrization(module, "weight", rounded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_FIRST_ORDER_RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def _one_point(model: nn.Module, batches: list[Mapping[str, Tensor]], seed: int) -> list[float]:
    """Train by one-point estimates with residual feedback (QuZO, appendix D.4): twice the noise, so half the rate."""
    settings, losses = TaskSettings(), list[float]()
    parameters = [(parameter, parameter.data.clone()) for parameter in model.parameters()]
    for step, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed_of(seed, step, 0))
        perturbations = [torch.randn(base.shape, generator=generator) for _, base in parameters]
        for (parameter, base), perturbation in zip(parameters, perturbations, strict=True):
            parameter.data = base + settings.epsilon * perturbation
        losses.append(float(model(**batch).loss))
        change = (losses[-1] - losses[-2]) / settings.epsilon if step else 0.0
        for (_, base), perturbation in zip(parameters, perturbations, strict=True):
            base.sub_(perturbation, alpha=settings.learning_rate / 2 * change)
    for parameter, base in parameters:
        parameter.data = base
    return losses


def _with_error(values: Sequence[float], digits: int) -> str:
    """Return a mean over seeds with its standard error, which one seed has none of."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"


def summary(rows: list[TrainingRow]) -> Table:
    """Return a row per case: seeds, and means over them with standard errors."""
    by_case = [[row for row in rows if row.case == name] for name in CASES]
    return Table.of(
        [of for of in by_case if of],
        {
            "case": lambda of: of[0].case,
            "seeds": lambda of: f"{len(of)}",
            "steps": lambda of: f"{of[0].num_steps}",
            "accuracy, %": lambda of: _with_error([100 * row.accuracy for row in of], 1),
            "of each seed": lambda of: ", ".join(f"{100 * row.accuracy:.1f}" for row in of),
            "held-out loss": lambda of: _with_error([row.loss for row in of], 3),
            "training loss, first": lambda of: f"{fmean(row.loss_first for row in of):.3f}",
            "last": lambda of: _with_error([row.loss_last for row in of], 3),
        },
    )


def plot(curves: Path, names: Sequence[str], num_steps: int, path: Path) -> None:
    """Draw the mean training losses of cases over their seeds, with a standard error to both sides (QuZO's Figure 3b)."""
    with curves.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if int(line["num_steps"]) == num_steps]
    with picture(path, dpi=100, layout="constrained", figsize=(8, 5)) as (_, axes):
        for number, name in enumerate(names):
            losses: dict[int, list[float]] = {}
            for line in lines:
                if line["case"] == name:
                    losses.setdefault(int(line["first_step"]) + _CURVE_STEPS // 2, []).append(
                        float(line["loss"])
                    )
            if not losses:
                continue
            means = [fmean(each) for each in losses.values()]
            errors = [stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0 for each in losses.values()]
            steps, color = list(losses), f"C{number}"
            axes.plot(
                steps, means, "--" if "first order" in name else "-", label=name, linewidth=1.2, color=color
            )
            low, high = (
                [mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1)
            )
            axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, color=color)
        axes.set(xlabel="step", ylabel=f"training loss, mean of {_CURVE_STEPS} steps")
        axes.legend(fontsize="small")


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = TaskSettings().num_steps,
    cases: Annotated[str, typer.Option(help="Names with semicolons between; by default all.")] = ";".join(
        CASES
    ),
    seeds: Annotated[str, typer.Option(help="Of perturbations and of the data's order.")] = "0,1,2",
    evaluated: Annotated[int, typer.Option(min=1, help="Held-out questions.")] = 600,
    out: Annotated[Path, typer.Option(help="File of rows.")] = RESULTS,
    figure: Annotated[Path | None, typer.Option(help="Draw the curves of these cases, too.")] = None,
) -> None:
    """Run what is missing, and print all that is there."""
    torch.set_num_threads(1)
    pretrained = pretrained_model()
    known = {(row.case, row.seed, row.num_steps) for row in records_in(out, TrainingRow)}
    for seed in map(int, seeds.split(",")):
        for name in cases.split(";"):
            if (name, seed, steps) in known:
                continue
            row, losses = train(pretrained, CASES[name], seed, steps, evaluated)
            append_records(out, [row])
            curve = [
                {
                    "case": name,
                    "seed": seed,
                    "num_steps": steps,
                    "first_step": first,
                    "loss": round(fmean(losses[first : first + _CURVE_STEPS]), 4),
                }
                for first in range(0, steps, _CURVE_STEPS)
            ]
            append_records(out.with_stem(out.stem + CURVES), curve)
            stderr.print(
                f"{name}, seed {seed}: accuracy {row.accuracy:.3f}, loss {row.loss:.3f}", markup=False
            )
    stdout.print(summary([row for row in records_in(out, TrainingRow) if row.num_steps == steps]))
    if figure is not None:
        plot(out.with_stem(out.stem + CURVES), cases.split(";"), steps, figure)


if __name__ == "__main__":
    typer.run(main)
