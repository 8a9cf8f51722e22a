"""All of ``python3 .ci/tasks.py demo``, with a model that is pretrained for a moment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from costmodel.models.configs import spec_of_config
from costmodel.rates.profile import Profile
from executors.calibration import calibrating
from executors.demo import Stages, _between, _clear
from executors.models.pretrain import Recipe, TaskSettings, build_model
from tests.support.requests import request_for
from topology import Topology, load_preset
from topology.errors import RunError
from zosim.config import PlanConfig, Search
from zosim.hardware.profiles import profile_for
from zosim.planning.planner import choose
from zosim.plans import Plan

TINY = Recipe(num_blocks=2, hidden_size=32, num_steps=2, batch=2)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOSIM_CACHE_DIR", str(tmp_path / "cache"))


def from_data_sheets(topology: Topology, device: str, **_: object) -> tuple[Profile, SimpleNamespace]:
    """What a calibration returns, without measuring: that has tests of its own.

    Of one thread: a rank that is a copy of this process cannot have more, once this one has had several.
    """
    return profile_for(topology, device, num_threads=1), SimpleNamespace(residuals=(), median_error=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("calibrates", [False, pytest.param(True, marks=pytest.mark.broad)])
def test_it_plans_runs_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, calibrates: bool
) -> None:
    if not calibrates:
        monkeypatch.setattr(calibrating, "calibrated", from_data_sheets)
    out = tmp_path / "demo"
    outcome = Stages(out, 6, 1, 0, recipe=TINY, calibration_s=0.1).run()
    assert Plan.load(out / "plan.json").model.num_blocks == 2
    assert outcome.summary["num_steps"] == 6
    assert outcome.comparison.predicted_step_s > 0
    assert outcome.comparison.measured_step_s > 0
    assert 0 <= outcome.after["accuracy"] <= 1
    assert (out / "model" / "model.safetensors").exists() or (out / "model.safetensors").exists()
    assert outcome.data()["bottleneck"]


def test_its_limit_leaves_no_room_for_the_default_model_on_the_device() -> None:
    topology = load_preset("cpu-laptop")
    device = topology.compute_devices[0].id
    config = build_model(Recipe()).config.to_dict()
    model = spec_of_config(config, name="demo")
    requested = request_for(
        model, topology, profile=profile_for(topology, device), batch=TaskSettings().batch, seq=75
    )
    free = choose(requested)
    tight = choose(
        requested.over(
            PlanConfig(search=Search(max_device_bytes=_between(requested.config, requested.hardware)))
        )
    )
    assert free.chosen.plan.residency.blocks == "resident"
    assert tight.chosen.plan.residency.blocks == "offloaded"


def test_it_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        _clear(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_it_says_so_before_it_does_anything_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for out, says in ((tmp_path, "holds no run"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(RunError, match=says):
            Stages(out, num_steps=4, num_threads=1, seed=0).run()
