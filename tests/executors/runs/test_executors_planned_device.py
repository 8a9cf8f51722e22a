"""A run is on the device that it was planned for, unless the command line names another, and says where it is."""

from __future__ import annotations

import json

import pytest

import zosim
from executors.ranks.mesh import launch_lines
from executors.runs.planning import planned_device, where_it_runs
from tests.support.command import run_words
from tests.support.command import zosim as command
from topology.errors import PlanError, RunError
from zosim.plans import Placement, Plan


@pytest.fixture
def plan(inputs, tmp_path):
    """Of a machine that is not this one, with a GPU."""
    file = tmp_path / "plan.json"
    zosim.plan(inputs[0], "a100-80gb-milan", batch=2, seq=9, dtype="float32").plan.save(file)
    return file


def placed(plan, topology, *devices, hosts=()):
    data = Plan.load(plan).model_dump(mode="json")
    data["mesh"] = {"data": len(devices)}
    data["batch"] = len(devices)
    data["placement"] = Placement(topology=topology, devices=devices, hosts=hosts).model_dump(mode="json")
    return Plan.model_validate(data)


def train(inputs, out, *more):
    return command(*run_words(*inputs, out, *more, steps=2))


def test_a_plan_for_a_gpu_is_not_run_on_the_cpu_unless_that_is_named(inputs, plan, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(inputs, out, plan) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "the plan is for gpu0 of a100-80gb-milan, but torch" in output
    assert "finds no cuda device here" in output
    assert "--device cpu runs it on the CPU" in output
    assert not out.exists()
    with pytest.raises(PlanError, match="the plan is for gpu0 of a100-80gb-milan"):
        zosim.run(Plan.load(plan), model=str(inputs[0]), data=str(inputs[1]), steps=2, out=str(out))
    assert train(inputs, out, plan, "--device", "cpu") == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "on cpu, planned for gpu0 of a100-80gb-milan"


def test_a_run_goes_on_where_it_was_begun(inputs, plan, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(inputs, out, plan, "--device", "cpu") == 0
    capsys.readouterr()
    assert train(inputs, out, "--resume", "--steps", 3) == 0
    assert capsys.readouterr().err.splitlines()[0] == "on cpu, planned for gpu0 of a100-80gb-milan"


def test_a_run_without_a_plan_is_on_the_cpu(inputs, tmp_path, capsys):
    assert train(inputs, tmp_path / "out") == 0
    assert capsys.readouterr().err.splitlines()[0] == "on cpu, planned for cpu0 of host"


@pytest.mark.parametrize(
    ("topology", "devices", "expected"),
    [
        ("a100-80gb-milan", ("gpu0",), "cuda"),
        ("cpu-laptop", ("cpu0",), "cpu"),
        ("dgx-1v", ("gpu0", "gpu1", "gpu2", "gpu3"), "cuda"),
        ("dgx-1v", ("gpu3",), "cuda"),
        ("host", ("gpu3",), "cuda:3"),
        ("host", ("gpu0",), "cuda"),
        ("host", ("cpu0",), "cpu"),
        ("of a file that is elsewhere", ("node0/gpu0", "node1/gpu0"), "cuda"),
    ],
)
def test_the_device_is_of_the_kind_that_was_planned(plan, topology, devices, expected):
    assert planned_device(placed(plan, topology, *devices)) == expected


def test_nodes_of_a_machine_of_ones_own_are_what_its_file_says(plan, tmp_path):
    from topology import load_preset

    machine = load_preset("a100-80gb-milan").model_dump(mode="json")
    text = json.dumps(machine).replace('"gpu0"', '"board"')
    (tmp_path / "mine.yaml").write_text(text)
    assert planned_device(placed(plan, str(tmp_path / "mine.yaml"), "board")) == "cuda"


def test_several_ranks_and_their_lines_say_where_they_run(plan):
    four = placed(plan, "dgx-1v", "gpu0", "gpu1", "gpu2", "gpu3")
    assert where_it_runs(four, "cuda") == "4 ranks, on cuda, planned for gpu0..gpu3 of dgx-1v"
    two = placed(plan, "two", "a/gpu0", "b/gpu0", hosts=("a", "b"))
    assert where_it_runs(two, "cuda") == "2 ranks, on cuda, planned for a/gpu0 and b/gpu0 of two"
    lines = launch_lines(two, ["run", "plan.json"], device="cuda")
    assert "Every rank runs on cuda, as planned; where torch finds no such device it stops" in lines
    named = launch_lines(two, ["run", "plan.json", "--device", "cpu"], device="cpu")
    assert "Every rank runs on cpu.\n" in named + "\n"


def test_lines_for_several_hosts_are_printed_where_there_is_no_gpu(inputs, plan, tmp_path, capsys):
    file = tmp_path / "two.json"
    placed(plan, "two", "a/gpu0", "b/gpu0", hosts=("a", "b")).save(file)
    assert train(inputs, tmp_path / "out", file, "--launch") == 0
    reported = capsys.readouterr()
    assert "Every rank runs on cuda" in reported.out
    assert reported.err.splitlines()[0] == "2 ranks, on cuda, planned for a/gpu0 and b/gpu0 of two"
    model, data = map(str, inputs)
    with pytest.raises(RunError, match="ranks on 2 hosts, but one Python process"):
        zosim.run(file, model=model, data=data, steps=2, out=str(tmp_path / "out"))
