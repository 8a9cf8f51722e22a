"""Exercises tell right from wrong; the solutions are in ``tests.support.solved``, for every study that has an exercise."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from studies.cli import STUDIES
from studies.exercises import function_in, tried

STUBS = Path(__file__).parents[2] / "studies"
EXERCISES = [item.name for item in STUDIES if item.has_exercise]
SOLVED = {name: import_module(f"tests.support.solved.{name}") for name in EXERCISES}
MISTAKES = [(name, *mistake) for name in EXERCISES for mistake in SOLVED[name].WRONG]


def check_of(name):
    return import_module(f"studies.{name}.exercise").check


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_solution_passes(name):
    verdict = check_of(name)(SOLVED[name].right)
    assert verdict.passed, verdict.message


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(("name", "wrong", "advice"), MISTAKES)
def test_a_wrong_solution_is_refused_with_advice(name, wrong, advice):
    verdict = check_of(name)(wrong)
    assert not verdict.passed
    assert advice in verdict.message


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_does_not_pass_and_says_so(name):
    stub = STUBS / name / "stub.py"
    functions = [node.name for node in ast.parse(stub.read_text()).body if isinstance(node, ast.FunctionDef)]
    verdict = tried(check_of(name), function_in(stub, functions[0]))
    assert verdict.message == "it raised NotImplementedError: write it"


@pytest.mark.parametrize("name", EXERCISES)
def test_a_study_with_an_exercise_has_a_page(name):
    assert next(item for item in STUDIES if item.name == name).page is not None
