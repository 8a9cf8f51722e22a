"""The event simulator against times worked out by hand, closed forms, and its own rules."""

import gc
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.work import Work
from tests.support.builders import (
    RATE,
    instruction,
    make_profile,
    pipeline,
    program,
    programs,
    shared,
    simulate_ranks,
    unshared,
)
from topology.errors import ProgramError
from zosim.hardware.machine import Machine
from zosim.program.contents import ParamGroupWeights, Perturbation
from zosim.program.instructions import Access, Buffer, Dependency, Space, Stream
from zosim.program.operations import Allocate, Copy, Free
from zosim.program.step_graph import RunNode, StepGraph
from zosim.simulators.simulate import simulate

# Times are sums of a few durations: rounding alone.
EXACT = {"rel": 1e-12, "abs": 1e-12}


def log(timeline):
    return [
        (span.instruction, span.step, round(span.start_s, 9), round(span.end_s, 9)) for span in timeline.spans
    ]


def moved(original, name, **changes):
    step = tuple(replace(item, **changes) if item.id == name else item for item in original.step)
    return replace(original, step=step)


def test_two_blocks_on_three_streams_take_the_times_worked_out_by_hand():
    timeline = simulate(pipeline(2, 2.0, 3.0, 1.0, num_staging_buffers=2), unshared(), num_steps=1)
    assert log(timeline) == [
        ("upload0", 0, 0.0, 2.0),
        ("compute0", 0, 2.0, 5.0),
        ("upload1", 0, 2.0, 4.0),
        ("compute1", 0, 5.0, 8.0),
        ("offload0", 0, 5.0, 6.0),
        ("offload1", 0, 8.0, 9.0),
    ]


def test_a_dependency_that_is_removed_changes_the_result():
    whole = pipeline(2, 2.0, 3.0, 1.0, num_staging_buffers=2)
    removed = moved(whole, "compute1", after=())
    # Nothing holds the second computation back any more: it follows the first on its stream.
    assert simulate(whole, unshared(), num_steps=1).makespan_s == pytest.approx(9.0, **EXACT)
    assert simulate(
        moved(removed, "compute0", after=()), unshared(), num_steps=1
    ).makespan_s == pytest.approx(7.0)


def test_an_instruction_that_is_moved_changes_the_result():
    whole = pipeline(2, 2.0, 3.0, 1.0, num_staging_buffers=2)
    on_compute = moved(whole, "offload0", stream=Stream.COMPUTE)
    assert simulate(on_compute, unshared(), num_steps=1).makespan_s == pytest.approx(10.0, **EXACT)
    by_position = {item.id: item for item in whole.step}
    order = ["upload1", "upload0", "compute0", "compute1", "offload0", "offload1"]
    swapped = replace(whole, step=tuple(by_position[name] for name in order))
    # The second block's upload goes first, so the first block is computed at 4, the second at 7.
    assert simulate(swapped, unshared(), num_steps=1).makespan_s == pytest.approx(11.0, **EXACT)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("times", [(2.0, 3.0, 1.0), (3.0, 1.0, 2.0), (1.0, 2.0, 3.0), (2.0, 2.0, 2.0)])
def test_a_pipeline_takes_fill_and_the_slowest_stage_and_drain(num_blocks, times):
    free = pipeline(num_blocks, *times, num_staging_buffers=num_blocks)
    expected = sum(times) + (num_blocks - 1) * max(times)
    assert simulate(free, unshared(), num_steps=1).makespan_s == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("num_staging_buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [(2.0, 3.0, 1.0), (3.0, 1.0, 2.0), (1.0, 1.0, 1.0)])
def test_steady_pipelines_are_limited_by_a_stage_or_by_their_staging_buffers(num_staging_buffers, times):
    timeline = simulate(pipeline(4, *times, num_staging_buffers), unshared())
    expected = 4 * max(*times, sum(times) / num_staging_buffers)
    assert timeline.step_time_s == pytest.approx(expected, **EXACT)


def test_the_flush_waits_for_the_last_step_and_the_first_step_for_the_prologue():
    whole = program(
        prologue=[instruction("work", "h2d", 5.0)],
        step=[instruction("work", "compute", 1.0, [("work", 1)])],
        flush=[instruction("store", "d2h", 2.0, [("work", 1)])],
    )
    timeline = simulate(whole, unshared(), num_steps=3)
    assert log(timeline) == [
        ("work", 0, 0.0, 5.0),
        ("work", 0, 5.0, 6.0),
        ("work", 1, 6.0, 7.0),
        ("work", 2, 7.0, 8.0),
        ("store", 3, 8.0, 10.0),
    ]


def test_the_hosts_part_of_a_step_delays_its_first_computation():
    whole = program([instruction("first", "compute", 1.0), instruction("second", "compute", 1.0)])
    timeline = simulate(whole, unshared(step_s=0.5), num_steps=2)
    assert [span.start_s for span in timeline.spans] == pytest.approx([0.5, 1.5, 3.0, 4.0], **EXACT)


def test_computation_and_copy_on_one_core_each_run_at_half_speed():
    whole = program([instruction("copy", "h2d", 1.0), instruction("work", "compute", 3.0)])
    timeline = simulate(whole, shared(num_cores=1.0), num_steps=1)
    # Both at half speed until the copy is done at 2; the computation has 2 of its 3 seconds left.
    assert {span.instruction: span.end_s for span in timeline.spans} == pytest.approx(
        {"copy": 2.0, "work": 4.0}
    )


def test_a_copy_slows_the_threads_beside_it_in_proportion():
    whole = program([instruction("copy", "h2d", 2.0), instruction("work", "compute", 3.0)])
    timeline = simulate(whole, shared(num_cores=2.0, num_threads=2), num_steps=1)
    # Three threads on two cores: two thirds of full speed each, so the copy ends at 3 and the work at 4.
    assert {span.instruction: span.end_s for span in timeline.spans} == pytest.approx(
        {"copy": 3.0, "work": 4.0}
    )


def test_memory_bandwidth_is_shared_as_well():
    # A pass over parameters moves its bytes once, a copy twice: 1 and 2 GB/s on a memory of 1.5 GB/s.
    whole = program([instruction("copy", "h2d", 1.0), instruction("work", "compute", 1.0)])
    timeline = simulate(whole, shared(num_cores=4.0, memory=1.5 * RATE), num_steps=1)
    # The copy alone could have no more than 1.5, so both want 2.5 of 1.5: 0.6 of full speed for both.
    assert [span.end_s for span in timeline.spans] == pytest.approx([1 / 0.6, 1 / 0.6])


def test_flows_share_a_link_and_one_copy_engine_serves_them_one_by_one():
    profile = make_profile("gpu")
    routes = {"h2d": ("link",), "d2h": ("link",)}
    two_way = program([instruction("up", "h2d", 1.0), instruction("down", "d2h", 1.0)])
    even = Machine(profile, {"link": RATE}, routes=routes)
    assert [span.end_s for span in simulate(two_way, even, num_steps=1).spans] == pytest.approx([2.0, 2.0])
    queued = Machine(profile, {"link": RATE}, fifo=frozenset({"link"}), routes=routes)
    ends = {span.instruction: span.end_s for span in simulate(two_way, queued, num_steps=1).spans}
    # At one instant the stream that stands first in Stream is served first.
    assert ends == pytest.approx({"up": 1.0, "down": 2.0})
    wide = Machine(profile, {"up": RATE, "down": RATE}, routes={"h2d": ("up",), "d2h": ("down",)})
    assert [span.end_s for span in simulate(two_way, wide, num_steps=1).spans] == pytest.approx([1.0, 1.0])


def test_ranks_share_resources_of_equal_names():
    whole = program([instruction("work", "compute", 1.0)])
    machine = shared(num_cores=1.0)
    together = simulate_ranks([whole, whole], [machine, machine], num_steps=3)
    assert together.ranks == (0, 1)
    assert together.step_time_s == pytest.approx(2.0, **EXACT)
    apart = Machine(make_profile(), {"other": 1.0}, cores="other")
    assert simulate_ranks([whole, whole], [machine, apart], num_steps=3).step_time_s == pytest.approx(1.0)


@given(programs(), st.booleans(), st.integers(1, 30))
def test_extrapolated_runs_equal_runs_that_list_every_step(whole, is_shared, num_steps):
    machine = shared(num_cores=1.5, num_threads=2, memory=2.5 * RATE) if is_shared else unshared()
    timeline = simulate(whole, machine, num_steps=num_steps)
    listed = timeline.expanded()
    assert listed.num_steps == num_steps
    assert len(listed.spans) == len(whole.prologue) + num_steps * len(whole.step) + len(whole.flush)
    reference = _every_step(whole, machine, num_steps)
    found = {(span.phase, span.step, span.instruction): (span.start_s, span.end_s) for span in listed.spans}
    assert found.keys() == reference.keys()
    for key, (start_s, end_s) in reference.items():
        assert found[key] == pytest.approx((start_s, end_s), rel=1e-9, abs=1e-12), key


def _every_step(whole, machine, num_steps):
    """The same run with all its steps in the prologue, where nothing is ever extrapolated."""
    placed = StepGraph(whole, num_steps).listed
    name = {item.index: f"{item.phase}.{item.step}.{item.instruction.id}" for item in placed}
    listed = [
        replace(
            item.instruction,
            id=name[item.index],
            after=tuple(Dependency(name[before]) for before in item.after),
        )
        for item in placed
    ]
    timeline = simulate(program([], prologue=listed), machine, num_steps=0)
    spans = {span.instruction: (span.start_s, span.end_s) for span in timeline.spans}
    return {(item.phase, item.step, item.instruction.id): spans[name[item.index]] for item in placed}


@given(programs(), st.booleans())
def test_streams_run_in_order_and_dependencies_are_kept(whole, is_shared):
    timeline = simulate(whole, shared(num_cores=1.0) if is_shared else unshared(), num_steps=4).expanded()
    graph = StepGraph(whole, 4)
    spans = {
        RunNode(graph.position(span.phase, span.step), span.instruction): span for span in timeline.spans
    }
    for place, span in spans.items():
        ends = [spans[before].end_s for before in graph.predecessors(place)]
        # It starts as soon as it may: with the last end that it waits for.
        assert span.start_s == pytest.approx(max(ends, default=0.0), rel=1e-12, abs=1e-15)


@given(programs())
def test_a_simulation_is_the_same_every_time(whole):
    assert simulate(whole, shared(), num_steps=5) == simulate(whole, shared(), num_steps=5)


def test_cost_grows_with_unlike_steps_only():
    whole = pipeline(3, 2.0, 3.0, 1.0, num_staging_buffers=3)
    few, many = simulate(whole, unshared(), num_steps=20), simulate(whole, unshared(), num_steps=10_000)
    assert len(many.spans) == len(few.spans)
    assert many.makespan_s == pytest.approx(3 * 10_000 * 3.0 + 3.0, rel=1e-12)
    assert many.step_end_s(9_999) == pytest.approx(3 * 10_000 * 3.0 + 3.0, rel=1e-12)
    assert many.step_end_s(5000) - many.step_end_s(4999) == pytest.approx(9.0, rel=1e-9)


def test_steps_that_alternate_are_found_as_a_cycle_of_two():
    # Each of two instructions waits for the other's of the step before: the one circuit goes through both.
    whole = program(
        [instruction("a", "compute", 1.0, [("b", 1)]), instruction("b", "h2d", 3.0, [("a", 1)])],
        prologue=[instruction("late", "compute", 2.0)],
    )
    timeline = simulate(whole, unshared(), num_steps=1001)
    assert timeline.repeat is not None
    assert timeline.step_time_s == pytest.approx(3.0)
    assert timeline.makespan_s == pytest.approx(
        simulate(whole, unshared(), num_steps=5).makespan_s + 996 * 3.0
    )


def test_instructions_that_wait_for_each_other_are_named():
    whole = program([instruction("a", "compute", 1.0, ["b"]), instruction("b", "h2d", 1.0, ["a"])])
    with pytest.raises(ProgramError, match="step/a waits for step/b waits for step/a"):
        simulate(whole, unshared(), num_steps=2)


def test_an_instruction_that_waits_for_a_later_one_of_its_stream_is_named():
    whole = program([instruction("a", "compute", 1.0, ["b"]), instruction("b", "compute", 1.0)])
    with pytest.raises(ProgramError, match="step/a waits for step/b waits for step/a"):
        simulate(whole, unshared(), num_steps=2)


def test_missing_instructions_and_negative_steps_are_refused():
    with pytest.raises(ProgramError, match="'nothing'"):
        simulate(program([instruction("a", "compute", 1.0, ["nothing"])]), unshared(), num_steps=1)
    with pytest.raises(ProgramError, match="-1 steps"):
        simulate(program([]), unshared(), num_steps=-1)


def test_garbage_collection_is_put_back():
    assert gc.isenabled()
    with pytest.raises(ProgramError):
        simulate(program([instruction("a", "compute", 1.0, ["a"])]), unshared(), num_steps=1)
    assert gc.isenabled()


def _memory_program():
    buffers = [
        Buffer("w", Space.DEVICE, 100, "weights", "float32"),
        Buffer("h", Space.HOST, 50, "weights", "float32"),
        Buffer("z", Space.DEVICE, 30, "perturbations", "float32", dynamic=True),
        Buffer("staging", Space.DEVICE, 7, "staging buffers", "float32"),
    ]
    z = Access("z", Perturbation("block.0", 0), 0, 30)
    step = [
        instruction("take", "compute", 1.0, op=Allocate("staging")),
        instruction("sample", "compute", 1.0, writes=(z,)),
        instruction("use", "compute", 1.0, reads=(z,), work=Work(param_pass_bytes=10**9, workspace_bytes=11)),
        instruction("give", "compute", 1.0, op=Free("staging")),
    ]
    return program(step, buffers=buffers)


def test_memory_is_taken_at_the_first_use_and_given_back_after_the_last():
    timeline = simulate(_memory_program(), unshared(), num_steps=1)
    curve = [(time, sum(parts.values())) for time, parts in timeline.memory_curve(Space.DEVICE)]
    assert curve == [(0.0, 107), (1.0, 137), (2.0, 148), (3.0, 107), (4.0, 100)]
    peak = timeline.peak_memory(Space.DEVICE)
    assert (peak.size_bytes, peak.time_s) == (148, 2.0)
    assert peak.components == {"weights": 100, "perturbations": 30, "workspace": 11, "staging buffers": 7}
    assert timeline.peak_memory(Space.HOST).components == {"weights": 50}


def test_memory_of_a_long_run_peaks_as_that_of_a_short_one():
    peaks = [
        simulate(_memory_program(), unshared(), num_steps=n).peak_memory(Space.DEVICE) for n in (1, 2, 500)
    ]
    assert [peak.size_bytes for peak in peaks] == [148] * 3


@given(programs(), st.sampled_from(["low", "high"]))
def test_bounds_enclose_the_central_prediction_where_nothing_is_shared(whole, bound):
    # Times of all rates are halved or doubled together.
    central = simulate(whole, unshared(), num_steps=3).makespan_s
    factor = {"low": 0.5, "high": 2.0}[bound]
    assert simulate(whole, unshared(), num_steps=3, bound=bound).makespan_s == pytest.approx(central * factor)


def test_a_copy_knows_its_direction_from_where_it_writes():
    buffers = [
        Buffer("d", Space.DEVICE, 8, "staging buffers", "float32"),
        Buffer("h", Space.HOST, 8, "weights", "float32"),
    ]
    there = instruction(
        "x",
        "compute",
        1.0,
        op=Copy(),
        work=Work(copy_bytes=int(RATE)),
        writes=(Access("h", ParamGroupWeights("w"), 0, 8),),
    )
    machine = unshared(copy_d2h_bandwidth=RATE / 4)
    assert simulate(program([there], buffers=buffers), machine, num_steps=1).makespan_s == pytest.approx(4.0)
    back = replace(there, writes=(Access("d", ParamGroupWeights("w"), 0, 8),))
    assert simulate(program([back], buffers=buffers), machine, num_steps=1).makespan_s == pytest.approx(1.0)


def test_spans_are_listed_by_start_then_stream():
    spans = simulate(pipeline(3, 1.0, 1.0, 1.0, num_staging_buffers=3), unshared(), num_steps=4).spans
    order = {stream: number for number, stream in enumerate(Stream)}
    assert all(
        (a.start_s, order[a.stream]) <= (b.start_s, order[b.stream]) for a, b in itertools.pairwise(spans)
    )
