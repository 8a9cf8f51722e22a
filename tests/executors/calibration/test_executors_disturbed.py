"""A calibration that other processes disturbed: what is kept of it, and what predictions that use it say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.calibration import FitReport
from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Profile, load_profile
from costmodel.work import Work
from executors.calibration import calibrating
from executors.calibration import exchange_probes as exchange_probes_module
from executors.calibration.calibrate import threads_set
from executors.calibration.calibrating import disturbed_share, fitted
from executors.calibration.whole_steps import STEP_SHAPES, WholeStep, measure_steps
from executors.demo import Stages
from executors.models.pretrain import Recipe
from executors.runs.planning import host_node
from tests.support.command import zosim
from tests.support.tiny import model_of, plan_of
from topology import load_preset
from topology.errors import RunError
from zosim.hardware.machine import Machine
from zosim.hardware.profiles import host_profile_path, profile_for, save_host_profile
from zosim.simulators.simulate import simulate

TOPOLOGY = load_preset("cpu-laptop")
BASE = datasheet_profile(TOPOLOGY, "cpu0", num_threads=1)
NOTHING_TO_FIT = FitReport((), (), {}, None)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOSIM_CACHE_DIR", str(tmp_path / "cache"))


def of_host(disturbed_share: float) -> Profile:
    """Return a profile of this machine, for one thread, of whose calibration others disturbed a share."""
    topology, node = host_node("cpu")
    sheet = datasheet_profile(topology, node, num_threads=1)
    return Profile(**{**dict(sheet), "origin": "calibrated", "disturbed_share": disturbed_share})


GOOD, DISTURBED = (of_host(share) for share in (0.05, 0.66))


def measured(num_disturbed: int, num: int = 10) -> list[Measurement]:
    return [
        Measurement("dispatch", Work(num_kernels=n + 4), 2e-5, 2e-5, 5, 1, is_bound=n < num_disturbed)
        for n in range(num)
    ]


def slowed(profile: Profile, times: float) -> Profile:
    """Return a profile with which everything takes so many times as long."""
    constants = [
        c.model_copy(
            update={
                end: getattr(c, end) * (1 / times if c.is_rate else times) for end in ("low", "value", "high")
            }
        )
        for c in profile.constants
        if c.is_rate or c.unit == "s"
    ]
    return profile.with_constants(*constants, origin=profile.origin)


@pytest.fixture(scope="module")
def steps() -> list[WholeStep]:
    """Steps that take what the data sheet says."""
    shapes = [replace(shape, hidden=64, head_dim=32, vocab=50, seq=8, batch=1) for shape in STEP_SHAPES[:2]]
    with threads_set(1):
        return measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=0.02, shapes=shapes)


@pytest.mark.parametrize(
    ("num_operations", "num_steps", "share"),
    [(0, 0, 0.0), (2, 0, 0.2), (6, 1, 0.6), (1, 3, 0.75), (0, 4, 1.0)],
)
def test_a_calibration_is_disturbed_as_far_as_its_operations_or_its_steps_are(
    steps: list[WholeStep], num_operations: int, num_steps: int, share: float
) -> None:
    beside = [replace(steps[0], foreign_cores=0.9 if number < num_steps else 0.0) for number in range(4)]
    assert disturbed_share(measured(num_operations), beside) == pytest.approx(share)
    assert disturbed_share([], []) == 0.0


@pytest.mark.slow
def test_a_disturbed_profile_is_marked_and_holds_what_steps_take_when_the_machine_is_quiet(
    steps: list[WholeStep],
) -> None:
    """Others have three quarters of the cores: all takes four times as long as it does alone."""
    slow = Machine.from_topology(TOPOLOGY, "cpu0", slowed(BASE, 4.0))
    undisturbed = Machine.from_topology(TOPOLOGY, "cpu0", BASE)
    taken = []
    for number in range(4):
        program = steps[number % 2].program
        seen = simulate(program, slow)
        foreign = 0.75 * BASE.num_cores
        taken.append(
            WholeStep(
                f"{number}",
                program,
                seen.step_time_s,
                1e-4 + 1e-6 * number,
                timeline=seen,
                foreign_cores=foreign,
            )
        )
    profile, _ = fitted(TOPOLOGY, "cpu0", BASE, measured(6), taken)
    assert profile.disturbed_share == 1.0
    assert profile.is_disturbed
    machine = Machine.from_topology(TOPOLOGY, "cpu0", profile)
    for step in taken[:2]:
        low_s, high_s = (simulate(step.program, machine, bound=end).step_time_s for end in ("low", "high"))
        assert low_s <= simulate(step.program, undisturbed).step_time_s
        assert step.seconds <= high_s


def test_processes_that_do_not_answer_in_time_cost_no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which starting a process takes minutes."""
    measured_s: list[object] = []

    def crowded() -> list[object]:
        if measured_s:
            raise RunError(
                "2 processes could not measure how they slow each other down: they did not finish in time"
            )
        measured_s.append("once")
        return ["once"]

    monkeypatch.setattr(calibrating, "crowded_cores", crowded)
    crowding = calibrating._Crowding()
    for _ in range(3):
        crowding.measure()
    assert crowding.measured == ["once"]
    (words,) = crowding.failures
    assert "they did not finish in time" in words


def test_a_mark_stays_in_the_file_and_with_what_is_made_of_the_profile(tmp_path: Path) -> None:
    DISTURBED.save(tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded.is_disturbed
    assert loaded.with_constants(origin="calibrated").is_disturbed
    old = json.loads((tmp_path / "profile.json").read_text())
    assert old["disturbed_share"] == 0.66


def test_a_disturbed_profile_is_kept_only_where_that_is_wanted_and_no_other_is() -> None:
    path = host_profile_path(GOOD.device_name, GOOD.num_threads)
    assert save_host_profile(DISTURBED) is None
    assert not path.exists()
    assert save_host_profile(DISTURBED, keep_disturbed=True) == path
    assert load_profile(path) == DISTURBED
    assert save_host_profile(GOOD) == path
    assert save_host_profile(DISTURBED, keep_disturbed=True) is None
    assert load_profile(path) == GOOD
    path.write_text("{}")  # nothing that predictions could use
    assert save_host_profile(DISTURBED, keep_disturbed=True) == path


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Profile]]:
    """What the next calibrations return, without measuring."""
    profiles: list[Profile] = []
    monkeypatch.setattr(calibrating, "calibrated", lambda *_, **__: (profiles.pop(0), NOTHING_TO_FIT))
    monkeypatch.setattr("executors.calibrate_command.calibration_view", lambda *_: "")
    monkeypatch.setattr(FitReport, "median_error", 0.0)
    yield profiles
    assert not profiles


def test_calibrate_keeps_no_disturbed_profile_and_says_how_it_can_be_kept(
    calibration: list[Profile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = host_profile_path(GOOD.device_name, GOOD.num_threads)
    calibration += [DISTURBED] * 2
    words = ("calibrate", "--threads", 1)
    assert zosim(*words, "-o", tmp_path / "mine.json") == 3
    output = capsys.readouterr().err
    assert "not saved: other processes disturbed 66% of the calibration" in output
    assert "--keep-disturbed" in output
    assert load_profile(tmp_path / "mine.json").is_disturbed
    assert not path.exists()
    assert zosim(*words, "--keep-disturbed") == 0
    assert load_profile(path).is_disturbed
    calibration += [GOOD, DISTURBED, DISTURBED]
    assert zosim(*words) == 0
    capsys.readouterr()
    for more, hint in (((), "calibrate again"), (("--keep-disturbed",), "-o FILE")):
        assert zosim(*words, *more) == 3
        output = capsys.readouterr().err
        assert "which nothing disturbed, stays" in output
        assert hint in output
        assert load_profile(path) == GOOD


def test_predictions_with_a_disturbed_profile_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology, node = host_node("cpu")
    plan = plan_of(model_of("opt"), size=2)
    placement = plan.placement.model_copy(update={"topology": "host", "devices": (node,)})
    plan.model_copy(update={"placement": placement}).save(tmp_path / "plan.json")
    DISTURBED.save(tmp_path / "profile.json")
    words = ("simulate", tmp_path / "plan.json", "--profile", tmp_path / "profile.json")
    assert zosim(*words) == 0
    output = capsys.readouterr()
    assert "other processes ran in 66% of its calibration" in " ".join(output.err.split())
    assert "disturbed, calibrated figures" in output.out
    assert zosim(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["disturbed_share"] == 0.66
    for profile in (DISTURBED, GOOD):
        save_host_profile(profile, keep_disturbed=True)
        assert profile_for(topology, node, num_threads=1, is_host=True) == profile
        assert ("disturbed" in capsys.readouterr().err) == profile.is_disturbed


@pytest.mark.slow
@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("has_earlier", [False, True])
def test_the_demo_ends_on_a_busy_machine_and_says_what_its_prediction_rests_on(
    calibration: list[Profile], tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_earlier: bool
) -> None:
    calibration.append(DISTURBED)
    if has_earlier:
        save_host_profile(GOOD)
    out, recipe = tmp_path / "demo", Recipe(num_blocks=2, hidden_size=32, num_steps=2, batch=2)
    outcome = Stages(out, 6, 1, 0, recipe=recipe, calibration_s=0.1).run()
    assert "not saved: other processes disturbed 66%" in " ".join(capsys.readouterr().err.split())
    assert ("predicted from a disturbed profile" in outcome.view().to_markdown()) != has_earlier
    assert (outcome.data()["disturbed_share"] > 0) != has_earlier
    path = host_profile_path(GOOD.device_name, GOOD.num_threads)
    if has_earlier:
        assert load_profile(path) == GOOD
    else:
        assert load_profile(out / "profile.json") == DISTURBED
        assert not path.exists()


def test_a_second_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*_: object) -> None:
        raise RuntimeError("Wait timeout")

    monkeypatch.setattr(exchange_probes_module, "loopback_pair", alone)
    with (
        pytest.raises(RunError, match="a second process did not join within 120 s"),
        exchange_probes_module.exchange_probes(),
    ):
        pass
