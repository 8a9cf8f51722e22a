"""The scale study compares ways of predicting one and the same step."""

import json

import pytest

from studies.scale import __main__ as scale
from studies.scale import planning
from topology.documents import load_preset
from zosim.simulators.lockstep import simulate_many


@pytest.fixture(scope="module")
def small():
    return scale.setting("opt-125m", "dgx-1v", 2)


def test_the_plain_model_runs_the_first_step_of_the_simulator(small):
    world = scale.unshared(small[0])
    seconds, num_processes = scale.naive_step(world)
    first = [span for span in simulate_many(world, num_steps=1).spans if span.phase == "step"]
    assert num_processes == len(first)
    assert seconds == pytest.approx(max(span.end_s for span in first), rel=1e-9)


def test_all_ways_do_the_same_work(small):
    world, plan, machine = small
    every, few = scale.event_by_event(world), scale.folded(world)
    assert few.step_s == pytest.approx(every.step_s, rel=scale.AGREEMENT)
    # Whole steps of all ranks, as many as it took to see that they repeat.
    assert every.num_done >= 2 * 16 * len(world.program(0).step)
    assert scale.grid(plan, machine, 2).num_done == 4 * 2**4


def test_the_table_is_printed_and_written(monkeypatch, capsys, tmp_path):
    arguments = ["--model", "opt-125m", "--hosts", "2", "--naive-hosts", "1", "--points", "2", "--json"]
    monkeypatch.setattr("sys.argv", ["scale", *arguments, str(tmp_path / "rows.json")])
    assert scale.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("opt-125m, 2 x dgx-1v, 16 ranks")
    assert [line.split(",")[0].split(" to")[0] for line in lines[2:]] == [
        "event by event",
        "folded",
        "closed form",
        "plain simpy",
    ]
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 4


@pytest.mark.slow
def test_the_planners_time_is_printed_with_what_it_chose(monkeypatch, capsys):
    monkeypatch.setattr(planning, "_SEARCHES", {"small": ("opt-125m", lambda: load_preset("rtx4090-2x"))})
    monkeypatch.setattr("sys.argv", ["planning", "--rounds", "1"])
    assert planning.main() == 0
    _, line = capsys.readouterr().out.splitlines()
    decision = planning.choose(planning.request_named("small"))
    assert line.split()[0] == "small"
    assert planning.digest(decision) in line
    assert decision.chosen.describe() in line
