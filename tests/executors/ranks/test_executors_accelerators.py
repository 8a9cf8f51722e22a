"""Ranks on accelerators: a device each, joined as NCCL joins them; on simulated devices, between processes that gloo joins."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from executors.calibration import calibrating
from executors.calibration.device_facts import device_facts, with_facts
from executors.calibration.device_state import device_state
from executors.calibration.pinning import in_fresh_process
from executors.calibration.probing import MEMORY_BYTES
from executors.devices import check_device, device_named
from executors.ranks.accelerators import backends_of, own_accelerator, refuse_shared, watchdog_settings
from executors.ranks.launch import launch
from executors.ranks.mesh import on_one_rank
from executors.ranks.rank_info import RankInfo
from executors.report import facts_table
from executors.runs.session import Session
from executors.steps.preparing import own_device
from executors.steps.streams_accelerator import AcceleratorBackend
from tests.support import staged
from tests.support.builders import make_profile
from tests.support.command import zosim
from tests.support.simulated_cuda import device as simulated_device
from tests.support.simulated_cuda import simulated
from tests.support.simulated_cuda.device import CONTEXT_BYTES
from tests.support.simulated_cuda.first_hour import small_probes
from tests.support.simulated_cuda.hosts import exchange_seconds_on_own_host, steps_on_own_host
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import PlanError, RunError
from topology.hardware import resolve
from zosim.program.instructions import Buffer, Space


def test_a_rank_takes_the_device_of_its_number():
    with simulated():
        assert own_accelerator("cuda", RankInfo(5, 0, 8)) == torch.device("cuda:0")
        with mock.patch.object(torch.accelerator, "device_count", return_value=2):
            assert own_accelerator("cuda", RankInfo(5, 1, 8)) == torch.device("cuda:1")
            with pytest.raises(RunError, match="rank 5 is number 2 on its host, but only 2 cuda") as raised:
                own_accelerator("cuda", RankInfo(5, 2, 8))
    assert "--nproc-per-node 2" in raised.value.hint


def test_a_rank_that_is_shown_one_device_takes_it_whatever_its_number(monkeypatch):
    """As Slurm's --gpus-per-task=1 shows them: each rank another device, all called 0."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with simulated():
        assert own_accelerator("cuda", RankInfo(7, 3, 8)) == torch.device("cuda:0")
        assert own_device("cuda") == "cuda:0"
        with mock.patch.object(torch.accelerator, "device_count", return_value=4):
            assert own_device("cuda") == "cuda:3"


def test_spans_of_a_recording_that_begins_late_keep_their_resolution(monkeypatch):
    """After months the driver's milliseconds of 24 bits go in steps of seconds; a kernel takes microseconds."""
    ticks, later_s = count(), [0.0]

    def now_s():
        return later_s[0] + 1e-6 * next(ticks)

    monkeypatch.setattr(simulated_device, "time", SimpleNamespace(perf_counter=now_s))
    model = model_of("opt")
    with simulated(), Session(plan_of(model), model, learning_rate=1e-2, device="cuda:0") as session:
        early, unrecorded, late = batches(3)
        session.step(early)
        session._num_timed_steps = 0
        session.step(unrecorded)
        later_s[0] = 1e7
        session._num_timed_steps = 3
        session.step(late)
        measured = session.interpreter.backend.measured()
    by_step = {number: [m for m in measured if m.step == number and m.phase == "step"] for number in (0, 2)}
    first_s, last_s = (by_step[number][0].start_s for number in (0, 2))
    assert last_s - first_s == pytest.approx(1e7, rel=1e-6)
    for spans in by_step.values():
        durations_s = [span.end_s - span.start_s for span in spans]
        assert all(0 < duration_s < 0.1 for duration_s in durations_s)
    # As many events and so many ticks lie between them, early or late.
    names = [{span.instruction.id: span.end_s - span.start_s for span in spans} for spans in by_step.values()]
    shared = names[0].keys() & names[1].keys()
    assert shared
    assert all(names[0][name] == pytest.approx(names[1][name], abs=1e-8) for name in shared)


def test_a_device_of_a_kind_that_torch_is_not_built_for_is_refused_in_words():
    check_device("xpu:1")
    with simulated(), pytest.raises(RunError, match="finds 0 XPU devices"):
        device_named("xpu:1")
    with pytest.raises(PlanError, match="is not the name of a device"):
        check_device("tpu")


def test_two_ranks_on_one_device_are_named():
    refuse_shared(["a 0", "a 1", "b 0"])
    with pytest.raises(RunError, match="ranks 1 and 3 use the same device, 1 of a"):
        refuse_shared(["a 0", "a 1", "b 1", "a 1"])


def test_what_a_user_told_the_watchdog_stays(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    settings = watchdog_settings(600.0)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in settings
    assert float(settings["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 600


def test_devices_are_joined_by_the_library_of_their_kind():
    assert backends_of("cuda", "gloo") == "cpu:gloo,cuda:nccl"
    assert backends_of("xpu", "gloo") == "cpu:gloo,xpu:xccl"
    assert backends_of("cpu", "gloo") == "gloo"


def test_pinned_buffers_lie_in_one_slab():
    with simulated() as device:
        backend = AcceleratorBackend("cuda:0")
        sizes = [640] * 3
        backend.reserve(sizes)
        buffers = [backend.allocate(Buffer("b", Space.HOST, 640, "weights", "float32"), 160, torch.float32) for _ in sizes]  # fmt: skip
        assert device.pinned_taken_bytes == 2048
        assert all(buffer.is_pinned() for buffer in buffers)
        assert len({buffer.data_ptr() for buffer in buffers}) == 3
        backend.allocate(Buffer("b", Space.HOST, 640, "weights", "float32"), 160, torch.float32)
        assert device.pinned_taken_bytes == 2048 + 1024


@pytest.mark.crossed(quick=3)
@pytest.mark.dist
@pytest.mark.parametrize("mesh", [(), (("perturb", 2),)], ids=["stages", "perturb"])
def test_a_dry_run_of_two_hosts_does_what_a_rank_alone_does(mesh):
    """Each rank is number 0 of its host, with a device of its own; they meet over gloo where NCCL would join devices."""
    case = staged.Case((() if mesh else ("block.0",)), mesh=mesh)
    apart = launch(steps_on_own_host, case, world_size=2)
    with (
        simulated(),
        Session(on_one_rank(case.plan()), case.made(), learning_rate=1e-2, device="cuda:0") as session,
    ):
        lines = batches(staged.STEPS, size=case.size)
        numbers = [list(session.step(batch).projected_gradients) for batch in lines]
    assert apart == [[numbers, []]] * 2


@pytest.mark.dist
def test_two_ranks_on_one_device_are_refused_before_they_exchange_anything():
    output = launch(partial(steps_on_own_host, has_own_name=False), staged.Case(("block.0",)), world_size=2)
    assert "ranks 0 and 1 use the same device" in output


def test_figures_of_a_device_are_measured_on_its_streams():
    with simulated() as device, small_probes():
        facts = device_facts("cuda:0")
        assert device.findings == []
    assert set(facts.copy_bytes_per_s) == {"h2d", "d2h", "h2d beside d2h", "d2h beside h2d"}
    assert facts.context_bytes == CONTEXT_BYTES
    assert facts.attention_s
    figures = (facts.launch_s, facts.synchronise_s, facts.pin_bytes_per_s, *facts.copy_bytes_per_s.values())
    assert min(figures) > 0
    sheet = make_profile("gpu")
    known = with_facts(sheet, facts).values()
    assert (known["context_bytes"], known["pin_bandwidth"]) == (CONTEXT_BYTES, facts.pin_bytes_per_s)
    assert len(facts_table(facts).rows) >= 9


def test_how_fast_memory_is_pinned_is_not_measured_on_blocks_that_torch_kept():
    with simulated() as device, small_probes():
        size = MEMORY_BYTES["accelerator"]
        for _ in range(2):  # what a calibration has pinned and given back
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
        before = device.pinned_taken_bytes
        assert before == size
        device_facts("cuda:0")
        assert device.pinned_taken_bytes >= before + size


@pytest.mark.slow
def test_a_process_that_cannot_pin_says_so():
    with pytest.raises(RunError, match="memory is pinned for cuda:7"):
        in_fresh_process("cuda:7", 1 << 10)


@pytest.mark.dist
def test_exchanges_between_devices_are_measured_by_ranks():
    assert set(launch(exchange_seconds_on_own_host, world_size=2)) == {8, 1024}


class DriverError(Exception):
    """Of a driver that does not know the device."""


def driver(handle_of, calls):
    """Return what answers as NVML does."""
    answers = {
        "NVMLError": DriverError,
        "nvmlInit": lambda: calls.append("on"),
        "nvmlShutdown": lambda: calls.append("off"),
        "nvmlDeviceGetHandleByUUID": handle_of,
        "nvmlDeviceGetPowerUsage": lambda _: 1500,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=5),
    }
    numbers = (
        "EnforcedPowerLimit",
        "CurrPcieLinkGeneration",
        "CurrPcieLinkWidth",
        "ClockInfo",
        "Temperature",
    )
    answers |= {f"nvmlDeviceGet{name}": lambda *_: 3 for name in numbers}
    return SimpleNamespace(**answers, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0)


def test_the_driver_says_how_fast_a_device_runs():
    def unknown(uuid):
        raise DriverError(uuid)

    calls = []
    with simulated():
        state = device_state("cuda:0", driver(lambda _: "handle", calls))
        assert device_state("cuda:0", driver(unknown, calls)) is None
    assert (state.clock_mhz, state.power_w, state.used_bytes) == (3, 1.5, 5)
    assert calls == ["on", "off"] * 2


@pytest.mark.slow
def test_the_command_calibrates_a_device(tmp_path, monkeypatch, capsys):
    machine, measure_steps = resolve("a100-80gb-milan"), calibrating.measure_steps

    def of_two(*given, shapes, **more):
        return measure_steps(*given, shapes=shapes[:2], **more)

    monkeypatch.setattr("executors.runs.planning.host_node", lambda _: (machine, "gpu0"))
    monkeypatch.setattr(calibrating, "measure_steps", of_two)
    with simulated(), small_probes():
        words = ("calibrate", "--device", "cuda:0", "--budget", "0.1", "--no-save", "--json")
        assert zosim(*words, "-o", tmp_path / "profile.json") == 0
    reported = json.loads(capsys.readouterr().out)
    constants = {constant["name"]: constant["value"] for constant in reported["profile"]["constants"]}
    assert reported["device"]["context_bytes"] == constants["context_bytes"] == CONTEXT_BYTES
    assert json.loads((tmp_path / "profile.json").read_text())["origin"] == "calibrated"
