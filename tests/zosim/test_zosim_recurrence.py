"""The closed form against the event simulator, and both against their bounds."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import (
    RATE,
    instruction,
    pipeline,
    program,
    programs,
    rank_sets,
    run_times,
    run_times_of,
    shared,
    unshared,
)
from topology.errors import ProgramError
from zosim.program.instructions import Dependency
from zosim.program.program_set import ProgramSet
from zosim.program.step_graph import RunNode, StepGraph
from zosim.simulators.closed_form import step_time_bound, step_time_bound_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.simulate import simulate
from zosim.simulators.world import World


@given(programs(), st.integers(1, 6), st.sampled_from([0.0, 2e-3]))
def test_closed_form_and_simulator_agree_wherever_nothing_is_shared(whole, num_steps, step_s):
    machine = unshared(step_s=step_s)
    timeline = simulate(whole, machine, num_steps=num_steps).expanded()
    graph = StepGraph(whole, num_steps)
    expected = run_times(whole, machine, num_steps)
    assert len(expected) == len(timeline.spans)
    for span in timeline.spans:
        place = RunNode(graph.position(span.phase, span.step), span.instruction)
        assert (span.start_s, span.end_s) == pytest.approx(expected[place], rel=1e-9, abs=1e-12)


@given(programs())
def test_steady_step_times_agree_wherever_nothing_is_shared(whole):
    timeline = simulate(whole, unshared())
    if timeline.repeat is not None:
        assert step_time_bound(whole, unshared()) == pytest.approx(timeline.step_time_s, rel=1e-9, abs=1e-12)


@given(programs(), st.floats(0.5, 3.0), st.floats(0.5, 4.0))
def test_closed_form_is_a_lower_bound_where_something_is_shared(whole, num_cores, memory):
    machine = shared(num_cores=num_cores, num_threads=2, memory=memory * RATE)
    timeline = simulate(whole, machine, num_steps=6).expanded()
    graph = StepGraph(whole, 6)
    alone = run_times(whole, machine, 6)
    for span in timeline.spans:
        place = RunNode(graph.position(span.phase, span.step), span.instruction)
        assert span.end_s >= alone[place][1] * (1 - 1e-9)
    if timeline.first_periodic_step > 1:
        assert simulate(whole, machine).step_time_s >= step_time_bound(whole, machine) * (1 - 1e-9)


@given(programs(), st.booleans())
def test_a_step_takes_at_least_its_busiest_stream_and_at_most_all_streams_together(whole, is_shared):
    machine = shared(num_cores=1.0, num_threads=2) if is_shared else unshared()
    by_stream = defaultdict(float)
    for item in whole.step:
        by_stream[item.stream] += machine.activity(whole, item).seconds
    timeline = simulate(whole, machine)
    if timeline.repeat is not None:
        assert max(by_stream.values()) * (1 - 1e-9) <= timeline.step_time_s
        assert timeline.step_time_s <= sum(by_stream.values()) * (1 + 1e-9)


def test_a_pipeline_without_enough_staging_buffers_is_bound_by_their_circuit():
    # Two staging buffers: each block's staging buffer goes through upload, computation and offload before the next but one.
    assert step_time_bound(pipeline(6, 2.0, 3.0, 2.0, 2), unshared()) == pytest.approx(6 * 7.0 / 2, rel=1e-12)
    assert step_time_bound(pipeline(6, 2.0, 3.0, 2.0, 3), unshared()) == pytest.approx(6 * 3.0, rel=1e-12)


def test_a_dependency_listed_before_what_it_needs_is_followed_all_the_same():
    whole = program([instruction("a", "compute", 1.0, ["b"]), instruction("b", "h2d", 2.0)])
    assert run_times(whole, unshared(), 1)[RunNode(1, "a")] == pytest.approx((2.0, 3.0))


def test_a_circle_is_named():
    whole = program([instruction("a", "compute", 1.0, ["b"]), instruction("b", "h2d", 1.0, ["a"])])
    with pytest.raises(ProgramError, match=r"step/[ab] waits for step/[ab] waits for step/[ab]"):
        step_time_bound(whole, unshared())


def test_a_program_without_steps_takes_no_time_per_step():
    assert step_time_bound(program([]), unshared()) == 0.0


def lonely(machine):
    """The same machine with so much of everything that nothing is shared."""
    capacities = dict.fromkeys(machine.capacities, 1e6 * RATE)
    return replace(machine, capacities=capacities, fifo=frozenset())


@given(rank_sets(), st.integers(1, 5))
def test_several_ranks_agree_wherever_nothing_is_shared(ranks, num_steps):
    programs, machines = ranks
    world = World.of(programs, [lonely(machine) for machine in machines])
    expected = run_times_of(world, num_steps)
    timeline = simulate_many(world, num_steps=num_steps).expanded()
    assert len(expected) == len(timeline.spans)
    for span in timeline.spans:
        position = StepGraph(world.program(span.rank), num_steps).position(span.phase, span.step)
        place = RunNode(position, span.instruction)
        assert (span.start_s, span.end_s) == pytest.approx(expected[span.rank, place], rel=1e-9, abs=1e-12)


@pytest.mark.slow
@given(rank_sets())
def test_several_ranks_take_no_less_than_the_closed_form_and_folding_does_not_change_it(ranks):
    world = World.of(*ranks)
    bound = step_time_bound_of(world)
    assert step_time_bound_of(fold(world)) == pytest.approx(bound, rel=1e-9, abs=1e-12)
    timeline = simulate_many(world)
    if timeline.repeat is not None:
        assert timeline.step_time_s >= bound * (1 - 1e-9)


def test_ranks_that_wait_for_each_other_are_named():
    step = [
        replace(instruction("a", "compute", 1.0), after=(Dependency("a", 0, "world"),)),
    ]
    programs = ProgramSet(
        (replace(program(step), process_groups={"world": 2}),), (0, 0), {"world": ((0, 1),)}
    )
    world = World.of(programs, [unshared(), unshared()])
    for run in (lambda: step_time_bound_of(world), lambda: simulate_many(world, num_steps=1)):
        with pytest.raises(ProgramError, match=r"step/a of rank [01] waits for step/a of rank [01]"):
            run()
