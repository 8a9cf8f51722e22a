"""Solutions of the exercise of the page on seeds: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations

import torch


def perturbations(base, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.normal(0.0, 1.0, size=t.shape, generator=generator) for name, t in base.items()}


def right(base, log, epsilon):
    theta = dict(base)
    for row in log:
        for name, z in perturbations(base, row.seed).items():
            for scale in (1, -2, 1):
                theta[name] = theta[name] + (scale * z) * epsilon
            theta[name] = theta[name] - row.learning_rate * (row.projected_gradient * z)
    return theta


def without_perturbing(base, log, epsilon):
    theta = dict(base)
    for row in log:
        z = perturbations(base, row.seed)
        theta = {n: t - row.learning_rate * (row.projected_gradient * z[n]) for n, t in theta.items()}
    return theta


def generator_reset_for_every_parameter(base, log, epsilon):
    theta = dict(base)
    for row in log:
        for name, tensor in theta.items():
            z = perturbations({name: tensor}, row.seed)[name]
            theta[name] = tensor - row.learning_rate * (row.projected_gradient * z)
    return theta


def products_in_another_order(base, log, epsilon):
    theta = dict(base)
    for row in log:
        for name, z in perturbations(base, row.seed).items():
            for scale in (1, -2, 1):
                theta[name] = theta[name] + scale * (z * epsilon)
            theta[name] = theta[name] - (row.learning_rate * row.projected_gradient) * z
    return theta


def one_rate_for_all_steps(base, log, epsilon):
    shifted = [type(row)(row.seed, row.projected_gradient, log[0].learning_rate) for row in log]
    return right(base, shifted, epsilon)


WRONG = [
    (without_perturbing, "last bits"),
    (products_in_another_order, "in this order"),
    (generator_reset_for_every_parameter, "which numbers"),
    (one_rate_for_all_steps, "learning rate"),
    (lambda base, log, epsilon: base, "nothing has changed"),
    (lambda base, log, epsilon: {}, "names of the base weights"),
    (lambda base, log, epsilon: {n: t.double() for n, t in base.items()}, "must be a tensor"),
    (lambda base, log, epsilon: {n: t * float("nan") for n, t in base.items()}, "off by up to nan"),
]
