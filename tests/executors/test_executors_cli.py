"""The executor's commands: cheap to import, and calibration as data."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from costmodel.rates.profile import load_profile
from tests.support.command import zosim


def test_listing_the_commands_imports_no_torch():
    program = (
        "import sys, executors.cli; print(sorted({'torch', 'transformers', 'simpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_run_without_a_directory_says_so(capsys):
    assert zosim("run", "--steps", 1) == 2
    assert "--out" in capsys.readouterr().err


def test_replaying_what_is_no_run_says_so(tmp_path, capsys):
    assert zosim("replay", tmp_path, "--model", tmp_path, "-o", tmp_path / "o") == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.broad
def test_calibrating_writes_a_profile_and_says_what_it_could_not_tell(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert zosim("calibrate", "--budget", 0.5, "--threads", 1, "--no-save", "-o", path, "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    profile = load_profile(path)
    assert profile.origin == "calibrated"
    assert reported["profile"]["num_threads"] == profile.num_threads == 1
    names = {constant.name for constant in profile.constants}
    assert set(reported["fit"]["identified"]) | set(reported["fit"]["unidentified"]) <= names
    # Other tests run beside this one: what they disturbed says little of the machine.
    assert profile.is_disturbed or reported["median_error"] < 0.5
