"""Solution of the unit on what a step estimates."""

from __future__ import annotations

import numpy as np


def perturbations(theta, seeds):
    return [np.random.default_rng(seed).standard_normal(theta.size) for seed in seeds]


def along(loss, theta, z, epsilon):
    return (loss(theta + epsilon * z) - loss(theta - epsilon * z)) / (2 * epsilon)


def right(loss, theta, seeds, epsilon):
    return sum(along(loss, theta, z, epsilon) * z for z in perturbations(theta, seeds)) / len(seeds)


def forward(loss, theta, seeds, epsilon):
    here = loss(theta)
    return sum((loss(theta + epsilon * z) - here) / epsilon * z for z in perturbations(theta, seeds)) / len(
        seeds
    )


def in_place(loss, theta, seeds, epsilon):
    for z in perturbations(theta, seeds):
        theta += epsilon * z
    return theta


def by_coordinates(loss, theta, seeds, epsilon):
    return np.array([along(loss, theta, e, epsilon) for e in np.eye(theta.size)])


WRONG = [
    (lambda *given: 2 * right(*given), "2ε apart"),
    (lambda *given: -right(*given), "plus comes first"),
    (lambda loss, theta, seeds, epsilon: len(seeds) * right(loss, theta, seeds, epsilon), "their mean"),
    (lambda loss, theta, seeds, epsilon: right(loss, theta, seeds[:1], epsilon), "a z of its own"),
    (forward, "forward difference"),
    (by_coordinates, "along z alone"),
    (in_place, "theta was changed"),
    (lambda *given: 3.0, "an array of shape"),
]


def answers(a, theta, z, dim, error):
    slopes = [a[i] * theta[i] for i in range(2)]
    g = sum(slopes[i] * z[i] for i in range(2))
    return {
        "projected_gradient": g,
        "first_component": g * z[0],
        "energy": dim + 2,
        "perturbations": (dim + 1) / error,
    }


MISSES = [
    ("projected_gradient", lambda n, right: 2 * right, "divide by 2ε"),
    ("first_component", lambda n, right: n["a"][0] * n["theta"][0], "the gradient itself"),
    ("energy", lambda n, right: n["dim"], "fourth moment"),
    ("perturbations", lambda n, right: right / n["error"], "falls as 1/P"),
]
