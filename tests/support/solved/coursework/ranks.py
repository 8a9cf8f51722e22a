"""Solution of the unit on ranks."""

from __future__ import annotations

import numpy as np


def solution(*, weigh=True, own_seeds=False, share=True, factor=1.0, average=True):
    """A solution with some of its steps left out."""

    def step(theta, shard, loss, seeds, epsilon, learning_rate, axis, rank, num_ranks, all_reduce):
        zs = [np.random.default_rng(s + 100 * rank * own_seeds).standard_normal(theta.size) for s in seeds]
        weight = (len(shard) if weigh else 1.0) if axis == "data" else 1.0
        sums = np.zeros(len(seeds) + 1)
        for i, z in enumerate(zs):
            if axis == "data" or i % num_ranks == rank:
                difference = loss(theta + epsilon * z, shard) - loss(theta - epsilon * z, shard)
                sums[i] = weight * difference / (2 * epsilon)
        sums[-1] = weight
        if share or rank:
            sums = all_reduce(sums)
        total = sums[-1] if axis == "data" and average else 1.0
        for z, g in zip(zs, sums[:-1] / total, strict=True):
            theta = theta - factor * learning_rate / len(seeds) * g * z
        return theta

    return step


right = solution()


def sends_the_estimate(theta, shard, loss, seeds, epsilon, learning_rate, axis, rank, num_ranks, all_reduce):
    whole = np.zeros(50)
    whole[:6] = (
        right(theta, shard, loss, seeds, epsilon, learning_rate, axis, rank, 1, lambda vector: vector) - theta
    )
    return theta + all_reduce(whole)[:6] / num_ranks


WRONG = [
    (solution(weigh=False), "weigh each by its number"),
    (solution(weigh=False, average=False), "twice the step"),
    (solution(own_seeds=True), "the replicas differ"),
    (solution(share=False), "waits for the other"),
    (solution(factor=-1.0), "the sign"),
    (solution(factor=0.5), "half the step"),
    (sends_the_estimate, "numbers were exchanged"),
    (lambda *given: 3.0, "parameters of shape"),
]


def answers(billions, ranks, gbit_per_s, perturbations, forward_ms, update_ms):
    sent_gb = 2 * (ranks - 1) * (2 * billions / ranks)
    one = perturbations * (2 * forward_ms + update_ms)
    many = perturbations * (2 * forward_ms / ranks + update_ms)
    return {
        "zeroth_order": perturbations * 2 * 8,
        "first_order": sent_gb,
        "seconds": sent_gb / (gbit_per_s / 8),
        "speedup": one / many,
    }


MISSES = [
    ("zeroth_order", lambda n, right: right / 2, "two signs"),
    ("first_order", lambda n, right: 2 * n["billions"], "2(n-1)/n"),
    ("seconds", lambda n, right: right / 8, "in bits"),
    ("speedup", lambda n, right: n["ranks"], "every rank samples"),
]
