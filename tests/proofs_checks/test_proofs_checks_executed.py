"""Alignment as a property: whatever the mesh, the split points, the slices and the point of resumption, ranks together are one device.

hypothesis chooses the same axes as the claims' own checks, and shrinks what differs to a case that a person can read.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from executors.randomness.counter import CounterKey, CounterSampler
from executors.randomness.samplers import SAMPLERS
from proofs_checks.promises.estimators import first_gradient
from proofs_checks.setups import literal
from proofs_checks.setups.executed import AXES, Case, against_literal, case_of, differences, random_cases

FEW = settings(
    max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=60)


def cases(kind):
    @st.composite
    def sampled(draw):
        case = case_of(kind, lambda options: draw(st.sampled_from(options)))
        assume(case is not None)
        return case

    return sampled()


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("kind", AXES)
def test_ranks_together_are_one_device(kind):
    @given(case=cases(kind), seed=st.integers(0, 2**40))
    @FEW
    def holds(case, seed):
        assert differences(case, seed) == []

    holds()


@pytest.mark.broad
@pytest.mark.parametrize("kind", AXES)
def test_ranks_together_are_one_device_in_many_cases(kind):
    @given(case=cases(kind), seed=st.integers(0, 2**40))
    @MANY
    def holds(case, seed):
        assert differences(case, seed) == []

    holds()


@given(
    numels=st.lists(st.integers(1, 70_000), min_size=1, max_size=3),
    fractions=st.lists(st.floats(0, 1), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**6),
    perturbation=st.integers(0, 30),
    name=st.sampled_from(sorted(SAMPLERS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(FEW, max_examples=25)
def test_any_slices_of_counter_draws_are_the_literal_stream(
    numels, fractions, seed, step, perturbation, name, dtype
):
    """Uneven slices, as ranks would make them, in descending order: together they are the literal perturbation."""
    wanted = literal.perturbations(
        [(numel,) for numel in numels],
        seed=seed, step=step, perturbation=perturbation, rng="counter", distribution=name, dtype=dtype,
    )  # fmt: skip
    counter, key = CounterSampler(numels, torch.device("cpu")), CounterKey.of(seed, step, perturbation)
    for parameter, numel in enumerate(numels):
        bounds = sorted({0, numel, *(int(fraction * numel) for fraction in fractions)})
        out = torch.empty(numel, dtype=dtype)
        for begin, end in reversed(list(pairwise(bounds))):
            counter.fill(out[begin:end], parameter, begin, key, SAMPLERS[name])
        assert torch.equal(out, wanted[parameter])


def test_a_difference_is_told_with_its_case():
    with first_gradient.apply():
        outcome = against_literal([Case(), Case(num_perturbations=2, rng="counter")], seed=1)
    assert not outcome.passed
    assert outcome.details[0].startswith("num_perturbations=2, rng=counter: ")
    assert "first rank 0: weights of" in outcome.details[0]


def test_cases_do_not_contradict_themselves_and_are_the_same_for_a_seed():
    for kind in AXES:
        chosen = list(random_cases(kind, 10, 3))
        assert chosen == list(random_cases(kind, 10, 3))
        assert len({case.describe() for case in chosen}) > 5
