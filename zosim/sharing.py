"""How activities that run at the same time share what they run on.

Activity ``i`` runs at a rate ``x_i`` in a unit of its own (bytes/s, cores, a fraction of full speed), never above
its bound ``b_i``, and takes ``a_ir`` of resource ``r`` per unit of rate; resource ``r`` has capacity ``C_r``:

    ``x_i <= b_i``  and  ``Σ_i a_ir x_i <= C_r``.

Of all such rates the max-min fair ones are those where none can grow without another shrinking that is no larger.
Rates are compared as ``x_i / w_i``: weights say what one activity's unit is worth in another's.

This is the linear model of flow-level simulators. It is exact for a bandwidth that a protocol divides evenly, and
an approximation where it stands for a scheduler or a memory controller.

References
----------
.. [1] Bertsekas and Gallager, Data Networks, 2nd ed., section 6.5.2: max-min flow control, progressive filling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Levels closer than this, relative, are one level: rounding must not split a tie into two rounds.
_TIE = 1e-12


def max_min_rates(
    bounds: npt.ArrayLike,
    coefficients: npt.ArrayLike,
    capacities: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
) -> Array:
    """Return the max-min fair rates, by progressive filling.

    Parameters
    ----------
    bounds : array of shape (num_activities,)
        Largest rate of each activity, positive and finite.
    coefficients : array of shape (num_activities, num_resources)
        What a unit of rate takes of a resource, not negative.
    capacities : array of shape (num_resources,)
        Positive, perhaps infinite.
    weights : array of shape (num_activities,), optional
        Positive; 1 unless given.

    Returns
    -------
    array of shape (num_activities,)
        An activity that is held up by its bound alone gets exactly its bound.

    Raises
    ------
    ValueError
        If the shapes do not fit, or a number lies outside its range.

    Notes
    -----
    All rates grow together, in proportion to their weights; whoever meets its bound or a resource that is used
    up stays where it is. Each round fixes at least one activity, so it takes at most ``num_activities`` rounds.

    Examples
    --------
    Two flows over a link of 10, of which one can do no more than 2; then two of its kind more:

    >>> max_min_rates([2.0, 20.0], [[1.0], [1.0]], [10.0]).tolist()
    [2.0, 8.0]
    >>> max_min_rates([20.0, 20.0], [[1.0], [3.0]], [10.0]).tolist()
    [2.5, 2.5]
    """
    bound, use, capacity = _checked(bounds, coefficients, capacities)
    weight = np.ones_like(bound) if weights is None else np.asarray(weights, dtype=np.float64)
    if weight.shape != bound.shape or not np.all((weight > 0) & np.isfinite(weight)):
        message = f"weights must be positive, one per activity, got {weight.tolist()}"
        raise ValueError(message)
    rates = np.zeros_like(bound)
    growing = np.ones(bound.shape, dtype=bool)
    while growing.any():
        level_by_activity = np.where(growing, bound / weight, np.inf)
        level_by_resource = _saturation_levels(use, capacity, rates, weight * growing)
        level = min(level_by_activity.min(), level_by_resource.min(initial=np.inf))
        full = level_by_resource <= level * (1 + _TIE)
        at_bound = growing & (level_by_activity <= level * (1 + _TIE))
        stopped = growing & ~at_bound & (use[:, full] > 0).any(axis=1)
        rates[at_bound] = bound[at_bound]
        rates[stopped] = weight[stopped] * level
        growing &= ~(at_bound | stopped)
    return rates


def _checked(
    bounds: npt.ArrayLike, coefficients: npt.ArrayLike, capacities: npt.ArrayLike
) -> tuple[Array, Array, Array]:
    bound = np.asarray(bounds, dtype=np.float64)
    capacity = np.asarray(capacities, dtype=np.float64)
    use = np.asarray(coefficients, dtype=np.float64).reshape(len(bound), len(capacity))
    if not np.all((bound > 0) & np.isfinite(bound)):
        message = f"bounds must be positive and finite, got {bound.tolist()}"
        raise ValueError(message)
    if not np.all(capacity > 0):
        message = f"capacities must be positive, got {capacity.tolist()}"
        raise ValueError(message)
    if not np.all((use >= 0) & np.isfinite(use)):
        message = "coefficients must be finite and not negative"
        raise ValueError(message)
    return bound, use, capacity


def _saturation_levels(use: Array, capacity: Array, rates: Array, growth: Array) -> Array:
    """Return the level at which each resource is used up while `growth` is added to fixed `rates`."""
    left = np.maximum(capacity - rates @ use, 0.0)
    demand = growth @ use
    levels = np.full(capacity.shape, np.inf)
    np.divide(left, demand, out=levels, where=demand > 0)
    return levels


def admitted(uses_fifo: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return who may run where resources serve one activity at a time, in order of arrival.

    An activity runs once no earlier one, running or waiting, uses any of its first-in-first-out resources:
    store and forward. The earliest is never held up, so nothing deadlocks.

    Parameters
    ----------
    uses_fifo : boolean array of shape (num_activities, num_fifo_resources)
        Rows in order of arrival.

    Examples
    --------
    >>> admitted([[True, False], [True, True], [False, True]]).tolist()
    [True, False, False]
    """
    uses = np.asarray(uses_fifo, dtype=bool)
    earlier = np.cumsum(uses, axis=0) - uses
    result: npt.NDArray[np.bool_] = ~(uses & (earlier > 0)).any(axis=1)
    return result
