"""MeZO over fine-tuning: quotients of the printed figures, and where the predicted ones cross."""

from __future__ import annotations

import pytest

from studies.published.crossover import SIZES, TIMES_AS_MANY_STEPS, learnt_bandwidth


def test_printed_seconds_give_the_printed_quotients() -> None:
    assert [round(size.wall_clock, 1) for size in SIZES] == [33.3, 33.8, 6.3, 4.1, 4.7]
    assert [round(size.gpu_hours, 2) for size in SIZES[2:]] == [1.58, 0.52, 0.95]


@pytest.mark.slow
def test_predicted_gpu_hours_cross_between_13_and_30_billion_parameters() -> None:
    bandwidth = learnt_bandwidth()
    hours = [
        TIMES_AS_MANY_STEPS * size.predicted_zeroth_s * size.zeroth_devices
        / (size.predicted_first_s(bandwidth) * size.first_devices)
        for size in SIZES
    ]  # fmt: skip
    assert min(hours[:2]) > 30
    assert hours[2] > 1 > hours[3]
