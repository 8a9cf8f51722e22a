"""The fit on measurements made up from a known profile: what went in must come out."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from costmodel import Attention, Matmul, Work, read_model_spec
from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import estimate
from costmodel.models.forward import forward_work
from costmodel.param_passes import allocation_work, copy_work, perturb_work, sampling_work
from costmodel.rates.calibration import _predicted_s, fit_profile
from costmodel.rates.measurement import Measurement
from topology import load_preset
from topology.errors import ProfileError

BASE = {
    "cpu": datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=2),
    "gpu": datasheet_profile(load_preset("h200-1x"), "gpu0"),
}
SPEC = read_model_spec("opt-125m")
SIZES = (1 << 16, 1 << 20, 1 << 26, 1 << 28)


def _probes() -> list[tuple[str, Work, str]]:
    rows: list[tuple[str, Work, str]] = []
    shapes = [
        (1, 4096, 4096),
        (64, 64, 64),
        (128, 256, 128),
        (256, 3072, 768),
        (512, 4096, 4096),
        (2048, 4096, 4096),
    ]
    for m, n, k in shapes:
        rows.append((f"matmul {m}", Work(matmuls=(Matmul(m=m, n=n, k=k),), num_kernels=1), "h2d"))
    for seq in (64, 256, 2048):
        part = Attention(num=64, query=seq, key=seq, head_dim=64, causal_skip=True)
        rows.append((f"attention {seq}", Work(attention=(part,), num_kernels=1), "h2d"))
    for size in SIZES:
        rows.append((f"elementwise {size}", Work(elementwise_bytes=size, num_kernels=1), "h2d"))
        rows.append((f"pass {size}", perturb_work(size // 12), "h2d"))
        rows += [(f"copy {way} {size}", copy_work(size), way) for way in ("h2d", "d2h")]
        rows.append((f"allocate {size}", allocation_work(size), "h2d"))
    for distribution in ("normal", "rademacher"):
        rows.append((f"draw {distribution}", sampling_work(10**7, distribution=distribution), "h2d"))
    rows += [("dispatch", Work(num_kernels=1000), "h2d"), ("instruction", Work(), "h2d")]
    for segment in ("embed", "block.0", "head"):
        for seq in (4, 32, 512):
            rows.append((f"segment {segment} {seq}", forward_work(SPEC, segment, batch=1, seq=seq), "h2d"))
    return rows


def _truth(kind: str, seed: int) -> dict[str, float]:
    """Constants somewhere inside the base's intervals."""
    rng = np.random.default_rng(seed)
    values = dict(BASE[kind].values())
    for constant in BASE[kind].constants:
        if constant.quantity not in {"cache_bytes", "copy_cores"} and constant.low > 0:
            share = rng.uniform(0.25, 0.75)
            values[constant.name] = constant.low ** (1 - share) * constant.high**share
    return values


def _measure(kind: str, truth: dict[str, float], noise: float, seed: int = 0) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    rows = []
    for name, work, way in _probes():
        bare = Measurement(
            name,
            work,
            1.0,
            1.0,
            9,
            BASE[kind].num_threads,
            direction=way,
            is_instruction=name == "instruction",
        )
        seconds = _predicted_s(bare, truth, kind) * math.exp(noise * rng.standard_normal())
        rows.append(dataclasses.replace(bare, seconds=seconds, fastest_s=seconds * 0.98))
    return rows


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(("kind", "seed"), [("cpu", 0), ("cpu", 1), ("gpu", 2)])
def test_constants_come_back_within_their_intervals(kind, seed):
    truth = _truth(kind, seed)
    profile, report = fit_profile(_measure(kind, truth, noise=0.03, seed=seed), BASE[kind])
    assert report.median_error < 0.05
    assert {"matmul_rate.float32", "sampling_rate.normal.float32", "dispatch_s"} <= set(report.identified)
    inside = [profile.constant(n).low <= truth[n] <= profile.constant(n).high for n in report.identified]
    # Intervals are two standard deviations: one in twenty may miss.
    assert sum(inside) >= 0.9 * len(inside)
    for name, is_inside in zip(report.identified, inside, strict=True):
        assert is_inside or profile.constant(name).value == pytest.approx(truth[name], rel=0.35), name
    assert profile.origin == "calibrated"
    assert math.isfinite(report.condition)


def test_a_perfect_measurement_is_explained_perfectly():
    truth = _truth("cpu", 3)
    profile, report = fit_profile(_measure("cpu", truth, noise=0.0), BASE["cpu"])
    assert report.median_error < 0.02
    work = forward_work(SPEC, "block.3", batch=2, seq=300)  # a shape that was not measured
    expected = _predicted_s(Measurement("new", work, 1.0, 1.0, 1, 2), truth, "cpu")
    predicted = estimate(work, profile).seconds - profile.values()["instruction_s"]
    assert predicted == pytest.approx(expected, rel=0.05)
    low, high = (estimate(work, profile, bound=bound).seconds for bound in ("low", "high"))
    assert low < expected < high


@pytest.mark.slow
def test_outliers_do_not_carry_the_fit_away():
    truth = _truth("cpu", 4)
    rows = _measure("cpu", truth, noise=0.03, seed=4)
    for index in (3, 11, 20, 30):
        rows[index] = dataclasses.replace(rows[index], seconds=rows[index].seconds * 8)
    profile, report = fit_profile(rows, BASE["cpu"])
    assert {row.case for row in report.worst(4)} & {rows[index].name for index in (3, 11, 20, 30)}
    assert report.median_error < 0.10
    assert profile.constant("matmul_rate.float32").value == pytest.approx(
        truth["matmul_rate.float32"], rel=0.25
    )


def test_what_was_not_measured_keeps_the_base_and_is_named():
    truth = _truth("cpu", 5)
    rows = [row for row in _measure("cpu", truth, noise=0.02) if row.operation not in {"draw", "copy"}]
    profile, report = fit_profile(rows, BASE["cpu"])
    for name in ("sampling_rate.normal.float32", "copy_h2d_bandwidth", "matmul_rate.bfloat16"):
        assert report.unidentified[name] == "no measurement depends on it"
        kept, base = profile.constant(name), BASE["cpu"].constant(name)
        assert kept.value == pytest.approx(base.value, rel=1e-6)
        assert (kept.low, kept.high) == (base.low, base.high)
        assert "not identified" in kept.source


def test_constants_that_only_appear_together_are_not_claimed():
    # One copy says how long it took, not how much of that was latency.
    work = copy_work(int(BASE["cpu"].values()["copy_latency_s"] * BASE["cpu"].values()["copy_h2d_bandwidth"]))
    rows = [Measurement("copy", work, 5e-6, 5e-6, 9, 2)]
    _, report = fit_profile(rows, BASE["cpu"])
    assert report.identified == () or set(report.identified) != {"copy_latency_s", "copy_cache_bandwidth"}
    assert "too little, or only together" in " ".join(report.unidentified.values())


def test_contended_rows_are_reported_and_not_fitted():
    truth = _truth("cpu", 6)
    rows = _measure("cpu", truth, noise=0.0)
    beside = dataclasses.replace(
        rows[4], name="matmul beside a copy", seconds=rows[4].seconds * 3, contended=True
    )
    with_it, report = fit_profile([*rows, beside], BASE["cpu"])
    without, _ = fit_profile(rows, BASE["cpu"])
    assert with_it == without
    assert report.residuals[-1].flag
    assert report.residuals[-1].error == pytest.approx(-2 / 3, abs=0.05)


def test_a_bound_drags_no_constant_along():
    """What others kept from its cores took a scheduler's time slice: it says nothing unless the prediction is longer."""
    rows = [row for row in _measure("cpu", _truth("cpu", 8), noise=0.02) if not row.work.num_allocations]
    slow = Measurement("disturbed", Work(num_allocations=1), 4e-3, 3e-3, 3, 2)
    assert fit_profile([*rows, slow], BASE["cpu"])[0].values()["allocation_s"] > 1e-3
    kept, report = fit_profile([*rows, dataclasses.replace(slow, is_bound=True)], BASE["cpu"])
    assert kept.values()["allocation_s"] == pytest.approx(BASE["cpu"].values()["allocation_s"])
    assert report.unidentified["allocation_s"] == "others disturbed every measurement that depends on it"
    fast = dataclasses.replace(slow, seconds=1e-7, fastest_s=1e-7, is_bound=True)
    assert fit_profile([*rows, fast], BASE["cpu"])[0].values()["allocation_s"] < 5e-7


@pytest.mark.slow
def test_the_fastest_samples_can_be_fitted_instead():
    rows = _measure("cpu", _truth("cpu", 7), noise=0.0)
    slow = [dataclasses.replace(row, seconds=row.seconds * 5) for row in rows]
    assert (
        fit_profile(slow, BASE["cpu"], statistic="fastest")[0]
        == fit_profile(rows, BASE["cpu"], statistic="fastest")[0]
    )


def test_measurements_that_cannot_be_fitted_are_refused():
    with pytest.raises(ProfileError, match="no measurements to fit"):
        fit_profile([], BASE["cpu"])
    with pytest.raises(ProfileError, match=r"used 1 threads, but the profile is for 2"):
        fit_profile([Measurement("x", Work(), 1.0, 1.0, 1, 1)], BASE["cpu"])
    with pytest.raises(ProfileError, match="0 < fastest"):
        Measurement("x", Work(), 0.0, 0.0, 1, 1)
