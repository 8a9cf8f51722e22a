"""Two ranks of unequal speed on one machine: how the batch is shared out, and that both run. What they take is no test."""

from __future__ import annotations

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.slowdown import Slowdown, with_slowdown
from studies.shaped.speeds import measured, planned_runs, report
from topology import load_preset

LAPTOP = load_preset("cpu-laptop")
PROFILE = with_slowdown(datasheet_profile(LAPTOP, "cpu0", num_threads=1), Slowdown(0.01, 1.2, 1.0, 1.3, {}))


def test_the_slower_rank_has_fewer_sequences_and_even_shares_wait_for_it():
    shares, even = planned_runs(LAPTOP, PROFILE, 0.5).values()
    alone, _ = planned_runs(LAPTOP, PROFILE, 1.0).values()
    fast, slow = shares.plan.mesh.num_sequences
    assert fast > slow
    assert alone.plan.mesh.num_sequences is None
    # All that the slower rank does takes twice as long; what all ranks wait for besides does not.
    assert 1.9 < even.step_time_s / alone.step_time_s <= 2
    assert shares.step_time_s < even.step_time_s / 1.3


@pytest.mark.slow
@pytest.mark.dist
def test_both_plans_run_while_the_second_rank_is_stopped_again_and_again():
    runs = planned_runs(LAPTOP, PROFILE, 0.5)
    times = measured({name: run.plan for name, run in runs.items()}, 0.5, 1)
    assert "even shares take" in report(runs, times, 0.5).to_markdown()
