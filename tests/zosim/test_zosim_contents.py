"""What operands hold, as types and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import read_model_spec
from topology.errors import ProgramError
from zosim.eval_points import BASE, EvalPoint, eval_points_of_step, parse_eval_point
from zosim.lowering import lower
from zosim.plans import Estimator, Placement, Plan, Residency, Weights
from zosim.program import Program
from zosim.program.contents import (
    BATCH,
    FREED,
    GATHERED_LOSSES,
    PACKED_LOSSES,
    UNSET,
    Contents,
    FrozenWeights,
    GeneratorState,
    Hidden,
    Loss,
    Message,
    Named,
    ParamGroupWeights,
    Perturbation,
    PerturbationRows,
    ProjectedGradient,
    parse_contents,
)

GROUPS = st.sampled_from(["embed.tokens", "block.0", "block.17.front", "embed+head", "head.norm"])
PERTURBATIONS = st.integers(0, 20)
POINTS = st.one_of(st.just(BASE), st.builds(EvalPoint, PERTURBATIONS, st.sampled_from([1, -1])))
CONTENTS = st.one_of(
    st.builds(ParamGroupWeights, GROUPS, POINTS),
    st.builds(ParamGroupWeights, GROUPS, updated_to=PERTURBATIONS),
    st.builds(FrozenWeights, GROUPS),
    st.builds(Perturbation, GROUPS, PERTURBATIONS, st.booleans()),
    st.builds(PerturbationRows, GROUPS, PERTURBATIONS),
    st.builds(GeneratorState, GROUPS, PERTURBATIONS, st.booleans()),
    st.builds(Hidden, GROUPS, POINTS),
    st.builds(Message, PERTURBATIONS, POINTS),
    st.builds(Loss, POINTS, st.booleans()),
    st.builds(ProjectedGradient, PERTURBATIONS),
    st.builds(Named, GROUPS.map(lambda group: f"grad:{group}"), st.sampled_from(["", "m3"])),
    st.sampled_from([BATCH, PACKED_LOSSES, GATHERED_LOSSES, UNSET, FREED]),
)


@given(CONTENTS)
def test_contents_are_what_their_text_says(what: Contents) -> None:
    assert parse_contents(str(what)) == what


@given(CONTENTS, CONTENTS)
def test_unlike_contents_have_unlike_texts(one: Contents, other: Contents) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(POINTS)
def test_points_are_what_their_text_says(eval_point: EvalPoint) -> None:
    assert parse_eval_point(str(eval_point)) == eval_point


def test_points_of_a_step_are_in_the_order_of_visits() -> None:
    assert " ".join(map(str, eval_points_of_step(2, "central"))) == "q0+ q0- q1+ q1-"
    assert " ".join(map(str, eval_points_of_step(2, "forward"))) == "base q0+ q1+"


@pytest.fixture
def program() -> Program:
    placement = Placement(topology="cpu-laptop", devices=("cpu0",))
    residency = Residency(blocks="offloaded")
    estimator = Estimator(difference="forward", num_perturbations=2)
    model = read_model_spec("opt-125m")
    return lower(
        Plan(
            model=model,
            placement=placement,
            batch=2,
            seq=16,
            residency=residency,
            estimator=estimator,
            weights=Weights(dtype="bfloat16"),
        )
    )


def _as_version_1(data: object) -> object:
    """Return a file's object with contents as version 1 wrote them: point and perturbation in a field of their own."""
    if isinstance(data, list):
        return [_as_version_1(item) for item in data]
    if not isinstance(data, dict):
        return data
    old = {name: _as_version_1(value) for name, value in data.items()}
    if "version" in old:
        old["version"] = 1
    if "what" in old:
        old["what"], _, point = str(old["what"]).partition("@")
        old |= {"point": point} if point else {}
    elif "eval_point" in old:
        point = old.pop("eval_point")
        old["point"] = "" if point == "base" else point
    return old


def test_files_of_version_1_are_read(program: Program) -> None:
    old = _as_version_1(json.loads(program.to_json()))
    assert Program.from_data(old, "an old file") == program  # type: ignore[arg-type]


def test_a_program_is_read_in_earlier_names(program: Program) -> None:
    names = {
        "num_split_sequences": "num_split_walks",
        "sampling_dtype": "draw_dtype",
        "num_shared_samplings": "num_shared_draws",
        "perturbation": "query",
        "eval_point": "point",
    }
    values = {"sample": "draw", "perturbations": "directions"}

    def earlier(data: Any) -> Any:
        if isinstance(data, list):
            return [earlier(item) for item in data]
        if not isinstance(data, dict):
            return data
        fields = ("kind", "label", "stream", "role")
        present = {name: values.get(data[name], data[name]) for name in fields if name in data}
        return {names.get(name, name): earlier(value) for name, value in (data | present).items()}

    old = earlier(json.loads(program.to_json()))
    assert all(f'"{name}"' in json.dumps(old) for name in (names | values).values())
    assert Program.from_data(old, "an old file") == program


def test_contents_that_are_none_are_refused_by_name(program: Program) -> None:
    data = json.loads(program.to_json().replace("z:block.3@q1", "z:block.3@q"))
    with pytest.raises(ProgramError, match=r"z:block\.3@q"):
        Program.from_data(data, "an edited file")


@pytest.mark.parametrize("what", [7, None, True, [], {}, ["block.0"], 1.5])
def test_contents_that_are_no_text_are_refused(program: Program, what: object) -> None:
    data = json.loads(program.to_json())
    data["initial"][0]["what"] = what
    with pytest.raises(ProgramError, match="in place of text"):
        Program.from_data(data, "an edited file")
