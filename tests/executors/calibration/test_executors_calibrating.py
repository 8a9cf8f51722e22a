"""A calibration's last part: whole steps, the time between them, and how wide intervals have to be."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from costmodel.devices.datasheet import datasheet_profile
from costmodel.param_passes import copy_work
from costmodel.rates.calibration import with_copy_cores
from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Profile
from costmodel.rates.slowdown import Slowdown
from costmodel.work import Matmul, Work
from executors.calibration import whole_steps
from executors.calibration.calibrate import threads_set
from executors.calibration.calibrating import BETWEEN_CALIBRATIONS, at_one_slowdown, fitted
from executors.calibration.core_contention import CrowdedCores, with_crowded_cores
from executors.calibration.whole_steps import (
    QUANTIZED_STEP_SHAPES,
    STEP_SHAPES,
    WholeStep,
    interval_ratios,
    measure_steps,
    with_interval_scale,
    with_step_overhead,
)
from studies.prediction.cases import choice_cases, held_out_cases, quantized_cases, rank_cases, tuning_cases
from topology import load_preset
from zosim.hardware.machine import Machine
from zosim.program import Program
from zosim.simulators.simulate import simulate

TOPOLOGY = load_preset("cpu-laptop")
PROFILE = datasheet_profile(TOPOLOGY, "cpu0", num_threads=1)


@pytest.fixture(scope="module")
def steps() -> list[WholeStep]:
    shapes = [replace(shape, hidden=64, head_dim=32, vocab=50, seq=8, batch=1) for shape in STEP_SHAPES[:2]]
    with threads_set(1):
        measured = measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=0.02, shapes=shapes)
    # What else the machine does while tests run is none of theirs.
    return [replace(step, foreign_cores=0.0) for step in measured]


def test_whole_steps_are_measured_with_the_time_between_them(steps: list[WholeStep]) -> None:
    for step in steps:
        assert 0 < step.gap_s < step.seconds
        assert 0 < step.pause_s < step.seconds
    profile = with_step_overhead(PROFILE, steps)
    found = profile.constant("step_s")
    assert found.low <= found.value <= found.high
    assert found.value <= max(step.gap_s for step in steps)
    assert profile.origin == "calibrated"
    assert torch.get_num_threads() >= 1


def test_the_host_time_of_a_step_is_parted_into_its_own_and_its_instructions(steps: list[WholeStep]) -> None:
    longer = lower_longer(steps[0])
    rows = [
        WholeStep("a", program, 1.0, gap_s=4e-4 + 1e-5 * len(program.step), pause_s=5e-6)
        for program in (steps[0].program, longer)
    ]
    profile = with_step_overhead(PROFILE, rows)
    assert profile.values()["step_s"] == pytest.approx(4e-4)
    added_s = profile.values()["instruction_s"] - PROFILE.values()["instruction_s"]
    assert added_s == pytest.approx(1.5e-5)


def lower_longer(step: WholeStep) -> Program:
    """Return the program with the instructions of its step twice, under other names."""
    copies = tuple(replace(item, id=f"{item.id}#copy") for item in step.program.step)
    return replace(step.program, step=(*step.program.step, *copies))


@pytest.mark.slow
def test_intervals_are_as_wide_as_whole_steps_say(steps: list[WholeStep]) -> None:
    machine = Machine.from_topology(TOPOLOGY, "cpu0", PROFILE)
    program = steps[0].program
    low_s, central_s, high_s = (
        simulate(program, machine, bound=bound).step_time_s for bound in ("low", "central", "high")
    )

    def scaled(*seconds: float) -> Profile:
        rows = [WholeStep("a", program, second, 1e-4) for second in seconds]
        return with_interval_scale(PROFILE, interval_ratios(PROFILE, TOPOLOGY, "cpu0", rows))

    # One error of the whole half interval, and many of a fifth of it.
    fifth_s = central_s * (high_s / central_s) ** 0.2
    scale = scaled(*[fifth_s] * 24).interval_scale
    assert scale == pytest.approx(1.71 * 0.2, rel=0.02)
    assert scaled(*[fifth_s] * 24, low_s).interval_scale > scale
    assert scaled(fifth_s, fifth_s).interval_scale > 1.5 * scale
    ends = Machine.from_topology(TOPOLOGY, "cpu0", scaled(*[fifth_s] * 24))
    assert low_s < simulate(program, ends, bound="low").step_time_s < central_s
    assert central_s < simulate(program, ends, bound="high").step_time_s < high_s


def test_a_profile_is_judged_by_steps_that_it_was_not_fitted_to() -> None:
    """Steps that take what a profile says, all but one: its part alone is found to be far off."""
    shapes = [replace(shape, hidden=64, head_dim=32, vocab=50, seq=8, batch=1) for shape in STEP_SHAPES[:4]]
    with threads_set(1):
        found = measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=0.04, shapes=shapes)
    machine = Machine.from_topology(TOPOLOGY, "cpu0", PROFILE)
    rows, gap_s = [], PROFILE.values()["step_s"]
    for number, step in enumerate(found):
        output = simulate(step.program, machine)
        assert step.timeline is not None
        assert step.timeline.spans
        seconds = output.step_time_s * (3.0 if number == 3 else 1.0)
        timeline = output if number != 3 else None
        rows.append(WholeStep(str(number), step.program, seconds, gap_s, timeline=timeline))
    single = Measurement("dispatch", Work(num_kernels=4), 2e-5, 2e-5, 5, 1)
    profile, report = fitted(TOPOLOGY, "cpu0", PROFILE, [single], rows)
    errors = {row.case: row.error for row in report.steps}
    assert set(errors) == {"0", "1", "2", "3"}
    assert errors["3"] == min(errors.values())
    assert errors["3"] < -0.4
    assert 0 < profile.interval_scale < 10
    assert {*report.identified, *report.unidentified} <= profile.values().keys()


@pytest.mark.slow
def test_steps_with_quantized_weights_change_rates_of_qvalues_and_nothing_else(
    steps: list[WholeStep],
) -> None:
    shapes = [
        replace(shape, hidden=64, head_dim=32, vocab=50, seq=8, batch=1)
        for shape in QUANTIZED_STEP_SHAPES[:2]
    ]
    with threads_set(1):
        measured = measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=0.02, shapes=shapes)
    # A step that others disturbed is a bound, and need not change a rate.
    quantized = [replace(step, foreign_cores=0.0) for step in measured]
    without, _ = fitted(TOPOLOGY, "cpu0", PROFILE, [], steps)
    profile, _ = fitted(TOPOLOGY, "cpu0", PROFILE, [], steps, quantized=quantized)
    changed = {
        one.name
        for one, other in zip(profile.constants, without.constants, strict=True)
        if one.value != other.value
    }
    assert {name.partition(".")[0] for name in changed} == {"quant_rate"}


def test_intervals_hold_what_another_calibration_of_a_cpu_would_have_said(steps: list[WholeStep]) -> None:
    """Steps that take what the profile says show no error; what all predictions of a calibration share stays."""
    machine = Machine.from_topology(TOPOLOGY, "cpu0", PROFILE)
    # Made-up gaps and pauses: a measured one makes the interval depend on what else the machine does.
    exact = [
        WholeStep(
            f"{step.name} {turn}",
            step.program,
            simulate(step.program, machine).step_time_s,
            gap_s=4e-4,
            pause_s=5e-6,
        )
        for turn in range(4)
        for step in steps
    ]
    single = Measurement("dispatch", Work(num_kernels=4), 2e-5, 2e-5, 5, 1)
    profile, _ = fitted(TOPOLOGY, "cpu0", PROFILE, [single], exact)
    there = Machine.from_topology(TOPOLOGY, "cpu0", profile)
    low_s, central_s, high_s = (
        simulate(steps[0].program, there, bound=bound).step_time_s for bound in ("low", "central", "high")
    )
    assert math.log(high_s / low_s) > 3 * BETWEEN_CALIBRATIONS
    assert low_s < central_s < high_s


def test_what_the_slower_pace_saw_is_measured_again(steps: list[WholeStep]) -> None:
    """Made-up timings of a machine that changes its pace between single operations and whole steps."""
    single = Measurement("dispatch", Work(num_kernels=4), 2e-5, 2e-5, 5, 1)

    def go(
        kernel_slowdowns: list[float], step_slowdowns: list[float]
    ) -> tuple[Slowdown, list[WholeStep], str]:
        kernels, whole = iter(kernel_slowdowns), iter(step_slowdowns)

        def measured(_fast_s: float | None) -> list[WholeStep]:
            slowdown = next(whole)
            return [replace(steps[0], seconds=slowdown, references_s=(1e-4 * slowdown,) * 9)]

        _, slowdown, seen, words = at_one_slowdown(
            lambda: ([single], Slowdown(1e-4 * next(kernels), 1.05, 1.0, 1.2, {})), measured
        )
        assert slowdown is not None
        assert not [*kernels, *whole]  # as often as it was to be done
        return slowdown, seen, " ".join(words)

    slowdown, seen, words = go([1.0], [1.1])
    assert (slowdown.ratio, seen[0].seconds, words) == (1.05, 1.1, "")
    slowdown, seen, words = go([1.0], [1.5, 1.0])
    assert (slowdown.ratio, seen[0].seconds) == (1.05, 1.0)
    assert "1.50 times as slow while it was measured: steps were measured again" in words
    # It stays slow: that is the pace of now.
    slowdown, seen, words = go([1.0], [1.5, 1.6])
    assert (seen[0].seconds, slowdown.fast_s) == (1.5, 1e-4)
    assert slowdown.ratio == pytest.approx(1.5)
    assert slowdown.high == pytest.approx(1.5)
    # Operations were all taken while another process had half of each core.
    slowdown, seen, words = go([1.5, 1.0], [1.0])
    assert slowdown.fast_s == 1e-4
    assert "1.50 times as fast while it was measured: operations were measured again" in words


@pytest.mark.slow
def test_steps_beside_other_processes_are_bounds_and_judge_nothing(
    steps: list[WholeStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.9, 0.5, 0.0, 0.05])
    monkeypatch.setattr(whole_steps, "_measured", lambda *_: replace(steps[0], foreign_cores=next(loads)))
    measured = measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=9.0, shapes=STEP_SHAPES[:2])
    assert [step.foreign_cores for step in measured] == [0.0, 0.05]  # the first was tried thrice
    disturbed = replace(steps[0], seconds=1e3, foreign_cores=0.9)
    words = at_one_slowdown(lambda: ([], None), lambda _: [disturbed, *steps])[3]
    assert words == (
        "other processes kept 0.9 cores busy during 1 of 3 whole steps, whose times are upper bounds",
    )
    single = Measurement("dispatch", Work(num_kernels=4), 2e-5, 2e-5, 5, 1)
    again = [replace(step, name=f"{step.name} again") for step in steps]
    alone, _ = fitted(TOPOLOGY, "cpu0", PROFILE, [single], [*steps, *again])
    beside, _ = fitted(TOPOLOGY, "cpu0", PROFILE, [single], [*steps, *again, disturbed])
    assert beside.interval_scale < 3 * alone.interval_scale


def test_shapes_of_the_calibration_are_none_that_predictions_are_judged_on() -> None:
    judged = {case.shape.hidden for case in (*held_out_cases(48), *rank_cases(16), *tuning_cases())}
    judged |= {case.shape.hidden for cases in (quantized_cases(48), *choice_cases(8)) for case in cases}
    shapes = (*STEP_SHAPES, *QUANTIZED_STEP_SHAPES)
    assert not judged & {shape.hidden for shape in shapes}
    assert all(shape.hidden % shape.head_dim == 0 for shape in shapes)


def test_what_a_copy_takes_comes_from_the_two_together() -> None:
    product = Work(matmuls=(Matmul(m=64, n=64, k=64),))
    rows = [
        Measurement("matmul", product, 1.0, 1.0, 3, 8),
        Measurement("copy", copy_work(100), 0.5, 0.5, 3, 8),
        Measurement("matmul beside a copy", product, 1.25, 1.2, 3, 8, contended=True),
        Measurement("copy beside a product", copy_work(100), 0.6, 0.5, 3, 8, contended=True),
    ]
    full = datasheet_profile(TOPOLOGY, "cpu0")
    profile, reason = with_copy_cores(full, rows)
    assert not reason
    expected = full.num_cores * (1 - 1 / 1.25) * 1.2
    assert profile.constant("copy_cores").value == pytest.approx(min(2.0, expected))
    assert "a core to spare" in with_copy_cores(PROFILE, rows)[1]
    assert "no copy" in with_copy_cores(full, rows[:2])[1]
    assert math.isclose(
        with_copy_cores(full, rows[:2])[0].values()["copy_cores"], full.values()["copy_cores"]
    )


def test_a_small_budget_leaves_later_shapes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []

    def measured(shape: object, *_: object) -> object:
        taken.append(shape)
        return SimpleNamespace(is_disturbed=False, foreign_cores=0.0)

    monkeypatch.setattr(whole_steps, "_measured", measured)
    measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=1e-9)
    assert taken == list(STEP_SHAPES[: whole_steps._LEAST_SHAPES])
    taken.clear()
    measure_steps(TOPOLOGY, "cpu0", device="cpu", budget_s=60.0)
    assert taken == list(STEP_SHAPES)


def test_steps_beside_a_stranger_do_not_count() -> None:
    def step(number: int, seconds: float, reference_s: float) -> whole_steps._TimedStep:
        return whole_steps._TimedStep(number, seconds, reference_s, 0.0)

    fast = [step(number, 1.0, 1.05) for number in range(3)]
    slow = [step(3, 1.2, 1.5), step(4, 2.0, 1.0)]
    assert whole_steps._at_full_speed([*slow, *fast], 1.0) == fast
    assert whole_steps._at_full_speed([*slow, fast[0]], 1.0) == [fast[0], *slow]
    # Where no reference is taken, only the length tells.
    assert whole_steps._at_full_speed([*slow, *fast], None) == [slow[0], *fast]
    assert whole_steps._goes_on([*slow, *slow], 1.0, 0.5, 1.0)
    assert not whole_steps._goes_on([*slow, *fast], 1.0, 0.5, 1.0)
    assert not whole_steps._goes_on([*slow, *slow], 2.1, 0.5, 1.0)


def test_what_ranks_take_from_each_other_is_the_middle_of_what_was_found() -> None:
    found = [CrowdedCores(1.9, 2e-3, 1e-4), CrowdedCores(1.1, 1e-3, 3e-4), CrowdedCores(1.2, 5e-3, 2e-4)]
    profile = with_crowded_cores(PROFILE, found)
    slowdown, wait, lost = (
        profile.constant(name) for name in ("ranks_slowdown", "busy_latency_s", "busy_core_s")
    )
    assert (slowdown.low, slowdown.value, slowdown.high) == (1.1, 1.2, 1.9)
    assert (wait.low, wait.value, wait.high) == (1e-3, 2e-3, 5e-3)
    assert (lost.low, lost.value, lost.high) == (1e-4, 2e-4, 3e-4)
    assert with_crowded_cores(PROFILE, []) == PROFILE
