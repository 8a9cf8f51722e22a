"""Predicted against measured: the join, and contributions that add up to the error."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import zosim
from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.configs import read_model_spec
from costmodel.rates.slowdown import Slowdown, at_slowdown, with_slowdown
from tests.support.builders import RATE, instruction, pipeline, program, shared, unshared
from topology import load_preset
from topology.errors import TimelineError
from zosim.analysis.compare import compare
from zosim.cli import app
from zosim.planning.predict import PlannedRun
from zosim.plans import Placement, Plan
from zosim.program.instructions import Space, Stream
from zosim.simulators.simulate import simulate
from zosim.timeline import MemorySample

WHOLE = pipeline(3, 1e-3, 3e-3, 1e-3, num_staging_buffers=3)


def measurement(whole, machine, num_steps=6, **fields):
    """A run on another machine, listed step by step as a measurement is."""
    listed = simulate(whole, machine, num_steps=num_steps).expanded()
    return replace(listed, source="measured", first_periodic_step=1, **fields)


def test_a_perfect_prediction_has_no_error():
    found = compare(simulate(WHOLE, unshared()), measurement(WHOLE, unshared()), WHOLE)
    assert found.step_error == pytest.approx(0.0, abs=1e-12)
    assert found.num_steps == 5
    assert {line.name: line.error for line in found.labels} == pytest.approx(
        {"upload": 0.0, "compute": 0.0, "offload": 0.0}, abs=1e-12
    )
    assert {line.name for line in found.instructions} == {item.id for item in WHOLE.step}


def test_tokens_that_were_planned_stand_beside_those_of_the_batches():
    measured = measurement(WHOLE, unshared(), tokens_per_step=20.5)
    found = compare(simulate(WHOLE, unshared()), measured, WHOLE, planned_tokens=41)
    (row,) = [row for row in found.summary_table().rows if row[0] == "tokens per step"]
    assert row == ("tokens per step", "41", "20.5", "+100.0%")
    unknown = compare(simulate(WHOLE, unshared()), measurement(WHOLE, unshared()), WHOLE, planned_tokens=41)
    assert [row for row in unknown.summary_table().rows if row[0] == "tokens per step"] == []


def test_a_slow_computation_is_found_under_its_label():
    slow = unshared(param_pass_bandwidth=RATE / 2, param_pass_cache_bandwidth=RATE / 2)
    found = compare(simulate(WHOLE, unshared()), measurement(WHOLE, slow), WHOLE)
    assert found.step_error == pytest.approx(-0.5)
    worst = found.labels[0]
    assert (worst.name, worst.error) == ("compute", pytest.approx(-0.5))
    assert worst.contribution_s == pytest.approx(-9e-3)
    assert worst.predicted_s == pytest.approx(9e-3)
    assert worst.measured_s == pytest.approx(18e-3)


def test_an_error_that_overlap_hides_contributes_nothing():
    slow = unshared(copy_d2h_bandwidth=RATE / 2)
    found = compare(simulate(WHOLE, unshared()), measurement(WHOLE, slow), WHOLE)
    offload = next(line for line in found.labels if line.name == "offload")
    assert offload.error == pytest.approx(-0.5)
    assert offload.contribution_s == pytest.approx(0.0, abs=1e-12)
    assert found.step_error == pytest.approx(0.0, abs=1e-9)


@given(st.floats(0.3, 3.0), st.floats(0.3, 3.0), st.floats(0.3, 3.0), st.sampled_from([0.0, 1e-3]))
def test_contributions_add_up_to_the_error_of_the_step(compute, upload, offload, step_s):
    other = unshared(
        param_pass_bandwidth=RATE * compute,
        copy_h2d_bandwidth=RATE * upload,
        copy_d2h_bandwidth=RATE * offload,
        step_s=step_s,
    )
    # Steps may alternate or settle late, and then their median is not their mean.
    repeat = simulate(WHOLE, other).repeat
    assume(repeat is not None and repeat.num_steps == 1 and repeat.first_step <= 6)
    measured = replace(measurement(WHOLE, other, num_steps=12), first_periodic_step=6)
    found = compare(simulate(WHOLE, shared()), measured, WHOLE)
    error_s = found.predicted_step_s - found.measured_step_s
    for lines in (found.labels, found.instructions):
        assert sum(line.contribution_s for line in lines) == pytest.approx(error_s, rel=1e-9, abs=1e-12)


def test_peak_memory_is_compared_per_space():
    sample = MemorySample(0, Space.DEVICE, "weights", 0.0, 100)
    predicted = replace(simulate(WHOLE, unshared()), memory=(replace(sample, size_bytes=110),))
    found = compare(predicted, measurement(WHOLE, unshared(), memory=(sample,)), WHOLE)
    assert {line.space: line.error for line in found.memory} == {"device": pytest.approx(0.1), "host": None}


def test_what_only_one_side_has_is_a_line_without_error():
    more = program([*WHOLE.step, instruction("extra", "sample", 1e-3)])
    found = compare(simulate(WHOLE, unshared()), measurement(more, unshared()), more)
    extra = next(line for line in found.labels if line.name == "extra")
    assert (extra.predicted_s, extra.measured_s, extra.error) == (None, pytest.approx(1e-3), None)


def test_a_comparison_can_be_read_and_parsed():
    found = compare(simulate(WHOLE, unshared()), measurement(WHOLE, unshared(step_s=1e-3)), WHOLE)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found)
    text = console.export_text()
    assert "step time (ms)" in text
    assert "compute (param pass)" in text
    assert "dispatch" in text
    data = json.loads(found.to_json())
    assert data["step_error"] == pytest.approx(-0.1)
    assert data["labels"][0]["error"] is None
    assert "zosim calibrate" not in found.view().to_markdown()
    assert "data-sheet figures" in replace(found, is_calibrated=False).view().to_markdown()


def test_a_run_that_found_its_core_slow_shows_what_is_predicted_there():
    topology = load_preset("cpu-laptop")
    full = datasheet_profile(topology, "cpu0", num_threads=1)
    known = with_slowdown(full, Slowdown(1e-4, 1.0, 1.0, 1.5, {"products": 0.5, "sampling": 1.0}))
    plan = Plan(
        model=read_model_spec("opt-125m"),
        placement=Placement(topology="cpu-laptop", devices=("cpu0",)),
        batch=1,
        seq=64,
    )
    calm, slow = (PlannedRun(plan, topology, at_slowdown(known, ratio)) for ratio in (1.0, 1.4))
    measured = replace(slow.simulated(num_steps=4).expanded(), source="measured")
    assert calm.at_slowdown_of(measured) is None
    measured = replace(measured, reference_s=1.4e-4)
    found = compare(calm.timeline, measured, calm.program, at_slowdown=calm.at_slowdown_of(measured))
    assert slow.step_time_s > calm.step_time_s
    assert found.at_slowdown.step_s == pytest.approx(slow.step_time_s)
    assert found.at_slowdown.slower > 0.1
    console = Console(file=io.StringIO(), width=120)
    console.print(found.summary_table())
    assert f"{found.at_slowdown.slower:.0%} slower than calibrated" in console.file.getvalue()
    assert slow.at_slowdown_of(replace(measured, reference_s=1e-4)).slower < 0
    assert PlannedRun(plan, topology, full).at_slowdown_of(measured) is None


def test_timelines_of_different_programs_are_refused():
    other = replace(simulate(WHOLE, unshared()), program="other")
    with pytest.raises(TimelineError, match="the prediction is of program other"):
        compare(other, measurement(WHOLE, unshared()), WHOLE)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A plan, another one, and a run of the first on a machine whose second GPU is slow."""
    folder = tmp_path_factory.mktemp("three")
    decision = zosim.plan("opt-125m", "rtx4090-2x", batch=2, seq=64, method="pertp")
    decision.plan.save(folder / "a.json")
    zosim.plan("opt-125m", "rtx4090-2x", batch=2, seq=64, method="zo2").plan.save(folder / "b.json")
    run = folder / "run"
    run.mkdir()
    decision.plan.save(run / "plan.json")
    slow = zosim.whatif(decision, changes=["gpu1.speed=0.5"], derive="none").after
    measured = slow.simulated(num_steps=5).expanded()
    replace(measured, source="measured", first_periodic_step=1).save(run / "timeline.json")
    return folder / "a.json", folder / "b.json", run


def test_two_plans_and_a_run_differ_in_time_links_memory_and_instructions(three):
    first, second, run = three
    found = zosim.compare(run, first, second=second)
    sides = {side.name: side for side in found.sides}
    assert list(sides) == ["predicted A", "predicted B", "measured"]
    # What instructions contribute adds up to the difference of the steps.
    for number, name in enumerate(("predicted A", "predicted B")):
        total_s = sum(row.contributions[number] for row in found.instructions)
        error_s = sides[name].step_time_s - sides["measured"].step_time_s
        assert total_s == pytest.approx(error_s, rel=1e-6)
        assert sum(row.contributions[number] for row in found.labels) == pytest.approx(error_s, rel=1e-6)
    # What is wrong with the first prediction is what the slow GPU computes.
    worst = min(found.labels, key=lambda row: row.contributions[0])
    assert worst.name in ("forward", "perturb")
    assert worst.values[2] > 1.5 * worst.values[0]
    # Bytes over a link are those of the copies that pass it.
    offloaded = sides["predicted B"].planned
    brought = [item for item in offloaded.program.step if item.stream == Stream.H2D]
    uploaded = sum(item.work.copy_bytes for item in brought)
    (link,) = [row for row in found.links if row.name.endswith(">gpu0") and row.values[1]]
    assert link.values[1] == pytest.approx(uploaded)
    assert link.values[0] == link.values[2]
    assert {row.name for row in found.memory} >= {"rank 0 on gpu0, device", "rank 1 on gpu1, device"}


def test_the_command_compares_any_two_or_three(three):
    first, second, run = three
    for arguments in ([first, second, run], [run, "--details"]):
        result = CliRunner().invoke(app, ["compare", *map(str, arguments), "--json"])
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert len(data["sides"]) == sum(isinstance(one, Path) for one in arguments) + (arguments[0] == run)
        assert data["link_bytes"]
    shown = CliRunner().invoke(app, ["compare", *map(str, three)])
    assert "instructions that differ most" in shown.output
    wrong = CliRunner().invoke(app, ["compare", str(first), str(run), str(second)])
    assert wrong.exit_code == 2
