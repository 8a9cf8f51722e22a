"""Timelines: steps and their periods, utilisation, memory, and the file that they are kept in."""

import json
from dataclasses import replace

import pytest

from tests.support.builders import instruction, pipeline, program, unshared
from topology.errors import TimelineError
from zosim.program.instructions import Space, Stream
from zosim.simulators.simulate import simulate
from zosim.timeline import MemorySample, Span, Timeline, merged


def span(name, step, start_s, end_s, *, phase="step", stream=Stream.COMPUTE, rank=0, label=None):
    return Span(rank, phase, step, name, stream, label or name, "block", start_s, end_s)


def measured(*spans, num_steps=3, **fields):
    return Timeline("test", "measured", num_steps, spans, **fields)


OVERLAPPING = (
    span("load", 0, 1.0, 2.0, phase="prologue", stream=Stream.H2D),
    span("work", 0, 2.0, 5.0),
    span("store", 0, 5.0, 6.0, stream=Stream.D2H),
    # The next step's work begins before this step's store is done.
    span("work", 1, 5.0, 8.0),
    span("store", 1, 8.0, 9.0, stream=Stream.D2H),
    span("work", 2, 8.0, 12.0),
    span("store", 2, 12.0, 14.0, stream=Stream.D2H),
    span("end", 3, 14.0, 15.0, phase="flush"),
)


def test_periods_are_differences_of_step_ends_and_the_first_holds_the_prologue():
    timeline = measured(*OVERLAPPING)
    assert [timeline.step_end_s(step) for step in range(3)] == [6.0, 9.0, 14.0]
    assert timeline.makespan_s == 14.0
    assert timeline.periodic_steps == (1, 2)
    assert timeline.step_time_s == 4.0


def test_steady_values_are_means_over_the_steady_steps():
    timeline = measured(*OVERLAPPING)
    assert timeline.seconds_by_label() == {"work": 3.5, "store": 1.5}
    # The step's work from 5 to 12, and what of its stores is not beside it: 12 to 14.
    assert timeline.busy((Stream.COMPUTE, Stream.D2H)) == 9 / 8
    assert timeline.busy((Stream.D2H,)) == 3 / 8
    assert timeline.busy(()) == 0


def test_a_run_of_one_step_is_its_own_steady_state():
    timeline = measured(span("work", 0, 0.0, 2.0), num_steps=1)
    assert timeline.step_time_s == 2.0
    with pytest.raises(TimelineError, match="holds no step"):
        _ = measured(num_steps=0).step_time_s


def test_omitted_steps_are_counted_as_if_listed():
    timeline = simulate(pipeline(2, 1.0, 2.0, 1.0, num_staging_buffers=2), unshared(), num_steps=50)
    listed = timeline.expanded()
    assert timeline.repeat.num_omitted_steps > 0
    assert len(listed.spans) == 50 * 6
    assert [timeline.step_end_s(step) for step in range(50)] == pytest.approx(
        [listed.step_end_s(step) for step in range(50)]
    )
    assert listed.step_time_s == pytest.approx(timeline.step_time_s)
    assert timeline.busy((Stream.H2D,)) == pytest.approx(listed.busy((Stream.H2D,)))
    with pytest.raises(TimelineError, match="no step 50"):
        timeline.step_end_s(50)


def test_memory_changes_of_one_instant_count_together():
    samples = (
        MemorySample(0, Space.DEVICE, "weights", 0.0, 100),
        MemorySample(0, Space.DEVICE, "workspace", 1.0, 60),
        # Handed over: what one role gives back at 2 the other takes at 2.
        MemorySample(0, Space.DEVICE, "perturbations", 2.0, 50),
        MemorySample(0, Space.DEVICE, "workspace", 2.0, 0),
        MemorySample(0, Space.HOST, "weights", 0.0, 7),
        MemorySample(1, Space.DEVICE, "weights", 0.0, 999),
    )
    timeline = measured(memory=samples)
    peak = timeline.peak_memory(Space.DEVICE)
    assert (peak.size_bytes, peak.time_s, peak.components) == (160, 1.0, {"weights": 100, "workspace": 60})
    assert timeline.peak_memory(Space.HOST).size_bytes == 7
    assert timeline.peak_memory(Space.HOST, rank=1).size_bytes == 0


def test_spans_are_put_in_order_whatever_order_they_are_given_in():
    assert measured(*reversed(OVERLAPPING)) == measured(*OVERLAPPING)


def test_a_timeline_survives_its_file(tmp_path):
    timeline = simulate(pipeline(2, 1.0, 2.0, 1.0, num_staging_buffers=2), unshared(), num_steps=50)
    path = tmp_path / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "no timeline at"),
        ("{", "is not a timeline"),
        ("[]", "timeline"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1, "program": "p", "source": "guessed", "num_steps": 1, "spans": []}', "guessed"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, text, complaint):
    path = tmp_path / "timeline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TimelineError, match=complaint):
        Timeline.load(path)


def test_impossible_spans_are_refused(tmp_path):
    with pytest.raises(TimelineError, match=r"starts at 2\.0 s and ends at 1\.0 s"):
        measured(span("work", 0, 2.0, 1.0))
    with pytest.raises(TimelineError, match="starts at nan s"):
        measured(span("work", 0, float("nan"), 1.0))
    with pytest.raises(TimelineError, match="belongs to step 3, but the run has 3 steps"):
        measured(span("work", 3, 0.0, 1.0))
    path = tmp_path / "timeline.json"
    data = json.loads(measured(span("work", 0, 0.0, 1.0)).to_json())
    data["spans"][0]["end_s"] = -1.0
    path.write_text(json.dumps(data))
    with pytest.raises(TimelineError, match=r"starts at 0\.0 s and ends at -1\.0 s"):
        Timeline.load(path)


def test_ranks_of_one_run_are_merged_and_others_refused():
    first = measured(span("work", 0, 0.0, 1.0), num_steps=1)
    second = measured(span("work", 0, 0.0, 2.0, rank=1), num_steps=1)
    both = merged([first, second])
    assert both.ranks == (0, 1)
    assert both.step_time_s == 2.0
    with pytest.raises(TimelineError, match="different runs"):
        merged([first, replace(second, program="other")])
    with pytest.raises(TimelineError, match="none given"):
        merged([])


def test_a_prologue_before_the_first_step_counts_in_no_steady_step():
    whole = program([instruction("work", "compute", 1.0)], prologue=[instruction("load", "compute", 9.0)])
    timeline = simulate(whole, unshared(), num_steps=4)
    assert [timeline.step_end_s(step) for step in range(4)] == pytest.approx([10.0, 11.0, 12.0, 13.0])
    assert timeline.step_time_s == pytest.approx(1.0)
