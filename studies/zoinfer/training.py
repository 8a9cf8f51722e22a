"""Loss against wall time: MeZO and LoZO as loops, and LoZO in the runtime, on the embedded task.

``python -m studies.zoinfer.training --out FOLDER`` trains the linears of the embedded model with every contender, one step of each in turn, so that
all of them see the same machine. LoZO's loop and the runtime's LoZO take the same perturbations, which the released loop's generator draws; a run that
tunes increments beside the base draws its own. Steps are timed; held-out losses are taken between them. Rows go into ``training.csv``,
and ``training.svg`` draws held-out losses over seconds and over steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from costmodel.models.configs import LoRA
from executors.models.loading import load_model
from executors.models.pretrain import Pretrained, TaskSettings, pretrained_model
from executors.runs.adapters import attach
from executors.runs.evaluate import evaluate_choices
from executors.runs.evaluations import EvaluatedWeights
from executors.runs.records import seed_of
from executors.runs.session import Session
from studies.plots import picture
from studies.records import write_records
from studies.sparq.training import batches_of, data_of, plan_of, tensors_of
from studies.zoinfer.reference import PlainLoop
from zosim.plans import Perturbations

RANK, LAZY_STEPS = 2, 50
_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_MEZO, _LOZO, _IN_PLACE, _ADAPTERS, _INCREMENTS = (
    "MeZO loop",
    "LoZO loop",
    "LoZO, in place",
    "LoZO, adapters",
    "LoZO, increments beside the base",
)


@dataclass(frozen=True)
class CurvePoint:
    """Where a run stands after some steps: seconds that its steps took, and loss and accuracy on held-out questions."""

    contender: str
    seed: int
    step: int
    seconds: float
    loss: float
    accuracy: float


@dataclass
class Contender:
    """A run."""

    # From the step's number and its batch to losses at ``+ε`` and ``-ε``.
    step: Callable[[int, Mapping[str, Tensor]], tuple[float, float]]
    model: Any  # what is evaluated
    seconds: float = 0.0  # of its steps so far


def linears_of(pretrained: Pretrained) -> nn.Module:
    """Return the embedded model in float32, whose linears alone are tuned."""
    model = load_model(str(pretrained.model), dtype="float32")
    attach(model, "linears")
    return model


def session_of(
    model: nn.Module, perturbation: Literal["serial", "adapters"], perturbations: Perturbations, seed: int
) -> Session:
    """Return a run of the runtime with the task's settings, whose weights come to their points in this way."""
    weights = {"dtype": "float32", "perturbation": perturbation}
    plan = plan_of(model, perturbations=perturbations, weights=weights)
    return Session(plan, model, learning_rate=TaskSettings().learning_rate, seed=seed, num_timed_steps=0)


def loop_of(model: nn.Module, rank: int | None, seed: int) -> Contender:
    """Return a plain loop with the task's settings: MeZO's, or LoZO's where a rank is given."""
    settings = TaskSettings()
    loop = PlainLoop(model, rank, LAZY_STEPS, settings.learning_rate, settings.epsilon)

    def step(number: int, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        loop.step(number, dict(batch), seed_of(seed, number, 0))
        return loop.losses

    return Contender(step, model)


def run_of(session: Session) -> Contender:
    """Return a session as a contender, whose steps report their two losses."""

    def step(_number: int, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        record = session.step(batch)
        assert record.losses_minus is not None
        return record.losses_plus[0], record.losses_minus[0]

    return Contender(step, EvaluatedWeights(session))


def _contenders(pretrained: Pretrained, seed: int, stack: ExitStack) -> dict[str, Contender]:
    lozo = Perturbations(distribution="lozo", rank=RANK, lazy_steps=LAZY_STEPS)
    with_increments = load_model(str(pretrained.model), dtype="float32")
    attach(
        with_increments,
        LoRA(rank=RANK, target_modules=_LINEARS, lazy_steps=LAZY_STEPS, seed=seed),
    )
    sessions = {
        _IN_PLACE: session_of(linears_of(pretrained), "serial", lozo, seed),
        _ADAPTERS: session_of(linears_of(pretrained), "adapters", lozo, seed),
        _INCREMENTS: session_of(with_increments, "adapters", Perturbations(), seed),
    }
    return {
        _MEZO: loop_of(linears_of(pretrained), None, seed),
        _LOZO: loop_of(linears_of(pretrained), RANK, seed),
    } | {name: run_of(stack.enter_context(session)) for name, session in sessions.items()}


def train(
    pretrained: Pretrained, seed: int, num_steps: int, every: int, num_evaluated: int
) -> Iterator[CurvePoint | tuple[int, dict[str, tuple[float, float]]]]:
    """Train all contenders side by side; yield where each stands every so often, and the losses of every step."""
    with ExitStack() as stack:
        contenders = _contenders(pretrained, seed, stack)
        like = linears_of(pretrained)
        batches, held_out = batches_of(pretrained, like, seed), data_of(pretrained.validation, like)
        for number in range(num_steps + 1):
            if number % every == 0:
                for name, contender in contenders.items():
                    reported = evaluate_choices(contender.model, held_out, num_examples=num_evaluated)
                    yield CurvePoint(
                        name, seed, number, round(contender.seconds, 3), reported.loss, reported.accuracy
                    )
            if number == num_steps:
                return
            batch, losses = tensors_of(batches, number), {}
            for name, contender in contenders.items():
                begin = time.perf_counter()
                losses[name] = contender.step(number, batch)
                contender.seconds += time.perf_counter() - begin
            yield number, losses


def _reported(losses: list[dict[str, tuple[float, float]]]) -> str:
    """Return how far the losses of one trajectory are apart, and in how many steps the signs of ``g`` agree."""
    pairs = [(step[_LOZO], step[_ADAPTERS]) for step in losses]
    apart = [max(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in pairs]
    signs = sum((one[0] - one[1]) * (other[0] - other[1]) > 0 for one, other in pairs)
    return (
        f"LoZO loop and adapters: losses at most {max(apart[:LAZY_STEPS]):.1e} apart in the first {LAZY_STEPS} steps, "
        f"{max(apart):.1e} in all; {signs} of {len(losses)} signs of g agree"
    )


def plot(points: list[CurvePoint], path: Path) -> None:
    """Draw held-out losses over seconds and over steps, seeds as lines of one colour."""
    with picture(path, 1, 2, figsize=(10, 4), sharey=True) as (_, panels):
        for axes, name in zip(panels, ("seconds", "step"), strict=True):
            for number, contender in enumerate(dict.fromkeys(point.contender for point in points)):
                for seed in sorted({point.seed for point in points}):
                    own = [point for point in points if (point.contender, point.seed) == (contender, seed)]
                    label = contender if seed == points[0].seed else None
                    xs = [getattr(point, name) for point in own]
                    axes.plot(xs, [point.loss for point in own], f"C{number}", label=label, linewidth=1.2)
            axes.set_xlabel({"seconds": "seconds of steps", "step": "steps"}[name])
        panels[0].set_ylabel("held-out loss")
        panels[1].legend(fontsize=8)


def main() -> None:
    """Train, print a row for each contender, and write rows and plot."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--evaluated", type=int, default=300, help="held-out questions")
    parser.add_argument("--seed", type=int, action="append", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="folder of rows and plot")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pretrained, points = pretrained_model(), []
    for seed in options.seed or [0]:
        losses: list[dict[str, tuple[float, float]]] = []
        for item in train(pretrained, seed, options.steps, options.every, options.evaluated):
            if isinstance(item, CurvePoint):
                points.append(item)
            else:
                losses.append(item[1])
        print(f"seed {seed}: {_reported(losses)}")
        for last in (point for point in points if (point.seed, point.step) == (seed, options.steps)):
            print(
                f"{last.contender:30s}{1e3 * last.seconds / options.steps:8.1f} ms a step"
                f"{last.loss:9.4f} held-out loss{100 * last.accuracy:7.1f} % right"
            )
    if options.out:
        write_records(options.out / "training.csv", points)
        plot(points, options.out / "training.svg")


if __name__ == "__main__":
    main()
