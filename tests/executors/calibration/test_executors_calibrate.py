"""Calibration: probes do the work they state, measurements are sane, torch is left as it was."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from costmodel.work import Work
from executors import reference_speed
from executors.calibration import background_load, calibrate, probes, probing
from executors.calibration.exchange_probes import exchange_probes
from executors.low_bits.exact_products import exact_sums
from tests.support.waiting import HANG_S
from topology.errors import RunError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def small_probes() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setitem(probing.MEMORY_BYTES, "cpu", 1 << 20)
    patch.setitem(probing.CACHE_BYTES, "cpu", 1 << 14)
    patch.setattr(probes, "JUMP_RAW", 1 << 16)
    patch.setattr(probes, "MATMUL_SHAPES", {"cpu": ((8, 16, 32), (64, 64, 64))})
    patch.setattr(probes, "INTEGER_SHAPES", ((32, 16, 64), (64, 64, 64)))
    patch.setattr(probes, "ATTENTION_SHAPES", {"cpu": ((2, 1, 16, 8),)})
    yield
    patch.undo()


@pytest.fixture(scope="module")
def all_probes(small_probes: Any) -> Iterator[list[probing.Probe]]:
    with exchange_probes() as exchanges:
        with torch.no_grad():
            found = [
                *probes.kernel_probes(CPU, ("float32", "bfloat16")),
                *exchanges,
            ]
        yield found


def test_every_kind_of_work_is_measured(all_probes: list[probing.Probe]) -> None:
    # What codecs do has a calibration of its own, which codec probes measure; whole segments are forwarded, and quantized values passed over, within steps.
    # What quantized values are rounded with is charged as normals are, which take no less. A drive's figures are its topology's.
    unmeasured = {"codec_work", "quant_passes", "calls", "workspace_bytes", "num_rounded", "disk_bytes"}
    total = dict.fromkeys(set(Work.model_fields) - unmeasured, 0)
    for probe in all_probes:
        for name in total:
            value = getattr(probe.work, name)
            total[name] += len(value) if isinstance(value, tuple) else value if isinstance(value, int) else 1
    assert min(total.values()) > 0
    assert {probe.work.distribution for probe in all_probes} == {"normal", "rademacher"}
    assert {probe.direction for probe in all_probes if probe.work.copy_bytes} == {"h2d", "d2h"}
    assert len({probe.name for probe in all_probes}) == len(all_probes)


def test_products_do_the_flops_they_state(all_probes: list[probing.Probe]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counted = [
        p for p in all_probes
        if p.work.matmuls and not p.work.attention and p.concurrent is None and not p.work.matmuls[0].format
    ]  # fmt: skip
    assert len(counted) == 4
    for probe in counted:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            probe.run()
        assert counter.get_total_flops() == probe.work.flops * probe.num_done, probe.name


def test_products_of_integers_are_exact(
    all_probes: list[probing.Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def noted(inputs: Tensor, weights: Tensor) -> Tensor:
        calls.append((inputs, weights, exact_sums(inputs, weights)))
        return calls[-1][2]

    monkeypatch.setattr(probes, "exact_sums", noted)
    integers = [p for p in all_probes if p.work.matmuls and p.work.matmuls[0].format == "int8"]
    for probe in integers:
        probe.run()
    assert len(calls) == len(integers) == 2
    for probe, (qvalues, weights, product) in zip(integers, calls, strict=True):
        assert torch.equal(product, (qvalues.double() @ weights.double().T).float())
        assert (*product.shape, qvalues.shape[1]) == tuple(
            getattr(probe.work.matmuls[0], dim) for dim in "mnk"
        )


def test_param_passes_return_to_where_they_began() -> None:
    *_, perturb, update = probes._param_passes(CPU, "float32")
    for probe in (perturb, update):
        theta = next(probe.run.__defaults__[0])  # type: ignore[attr-defined]
        before = theta.clone()
        probe.run()
        assert not torch.equal(before, theta)
        probe.run()
        assert torch.allclose(before, theta, atol=1e-6)


@pytest.mark.slow
def test_measurements_and_the_state_left_behind(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    seed, shares = torch.random.get_rng_state(), []
    measured, found = calibrate.calibrate(
        dtypes=("float32",), budget_s=0.2, num_threads=2, on_round=shares.append
    )
    assert torch.get_num_threads() == 1
    assert torch.is_grad_enabled()
    assert torch.equal(seed, torch.random.get_rng_state())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found is not None
    assert 0 < found.fast_s < 1
    assert 1 <= found.low <= found.ratio <= found.high
    assert len(measured) > 20
    assert all(m.num_threads == 2 and m.num_samples >= 3 for m in measured)
    assert sum(m.contended for m in measured) == 2


class ClockOfElements(TorchDispatchMode):
    """A clock that goes on by a second for each element that an operation writes."""

    now_s = 0.0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.now_s += result.numel()
        return result


def test_a_larger_pass_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probing.MEMORY_BYTES, "cpu", 1 << 24)
    memory, _, cache, _ = probes._param_passes(CPU, "float32")
    with ClockOfElements() as clock:
        monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
        in_memory_s, in_cache_s = (calibrate._seconds(probe, 3, CPU) for probe in (memory, cache))
    assert in_memory_s == 64 * in_cache_s  # of 64 times the bytes
    assert in_cache_s > 0


def sampled(name: str, *rows: tuple[float, float, float]) -> calibrate._Samples:
    """Return samples, each as the reference before, seconds, the reference after."""
    probe = probing.Probe(name, Work(), lambda: None)
    pairs = [(before, after) for before, _, after in rows]
    return calibrate._Samples(probe, 1, [s for _, s, _ in rows], pairs, [0.0] * len(rows))


def test_samples_beside_a_stranger_do_not_count() -> None:
    slow, fast = (1.5, 3.0, 1.6), (1.0, 2.0, 1.1)
    samples = sampled("matmul", *[slow] * 20, *[fast] * 3, (1.0, 2.9, 1.5))
    assert calibrate._measurement(samples, 1, 1.0).seconds == 2.0
    # Where none was at full pace, those around which the reference was fastest count.
    disturbed = sampled("matmul", *[slow] * 20, *[(1.3, 2.5, 1.3)] * 3)
    assert calibrate._measurement(disturbed, 1, 1.0).seconds == 2.5
    assert calibrate._never_at_full_speed([samples, disturbed]) == [disturbed]


def test_samples_that_waited_for_a_core_do_not_count() -> None:
    """One thread's reference is as fast as ever while another process has the other core."""
    idle, sliced = (1.0, 5e-6, 1.0), (1.0, 6e-3, 1.0)
    samples = sampled("elementwise", *[sliced] * 20, *[idle] * 4)
    assert calibrate._measurement(samples, 2, 1.0).seconds == 5e-6
    assert not calibrate._measurement(samples, 2, 1.0).is_bound
    assert not calibrate._never_at_full_speed([samples])
    # Where all of them waited, those that waited least, and as a bound.
    waited = sampled("elementwise", *[sliced] * 20, *[(1.0, 5.9e-3, 1.0)] * 3)
    waited.waits = [0.9] * 20 + [0.6] * 3
    measured = calibrate._measurement(waited, 2, 1.0)
    assert (measured.seconds, measured.is_bound) == (5.9e-3, True)
    assert calibrate._never_at_full_speed([waited]) == [waited]
    # A slow stretch of the machine is no process: what was seen at the slower pace is no bound.
    slow = sampled("elementwise", *[(1.6, 9e-6, 1.6)] * 20, (1.0, 5e-6, 1.0))
    assert not calibrate._measurement(slow, 2, 1.0).is_bound


def test_a_thread_that_gets_no_core_is_seen_to_wait() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("only Linux tells")
    before_s = background_load.waited_s()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        threads = [threading.Thread(target=sum, args=(range(3_000_000),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        waited_s = 0.0
        while any(thread.is_alive() for thread in threads):
            torch.ones(
                200_000
            ).sigmoid_()  # without the interpreter's lock, on the core that another thread is on
            waited_s = max(waited_s, background_load.waited_s() - before_s)
    finally:
        os.sched_setaffinity(0, cores)
    assert waited_s > 0


def test_kinds_of_work_follow_the_reference_as_they_were_seen_to() -> None:
    rows = [sampled("matmul", *[(1.0, 1.0, 1.0)] * 20, *[(1.5, 1.25, 1.5)] * 20)]
    rows += [sampled("draw", *[(1.0, 4.0, 1.0)] * 20, *[(1.5, 6.0, 1.5)] * 20)]
    seen = calibrate._slowdown(rows, [calibrate._measurement(row, 1, 1.0) for row in rows], 1.0)
    assert seen.fractions == pytest.approx({"products": 0.5, "sampling": 1.0})
    assert 1.0 <= seen.low <= 1.25 <= seen.high <= 1.5


def test_what_runs_beside_really_does_and_stops() -> None:
    ran, runs = threading.Event(), []

    def concurrent() -> None:
        runs.append(len(runs))
        if len(runs) > 2:
            ran.set()

    probe = probing.Probe("slow", Work(), lambda: ran.wait(HANG_S), concurrent=concurrent)
    calibrate._seconds(probe, 2, CPU)
    done = len(runs)
    assert ran.is_set()
    time.sleep(0.005)
    assert len(runs) == done


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget_s": 0}, "budget_s=0 must be above 0"),
        ({"num_threads": -2}, "num_threads=-2"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "cuda:99"}, "device 'cuda:99' does not exist"),
        ({"device": "meta"}, "device 'meta' does not exist"),
    ],
)
def test_refuses_nonsense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        calibrate.calibrate(**arguments)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    assert calibrate.calibrate(device="cuda", budget_s=1.0)


def test_the_reference_takes_about_as_long_as_it_did() -> None:
    assert 0 < reference_speed.reference_now_s(0.05) < HANG_S
    assert reference_speed.full_speed_s([2.0] * 500 + [1.0] * 50) == 1.0


@pytest.mark.slow
def test_windows_hold_the_mean_pace_of_each() -> None:
    assert reference_speed.intervals_of([1.0, 1.0, 3.0, 3.0, 100.0, 1.0], 1.0, 2) == [1.0, 3.0, 2.5]
    assert reference_speed.slowdown_of([0.9, 1.0, 1.2, 1.4, 1.3])[0] == 1.2
