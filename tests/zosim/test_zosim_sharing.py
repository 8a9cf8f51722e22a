"""Max-min fairness against its definition and against a second implementation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from zosim.simulators.sharing import fill

positive = st.floats(min_value=0.1, max_value=100.0)


def max_min_rates(bounds, use, capacities, weights=None):
    """Return the rates of a problem with a use of every resource by every activity, 0 where it takes nothing of it."""
    rates, use = np.array(bounds, dtype=float), np.array(use, dtype=float)
    weights = np.ones_like(rates) if weights is None else weights
    users = np.flatnonzero(use.any(axis=1))
    if users.size:
        rows, columns = np.nonzero(use[users])
        sparse = rows, columns, use[users][rows, columns], np.array(capacities)
        rates[users] = fill(rates[users], weights[users], *sparse)
    return rates


@st.composite
def problems(draw, max_activities=5, max_resources=4):
    num_activities = draw(st.integers(1, max_activities))
    num_resources = draw(st.integers(1, max_resources))
    sparse = st.one_of(st.just(0.0), st.floats(min_value=0.1, max_value=4.0))
    rows = st.lists(sparse, min_size=num_resources, max_size=num_resources)
    return (
        np.array(draw(st.lists(positive, min_size=num_activities, max_size=num_activities))),
        np.array(draw(st.lists(rows, min_size=num_activities, max_size=num_activities))),
        np.array(draw(st.lists(positive, min_size=num_resources, max_size=num_resources))),
        np.array(draw(st.lists(positive, min_size=num_activities, max_size=num_activities))),
    )


def lexicographic_rates(bounds, use, capacities, weights):
    """Maximise the least level by linear programming, fix whoever cannot exceed it, and go on."""
    num = len(bounds)
    fixed: dict[int, float] = {}
    while len(fixed) < num:
        free = [i for i in range(num) if i not in fixed]
        level = _best(bounds, use, capacities, weights, fixed, floor=None, raise_one=None)
        for i in free:
            best = _best(bounds, use, capacities, weights, fixed, floor=(free, level), raise_one=i)
            if best <= level * (1 + 1e-7):
                fixed[i] = level
    return np.array([fixed[i] * weights[i] for i in range(num)])


def _best(bounds, use, capacities, weights, fixed, floor, raise_one):
    num = len(bounds)
    # Variables: the levels x_i / w_i, then the least level t.
    objective = np.zeros(num + 1)
    objective[num if raise_one is None else raise_one] = -1.0
    rows = [np.append(use[:, r] * weights, 0.0) for r in range(len(capacities))]
    limits = list(capacities)
    free = [i for i in range(num) if i not in fixed]
    for i in free:
        row = np.zeros(num + 1)
        row[i], row[num] = -1.0, 1.0
        rows.append(row)
        limits.append(0.0)
    box = [(fixed[i], fixed[i]) if i in fixed else (0.0, bounds[i] / weights[i]) for i in range(num)]
    least = 0.0 if floor is None else floor[1] * (1 - 1e-10)
    # Rounding of fixed levels must not make the problem infeasible.
    slack = np.append(np.array(limits[: len(capacities)]) * (1 + 1e-9), limits[len(capacities) :])
    solved = linprog(objective, A_ub=np.array(rows), b_ub=slack, bounds=[*box, (least, None)])
    assert solved.status == 0, solved.message
    return -solved.fun


@given(problems())
def test_rates_are_feasible_and_everyone_has_a_reason_not_to_be_faster(problem):
    bounds, use, capacities, weights = problem
    rates = max_min_rates(bounds, use, capacities, weights)
    load = rates @ use
    assert np.all(rates <= bounds)
    assert np.all(rates > 0)
    assert np.all(load <= capacities * (1 + 1e-9))
    full = load >= capacities * (1 - 1e-9)
    level = rates / weights
    for i in range(len(bounds)):
        at_bound = rates[i] == bounds[i]
        bottlenecks = [
            r
            for r in np.flatnonzero(full & (use[i] > 0))
            if level[i] >= level[use[:, r] > 0].max() * (1 - 1e-9)
        ]
        assert at_bound or bottlenecks


@given(problems(), st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_of_activities_or_resources(problem, random):
    bounds, use, capacities, weights = problem
    activities, resources = list(range(len(bounds))), list(range(len(capacities)))
    random.shuffle(activities)
    random.shuffle(resources)
    rates = max_min_rates(bounds, use, capacities, weights)
    permuted = max_min_rates(
        bounds[activities], use[np.ix_(activities, resources)], capacities[resources], weights[activities]
    )
    np.testing.assert_allclose(permuted, rates[activities], rtol=1e-11)


@given(problems(max_activities=4, max_resources=3))
def test_rates_equal_the_lexicographic_optimum_of_linear_programs(problem):
    # The solver's own feasibility tolerance is 1e-7.
    np.testing.assert_allclose(max_min_rates(*problem), lexicographic_rates(*problem), rtol=1e-5)


@given(problems())
def test_more_capacity_never_lowers_the_least_level(problem):
    bounds, use, capacities, weights = problem
    before = (max_min_rates(bounds, use, capacities, weights) / weights).min()
    after = (max_min_rates(bounds, use, capacities * 1.5, weights) / weights).min()
    assert after >= before * (1 - 1e-12)


def test_two_flows_of_a_slow_network_leave_the_rest_to_the_third():
    # Flows 0 and 1 cross the slow link 0; flows 1 and 2 cross the fast link 1.
    rates = max_min_rates([100.0] * 3, [[1, 0], [1, 1], [0, 1]], [10.0, 30.0])
    np.testing.assert_array_equal(rates, [5.0, 5.0, 25.0])


def test_threads_of_a_computation_and_of_a_copy_share_two_cores():
    # Fractions of full speed: two threads and one thread on two cores leave two thirds of a core to each.
    np.testing.assert_allclose(max_min_rates([1.0, 1.0], [[2.0], [1.0]], [2.0]), [2 / 3, 2 / 3], rtol=1e-15)
