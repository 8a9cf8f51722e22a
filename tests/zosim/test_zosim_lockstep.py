"""The simulator on arrays against the simulator on processes: one run, twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import RATE, programs, rank_sets, shared, unshared
from zosim.program.instructions import Space
from zosim.program.program_set import ProgramSet
from zosim.simulators.lockstep import periodic_step_s, simulate_many
from zosim.simulators.simulate import simulate_world
from zosim.simulators.world import World


def times(timeline):
    return {
        (span.rank, span.phase, span.step, span.instruction): (span.start_s, span.end_s)
        for span in timeline.spans
    }


def assert_same_run(world, num_steps):
    """Both list other steps, since they notice at other times that steps repeat; put in again, all are the same."""
    expected, found = simulate_world(world, num_steps=num_steps), simulate_many(world, num_steps=num_steps)
    wanted, got = times(expected.expanded()), times(found.expanded())
    assert got.keys() == wanted.keys()
    for key, ends in wanted.items():
        assert got[key] == pytest.approx(ends, rel=1e-9, abs=1e-12), key
    for rank in expected.ranks:
        for space in Space:
            peak, other = expected.peak_memory(space, rank), found.peak_memory(space, rank)
            assert (peak.size_bytes, peak.components) == (other.size_bytes, other.components)


def assert_same_step(world):
    timeline = simulate_world(world)
    if timeline.repeat is not None:
        assert simulate_many(world).step_time_s == pytest.approx(timeline.step_time_s, rel=1e-9, abs=1e-12)
        assert periodic_step_s(world) == pytest.approx(timeline.step_time_s, rel=1e-9, abs=1e-12)


def alone(whole, machine):
    return World.of(ProgramSet.of_one(whole), [machine])


@given(programs(), st.sampled_from(["unshared", "shared", "waiting"]), st.integers(1, 12))
def test_one_rank(whole, kind, num_steps):
    machine = {
        "unshared": unshared(),
        "shared": shared(num_cores=1.5, num_threads=2, memory=2.5 * RATE),
        "waiting": unshared(step_s=2e-3),
    }[kind]
    assert_same_run(alone(whole, machine), num_steps)


@pytest.mark.slow
@given(programs(), st.booleans())
def test_one_rank_until_steps_repeat(whole, is_shared):
    assert_same_step(alone(whole, shared(num_cores=1.0) if is_shared else unshared()))


@given(rank_sets(), st.integers(1, 9))
def test_several_ranks(ranks, num_steps):
    assert_same_run(World.of(*ranks), num_steps)


@pytest.mark.slow
@given(rank_sets())
def test_several_ranks_until_steps_repeat(ranks):
    assert_same_step(World.of(*ranks))
