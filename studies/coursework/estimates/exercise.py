"""What a zeroth-order step estimates: predictions, and the estimator itself. Start from ``stub.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.coursework.pencil import PencilQuestion
from studies.exercises import Grade, plain

Vector = NDArray[np.float64]
Estimate = Callable[[Callable[[Vector], float], Vector, Sequence[int], float], object]

FUNCTION = "estimate"
CURVE = ("Error of the estimate over the length of the gradient", "perturbations")
_EPSILON = 0.25


def numbers(r: random.Random) -> dict[str, Any]:
    """Return a student's numbers."""
    while True:
        a, theta = (r.randint(2, 5), r.randint(2, 5)), (r.randint(1, 4), r.randint(1, 4))
        z = r.choice((2, 3)), r.choice((-1, 1))
        if abs(a[0] * theta[0] * z[0] + a[1] * theta[1] * z[1]) > 2:
            return {
                "a": a,
                "theta": theta,
                "z": z,
                "dim": r.randint(5, 60),
                "error": r.choice((0.1, 0.2, 0.25)),
            }


def questions(
    a: tuple[int, int], theta: tuple[int, int], z: tuple[int, int], dim: int, error: float
) -> list[PencilQuestion]:
    """Return the questions about these numbers."""
    gradient = a[0] * theta[0], a[1] * theta[1]
    g = gradient[0] * z[0] + gradient[1] * z[1]
    forward = g + _EPSILON / 2 * (a[0] * z[0] ** 2 + a[1] * z[1] ** 2)
    losses = f"L = ½({a[0]}·x² + {a[1]}·y²), at (x, y) = {theta}, along z = {z}, with ε = {_EPSILON}"
    return [
        PencilQuestion(
            "projected_gradient",
            f"{losses}: the projected gradient of central differences",
            "",
            g,
            (
                (2 * g, "twice: the two evaluation points are 2ε apart, so divide by 2ε"),
                (forward, "that is a forward difference, which has a term of ε; a central one cancels it"),
            ),
        ),
        PencilQuestion(
            "first_component",
            f"{losses}: the first component of the estimate",
            "",
            g * z[0],
            (
                (gradient[0], "that is the gradient itself; a step knows g alone, and moves along z"),
                (g, "that is g; the estimate is g times z, component by component"),
            ),
        ),
        PencilQuestion(
            "energy",
            f"mean of |g·z|² over the gradient's |∇L|², for {dim} parameters and normal z",
            "",
            dim + 2,
            (
                (dim, "the fourth moment of a normal is 3, not 1: it adds 2"),
                (1, "the mean of g·z is the gradient; its mean square is not"),
                (3 * dim, "only the parameter's own z has the fourth moment; the others have z² twice"),
            ),
        ),
        PencilQuestion(
            "perturbations",
            f"perturbations to average so that the mean of |error|² is {error} of |∇L|², for {dim} parameters",
            "",
            (dim + 1) / error,
            (
                (
                    (dim + 2) / error,
                    "the mean square counts the gradient itself; the variance does not: subtract 1",
                ),
                ((dim + 1) / error**2, "the question is about the square of the error, so it falls as 1/P"),
                ((dim + 1) / error**0.5, "the square of the error falls as 1/P, not as 1/P²"),
            ),
        ),
    ]


class _Quadratic:
    """A loss that counts its calls."""

    def __init__(self, dim: int) -> None:
        self.weights = np.linspace(1.0, 3.0, dim)
        self.num_calls = 0

    def __call__(self, theta: Vector) -> float:
        self.num_calls += 1
        return float(0.5 * self.weights @ theta**2)


def _reference(
    loss: Callable[[Vector], float], theta: Vector, seeds: Sequence[int], epsilon: float
) -> Vector:
    zs = [np.random.default_rng(seed).standard_normal(theta.size) for seed in seeds]
    along = [(loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon) for z in zs]
    mean: Vector = np.asarray(along) @ np.asarray(zs) / len(seeds)
    return mean


def check(estimate: Estimate) -> Grade:
    """Return whether `estimate` is the mean of g·z along the seeds' perturbations, and if not, what to look at."""
    for done, seeds in enumerate(((7,), (7, 8, 9), (3, 3, 4))):
        complaint = _complaint(estimate, seeds)
        if complaint:
            return Grade(False, f"{len(seeds)} seeds: {complaint}", done / 3)
    return Grade(True, "estimates along three sets of seeds agree")


def _complaint(estimate: Estimate, seeds: tuple[int, ...]) -> str:
    loss, theta = _Quadratic(5), np.linspace(1.0, 2.0, 5)
    given = theta.copy()
    answer = np.asarray(plain(estimate(loss, given, seeds, _EPSILON)))
    num_calls = loss.num_calls
    if answer.shape != theta.shape:
        return f"return an array of shape {theta.shape}, not {answer.shape}"
    if not np.allclose(given, theta, rtol=0, atol=1e-9):
        return "theta was changed: restore it, or work on a copy"
    wanted = _reference(loss, theta, seeds, _EPSILON)
    gradient = loss.weights * theta
    zs = [np.random.default_rng(seed).standard_normal(theta.size) for seed in seeds]
    forward = np.mean([(loss(theta + _EPSILON * z) - loss(theta)) / _EPSILON * z for z in zs], axis=0)
    for wrong, advice in (
        (wanted, ""),
        (len(seeds) * wanted, "that is the sum over the seeds; the estimate is their mean"),
        (2 * wanted, "twice the estimate: the two evaluation points are 2ε apart"),
        (-wanted, "the sign is the other way: plus comes first"),
        (forward, "that is a forward difference; take both signs"),
        (gradient, "that is the gradient; a step sees it along z alone"),
        (
            len(seeds) * _reference(loss, theta, seeds[:1], _EPSILON) / len(seeds),
            "every seed has a z of its own",
        ),
    ):
        if np.allclose(answer, wrong, rtol=1e-9, atol=1e-12):
            if not advice and num_calls > 2 * len(seeds):
                return f"{num_calls} forwards, where two for each seed are enough"
            return advice
    times = float(answer @ wanted / (wanted @ wanted))
    if times and np.allclose(answer, times * wanted, rtol=1e-9, atol=0):
        return f"the right direction, but {times:.3g} times the estimate: what is the difference divided by?"
    return "not along the seeds' perturbations: z is default_rng(seed).standard_normal(theta.size)"


def curve(estimate: Estimate) -> list[tuple[float, float, float]]:
    """Return the relative error of an estimate by the number of perturbations, and that of the reference."""
    loss, theta = _Quadratic(16), np.ones(16)
    rows = []
    for num_perturbations in (1, 4, 16, 64, 256):
        both = (
            np.asarray(each(loss, theta.copy(), range(num_perturbations), 1e-3)) - loss.weights
            for each in (estimate, _reference)
        )
        own, reference = (float(np.linalg.norm(off) / np.linalg.norm(loss.weights)) for off in both)
        rows.append((float(num_perturbations), own, reference))
    return rows
