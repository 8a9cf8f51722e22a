"""What two ranks exchange: predictions, and a step by examples or by perturbations. Start from ``stub.py``."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.coursework.pencil import PencilQuestion
from studies.exercises import Grade, plain

Vector = NDArray[np.float64]
Step = Callable[..., object]

FUNCTION = "step"
CURVE = ("Loss of two ranks, beside one rank with all examples", "step")
_WAIT_S = 5.0
"""For a rank that never comes; ranks meet within milliseconds."""


def numbers(r: random.Random) -> dict[str, float]:
    """Return a student's numbers."""
    return {
        "billions": r.randint(12, 80) / 10,
        "ranks": r.randint(3, 8),
        "gbit_per_s": r.choice((10, 25, 100)),
        "perturbations": r.randint(16, 48),
        "forward_ms": r.randint(30, 70),
        "update_ms": r.randint(4, 9),
    }


def questions(
    billions: float, ranks: int, gbit_per_s: float, perturbations: int, forward_ms: float, update_ms: float
) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    ring_gb = 2 * (ranks - 1) / ranks * 2 * billions
    forwards, updates = 2 * perturbations * forward_ms, perturbations * update_ms
    one, many = forwards + updates, forwards / ranks + updates
    work = f"{perturbations} perturbations, {forward_ms} ms a forward, {update_ms} ms to sample and update along one"
    return [
        PencilQuestion(
            "zeroth_order",
            f"a step of {perturbations} perturbations, central differences: bytes of losses (8 each) that a rank contributes",
            "bytes",
            16 * perturbations,
            (
                (
                    16 * perturbations * billions * 1e9,
                    "no gradient is sent: every rank makes z again from its seed",
                ),
            ),
        ),
        PencilQuestion(
            "first_order",
            f"{billions} billion gradients of 2 bytes, a ring all-reduce of {ranks} ranks: what a rank sends",
            "GB",
            ring_gb,
            (
                (
                    2 * billions,
                    "a ring sends 2(n-1)/n times the gradients: a reduce-scatter and an all-gather",
                ),
                (ring_gb / 2, "a ring goes round twice: a reduce-scatter and an all-gather"),
                (4 * billions, "each rank keeps an n-th: (n-1)/n of it is sent in each round"),
            ),
        ),
        PencilQuestion(
            "seconds",
            f"the same over {gbit_per_s} Gbit/s",
            "s",
            ring_gb * 8 / gbit_per_s,
            ((ring_gb / gbit_per_s, "the link's rate is in bits, the gradients are in bytes"),),
        ),
        PencilQuestion(
            "speedup",
            f"{work}: how many times as fast are {ranks} ranks that share the perturbations out?",
            "",
            one / many,
            (
                (ranks, "forwards are shared out; every rank samples and updates along all perturbations"),
                (many / one, "upside down: one rank's time over that of all"),
                (one / (many * ranks), "that is the efficiency"),
            ),
        ),
    ]


def loss(theta: Vector, examples: Vector) -> float:
    """Return the mean loss over examples, rows of features whose last number is the target."""
    return float(np.mean((examples[:, :-1] @ theta - examples[:, -1]) ** 2))


def examples_of(num_examples: int, *, seed: int = 0) -> Vector:
    """Return made-up examples."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((num_examples, 6))
    return np.column_stack(
        [features, features @ np.arange(1.0, 7.0) + 0.1 * generator.standard_normal(num_examples)]
    )


class ThreadRanks:
    """Sums vectors of ranks that are threads, and notes how many numbers each contributed."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._given: list[Vector] = [np.zeros(0)] * num_ranks
        self.num_floats = 0

    def all_reduce(self, rank: int, vector: object) -> Vector:
        """Return the sum over ranks."""
        self._given[rank] = np.atleast_1d(np.asarray(vector, dtype=np.float64))
        self._barrier.wait(_WAIT_S)
        total: Vector = np.sum(self._given, axis=0)
        if rank == 0:
            self.num_floats += self._given[0].size
        self._barrier.wait(_WAIT_S)
        return total


def run_ranks(
    step: Step, shards: Sequence[Vector], axis: str, seeds: Sequence[int], theta: Vector
) -> tuple[list[Any], int]:
    """Return what a step gives on each rank, and how many numbers a rank contributed."""
    summing = ThreadRanks(len(shards))
    answers: list[Any] = [None] * len(shards)

    def one_rank(rank: int) -> None:
        def all_reduce(vector: object) -> Vector:
            return summing.all_reduce(rank, vector)

        try:
            answers[rank] = step(
                theta.copy(), shards[rank], loss, seeds, 1e-3, 0.01, axis, rank, len(shards), all_reduce
            )
        except Exception as error:  # noqa: BLE001 - handed to the grader's thread
            answers[rank] = error

    threads = [threading.Thread(target=one_rank, args=(rank,), daemon=True) for rank in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * _WAIT_S)
    return answers, summing.num_floats


def reference(theta: Vector, examples: Vector, seeds: Sequence[int]) -> Vector:
    """Return the parameters after a step of one rank with all examples."""
    return along(theta, examples, [np.random.default_rng(seed).standard_normal(theta.size) for seed in seeds])


def along(theta: Vector, examples: Vector, zs: Sequence[Vector]) -> Vector:
    """Return the parameters after a step of one rank along some perturbations."""
    gs = [(loss(theta + 1e-3 * z, examples) - loss(theta - 1e-3 * z, examples)) / 2e-3 for z in zs]
    return theta - 0.01 * np.mean([g * z for g, z in zip(gs, zs, strict=True)], axis=0)  # type: ignore[no-any-return]


def check(step: Step) -> Grade:
    """Return whether two ranks take the step of one, exchanging scalars alone, and if not, what to look at."""
    cases = (
        ("data", (8, 8), (1,)),
        ("data", (10, 3), (1, 2)),
        ("perturb", (12, 12), (1, 2, 3, 4)),
        ("perturb", (12, 12), (1, 2, 3)),
    )
    for done, (axis, sizes, seeds) in enumerate(cases):
        complaint = _complaint(step, axis, sizes, seeds)
        if complaint:
            return Grade(
                False, f"axis {axis}, {sizes} examples, {len(seeds)} seeds: {complaint}", done / len(cases)
            )
    return Grade(True, f"{len(cases)} steps of two ranks are those of one")


def _complaint(step: Step, axis: str, sizes: tuple[int, int], seeds: tuple[int, ...]) -> str:
    whole, theta = examples_of(sum(sizes) if axis == "data" else sizes[0]), np.zeros(6)
    shards = [whole[: sizes[0]], whole[sizes[0] :]] if axis == "data" else [whole, whole]
    answers, num_floats = run_ranks(step, shards, axis, seeds, theta)
    for rank, answer in enumerate(answers):
        if isinstance(answer, threading.BrokenBarrierError) or answer is None:
            return f"rank {rank} waits for the other: every rank calls all_reduce equally often"
        if isinstance(answer, Exception):
            return f"rank {rank} raised {type(answer).__name__}: {answer}"
        answers[rank] = np.asarray(plain(answer))
        if answers[rank].shape != theta.shape:
            return f"return parameters of shape {theta.shape}, not {answers[rank].shape}"
    if not np.allclose(answers[0], answers[1], rtol=1e-12, atol=1e-12):
        return "the replicas differ: both ranks update along the same z with the same g"
    if num_floats > 2 * len(seeds) + 2:
        return f"{num_floats} numbers were exchanged; two for each seed and a count are enough, as z comes from its seed"
    moved, wanted = answers[0] - theta, reference(theta, whole, seeds) - theta
    by_shard = [reference(theta, shard, seeds) - theta for shard in shards]
    for wrong, advice in (
        (wanted, ""),
        (
            2 * wanted,
            "twice the step: a difference is divided by 2 epsilon, and the sum over ranks is not yet the mean",
        ),
        (len(seeds) * wanted, "the mean over the seeds is missing"),
        (
            wanted / 2,
            "half the step: a perturbation that one rank scores is not to be averaged with the other's nothing",
        ),
        (np.mean(by_shard, axis=0), "shards differ in size: weigh each by its number of examples"),
        (-wanted, "the sign is the other way"),
        (
            along(
                theta, whole, list(np.random.default_rng(seeds[0]).standard_normal((len(seeds), theta.size)))
            )
            - theta,
            "every seed has a generator of its own, and so a z",
        ),
    ):
        if np.allclose(moved, wrong, rtol=1e-6, atol=1e-9):
            return advice
    times = float(moved @ wanted / (wanted @ wanted))
    if times and np.allclose(moved, times * wanted, rtol=1e-6, atol=0):
        return f"the right direction, but {times:.3g} times the step: what is g divided by?"
    return "not the step of one rank with all examples: which seeds and which examples does each loss see?"


def curve(step: Step) -> list[tuple[float, float, float]]:
    """Return the loss over steps of two ranks that share examples out, and of one rank."""
    whole, rows = examples_of(40), []
    own, alone = np.zeros(6), np.zeros(6)
    for number in range(41):
        if number % 10 == 0:
            rows.append((float(number), loss(own, whole), loss(alone, whole)))
        own = run_ranks(step, [whole[:30], whole[30:]], "data", (number,), own)[0][0]
        alone = reference(alone, whole, (number,))
    return rows
