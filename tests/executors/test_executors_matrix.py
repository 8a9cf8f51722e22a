"""Placement x setting x {fresh, resumed, replayed}: whatever a step's placement, every bit is that of its mathematics.

:mod:`tests.support.matrix` makes the cases of the settings. Quick are those that hold a value for the first time; slow,
those that hold every pair of values that the literal loop is written for, and every other value with every value of a
placement; broad, all pairs on up to four ranks, and a thousand at random.
"""

from __future__ import annotations

import pytest

from executors.runs.learning_rate import LearningRate
from executors.runs.settings import RunOptions
from tests.support import matrix
from zosim.plans import AXES, fields_of

NUM_AT_RANDOM = 1000
NOT_QUICK = {
    ("mesh.inner", "data"),  # takes four ranks
    ("split.split_points", ("block.0", "block.1.mlp")),  # takes three
    ("low_bits.kernel", "scaled_mm"),  # is there on GPUs alone
    ("residency.transfer_dtype", "float64"),  # rounds nothing
}


def quick_cases():
    """Return the cases that are the first to hold a value."""
    cases, held = [], set()
    for case in (*matrix.literal_cases(), *matrix.other_cases()):
        if not held.issuperset(case.settings.items()):
            cases.append(case)
            held.update(case.settings.items())
    return cases


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    chosen = dict.fromkeys(quick_cases(), ())
    slow = (*matrix.literal_cases(), *matrix.other_cases())
    chosen |= {case: pytest.mark.slow for case in slow if case not in chosen}
    if metafunc.config.getoption("--run-broad"):
        others = (*matrix.all_cases(), *matrix.random_cases(NUM_AT_RANDOM))
        chosen |= {case: pytest.mark.broad for case in others if case not in chosen}
    cases = [
        pytest.param(case, marks=marks, id=f"{number}-{case['way']}")
        for number, (case, marks) in enumerate(chosen.items())
    ]
    metafunc.parametrize("case", cases)


def test_every_bit_is_that_of_the_mathematics(case, tmp_path):
    matrix.assert_as_wanted(case, tmp_path)


def test_every_setting_that_may_change_a_step_is_varied_or_left_out_for_a_reason():
    of_plans = {f"{axis}.{name}" for axis, kind in AXES.items() for name in fields_of(kind)}
    of_runs = {
        f"{section}.{name}"
        for section, kind in (("run", RunOptions), ("learning_rate", LearningRate))
        for name, field in fields_of(kind).items()
        if field.setting.changes == "numbers"
    }
    assert of_plans | of_runs <= matrix.values().keys() | matrix.LEFT_OUT.keys()


def test_every_value_is_in_a_quick_case():
    cases = quick_cases()
    missing = {
        (name, value)
        for name, known in matrix.values().items()
        for value in known
        if not any(case[name] == value for case in cases)
    }
    assert missing <= NOT_QUICK
