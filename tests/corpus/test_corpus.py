"""The corpus covers what can be set, and its comparison finds what changed."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from executors.runs.settings import RunConfig
from tests.corpus.__main__ import SEED, differing
from tests.corpus.cases import LEFT_OUT, request_cases, run_cases
from zosim.options import options_of


def test_each_listed_value_of_each_setting_is_in_a_run():
    listed = {
        (option.flag, value)
        for option in options_of(RunConfig)
        if get_origin(option.typed) is Literal and option.flag not in LEFT_OUT
        for value in get_args(option.typed)
    }
    covered = {
        pair for case in run_cases(0, SEED) for pair in zip(case.options, case.options[1:], strict=False)
    }
    assert listed <= covered


def test_the_cases_are_the_same_each_time():
    assert list(run_cases(5, SEED)) == list(run_cases(5, SEED))
    assert request_cases(5, SEED) == request_cases(5, SEED)
    assert len(set(request_cases(200, SEED))) == 200


def test_a_changed_bit_a_changed_time_and_a_missing_case_are_differences():
    frozen = {
        "run": {"weights": {"model.safetensors": "aa"}},
        "plan": {"step_time_s": 1.0},
        "gone": {"exit": 2},
    }
    same = {**frozen, "plan": {"step_time_s": 1.0 + 1e-15}}
    assert not list(differing("runs", frozen, same, 1))
    for changed in (
        {**frozen, "run": {"weights": {"model.safetensors": "ab"}}},
        {**frozen, "plan": {"step_time_s": 1.0 + 1e-9}},
        {name: frozen[name] for name in ("run", "plan")},
        {**frozen, "new": {"exit": 2}},
    ):
        assert len(list(differing("runs", frozen, changed, 1))) == 1
