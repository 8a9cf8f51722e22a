"""A first hour on a device: rehearsed on a simulated one, gone on with, and not stopped by a part that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import typer

from executors.runs.session import Session
from studies.first_hour import hour, parts, paths, questions, steps
from studies.first_hour.__main__ import main
from studies.first_hour.parts import Part
from studies.first_hour.report import report
from studies.first_hour.setting import Setting
from tests.support.simulated_cuda import simulated
from tests.support.simulated_cuda.first_hour import rehearse
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    return rehearse(tmp_path_factory.mktemp("hour"))


@pytest.mark.slow
def test_every_part_runs_and_leaves_nothing_to_chance(rehearsed):
    contents, findings, path, is_done = rehearsed
    assert is_done
    assert findings == []
    assert [name for name, content in contents.items() if "error" in content or "left_out" in content] == []
    assert all(content.get("is_right", True) for content in contents.values())
    page = path.read_text()
    assert "- Nothing." in page
    assert "tiny-offloaded" in page
    assert json.loads(path.with_suffix(".json").read_text()) == contents


@pytest.mark.slow
def test_memory_is_predicted_as_the_device_counts_it(rehearsed):
    timed = {name: content for name, content in rehearsed[0].items() if name.startswith("step-")}
    assert len(timed) == 4
    for step in timed.values():
        assert 0 <= step["predicted_device_bytes"] / step["device_bytes"] - 1 <= 0.05


class Zo2Config(SimpleNamespace):
    """What zo2's options are given as."""


@contextmanager
def zo2_models(_options):
    """Let transformers have a model that trains itself when it is called, as zo2's does."""
    import transformers

    class Trained(transformers.OPTForCausalLM):
        def zo_init(self, options):
            self.to(options.working_device)

        def zo_train(self):
            self.eval()

        def forward(self, **data):
            with torch.no_grad():
                return super().forward(**data).loss

    before, transformers.OPTForCausalLM = transformers.OPTForCausalLM, Trained
    try:
        yield
    finally:
        transformers.OPTForCausalLM = before


def test_zo2s_own_step_is_timed_where_its_package_is(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zo2", SimpleNamespace(ZOConfig=Zo2Config, zo_hf_init=zo2_models))
    setting = Setting(hardware="a100-80gb-milan", folder=tmp_path, is_rehearsal=True)
    case = steps.Case("tiny", "offloaded", "float32", 2, 16)
    with simulated():
        assert steps.zo2_case(setting, case)["step_s"] > 0
    monkeypatch.setitem(sys.modules, "zo2", None)
    assert "zo2 is not installed" in steps.zo2_case(setting, case)["left_out"]


def test_a_part_that_has_too_little_time_left_is_left_for_another(tmp_path, monkeypatch):
    both = [Part("quick", "quick", lambda _: {}), Part("slow", "slow", lambda _: {})]
    monkeypatch.setattr(hour, "parts_of", lambda _: both)
    slow = hour.in_processes([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 600)

    def run(part, left_s):
        return {} if part.name == "quick" else slow(part, left_s)

    assert not hour.spend(Setting(folder=tmp_path), run, stop_after_s=2, say=print)
    assert (tmp_path / "quick.json").exists()
    assert not (tmp_path / "slow.json").exists()


def test_a_part_that_had_all_the_time_there_was_is_given_up_until_there_is_more(tmp_path, monkeypatch):
    slow_and_quick = [Part("slow", "slow", lambda _: {}), Part("quick", "quick", lambda _: {})]
    monkeypatch.setattr(hour, "parts_of", lambda _: slow_and_quick)
    setting, reported = Setting(folder=tmp_path), []

    def run(part, left_s):
        return {"left_s": left_s} if part.name == "quick" or left_s > 1000 else None

    def spent(stop_after_s):
        done = hour.spend(setting, run, stop_after_s=stop_after_s, say=reported.append)
        return done, hour.contents_of(setting)["slow"]

    is_done, slow = spent(60)
    assert is_done
    assert slow["error"] == "not done in 60 s, which is all that it had"
    assert len(reported) == 2
    assert spent(60)[0]
    assert len(reported) == 2
    assert "error" not in spent(2000)[1]
    assert len(reported) == 3


def test_the_tests_are_left_out_where_pytest_is_not_there(monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda _: None)
    assert parts.cuda_tests(Setting()) == {"left_out": "pytest is not installed"}


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    both = [Part("one", "one", lambda _: {}), Part("two", "two", lambda _: {})]
    monkeypatch.setattr(hour, "parts_of", lambda _: both)
    setting, done = Setting(folder=tmp_path), []

    def run(part, left_s):
        assert left_s <= 60
        done.append(part.name)
        return {"number": len(done)}

    assert not hour.spend(setting, run, stop_after_s=-1, say=done.append)
    assert done == []
    assert hour.spend(setting, run, stop_after_s=60, say=lambda _: None)
    assert hour.spend(setting, run, stop_after_s=60, say=lambda _: None)
    assert done == ["one", "two"]
    assert hour.contents_of(setting)["two"]["number"] == 2


LEFT = "import sys, pathlib; pathlib.Path(sys.argv[4]).write_text('{\"is_right\": true}')"


@pytest.mark.parametrize(
    ("script", "within_s", "content"),
    [
        (LEFT, 60, {"is_right": True}),
        ("raise SystemError('no device')", 60, "SystemError: no device"),
        ("import time; time.sleep(60)", 0.2, "not done after"),
    ],
)
def test_a_part_that_crashes_or_hangs_takes_no_other_with_it(tmp_path, script, within_s, content):
    run = hour.in_processes([sys.executable, "-c", script], tmp_path, within_s)
    made = run(Part("one", "one", lambda _: {}), 600)
    if isinstance(content, str):
        assert content in made["error"]
        assert content in report({"one": made}, "a command").to_markdown()
    else:
        assert made == content


CHILD = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "left = pathlib.Path(sys.argv[4])\n"
    "left.with_suffix('.new').write_text('{\"rows\": [], \"pid\": %d}' % child.pid)\n"
    "left.with_suffix('.new').rename(left)\n"
)


@pytest.mark.parametrize("hangs", [True, False])
def test_what_a_part_has_started_ends_with_it_and_what_it_had_found_is_kept(tmp_path, monkeypatch, *, hangs):
    class Hanging(subprocess.Popen):
        """A process whose time is up once it has left something, however long that takes."""

        def wait(self, timeout=None):
            if timeout is None or not hangs:
                return super().wait()
            while not (tmp_path / "one.part").exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    known = SimpleNamespace(Popen=Hanging, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(hour, "subprocess", known)
    end = "time.sleep(600)" if hangs else "raise SystemError('no device')"
    made = hour.in_processes([sys.executable, "-c", CHILD + end], tmp_path, 60)(
        Part("one", "one", lambda _: {}), 600
    )
    assert made["rows"] == []
    assert ("not done after 60 s" if hangs else "SystemError: no device") in made["error"]

    def is_gone():
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    pid = made["pid"]
    wait_until(is_gone, "the child's end: killed with its group, it is removed by whoever takes over orphans")


def test_a_part_has_a_limit_of_its_own(tmp_path):
    run = hour.in_processes([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, 600)
    assert run(Part("one", "one", lambda _: {}, limit_s=0.1), 600) == {"error": "not done after 0 s"}


def test_paths_are_noted_one_by_one_and_one_that_fails_hides_no_other(tmp_path):
    def broken(_):
        raise RuntimeError("an illegal memory access")

    checks = {"one": lambda _: (True, "fine"), "two": broken, "three": lambda _: (False, "other bits")}
    found = list(paths.checked(Setting(folder=tmp_path), checks))
    assert [content.get("under_way") for content in found] == ["one", "two", "three", None]
    assert [row["is_right"] for row in found[-1]["rows"]] == [True, False, False]
    page = report({"paths": found[-1], "graphs": {"error": "gone", "under_way": "x"}}, "a").to_markdown()
    assert "paths: two, three" in page
    assert "paths: 1 of 3 cases" in page
    assert "graphs (during x): gone" in page


@pytest.fixture
def requested(tmp_path):
    """What is asked of the simulated device, by question, with the device's findings."""

    def answers():
        setting = Setting(hardware="a100-80gb-milan", folder=tmp_path, is_rehearsal=True)
        with simulated() as device:
            content = list(questions.questions(setting))[-1]
        return {row["case"]: row for row in content["rows"]}, device.findings

    return answers


@pytest.mark.slow
def test_what_only_a_device_can_answer_is_asked_with_what_is_expected(requested):
    answers, findings = requested()
    assert len(answers) == 8
    assert [row for row in answers.values() if not row["is_right"]] == []
    assert findings == []


@pytest.mark.slow
def test_an_answer_that_was_not_expected_says_what_is_so(requested, monkeypatch):
    monkeypatch.setattr("tests.support.simulated_cuda.device.NATIVE_STREAMS", 16)
    monkeypatch.setattr(
        "tests.support.simulated_cuda.modes._MULTIPLES", {"aten._int_mm": 4, "aten._scaled_mm": 16}
    )
    real = Session.begin_step

    def begin_step(self, batch, **options):
        torch.zeros(1, device="cuda").item()
        return real(self, batch, **options)

    monkeypatch.setattr(Session, "begin_step", begin_step)
    answers, _ = requested()
    wrong = {case: row["details"] for case, row in answers.items() if not row["is_right"]}
    assert len(wrong) == 3
    assert "16 native streams among 96" in wrong["torch's streams go round 32"]
    (output,) = (details for case, details in wrong.items() if "odd widths" in case)
    assert (
        output == "52 wide: ACCEPTED as it is, exact filled up; 60 wide: ACCEPTED as it is, exact filled up"
    )
    (output,) = (details for case, details in wrong.items() if "packed" in case)
    assert output.startswith("1 in a step, at ")


def test_the_most_valuable_evidence_comes_first():
    setting = Setting(hardware="a100-80gb-milan")
    names = [part.name for part in parts.parts_of(setting) if not part.name.startswith("zo2")]
    assert names[:5] == ["device", "paths", "graphs", "products", "questions"]
    assert names[5:11] == [
        "step-1.3b-resident-float16-1x2048",
        "step-1.3b-offloaded-float16-1x2048",
        "step-1.3b-resident-float16-1x2048-graphs",
        "step-1.3b-offloaded-float16-1x2048-graphs",
        "parity",
        "calibration",
    ]
    assert [name.split("-")[1] for name in names[11:15]] == ["6.7b", "6.7b", "13b", "13b"]
    assert names[-3:] == ["kills", "tests", "step-30b-offloaded-float16-1x2048"]
    # In ten minutes, whatever hangs, there is more than the device's name.
    assert sum(part.limit_s for part in parts.parts_of(setting)[:5]) < 600


def test_a_report_says_what_worked_how_far_predictions_were_off_and_what_is_not_done():
    step = {
        "step_s": 2.0,
        "predicted_s": {"data sheet": 1.0, "calibrated": 2.1},
        "two_forwards_s": 1.0,
        "hidden": None,
    }
    step |= {"device_bytes": 1, "host_bytes": 0, "predicted_device_bytes": 1, "predicted_host_bytes": 0}
    contents = {"device": {"device": "H"}, "step-a": {**step, "allocator_bytes": 0}}
    page = report(contents, "a command", ["the device", "a step of a", "parity"]).to_markdown()
    assert "data sheet: 50.0% in the median of 1, at most -50.0% (a)" in page
    assert "calibrated: 5.0% in the median of 1, at most +5.0% (a)" in page
    assert "Not done yet" in page
    assert "- parity" in page
    assert "- step-a" in page


def test_what_an_earlier_report_found_is_not_done_again(tmp_path, monkeypatch):
    both = [Part("device", "device", lambda _: {}), Part("calibration", "calibration", lambda _: {})]
    monkeypatch.setattr(hour, "parts_of", lambda _: both)
    made_by = {"commit": "0123abc"}  # which stays that of the earlier report
    found = {
        "device": {"device": "H", **made_by},
        "calibration": {"profile": {"format": "zosim-profile"}, **made_by},
        "other": {},
    }
    (tmp_path / "report.json").write_text(json.dumps(found))
    setting = Setting(folder=tmp_path / "new" / "hour")
    hour.take_over(setting, tmp_path / "report.json")
    assert hour.contents_of(setting) == {name: found[name] for name in ("device", "calibration")}
    assert json.loads(setting.kept_profile.read_text()) == {"format": "zosim-profile"}
    assert hour.spend(setting, lambda *_: pytest.fail("done again"), stop_after_s=60, say=print)


def test_warnings_of_other_releases_fail_no_test_of_the_device(monkeypatch):
    reported = []
    processes = SimpleNamespace(run=lambda words: reported.append(words) or (0, ""))
    assert parts.cuda_tests(Setting(processes=processes))["is_right"]
    assert reported[0][reported[0].index("-W") + 1] == "default"


@pytest.mark.broad
def test_a_rehearsal_from_a_fresh_clone_is_killed_half_way_and_goes_on(tmp_path):
    clone, folder = tmp_path / "clone", tmp_path / "hour"
    root = Path(__file__).parents[2]
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{root}", clone], check=True)
    command = [sys.executable, ".ci/tasks.py", "gpu", "--here", "--simulated", "--folder", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    first = subprocess.Popen(command, cwd=clone, env=variables, start_new_session=True)
    while not (folder / "graphs.json").exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = {path.name: path.read_bytes() for path in folder.glob("*.json") if "first-hour" not in path.name}
    assert {"device.json", "paths.json", "graphs.json"} <= set(kept)
    assert list(folder.glob("*-first-hour.md"))  # a report is there however it ended
    done = subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all((folder / name).read_bytes() == content for name, content in kept.items())
    assert "Not done yet" not in done.stdout
    assert "nothing failed" in done.stderr


@pytest.mark.slow
def test_the_command_does_one_part_and_leaves_it(tmp_path, monkeypatch):
    left = tmp_path / "left.json"
    monkeypatch.setattr("executors.ranks.launch.die_with", lambda _: None)
    with simulated():
        main(hardware="a100-80gb-milan", folder=tmp_path, only="device", left=left)
    assert json.loads(left.read_text())["device"] == "Simulated"


def test_a_device_that_is_not_there_is_refused_in_words(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        main(folder=tmp_path)
    assert "device 'cuda:0' does not exist" in capsys.readouterr().err
    with simulated(), pytest.raises(typer.Exit):
        main(hardware="cpu-laptop", folder=tmp_path)
    assert "--hardware dgx-h100" in capsys.readouterr().err
