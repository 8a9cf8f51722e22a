"""How activities that run at the same time share what they run on.

Activity ``i`` runs at a rate ``x_i`` in a unit of its own (bytes/s, cores, a fraction of full speed), never above
its bound ``b_i``, and takes ``a_ir`` of resource ``r`` per unit of rate; resource ``r`` has capacity ``C_r``:

    ``x_i <= b_i``  and  ``Σ_i a_ir x_i <= C_r``.

Of all such rates the max-min fair ones are those where none can grow without another shrinking that is no larger.
Rates are compared as ``x_i / w_i``: weights say what one activity's unit is worth in another's.

This is the linear model of flow-level simulators. It is exact for a bandwidth that a protocol divides evenly, and
an approximation where it stands for a scheduler or a memory controller.

.. [1] Bertsekas and Gallager, Data Networks, 2nd ed., section 6.5.2: max-min flow control, progressive filling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Ends of activities closer than this, relative to the time, are one instant: rounding must not split what is simultaneous.
SAME_INSTANT = 1e-14
# Levels closer than this, relative, are one level: rounding must not split a tie into two rounds.
_TIE = 1e-12


def fill(bound: Array, weight: Array, rows: Indices, columns: Indices, use: Array, capacity: Array) -> Array:
    """Return the max-min fair rates, by progressive filling of all parts of a network at once.

    Parameters
    ----------
    bound, weight : array of shape (num_activities,)
        Positive and finite.
    rows, columns : array of int
        Activity and resource of each entry, sorted by activity; every activity has one at least.
    use : array
        What a unit of the activity's rate takes of the resource, positive.
    capacity : array of shape (num_resources,)
        Positive, perhaps infinite.

    Returns
    -------
    array of shape (num_activities,)
        An activity that is held up by its bound alone gets exactly its bound.

    Notes
    -----
    All rates grow together, in proportion to their weights; whoever meets its bound or a resource that is used up stays
    where it is. An activity whose own bound is reached before any of its resources would be used up gets its bound; all
    activities of a resource that none of them finds wider than another one of its own stop where it is used up.
    Both are final, because a resource's level only rises as others stop below it. So far-apart parts of a
    network stop in the same round, and there are as many rounds as bottlenecks that depend on each other.

    Examples
    --------
    Two flows over a link of 10 bytes/s, of which the first can do no more than 2; then two that could fill it, the second of
    which takes three bytes of the link for each of its own:

    >>> both, link = np.array([0, 1]), np.array([0, 0])
    >>> fill(np.array([2.0, 20.0]), np.ones(2), both, link, np.ones(2), np.array([10.0])).tolist()
    [2.0, 8.0]
    >>> fill(np.array([20.0, 20.0]), np.ones(2), both, link, np.array([1.0, 3.0]), np.array([10.0])).tolist()
    [2.5, 2.5]
    """
    rates = np.zeros_like(bound)
    left, own = capacity.astype(np.float64), bound / weight
    growing = np.ones(bound.shape, dtype=bool)
    while True:
        # What is settled would be in the way: only entries of growing activities are kept.
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        active = rows[starts]
        demand = np.bincount(columns, use * weight[rows], len(left))
        level = np.full(len(left), np.inf)
        np.divide(left, demand, out=level, where=demand > 0)
        narrowest = np.minimum.reduceat(level[columns], starts)
        reached = np.minimum(own[active], narrowest)
        # The least level that any growing activity of a resource reaches at all.
        least = np.full(len(left), np.inf)
        np.minimum.at(least, columns, np.repeat(reached, np.diff(starts, append=len(rows))))
        full = (level <= least * (1 + _TIE)) & (demand > 0)
        at_bound = own[active] <= narrowest * (1 + _TIE)
        stopped = ~at_bound & np.logical_or.reduceat(full[columns], starts)
        rates[active[at_bound]] = bound[active[at_bound]]
        rates[active[stopped]] = weight[active[stopped]] * reached[stopped]
        growing[active[at_bound | stopped]] = False
        kept = growing[rows]
        if not kept.any():
            return rates
        gone = ~kept
        used = np.bincount(columns[gone], use[gone] * rates[rows[gone]], len(left))
        left = np.maximum(left - used, 0.0)
        rows, columns, use = rows[kept], columns[kept], use[kept]
