"""The pace of a CPU: what a profile says at another one."""

from __future__ import annotations

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.estimate import estimate
from costmodel.param_passes import sampling_work
from costmodel.rates.slowdown import Slowdown, at_slowdown, off_slowdown, with_slowdown
from costmodel.work import Matmul, Work
from topology import load_preset

FULL = datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=1)
PRODUCT, SAMPLING = Work(matmuls=(Matmul(m=512, n=512, k=512),)), sampling_work(1 << 24)
KNOWN = with_slowdown(FULL, Slowdown(1e-4, 1.2, 1.0, 1.5, {"products": 0.5, "sampling": 1.0}))


def seconds(work: Work, ratio: float) -> float:
    return estimate(work, at_slowdown(KNOWN, ratio)).seconds


def test_at_full_pace_a_profile_says_what_was_measured_at_it() -> None:
    full, again = FULL.values(), at_slowdown(KNOWN, 1.0).values()
    assert all(again[name] == pytest.approx(value) for name, value in full.items())


def test_kinds_of_work_slow_each_by_its_part() -> None:
    # Only their host time, a tiny part, follows another kind.
    assert seconds(SAMPLING, 1.4) / seconds(SAMPLING, 1.0) == pytest.approx(1.4, rel=0.01)
    matmul = [estimate(PRODUCT, at_slowdown(KNOWN, ratio)).terms["matmul"] for ratio in (1.0, 1.4)]
    assert matmul[1] / matmul[0] == pytest.approx(1.2)


def test_a_profile_is_at_the_pace_of_its_calibration() -> None:
    assert KNOWN.values()["slowdown"] == pytest.approx(1.2)
    assert estimate(SAMPLING, KNOWN).seconds == pytest.approx(seconds(SAMPLING, 1.2))


def test_there_and_back_is_where_it_was() -> None:
    back = at_slowdown(at_slowdown(KNOWN, 1.7), 1.2)
    assert back.values() == pytest.approx(dict(KNOWN.values()))


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.3, 2.0])
def test_memory_and_what_is_not_known_do_not_change(ratio: float) -> None:
    found = at_slowdown(KNOWN, ratio)
    assert found.values()["context_bytes"] == KNOWN.values()["context_bytes"]
    assert found.values()["cache_bytes"] == KNOWN.values()["cache_bytes"]
    assert all(constant.low <= constant.value <= constant.high for constant in found.constants)
    assert at_slowdown(FULL, ratio) == FULL


def test_faster_than_full_pace_counts_as_full_pace() -> None:
    assert seconds(SAMPLING, 0.5) == seconds(SAMPLING, 1.0)


def test_off_pace_is_nothing_where_the_pace_is_the_same_and_grows_with_it() -> None:
    assert off_slowdown(KNOWN, 1.2) == pytest.approx(0.0)
    assert off_slowdown(FULL, 2.0) == 0.0
    assert off_slowdown(KNOWN, 1.0) < 0 < off_slowdown(KNOWN, 1.3) < off_slowdown(KNOWN, 1.6)
