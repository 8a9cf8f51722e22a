"""Everything that was found before, and a new case of every target; ``tasks.py fuzz`` tries as many as are wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["--corpus", "--cases=2"])
def test_broken_inputs_are_refused_in_words(which: str) -> None:
    # A process of its own: workers are forked from it, which a test process full of threads should not be.
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr[-6_000:] + done.stdout


def test_a_fault_is_found_cut_down_and_replayed(tmp_path: Path) -> None:
    """Plant a reader with four faults, and see that each has its name."""
    script = """
import json, sys
from pathlib import Path
from tests.fuzz import harness
from tests.fuzz.cases import Case, Target
from tests.fuzz.mutations import mutated
from topology.errors import ZosimError

def call(case, folder):
    data = json.loads((folder / "a.json").read_text())
    match data.get("kind"):
        case "deep": return data["missing"]
        case "slow":
            while True: pass
        case "large": return bytes(2 * harness.MEMORY_LIMIT_BYTES)
        case "print": print("\\x1b[31m")
        case "fine": raise ZosimError("no")
        case "gone": import os; os._exit(7)

kinds = ("deep", "slow", "large", "print", "fine", "gone")
seeds = [Case({"a.json": json.dumps({"kind": kind, "more": [1, 2, 3]}).encode()}) for kind in kinds]
harness.CPU_LIMIT_S = 0.5
harness.CORPUS = Path(sys.argv[1])
target = Target("planted", lambda: seeds, call, mutated)
found = harness.run_jobs([target], iter([("planted", n) for n in range(6)]), lambda _, n: seeds[n])
print(sorted(kind for _, kind, _ in found.findings), dict(found.counts["planted"]))
case, outcome = found.findings["planted", "traceback", "KeyError in <string>:call"]
least = harness.smaller(target, case, outcome)
path = harness.save("planted", least, outcome)
again = Case.of_json(path.read_text(), target.kept)
print(len(again.files["a.json"]) < len(case.files["a.json"]), harness.stored([target]) == [("planted", path)])
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    kinds, replayed = done.stdout.splitlines()
    assert kinds.startswith("['crash', 'memory', 'slow', 'traceback', 'unclean']"), kinds
    assert "'refused': 1" in kinds
    assert replayed == "True True"
