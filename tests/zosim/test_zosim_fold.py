"""Folded worlds against the same worlds rank by rank."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import RATE, host_machine, make_profile, pipeline, rank_sets
from zosim.hardware.machine import Machine
from zosim.program.program_set import ProgramSet
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import periodic_step_s, simulate_many
from zosim.simulators.world import World


def times_of(timeline, rank):
    return {
        (span.phase, span.step, span.instruction): (span.start_s, span.end_s)
        for span in timeline.expanded().spans
        if span.rank == rank
    }


@pytest.mark.slow
@given(rank_sets(), st.integers(1, 9))
def test_a_representative_has_the_times_of_its_rank(ranks, num_steps):
    world = World.of(*ranks)
    folded = fold(world)
    every, few = (simulate_many(item, num_steps=num_steps) for item in (world, folded))
    assert sum(folded.counts) == world.size
    for number in folded.numbers:
        expected, found = times_of(every, number), times_of(few, number)
        assert found.keys() == expected.keys()
        for key, ends in expected.items():
            assert found[key] == pytest.approx(ends, rel=1e-9, abs=1e-12), key


@pytest.mark.slow
@given(rank_sets())
def test_every_rank_has_the_times_of_one_representative(ranks):
    world = World.of(*ranks)
    every, few = simulate_many(world, num_steps=3), simulate_many(fold(world), num_steps=3)
    patterns = [sorted(times_of(few, number).items()) for number in fold(world).numbers]
    for rank in range(world.size):
        own = sorted(times_of(every, rank).items())
        assert any(
            [key for key, _ in own] == [key for key, _ in other]
            and [t for _, ends in own for t in ends]
            == pytest.approx([t for _, ends in other for t in ends], rel=1e-9, abs=1e-12)
            for other in patterns
        )


@pytest.mark.slow
@settings(max_examples=20)
@given(rank_sets(max_instructions=4))
def test_steps_take_the_same(ranks):
    world = World.of(*ranks)
    assert periodic_step_s(fold(world)) == pytest.approx(periodic_step_s(world), rel=1e-9, abs=1e-12)


def hosts_of(num_hosts, per_host, **machine):
    whole = replace(pipeline(3, 1e-3, 2e-3, 1e-3, num_staging_buffers=2), process_groups={})
    size = num_hosts * per_host
    machines = [host_machine(rank, f"host{rank // per_host}", [], **machine) for rank in range(size)]
    return ProgramSet((whole,), (0,) * size), machines


def test_like_ranks_on_like_hosts_are_one_whose_use_counts_for_all_on_its_host():
    programs, machines = hosts_of(5, 4)
    folded = fold(World.of(programs, machines))
    assert (folded.numbers, folded.counts) == ((0,), (20,))
    uses = {name: use for activity in folded.templates[0].activities.values() for name, use in activity.uses}
    assert uses == {"link0": 1.0, "host0:root": 4.0} or uses == {"host0:root": 4.0}
    # Four ranks share 1.5 of what each could take alone: an upload takes 4 / 1.5 of its time, an offload as well.
    assert simulate_many(fold(World.of(programs, machines))).step_time_s == pytest.approx(
        simulate_many(World.of(programs, machines)).step_time_s, rel=1e-12
    )


def test_hosts_with_other_numbers_of_ranks_are_told_apart():
    programs, machines = hosts_of(3, 2)
    machines[5] = host_machine(5, "host1", [])
    folded = fold(World.of(programs, machines))
    # host0 with two ranks, host1 with three, host2 with one.
    assert sorted(folded.counts) == [1, 2, 3]


def test_ranks_that_queue_for_one_resource_are_not_folded():
    programs, machines = hosts_of(2, 3, sharing="fifo")
    folded = fold(World.of(programs, machines))
    assert folded.counts == (1,) * 6
    apart, alone = hosts_of(4, 1, sharing="fifo")
    assert fold(World.of(apart, alone)).counts == (4,)


def test_a_rank_on_a_slower_device_is_a_class_of_its_own():
    programs, machines = hosts_of(4, 1)
    machines[2] = replace(machines[2], profile=make_profile("gpu", copy_h2d_bandwidth=RATE / 2))
    assert Counter(fold(World.of(programs, machines)).counts) == {1: 1, 3: 1}


def test_ranks_that_share_nothing_are_one():
    whole = pipeline(2, 1e-3, 1e-3, 1e-3, num_staging_buffers=2)
    programs = ProgramSet((whole,), (0,) * 8)
    profile = make_profile("gpu")
    assert fold(World.of(programs, [Machine(profile)] * 8)).counts == (8,)
