"""Exercises tell right from wrong; the solutions are in ``tests.support.solved``, for every study that has an exercise."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from studies import exercises
from studies.cli import STUDIES
from studies.exercises import grade
from topology.errors import ZosimError

STUBS = Path(__file__).parents[2] / "studies"
EXERCISES = [item.name for item in STUDIES if item.has_exercise and item.unit is None]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_does_not_pass_and_says_so(name):
    assert grade(name, STUBS / name / "stub.py").message == "it raised NotImplementedError: write it"


def solution(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("from studies.where_to_split.cases import forward_bytes as bytes_forward", "module studies"),
        ("from .cases import forward_bytes", r"module \.cases"),
        ("import numpy, socket", "module socket"),
        ("def bytes_forward(case):\n    return __import__('os').getpid()", "line 2 uses __import__"),
        ("def bytes_forward(case):\n    return case.__class__", "line 2 uses __class__"),
        ("bytes_forward = eval('3')", "uses eval"),
        ("import dataclasses\nbytes_forward = dataclasses.sys.modules['x'].y", "line 2 uses sys"),
        ("from dataclasses import sys", "uses dataclasses.sys"),
        ("import torch.os", "uses torch.os"),
        ("import numpy\nbytes_forward = numpy.ctypeslib.ctypes.CDLL(None).fork", "line 2 uses ctypes"),
        ("def bytes_forward(case):\n    return g.gi_frame.f_back", "line 2 uses"),
        ("class Any(float):\n    def __sub__(self, other):\n        return 0.0", "line 2 uses __sub__"),
        ("def bytes_forward(case)\n", "line 1 is no Python"),
        ("x = '\0'", "is no Python: .*null bytes"),
        (f"x = {'-' * 200_000}1", "is no Python: (it nests too deep|too many nested)"),
    ],
)
def test_what_a_solution_may_not_use_is_refused_by_its_line(tmp_path, text, used):
    with pytest.raises(ZosimError, match=used):
        grade("where_to_split", solution(tmp_path, text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("while True: pass", "had not ended after 5 s|does a loop never end"),
        ("return len(torch.zeros(2**36))", "RuntimeError"),
        ("return numpy.zeros(1).tofile('out')", "PermissionError"),
        (f"return numpy.fromfile({__file__!r})[0]", "PermissionError"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return torch.save({}, 'out')", "RuntimeError"),
        (
            "torch.multiprocessing.get_context('spawn').Process(target=print).start()",
            "PermissionError: a solution may not start a process",
        ),
    ],
)
def test_a_solution_is_confined(tmp_path, monkeypatch, body, seen):
    monkeypatch.setattr(exercises, "MAX_SECONDS", 5.0 if "while" in body else 600.0)
    text = f"import numpy, torch\n\ndef bytes_forward(case):\n    {body}\n"
    verdict = grade("where_to_split", solution(tmp_path, text))
    assert not verdict.passed
    assert re.search(seen, verdict.message), verdict.message


@pytest.mark.parametrize("name", EXERCISES)
def test_a_study_with_an_exercise_has_a_page(name):
    assert next(item for item in STUDIES if item.name == name).page is not None


@pytest.mark.slow
def test_a_solution_without_the_function_is_refused(tmp_path):
    with pytest.raises(ZosimError, match="has no function 'bytes_forward'"):
        grade("where_to_split", solution(tmp_path, "x = 1\n"))
