"""Ranks of factorised perturbations against dense ones: the estimate's variance, what a step costs, and what is learnt (ZOinfer, section 6).

``python -m studies.zoinfer.ranks --out FOLDER`` does three things with the linears of the embedded model. For each rank of
``z = U·Vᵀ/√r``, and for a dense ``z``, it draws many perturbations beside one true gradient ``∇``, and prints the second moment of the estimate
``g·z``, with ``g = ⟨∇, z⟩``, over that of dense perturbations, and the kurtosis of ``g``, each beside what the moments of normals say. It times steps, a contender after
the other: those of a rank as one batch of scoring, a dense perturbation's as MeZO's loop. And it trains some hundred steps with each.

With all moments of normals taken, a matrix of ``m`` rows and ``n`` columns whose gradient is ``G`` has ``E g²‖z‖² = ‖G‖²·(mn + 2 + 2(m + n + 1)/r)`` and
``E g⁴ = 3‖G‖⁴ + 6/r·‖GᵀG‖²``, where dense perturbations have ``‖G‖²·(mn + 2)`` and ``3‖G‖⁴``. Matrices are drawn apart from each other.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from executors.models.pretrain import Pretrained, TaskSettings, pretrained_model
from executors.runs.evaluate import evaluate_choices
from executors.turns import Way, in_turns
from studies.plots import picture
from studies.records import write_records
from studies.sparq.training import batches_of, data_of, tensors_of
from studies.zoinfer.training import Contender, linears_of, loop_of, run_of, session_of
from zosim.plans import Perturbations

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class RankRow:
    """What became of one rank."""

    rank: int  # 0 for dense perturbations
    # second_moment, kurtosis: of the estimate over that of dense perturbations, and of the projected gradient; sampled.
    second_moment: float
    # second_moment_reported, kurtosis_reported: the same by formula.
    second_moment_reported: float
    kurtosis: float
    kurtosis_reported: float
    milliseconds: float = float("nan")  # of a step; nan where none was timed
    # loss, accuracy: On held-out questions, mean over seeds; nan where nothing was trained.
    loss: float = float("nan")
    accuracy: float = float("nan")


def gradients(pretrained: Pretrained, num_batches: int = 4) -> list[Tensor]:
    """Return the gradient of every tuned matrix, over the first batches."""
    model = linears_of(pretrained)
    batches = batches_of(pretrained, model, 0)
    for number in range(num_batches):
        (model(**tensors_of(batches, number)).loss / num_batches).backward()
    return [p.grad.double() for p in model.parameters() if p.requires_grad and p.grad is not None]


def moments_reported(matrices: Sequence[Tensor], rank: int) -> tuple[float, float]:
    """Return ``E g²‖z‖²`` and ``E g⁴`` of perturbations of a rank (0: dense) beside these gradients.

    `matrices`: gradients, each of shape (m, n).

    Of a 1 by 2 matrix (1, 0): dense perturbations have ``E g²‖z‖² = 2 + 2``, those of rank 1 as much as ``4 + 2·(1 + 2 + 1)``.

    >>> moments_reported([torch.tensor([[1.0, 0.0]])], 0), moments_reported([torch.tensor([[1.0, 0.0]])], 1)
    ((4.0, 3.0), (12.0, 9.0))
    """
    squares = [float(g.square().sum()) for g in matrices]
    sizes = [g.numel() for g in matrices]
    own_second, own_fourth = [], []
    for g, square in zip(matrices, squares, strict=True):
        m, n = g.shape
        if rank == 0:
            own_second.append(square * (m * n + 2))
            own_fourth.append(3 * square**2)
            continue
        own_second.append(square * (m * n + 2 + 2 * (m + n + 1) / rank))
        gram = g.T @ g
        own_fourth.append(3 * square**2 + 6 / rank * float(gram.square().sum()))
    total, size = sum(squares), sum(sizes)
    # Of two different matrices g·g' has mean 0, and a square of one is apart from the other's norm.
    second = sum(own_second) + sum(s * (size - n) for s, n in zip(squares, sizes, strict=True))
    fourth = sum(own_fourth) + 3 * (total**2 - sum(s**2 for s in squares))
    return second, fourth


def sampled_moments(
    matrices: Sequence[Tensor], rank: int, count: int, seed: int
) -> tuple[float, float, float]:
    """Return the means of ``g²‖z‖²``, ``g²`` and ``g⁴`` over `count` perturbations, with ``g = Σ ⟨G, z⟩`` over the matrices.

    - `matrices`: gradients, each of shape (m, n).
    - `rank`: of ``z = U·Vᵀ/√r``; 0 for normals.

    No ``z`` is made where it has factors: ``⟨G, UVᵀ⟩ = Σ (GV)∘U``, and ``‖UVᵀ‖² = Σ (UᵀU)∘(VᵀV)``.
    """
    generator = torch.Generator().manual_seed(seed)
    g, norm = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for matrix in matrices:
        m, n = matrix.shape
        chunk = max(1, _CHUNK_ELEMENTS // (m * n if rank == 0 else (m + n + rank) * rank))
        for begin in range(0, count, chunk):
            here = slice(begin, min(begin + chunk, count))
            num = here.stop - here.start
            if rank == 0:
                z = torch.randn(num, m * n, generator=generator)
                g[here] += z.double() @ matrix.flatten()
                norm[here] += z.double().square().sum(1)
                continue
            left = torch.randn(num, m, rank, generator=generator)
            right = torch.randn(num, n, rank, generator=generator)
            g[here] += ((matrix.float() @ right) * left).double().sum((1, 2)) / rank**0.5
            grams = (left.mT @ left) * (right.mT @ right)
            norm[here] += grams.double().sum((1, 2)) / rank
    return float((g**2 * norm).mean()), float((g**2).mean()), float((g**4).mean())


def _moments(matrices: Sequence[Tensor], count: int) -> list[RankRow]:
    dense_second, _ = moments_reported(matrices, 0)
    square = sum(float(g.square().sum()) for g in matrices)
    rows = []
    for rank in (0, *RANKS):
        second, _, fourth = sampled_moments(matrices, rank, count, rank)
        second_reported, fourth_reported = moments_reported(matrices, rank)
        rows.append(
            RankRow(
                rank,
                second / dense_second,
                second_reported / dense_second,
                fourth / square**2,
                fourth_reported / square**2,
            )
        )
    return rows


def _contender(pretrained: Pretrained, rank: int, seed: int, stack: ExitStack) -> Contender:
    model = linears_of(pretrained)
    if rank == 0:
        return loop_of(model, None, seed)
    perturbations = Perturbations(distribution="factorised", rank=rank, lazy_steps=1)
    return run_of(stack.enter_context(session_of(model, "adapters", perturbations, seed)))


def _milliseconds(pretrained: Pretrained, rounds: int) -> dict[int, float]:
    """Return medians of steps, contenders in turns."""
    with ExitStack() as stack:
        contenders = {rank: _contender(pretrained, rank, 0, stack) for rank in (0, *RANKS)}
        task = batches_of(pretrained, linears_of(pretrained), 0)
        batches = [tensors_of(task, number) for number in range(rounds + 2)]

        def way(contender: Contender) -> Way:
            return lambda number: contender.step(number, batches[number])

        ways = {str(rank): way(contender) for rank, contender in contenders.items()}
        # A session observes its memory in the first two steps.
        times = in_turns(ways, rounds, num_warm_rounds=2)
        return {rank: 1e3 * times[str(rank)].median_s for rank in contenders}


def _trained(
    pretrained: Pretrained, rank: int, seeds: Sequence[int], num_steps: int, num_evaluated: int
) -> tuple[float, float]:
    """Return mean loss and accuracy on held-out questions."""
    results = []
    for seed in seeds:
        with ExitStack() as stack:
            contender = _contender(pretrained, rank, seed, stack)
            like = linears_of(pretrained)
            batches = batches_of(pretrained, like, seed)
            for number in range(num_steps):
                contender.step(number, tensors_of(batches, number))
            held_out = data_of(pretrained.validation, like)
            results.append(evaluate_choices(contender.model, held_out, num_examples=num_evaluated))
    return statistics.fmean(of.loss for of in results), statistics.fmean(of.accuracy for of in results)


def _print(row: RankRow) -> None:
    print(
        f"{row.rank or 'dense':>6}{row.second_moment:11.4f}{row.second_moment_reported:9.4f}{row.kurtosis:11.2f}"
        f"{row.kurtosis_reported:8.2f}{row.milliseconds:11.1f}{row.loss:11.4f}{100 * row.accuracy:9.1f}",
        flush=True,
    )


def plot(rows: Sequence[RankRow], path: Path) -> None:
    """Draw kurtosis, times and losses over ranks, what dense perturbations have as a line across."""
    dense = next(row for row in rows if row.rank == 0)
    own = [row for row in rows if row.rank]
    what = [("kurtosis", "kurtosis of g"), ("milliseconds", "ms a step"), ("loss", "held-out loss")]
    what = [(name, label) for name, label in what if not math.isnan(getattr(dense, name))]
    with picture(path, 1, len(what), figsize=(4 * len(what), 3.8), squeeze=False) as (_, grid):
        panels = grid[0]
        for axes, (name, label) in zip(panels, what, strict=True):
            axes.plot(
                [row.rank for row in own], [getattr(row, name) for row in own], "o-", label="factorised"
            )
            axes.axhline(getattr(dense, name), color="black", linewidth=0.8, label="dense, MeZO's loop")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("rank")
            axes.set_ylabel(label)
        panels[0].plot(
            [row.rank for row in own], [row.kurtosis_reported for row in own], "C1:", label="by formula"
        )
        panels[0].legend(fontsize=8)


def main() -> None:
    """Print a row for each rank, and write rows and plot."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.ranks", description=__doc__)
    parser.add_argument("--draws", type=int, default=2000, help="perturbations beside the gradient")
    parser.add_argument("--rounds", type=int, default=15, help="steps timed of each; 0 for none")
    parser.add_argument("--steps", type=int, default=300, help="of training; 0 for none")
    parser.add_argument("--seed", type=int, action="append", default=None)
    parser.add_argument("--evaluated", type=int, default=600, help="held-out questions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="folder of rows and plot")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pretrained = pretrained_model()
    rows = _moments(gradients(pretrained), options.draws)
    times = _milliseconds(pretrained, options.rounds) if options.rounds else {}
    print(
        f"linears of the embedded model, batch {TaskSettings().batch}, {options.draws} perturbations, {options.steps} steps"
    )
    print(
        f"{'rank':>6}{'E g2|z|2':>11}{'theory':>9}{'kurtosis':>11}{'theory':>8}{'ms':>11}{'loss':>11}{'right %':>9}"
    )
    made = []
    for row in rows:
        trained = {}
        if options.steps:
            loss, accuracy = _trained(
                pretrained, row.rank, options.seed or [0], options.steps, options.evaluated
            )
            trained = {"loss": loss, "accuracy": accuracy}
        timed = {"milliseconds": times[row.rank]} if times else {}
        made.append(RankRow(**(asdict(row) | timed | trained)))
        _print(made[-1])
    if options.out:
        rounded = [{name: round(value, 5) for name, value in asdict(row).items()} for row in made]
        write_records(options.out / "ranks.csv", rounded)
        plot(made, options.out / "ranks.svg")


if __name__ == "__main__":
    main()
