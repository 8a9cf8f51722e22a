"""Critical paths: they tile what they explain, and blame what is to blame."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import RATE, instruction, pipeline, program, programs, shared, unshared
from topology.errors import TimelineError
from zosim.analysis.critical_path import bottleneck, step_path
from zosim.simulators.simulate import simulate
from zosim.timeline import Timeline


def seconds_by_label(path):
    seconds = defaultdict(float)
    for item in path.segments:
        seconds[item.label] += item.duration_s
    return seconds


def as_measured(timeline):
    """The same spans without the knowledge that they repeat."""
    listed = timeline.expanded()
    return replace(listed, source="measured", first_periodic_step=1)


@pytest.mark.parametrize(
    ("times", "num_buffers", "label", "description"),
    [
        ((1.0, 3.0, 2.0), 3, "compute", "compute (param pass)"),
        ((3.0, 1.0, 2.0), 3, "upload", "upload over memory"),
        ((1.0, 2.0, 3.0), 3, "offload", "offload over memory"),
    ],
)
def test_a_steady_step_is_its_slowest_stage_alone(times, num_buffers, label, description):
    whole = pipeline(4, *times, num_buffers)
    for timeline in (simulate(whole, unshared()), as_measured(simulate(whole, unshared(), num_steps=8))):
        path = step_path(timeline, whole)
        assert seconds_by_label(path) == pytest.approx({label: path.duration_s})
        assert path.duration_s / path.num_steps == pytest.approx(12.0)
        found = bottleneck(path)
        assert (found.description, found.share) == (description, pytest.approx(1.0))
        assert found.seconds_per_step == pytest.approx(12.0)


def test_too_few_staging_buffers_show_as_a_circuit_through_all_three_streams():
    whole = pipeline(4, 2.0, 3.0, 2.0, num_staging_buffers=2)
    path = step_path(simulate(whole, unshared()), whole)
    per_step = {label: seconds / path.num_steps for label, seconds in seconds_by_label(path).items()}
    # Half of the blocks' staging buffers: the other half runs beside them.
    assert per_step == pytest.approx({"upload": 4.0, "compute": 6.0, "offload": 4.0})


def test_the_hosts_part_of_a_step_is_a_gap_called_dispatch():
    whole = program([instruction("work", "compute", 2.0)])
    path = step_path(simulate(whole, unshared(step_s=0.5)), whole)
    assert seconds_by_label(path) == pytest.approx({"work": 2.0, "dispatch": 0.5})
    assert not bottleneck(path).description.startswith("dispatch")


@given(programs(), st.booleans(), st.sampled_from([0.0, 1e-3]))
def test_segments_tile_steady_steps_exactly(whole, is_shared, step_s):
    machine = shared(num_cores=1.3, memory=2 * RATE, step_s=step_s) if is_shared else unshared(step_s=step_s)
    timeline = simulate(whole, machine, num_steps=7)
    circuit = step_path(timeline, whole)
    assert sum(seconds_by_label(circuit).values()) == pytest.approx(circuit.duration_s, rel=1e-12, abs=1e-15)
    if timeline.repeat is not None and circuit.segments:
        assert circuit.duration_s / circuit.num_steps == pytest.approx(timeline.step_time_s, rel=1e-9)


@given(programs(), st.lists(st.floats(0.0, 3e-3), min_size=40, max_size=40))
def test_measured_spans_with_noise_and_overlap_are_tiled_as_well(whole, noise):
    exact = as_measured(simulate(whole, unshared(), num_steps=5))
    # Clocks of two threads: a span may seem to begin before what it waited for has ended.
    spans = tuple(
        replace(span, end_s=span.end_s + noise[number % len(noise)])
        for number, span in enumerate(exact.spans)
    )
    timeline = replace(exact, spans=spans)
    circuit = step_path(timeline, whole)
    assert sum(item.duration_s for item in circuit.segments) == pytest.approx(circuit.duration_s, abs=1e-12)


def test_a_run_too_short_for_a_circuit_is_clipped_to_its_steady_step():
    whole = pipeline(2, 2.0, 3.0, 1.0, num_staging_buffers=2)
    timeline = as_measured(simulate(whole, unshared(), num_steps=2))
    path = step_path(timeline, whole)
    assert path.num_steps == 1
    assert path.duration_s == pytest.approx(timeline.step_time_s)


def test_spans_of_another_program_and_missing_ranks_are_refused():
    whole = pipeline(2, 2.0, 3.0, 1.0, num_staging_buffers=2)
    timeline = simulate(whole, unshared(), num_steps=2)
    with pytest.raises(TimelineError, match="does not have"):
        step_path(timeline, program([instruction("other", "compute", 1.0)]))
    with pytest.raises(TimelineError, match="no spans of rank 3"):
        step_path(timeline, whole, rank=3)
    with pytest.raises(TimelineError, match="no spans"):
        step_path(Timeline("test", "measured", 0, ()), whole)


def test_an_empty_path_has_no_bottleneck():
    whole = program([instruction("work", "compute", 0.0)])
    with pytest.raises(TimelineError, match="has no bottleneck"):
        bottleneck(step_path(simulate(whole, unshared(), num_steps=2), whole))
