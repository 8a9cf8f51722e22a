"""A handful of the kill suite's cases; ``python3 .ci/tasks.py kills`` runs as many as are wanted."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.kills.cases import PLACEMENTS, POINTS, Case, Strike, case_of
from tests.kills.suite import ROOT, Suite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return Suite(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("point", [point for point in POINTS.values() if point.event == "call"], ids=str)
def test_functions_that_kills_are_aimed_at_exist(point):
    module, name = point.match.split(":")
    owner = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)
    assert callable(owner)


def test_a_schedule_follows_from_its_seed_and_spares_nobody():
    cases = [case_of(3, number) for number in range(len(PLACEMENTS) * 18)]
    assert cases == [case_of(3, number) for number in range(len(cases))]
    assert cases != [case_of(4, number) for number in range(len(cases))]
    strikes = [strike for case in cases for strike in case.strikes]
    first = {(case.placement, case.strikes[0].signal) for case in cases}
    assert first == {(p, s) for p in PLACEMENTS for s in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")}
    assert {strike.point.name for strike in strikes if strike.point} == set(POINTS)
    assert {strike.target.split()[0] for strike in strikes} == {"rank", "launcher", "group"}
    assert max(len(case.strikes) for case in cases) == 3


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["data-shared", "stage"])
def test_runs_that_are_killed_end_as_if_nobody_had(tmp_path, kind):
    """Forked, as new Pythons take seconds each."""
    command = [
        sys.executable,
        "-m",
        "tests.kills",
        "--new-python-every",
        "0",
        "--count",
        "1",
        "--placement",
        kind,
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["failures"] for row in rows] == [[]], done.stderr
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("zosim-*"))


CASES = {
    "torn log": Case(0, "one-process", (Strike("SIGKILL", "launcher", point=POINTS["log/half a line"]),)),
    "two ranks": Case(
        1,
        "data-shared",
        (
            Strike("SIGKILL", "launcher", point=POINTS["checkpoint/rename"]),
            Strike("SIGTERM", "rank 1", log_part=0.6),
        ),
    ),
    "stopped": Case(2, "perturb", (Strike("SIGSTOP", "rank 1", log_part=0.3),)),
    "stages": Case(3, "stage", (Strike("SIGINT", "group", point=POINTS["evaluation"]),)),
    "four": Case(4, "2d-sliced", (Strike("SIGKILL", "group", point=POINTS["flush"]),)),
}


@pytest.mark.crossed(slow=5)
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_new_pythons_that_are_killed_end_as_if_nobody_had(suite, case):
    row = suite.run(case)
    assert row["failures"] == []
    assert all(strike["came"] for strike in row["strikes"])
