"""Messages between neighbouring ranks: pipelines whose times can be worked out by hand, in every simulator."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_zosim_lockstep import assert_same_run, assert_same_step

from costmodel.work import Work
from tests.support.builders import RATE, host_machine, instruction, program, simulate_ranks
from topology.errors import ProgramError
from zosim.analysis.critical_path import bottleneck, step_path
from zosim.hardware.machine import Hop
from zosim.program.operations import Collective, Recv, Send
from zosim.program.program_set import ProgramSet
from zosim.program.validate_set import validate_set
from zosim.simulators.closed_form import step_time_bound, step_time_bound_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import periodic_step_s, simulate_many
from zosim.simulators.simulate import simulate
from zosim.simulators.world import World

MS = 1e-3


def message(name, op, stream, seconds, after=()):
    work = Work(link_bytes=round(seconds * RATE))
    return instruction(name, stream, 0.0, after, op=op, work=work)


def stage_program(stage, num_stages, compute_s, message_s, sizes):
    """One stage: points come in, are computed and go on; then all exchange losses and update."""
    step = []
    for eval_point in range(len(message_s[0])):
        before = []
        if stage:
            recv = message(f"r{eval_point}", Recv("pipeline", -1), "recv", message_s[stage - 1][eval_point])
            step.append(recv)
            before = [recv.id]
        step.append(instruction(f"f{eval_point}", "compute", compute_s[stage][eval_point], before))
        if stage < num_stages - 1:
            send = Send("pipeline", 1)
            step.append(
                message(f"s{eval_point}", send, "link", message_s[stage][eval_point], [f"f{eval_point}"])
            )
    last = [f"f{len(message_s[0]) - 1}"]
    step.append(message("losses", Collective("all_gather", "world"), "link", 0.0, last))
    step.append(instruction("update", "compute", 0.0, ["losses"]))
    return replace(program(step, name=f"stage{stage}"), process_groups=sizes)


def pipelines(compute_s, message_s, data=1, sharing="maxmin", latency_s=0.0):
    """`data` pipelines, one host each, with their machines: all sends of a host cross one more link."""
    num_stages = len(compute_s)
    size = num_stages * data
    sizes = {"world": size, "pipeline": num_stages}
    programs = tuple(
        stage_program(stage, num_stages, compute_s, message_s, sizes) for stage in range(num_stages)
    )
    parts = tuple(tuple(range(first, first + num_stages)) for first in range(0, size, num_stages))
    groups = {"world": (tuple(range(size)),), "pipeline": parts}
    machines = []
    for rank in range(size):
        host = f"host{rank // num_stages}"
        machine = host_machine(rank, host, [("world", size, 0.0)], sharing=sharing)
        hop = Hop(latency_s, RATE, ((f"link{rank}", 1.0), (f"{host}:root", 1.0)), "pcie")
        channels = {Send("pipeline", 1): hop, Recv("pipeline", -1): replace(hop, uses=())}
        machines.append(replace(machine, channels=channels))
    return ProgramSet(programs, tuple(range(num_stages)) * data, groups), machines


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_eval_points", [2, 5])
def test_the_bubble_of_a_full_pass_is_what_filling_the_pipeline_takes(num_stages, num_eval_points):
    # Every point is on the next stage one point's time later: num_eval_points + num_stages - 1 times in all, and each stage
    # works during num_eval_points of them.
    free = [[0.0] * num_eval_points] * (num_stages - 1)
    world = World.of(*pipelines([[2 * MS] * num_eval_points] * num_stages, free))
    expected_s = (num_eval_points + num_stages - 1) * 2 * MS
    assert periodic_step_s(world) == pytest.approx(expected_s)
    assert step_time_bound_of(world) == pytest.approx(expected_s)


def test_what_leaves_at_the_end_overlaps_with_nothing():
    # As when both points leave together: the second stage has both only when the first is done.
    listed, machines = pipelines([[3 * MS], [5 * MS]], [[1 * MS]])
    assert periodic_step_s(World.of(listed, machines)) == pytest.approx(9 * MS)


def test_both_sides_of_a_message_take_the_same_time():
    listed, machines = pipelines([[1 * MS] * 2, [4 * MS] * 2], [[2 * MS] * 2], latency_s=0.5 * MS)
    timeline = simulate_ranks(listed, machines, num_steps=2)
    times = {(span.rank, span.step, span.instruction): (span.start_s, span.end_s) for span in timeline.spans}
    for step in range(2):
        for eval_point in range(2):
            assert times[0, step, f"s{eval_point}"] == times[1, step, f"r{eval_point}"]
    assert times[1, 0, "r0"] == pytest.approx((1 * MS, 3.5 * MS))
    assert times[1, 0, "f0"] == pytest.approx((3.5 * MS, 7.5 * MS))


def test_a_slow_link_bounds_the_step():
    listed, machines = pipelines([[1 * MS] * 4] * 2, [[7 * MS] * 4])
    # The first point is computed, four messages follow each other, the last one is computed on the second stage.
    assert periodic_step_s(World.of(listed, machines)) == pytest.approx((1 + 4 * 7 + 1) * MS)


def test_messages_share_a_link():
    # Two hops cross the host's link of 1.5 messages at a time; while both run, each has three quarters.
    listed, machines = pipelines([[0.0] * 4] * 3, [[6 * MS] * 4] * 2)
    step_s = periodic_step_s(World.of(listed, machines))
    assert step_s >= 2 * 4 * 6 * MS / 1.5
    assert step_s == pytest.approx((6 + 3 * 8 + 6) * MS)


def test_one_rank_alone_is_taken_to_be_in_step_with_its_neighbours():
    listed, machines = pipelines([[1 * MS] * 2] * 3, [[2 * MS] * 2] * 2)
    middle = listed.programs[1]
    # What it receives for the next step is there early: it computes a point, and sends two.
    assert simulate(middle, machines[1]).step_time_s == pytest.approx((1 + 2 + 2) * MS)
    assert step_time_bound(middle, machines[1]) == pytest.approx((1 + 2 + 2) * MS)


def test_a_message_without_receiver_is_a_deadlock():
    listed, machines = pipelines([[1 * MS] * 2] * 2, [[1 * MS] * 2])
    first, second = listed.programs
    second = replace(
        second,
        step=tuple(
            replace(item, after=() if item.id == "f1" else item.after)
            for item in second.step
            if item.id != "r1"
        ),
    )
    broken = replace(listed, programs=(first, second))
    with pytest.raises(ProgramError, match="step/s1 of rank 0 waits for a partner that never comes"):
        simulate_ranks(broken, machines)
    with pytest.raises(ProgramError, match="a partner that never comes"):
        simulate_many(fold(World.of(broken, machines)))


def test_messages_that_wait_for_each_other_are_a_deadlock():
    listed, machines = pipelines([[1 * MS] * 2] * 2, [[1 * MS] * 2])
    first, second = listed.programs
    last_first = {item.id: item for item in second.step}
    circular = replace(last_first["r0"], after=instruction("x", "recv", 0.0, ["f1"]).after)
    second = replace(second, step=(circular, *(item for item in second.step if item.id != "r0")))
    with pytest.raises(ProgramError, match="deadlock"):
        simulate_ranks(replace(listed, programs=(first, second)), machines)


def test_a_message_needs_a_neighbour():
    listed, _ = pipelines([[1 * MS]] * 2, [[1 * MS]])
    swapped = replace(listed, roles=(1, 0))
    with pytest.raises(
        ProgramError, match="r0 of rank 0 receives from a member of pipeline that does not exist"
    ):
        validate_set(swapped)


@pytest.mark.parametrize("op", [Send("pipeline", 0), Recv("pipeline", 0)])
def test_a_message_goes_to_another_rank(op):
    listed, _ = pipelines([[1 * MS]] * 2, [[1 * MS]])
    to_itself = replace(listed.programs[0], step=(message("own", op, "link", 1 * MS),))
    with pytest.raises(ProgramError, match="step/own sends a message to its own rank"):
        validate_set(replace(listed, programs=(to_itself, to_itself)))


@st.composite
def staged_runs(draw, sharings=("maxmin", "fifo")):
    """Pipelines of two to four stages, side by side."""
    num_stages, data = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    num_eval_points = draw(st.integers(1, 4))
    ticks = st.integers(0, 4).map(lambda tick: tick * MS)

    def table(rows):
        row = st.lists(ticks, min_size=num_eval_points, max_size=num_eval_points)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    latency_s = draw(st.sampled_from([0.0, 0.5 * MS]))
    sharing = draw(st.sampled_from(sharings))
    return pipelines(table(num_stages), table(num_stages - 1), data, sharing, latency_s)


@settings(max_examples=12)
@given(staged_runs(), st.integers(1, 6))
def test_both_simulators_agree(run, num_steps):
    assert_same_run(World.of(*run), num_steps)


@pytest.mark.slow
@settings(max_examples=30)
@given(staged_runs())
def test_both_simulators_agree_once_steps_repeat(run):
    assert_same_step(World.of(*run))


@settings(max_examples=30)
@given(staged_runs(sharings=("maxmin",)))
def test_pipelines_that_are_alike_are_simulated_once(run):
    listed, _ = run
    world = World.of(*run)
    folded = fold(world)
    assert folded.size == len(listed.programs)
    assert periodic_step_s(folded) == pytest.approx(periodic_step_s(world), rel=1e-9, abs=1e-12)


@settings(max_examples=30)
@given(staged_runs())
def test_the_closed_form_and_the_bytes_bound_the_step(run):
    listed, machines = run
    world = World.of(listed, machines)
    step_s = periodic_step_s(world)
    assert step_time_bound_of(world) <= step_s * (1 + 1e-9) + 1e-12
    for rank, machine in enumerate(machines):
        sent = [item for item in listed.program_of(rank).step if isinstance(item.op, Send)]
        bandwidth = machine.capacities[f"link{rank}"]
        assert sum(item.work.link_bytes for item in sent) / bandwidth <= step_s * (1 + 1e-9) + 1e-12


def test_a_stage_that_waits_for_the_one_before_is_said_to_wait():
    listed, machines = pipelines([[6 * MS], [1 * MS]], [[2 * MS]])
    timeline = simulate_ranks(listed, machines)
    found = bottleneck(step_path(timeline, listed.program_of(1), 1))
    assert found.description == "wait for other ranks"
    # A step takes 6 + 2 + 1 ms, and nothing but its message, of 2 ms, holds up the next one here.
    assert found.seconds_per_step == pytest.approx(7 * MS)
