"""A first hour on a device: rehearsed on a simulated one, gone on with, and not stopped by a part that fails."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import typer

from studies.first_hour import hour, parts, steps
from studies.first_hour.__main__ import main
from studies.first_hour.parts import Part
from studies.first_hour.report import report
from studies.first_hour.setting import Setting
from tests.support.simulated_cuda import simulated
from tests.support.simulated_cuda.first_hour import rehearse


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    return rehearse(tmp_path_factory.mktemp("hour"))


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


def test_memory_is_predicted_as_the_device_counts_it(rehearsed):
    steps = [content for name, content in rehearsed[0].items() if name.startswith("step-")]
    assert len(steps) == 2
    for step in steps:
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

    assert not hour.spend(Setting(folder=tmp_path), run, stop_after_s=0.2, say=print)
    assert (tmp_path / "quick.json").exists()
    assert not (tmp_path / "slow.json").exists()


def test_a_part_that_had_all_the_time_there_was_is_given_up_until_there_is_more(tmp_path, monkeypatch):
    slow_and_quick = [Part("slow", "slow", lambda _: {}), Part("quick", "quick", lambda _: {})]
    monkeypatch.setattr(hour, "parts_of", lambda _: slow_and_quick)
    setting, told = Setting(folder=tmp_path), []

    def run(part, left_s):
        return {"left_s": left_s} if part.name == "quick" or left_s > 1000 else None

    def spent(stop_after_s):
        done = hour.spend(setting, run, stop_after_s=stop_after_s, say=told.append)
        return done, hour.contents_of(setting)["slow"]

    is_done, slow = spent(60)
    assert is_done
    assert slow["error"] == "not done in 60 s, which is all that it had"
    assert len(told) == 2
    assert spent(60)[0]
    assert len(told) == 2
    assert "error" not in spent(2000)[1]
    assert len(told) == 3


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


def test_the_command_does_one_part_and_leaves_it(tmp_path):
    left = tmp_path / "left.json"
    with simulated():
        main(hardware="a100-80gb-milan", folder=tmp_path, only="device", left=left)
    assert json.loads(left.read_text())["device"] == "Simulated"


def test_a_device_that_is_not_there_is_refused_in_words(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        main(folder=tmp_path)
    assert "there is no device 'cuda:0'" in capsys.readouterr().err
    with simulated(), pytest.raises(typer.Exit):
        main(hardware="cpu-laptop", folder=tmp_path)
    assert "--hardware dgx-h100" in capsys.readouterr().err
