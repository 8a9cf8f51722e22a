"""Pictures of timelines: a bar for each instruction of a periodic step, a row for each stream."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import zosim
from tests.support.builders import pipeline, simulate_ranks, unshared
from topology.errors import TimelineError
from zosim.applications.picture import draw_timeline
from zosim.simulators.simulate import simulate

PIPELINE = pipeline(2, 2e-3, 3e-3, 1e-3, num_staging_buffers=2)


def words(path):
    return {text.text for text in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def test_rows_are_streams_and_the_title_says_what_a_step_takes(tmp_path):
    timeline = simulate(PIPELINE, unshared(), num_steps=4)
    output = words(draw_timeline(timeline, tmp_path / "one.svg"))
    assert {"compute", "h2d", "d2h"} <= output
    assert any(text.endswith("a step, simulated") for text in output)


def test_rows_of_several_ranks_are_named_by_their_ranks(tmp_path):
    timeline = simulate_ranks([PIPELINE, PIPELINE], [unshared(), unshared()], num_steps=3)
    assert {"rank 0 compute", "rank 1 compute"} <= words(draw_timeline(timeline, tmp_path / "two.svg"))


def test_the_same_timeline_has_the_same_picture_with_a_bar_for_each_instruction_of_a_step(tmp_path):
    timeline = simulate(PIPELINE, unshared(), num_steps=4)
    first, again = (draw_timeline(timeline, tmp_path / f"{name}.svg") for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    begin_s, end_s = (timeline.step_end_s(timeline.periodic_steps[0] + number) for number in (-1, 0))
    num_bars = sum(span.start_s < end_s and span.end_s > begin_s for span in timeline.spans)
    entries = len({span.label for span in timeline.spans})
    # Besides bars and the legend's entries: the picture, the axes, and four sides of their frame.
    assert first.read_text().count('id="patch_') == num_bars + entries + 6


def test_what_cannot_be_drawn_is_refused(tmp_path):
    timeline = simulate(PIPELINE, unshared(), num_steps=2)
    with pytest.raises(TimelineError, match=r"unknown format '\.gif'"):
        draw_timeline(timeline, tmp_path / "step.gif")
    with pytest.raises(TimelineError, match="cannot write"):
        draw_timeline(timeline, tmp_path / "missing" / "step.svg")
    with pytest.raises(TimelineError, match="holds no step"):
        draw_timeline(replace(timeline, spans=(), repeat=None), tmp_path / "none.svg")
    many = simulate_ranks([PIPELINE] * 22, [unshared()] * 22, num_steps=2)
    with pytest.raises(TimelineError, match="66 streams has too many rows"):
        draw_timeline(many, tmp_path / "many.svg")


@pytest.mark.slow
def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path):
    decision = zosim.plan(
        "opt-13b", "a100-80gb-milan", dtype="float16", batch=1, seq=2048, max_device_memory="20GiB"
    )
    drawn = draw_timeline(zosim.simulate(decision).timeline, tmp_path / "step.svg")
    committed = Path(__file__).parents[2] / "docs/pictures/opt-13b-step.svg"
    assert words(drawn) == words(committed)
    assert drawn.read_text().count('id="patch_') == committed.read_text().count('id="patch_')
