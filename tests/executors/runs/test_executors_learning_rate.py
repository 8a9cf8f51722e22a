"""The schedules against their formulas, torch's own schedulers and their invariants."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.runs.learning_rate import LearningRate, Schedule
from topology.errors import RunError


@given(st.floats(1e-8, 1.0), st.integers(1, 500), st.data())
def test_linear_is_the_published_formula_bit_for_bit(lr: float, num_steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, num_steps))
    assert LearningRate(schedule="linear", learning_rate=lr, num_steps=num_steps).at(step) == lr * (
        1 - step / num_steps
    )


@pytest.mark.parametrize("num_steps", [1, 7, 100])
def test_cosine_agrees_with_torch(num_steps: int) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=num_steps)
    ours = LearningRate(schedule="cosine", learning_rate=0.3, num_steps=num_steps)
    for step in range(num_steps):
        # torch uses a recurrence, whose rounding differs by a few units in the last place.
        assert ours.at(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9, abs=1e-12)
        optimiser.step()
        reference.step()


@given(st.sampled_from(get_args(Schedule)), st.integers(2, 200), st.data())
def test_climbs_through_warmup_then_never_rises(kind: str, num_steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, num_steps - 1))
    schedule = LearningRate(schedule=kind, learning_rate=1.0, num_steps=num_steps, warmup_steps=warmup)  # type: ignore[arg-type]
    rates = [schedule.at(step) for step in range(num_steps + 3)]
    assert rates[warmup] == 1.0
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert min(rates) >= 0
    assert rates[0] > 0
    if kind != "constant":
        assert rates[-1] == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("linear", math.nan, 10, 0), "learning_rate=nan"),
        (("linear", -1.0, 10, 0), "learning_rate=-1.0"),
        (("linear", 1.0, 0, 0), "num_steps=0"),
        (("linear", 1.0, 10, 10), "warmup_steps=10"),
    ],
)
def test_refuses_nonsense(arguments: tuple[object, ...], words: str) -> None:
    kind, lr, steps, warmup = arguments
    with pytest.raises(RunError, match=words):
        LearningRate(schedule=kind, learning_rate=lr, num_steps=steps, warmup_steps=warmup)  # type: ignore[arg-type]


def test_a_step_before_the_first_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        LearningRate(learning_rate=1.0, num_steps=3).at(-1)
