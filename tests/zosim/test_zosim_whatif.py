"""Plans on changed machines: what they cost there, what is planned anew, and derivatives against critical paths."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from typer.testing import CliRunner

import zosim
from costmodel.devices.datasheet import datasheet_profile
from topology import load_preset
from topology.changes import changed
from zosim.cli import app
from zosim.hardware.profiles import Profiles
from zosim.planning.derivatives import derivatives, limits, next_limit


@pytest.fixture(scope="module")
def offloaded():
    return zosim.plan("opt-1.3b", "rtx4090-2x", batch=8, seq=256, method="zo2", device="gpu0")


@pytest.fixture(scope="module")
def shared():
    return zosim.plan("opt-125m", "rtx4090-2x", batch=4, seq=64, method="pertp")


def test_elasticities_are_the_shares_of_the_critical_path(offloaded):
    """Where a step is a sum along one path, a percent more of a rate saves a percent of what that rate takes of it."""
    planned = zosim.simulate(offloaded)
    found = {item.lever.type: item.elasticity for item in derivatives(planned)}
    shares = defaultdict(float)
    for limit in limits(planned):
        shares[limit.limiter] += limit.share
    assert found["link"] == pytest.approx(-shares["pcie"], abs=0.03)
    assert found["compute"] == pytest.approx(-shares["matmul"] - shares["attention"], abs=0.05)
    assert -1 < sum(found.values()) < -0.8  # the rest is software
    assert found["memory"] == 0


@pytest.mark.slow
def test_the_limit_after_the_first_is_where_another_figure_takes_over(offloaded):
    planned = zosim.simulate(offloaded).on(changed(load_preset("rtx4090-2x"), ["pcie.bandwidth=0.5x"]))
    limit = next_limit(planned, derivatives(planned))
    assert limit.first.name == "bandwidth of pcie4-x8"
    assert limit.factor > 1
    assert limit.step_time_s < planned.step_time_s
    beyond = planned.on(limit.first.apply(planned.topology, 1.05 * limit.factor))
    assert derivatives(beyond)[0].lever.name == limit.then.name


@pytest.mark.slow
def test_a_slow_link_costs_what_simulating_there_says_and_memory_may_be_limited(offloaded, tmp_path):
    answer = zosim.whatif(
        offloaded, changes=["pcie.bandwidth=0.25x"], max_device_memory="4GiB", derive="none"
    )
    machine = changed(load_preset("rtx4090-2x"), ["pcie.bandwidth=0.25x"])
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    there = zosim.simulate(offloaded, str(tmp_path / "machine.json"))
    assert answer.after.step_time_s == there.step_time_s > answer.before.step_time_s
    anew = zosim.plan(
        "opt-1.3b", str(tmp_path / "machine.json"), batch=8, seq=256, device="gpu0", max_device_memory="4GiB"
    )
    assert answer.replanned.chosen.seconds == anew.chosen.seconds <= there.step_time_s


@pytest.mark.slow
def test_a_lost_device_ends_a_plan_and_another_takes_its_place(shared):
    answer = zosim.whatif(shared, drop=["gpu1"], derive="none")
    assert answer.after is None
    assert answer.obstacle == "it runs on gpu1"
    assert answer.replanned.plan.placement.devices == ("gpu0",)
    assert answer.replanned.plan.estimator == shared.plan.estimator
    nothing = zosim.whatif(shared, drop=["gpu0", "gpu1"], derive="none")
    assert nothing.replanned is None
    assert nothing.planning_error == "no gpu is left of rtx4090-2x"
    small = zosim.whatif(shared, changes=["gpu.memory=300MiB"], derive="none")
    assert small.obstacle.startswith("it needs ")


@pytest.mark.slow
def test_a_slow_device_holds_up_its_rank_alone(shared):
    slow = zosim.whatif(shared, changes=["gpu1.speed=0.5"], derive="each")
    both = zosim.whatif(shared, changes=["gpu.speed=0.5"], derive="none")
    assert slow.before.step_time_s < slow.after.step_time_s <= both.after.step_time_s
    assert slow.after.prediction.slowest_rank == 1
    elasticity = {item.lever.name: item.elasticity for item in slow.derivatives}
    assert elasticity["compute rate of gpu1"] < -0.05 < elasticity["compute rate of gpu0"]


def test_calibrated_rates_change_as_their_data_sheet_does(tmp_path):
    topology = load_preset("a100-80gb-milan")
    sheet = datasheet_profile(topology, "gpu0")
    halved = [
        constant.model_copy(update={name: getattr(constant, name) / 2 for name in ("low", "value", "high")})
        for constant in sheet.constants
        if constant.is_rate
    ]
    sheet.with_constants(*halved, origin="calibrated").save(tmp_path / "profile.json")
    profiles = Profiles(topology, path=tmp_path / "profile.json")
    slow = profiles.on(changed(topology, ["pcie.bandwidth=0.25x"]))
    now, then = profiles.of("gpu0").values(), slow.of("gpu0").values()
    ratios = {name: then[name] / now[name] for name in now if then[name] != now[name]}
    assert {"copy_h2d_bandwidth", "copy_d2h_bandwidth"} <= ratios.keys()
    assert set(ratios.values()) == {0.25}
    assert "matmul_rate.float16" not in ratios


def test_the_command_prints_both_plans(shared, tmp_path):
    shared.plan.save(tmp_path / "plan.json")
    arguments = ["whatif", str(tmp_path / "plan.json"), "--set", "gpu1.speed=0.5", "--derive", "none"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--report", str(tmp_path / "report.html")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert page.index("What the change costs") < page.index("planned anew: prediction")
    data = json.loads(result.stdout)
    assert data["after"]["step_time_s"] > data["before"]["step_time_s"]
    assert data["replanned"]["prediction"]["step_time_s"] <= data["after"]["step_time_s"]
