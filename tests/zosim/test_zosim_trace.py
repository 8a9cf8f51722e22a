"""Chrome traces: what Perfetto and Holistic Trace Analysis (HTA) rely on."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.support.builders import instruction, pipeline, program, simulate_ranks, unshared
from topology.errors import TimelineError
from zosim.applications.trace import HOST_THREAD, STREAM_THREADS, chrome_trace, save_trace
from zosim.program.contents import Perturbation
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.simulators.simulate import simulate

PIPELINE = pipeline(2, 2e-3, 3e-3, 1e-3, num_staging_buffers=2)


@pytest.fixture(scope="module")
def trace():
    return chrome_trace(simulate(PIPELINE, unshared(), num_steps=3), PIPELINE)


def of_phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_spans_are_complete_events_in_microseconds(trace):
    first = next(
        event for event in of_phase(trace, "X") if event.get("args", {}).get("instruction") == "compute0"
    )
    assert (first["ts"], first["dur"]) == (2000.0, 3000.0)
    assert (first["pid"], first["tid"], first["cat"]) == (0, STREAM_THREADS[Stream.COMPUTE], "kernel")
    assert first["name"] == "compute compute0"


def test_every_thread_has_a_name(trace):
    named = {
        event["tid"]: event["args"]["name"]
        for event in of_phase(trace, "M")
        if event["name"] == "thread_name"
    }
    assert {event["tid"] for event in of_phase(trace, "X")} <= named.keys()
    assert named[STREAM_THREADS[Stream.H2D]] == "h2d"


def test_hta_finds_rank_device_launches_and_copies(trace):
    rank = trace["distributedInfo"]["rank"]
    assert isinstance(rank, int)
    assert rank >= 0
    assert trace["distributedInfo"]["world_size"] == 1
    assert trace["deviceProperties"][0]["id"] == 0
    complete = of_phase(trace, "X")
    for event in complete:
        assert {"ts", "dur", "name", "cat", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    on_device = [event for event in complete if "stream" in event["args"]]
    assert len(on_device) == 3 * 6
    assert all(event["args"]["stream"] > 0 for event in on_device)
    launches = {event["args"]["correlation"]: event for event in complete if event["cat"] == "cuda_runtime"}
    assert len(launches) == len(on_device)
    for event in on_device:
        launch = launches[event["args"]["correlation"]]
        is_copy = event["cat"] == "gpu_memcpy"
        assert launch["tid"] == HOST_THREAD
        assert launch["ts"] <= event["ts"]
        assert launch["name"] == ("cudaMemcpyAsync" if is_copy else "cudaLaunchKernel")
        assert event["name"].startswith("Memcpy ") == is_copy
    # Row numbers must fit the type that HTA keeps correlations in.
    assert min(launches) > len(trace["traceEvents"])


def test_hta_finds_steps_as_annotations_that_tile_the_run(trace):
    steps = [event for event in of_phase(trace, "X") if event["name"].startswith("ProfilerStep#")]
    assert [event["name"] for event in steps] == [f"ProfilerStep#{number}" for number in range(3)]
    assert steps[0]["ts"] == 0.0
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-6)


def test_every_dependency_between_streams_is_an_arrow_inside_its_spans(trace):
    starts = {event["id"]: event for event in of_phase(trace, "s")}
    ends = {event["id"]: event for event in of_phase(trace, "f")}
    # Per step: two uploads to computes and two computes to offloads; from the second step on, two staging buffers freed.
    assert len(starts) == len(ends) == 3 * 4 + 2 * 2
    slices = defaultdict(list)
    for event in of_phase(trace, "X"):
        slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for name, start in starts.items():
        end = ends[name]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        assert start["tid"] != end["tid"]
        for event in (start, end):
            assert any(begin <= event["ts"] < until for begin, until in slices[event["tid"]])


def test_memory_is_a_counter_per_space():
    buffers = [
        Buffer("w", Space.DEVICE, 100, "weights", "float32"),
        Buffer("z", Space.DEVICE, 9, "perturbations", "float32", dynamic=True),
    ]
    step = [
        instruction("sample", "compute", 1e-3, writes=(Access("z", Perturbation("block.0", 0), 0, 9),)),
        instruction("rest", "compute", 1e-3),
    ]
    counters = of_phase(chrome_trace(simulate(program(step, buffers=buffers), unshared(), num_steps=1)), "C")
    assert [(event["name"], event["ts"], event["args"]) for event in counters] == [
        ("device memory (bytes)", 0.0, {"perturbations": 9, "weights": 100}),
        ("device memory (bytes)", 1000.0, {"perturbations": 0, "weights": 100}),
    ]


def test_omitted_steps_are_announced():
    events = of_phase(chrome_trace(simulate(PIPELINE, unshared(), num_steps=500)), "i")
    assert len(events) == 1
    assert "steps like step" in events[0]["name"]


def test_files_are_json_plain_or_compressed_one_per_rank(tmp_path):
    timeline = simulate_ranks([PIPELINE, PIPELINE], [unshared(), unshared()], num_steps=2)
    save_trace(timeline, tmp_path / "all.json", PIPELINE)
    both = json.loads((tmp_path / "all.json").read_text())
    assert {event["pid"] for event in both["traceEvents"]} == {0, 1}
    save_trace(timeline, tmp_path / "one.json.gz", PIPELINE, rank=1)
    one = json.loads(gzip.decompress((tmp_path / "one.json.gz").read_bytes()))
    assert {event["pid"] for event in one["traceEvents"]} == {1}
    assert one["distributedInfo"] == {"backend": "zosim", "rank": 1, "world_size": 2}


def test_what_cannot_be_written_is_refused(tmp_path):
    timeline = simulate(PIPELINE, unshared(), num_steps=1)
    with pytest.raises(TimelineError, match="no spans of rank 5"):
        chrome_trace(timeline, rank=5)
    with pytest.raises(TimelineError, match="cannot write the trace"):
        save_trace(timeline, tmp_path / "missing" / "t.json")
    with pytest.raises(TimelineError, match="has no step/"):
        chrome_trace(timeline, program([instruction("other", "compute", 1.0)]))
