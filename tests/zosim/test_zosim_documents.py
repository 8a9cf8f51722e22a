"""Files that commands read and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zosim
from topology.errors import MachineError, PlanError
from zosim.cli import app
from zosim.documents import check_writable
from zosim.plans import Plan, upgrade


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[]", b'{"version": 3}'])
def test_every_refusal_of_a_file_says_how_to_make_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    for requested in (path, tmp_path, tmp_path / "missing.json"):
        with pytest.raises(PlanError) as refusal:
            Plan.load(requested)
        assert refusal.value.hint == Plan.document.make
        assert str(requested) in refusal.value.message


def test_what_can_be_written_is_found_without_writing(tmp_path: Path) -> None:
    check_writable(None)
    check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "no" / "new.json", "does not exist")):
        with pytest.raises(MachineError, match=says):
            check_writable(path)


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "-o"),
        ("calibrate", "--rows", "shipped", "-o"),
        ("predict", "no-such-cases.csv", "-o"),
    ],
)
def test_minutes_are_not_spent_on_what_cannot_be_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, str(tmp_path / "no" / "new")])
    assert result.exit_code == 2
    assert f"the directory {tmp_path / 'no'} does not exist" in result.stderr


def test_there_is_one_way_to_calibrate_at_a_time() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--rows", "shipped", "--evidence", "run.json"])
    assert result.exit_code == 2
    assert "leave one of them out" in result.stderr


@pytest.fixture(scope="module")
def good_plan() -> dict[str, object]:
    return json.loads(zosim.plan("opt-1m", "cpu-laptop", seq=16).plan.model_dump_json())


@pytest.mark.parametrize(
    ("axis", "name", "value"),
    [
        ("schedule", "traversal", "querywise"),
        ("residency", "share_group", "world"),
        ("low_bits", "weights", "best8"),
        ("low_bits", "adapters", "best4"),
        ("low_bits", "parts", "all"),
        ("low_bits", "full_range", True),
        ("low_bits", "outliers", 0.01),
        ("low_bits", "adapter_span", 4.0),
    ],
)
def test_what_was_removed_is_refused_by_its_name(tmp_path, good_plan, axis, name, value):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(good_plan | {axis: good_plan[axis] | {name: value}}))
    with pytest.raises(PlanError, match=f"{axis}.{name}={value!r} was removed"):
        zosim.Plan.load(file)


def test_fields_that_were_removed_are_left_out_where_they_say_what_holds_now(good_plan):
    removed = {"parts": "blocks", "full_range": False, "outliers": 0.0, "adapter_span": 2.0}
    assert Plan.model_validate(
        good_plan | {"low_bits": good_plan["low_bits"] | removed}
    ) == Plan.model_validate(good_plan)
    of_another_tool = {"model": {"stored": {"full_range": True}}, "low_bits": {"full_range": True}}
    assert upgrade(of_another_tool)["low_bits"] == {}
    shared = {"residency": good_plan["residency"] | {"share_group": "host"}}
    assert Plan.model_validate(good_plan | shared) == Plan.model_validate(good_plan)


def test_plans_are_read_in_the_present_names(good_plan):
    old = {"residency": {"blocks": "offloaded", "num_slots": 2, "reuse_slots": False}}
    residency = Plan.model_validate(good_plan | old).residency
    assert (residency.num_staging_buffers, residency.reuse_staging_buffers) == (2, False)
    assert upgrade(good_plan) == good_plan


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "axis", ["weights", "residency", "forward", "estimator", "runtime", "precision", "mesh"]
)
@pytest.mark.parametrize("broken", [None, [], [1], "x", 3, {"dtype": []}], ids=repr)
def test_an_axis_that_is_none_is_refused_as_what_it_is(tmp_path, good_plan, version, axis, broken):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(good_plan | {"version": version, axis: broken}))
    with pytest.raises(PlanError):
        zosim.Plan.load(file)
