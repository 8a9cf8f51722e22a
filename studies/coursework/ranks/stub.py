"""Copy this file to solution.py, write the function, and try it: ``zosim study check ranks answers.json solution.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def step(
    theta: np.ndarray,
    shard: np.ndarray,
    loss: Callable[[np.ndarray, np.ndarray], float],
    seeds: Sequence[int],
    epsilon: float,
    learning_rate: float,
    axis: str,
    rank: int,
    num_ranks: int,
    all_reduce: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return a rank's parameters after a step: those of one rank that has all examples.

    The update is along the mean of ``g·z`` over the seeds, ``z = numpy.random.default_rng(seed).standard_normal(d)``.
    ``loss(theta, shard)`` is the mean over the shard's rows, ``all_reduce(vector)`` the sum over ranks.

    `axis`: ``"data"``: each rank has its own rows (numbers of rows may differ) and scores every seed. ``"perturb"``: all ranks
    have the same rows; each scores a share of the seeds.
    """
    raise NotImplementedError("write it")
