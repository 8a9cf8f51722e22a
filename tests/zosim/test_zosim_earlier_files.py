"""Files that earlier versions wrote load in the names of this one."""

from __future__ import annotations

import json

import pytest

import zosim
from costmodel.models.configs import read_model_spec
from costmodel.rates.profile import Profile
from costmodel.rates.slowdown import Slowdown, with_slowdown
from topology.hardware import resolve
from zosim.hardware.profiles import Profiles
from zosim.lowering import lower_all
from zosim.plans import LowBits, Mesh, Perturbations, Placement, Plan, Schedule, Split, Weights
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline


def renamed(content: object, names: dict[str, str]) -> object:
    """Return JSON with some keys called otherwise, at any depth."""
    if isinstance(content, list):
        return [renamed(item, names) for item in content]
    if isinstance(content, dict):
        return {names.get(name, name): renamed(value, names) for name, value in content.items()}
    return content


@pytest.fixture(scope="module")
def staged() -> Plan:
    return Plan(
        model=read_model_spec("opt-125m", split_blocks=(5,)),
        batch=4,
        seq=16,
        mesh=Mesh(stage=2),
        placement=Placement(topology="any", devices=("cpu0", "cpu1")),
        split=Split(split_points=("block.5.mlp",)),
    )


def test_a_plan_with_cuts_has_split_points(staged: Plan) -> None:
    old = renamed(staged.model_dump(mode="json"), {"split_points": "cuts", "split_blocks": "cut_blocks"})
    assert Plan.model_validate(old) == staged


def test_a_plan_with_edges_has_embedding_and_head(staged: Plan) -> None:
    old = renamed(staged.model_dump(mode="json"), {"embedding_and_head": "edges"})
    assert "edges" in old["residency"]
    assert Plan.model_validate(old) == staged


def test_a_profile_with_a_pace_has_a_slowdown() -> None:
    profile = Profiles(resolve("cpu-laptop")).of("cpu0")
    names = {"reference_s": "pace_s", "slowdown": "pace", "slowdown_fraction.products": "pace_part.products"}
    slowed = with_slowdown(profile, Slowdown(1e-4, 1.2, 1.0, 1.5, {"products": 0.5}))
    old = slowed.model_dump(mode="json")
    assert {constant["name"] for constant in old["constants"]} >= set(names)
    for constant in old["constants"]:
        constant["name"] = names.get(constant["name"], constant["name"])
    assert Profile.model_validate(old) == slowed


def test_programs_whose_messages_cross_a_cut_load(staged: Plan) -> None:
    programs = lower_all(staged)
    text = programs.to_json()
    assert '"boundary.0:message' in text
    old = ProgramSet.from_data(json.loads(text.replace('"boundary.0:', '"cut.0:')), "old")
    assert old == programs


def test_plans_programs_and_timelines_that_sweep_pass_over_the_parameters(staged: Plan) -> None:
    plan = staged.model_copy(update={"schedule": Schedule(traversal="full")})
    assert Plan.model_validate_json(plan.model_dump_json().replace('"full"', '"sweep"')) == plan
    programs = lower_all(plan)
    old = programs.to_json().replace('"param_pass_bytes"', '"sweep_bytes"')
    assert ProgramSet.from_data(json.loads(old), "old") == programs
    timeline = zosim.plan("opt-1m", "cpu-laptop", seq=16, traversal="full").chosen.planned.timeline
    old = timeline.to_json().replace('"param_pass"', '"sweep"')
    assert '"sweep"' in old
    assert Timeline.from_data(json.loads(old), "old") == timeline


def test_a_program_with_points_together_has_batched_evaluation_points() -> None:
    plan = Plan(
        model=read_model_spec("opt-125m", trainable="linears"),
        batch=4,
        seq=16,
        placement=Placement(topology="any", devices=("cpu0",)),
        weights=Weights(perturbation="adapters"),
        perturbations=Perturbations(distribution="factorised", rank=2),
    )
    programs = lower_all(plan)
    old = (
        programs.to_json().replace('"side_paths"', '"beside"').replace('"batched_eval_points"', '"together"')
    )
    assert '"together"' in old
    assert '"beside"' in old
    assert ProgramSet.from_data(json.loads(old), "old") == programs


def test_a_profile_with_sweeps_has_passes_over_parameters() -> None:
    profile = Profiles(resolve("cpu-laptop")).of("cpu0")
    old = profile.model_dump_json().replace('"param_pass_', '"sweep_').replace("side_path", "beside")
    assert '"sweep_cache_bandwidth' in old
    assert '"quant_rate.beside' in old
    assert Profile.model_validate_json(old) == profile


def test_codecs_and_kernels_that_quantise_quantize(staged: Plan) -> None:
    low_bits = LowBits(weights="int8", kernel="dequantize")
    one = Placement(topology="any", devices=("cpu0",))
    plan = staged.model_copy(
        update={"split": Split(), "mesh": Mesh(), "placement": one, "low_bits": low_bits}
    )
    old = plan.model_dump_json().replace("dequantize", "dequantise")
    assert Plan.model_validate_json(old).low_bits == low_bits
    split = staged.split.model_copy(update={"codec": "q4", "residual_codec": "q4"})
    programs = lower_all(staged.model_copy(update={"split": split}))
    old = programs.to_json().replace("quantize_s", "quantise_s")
    assert '"dequantise_s"' in old
    assert '"quantise_s.nearest"' in old
    assert ProgramSet.from_data(json.loads(old), "old") == programs


def test_a_timeline_with_steady_steps_has_periodic_ones() -> None:
    timeline = zosim.plan("opt-1m", "cpu-laptop", seq=16).chosen.planned.timeline
    data = json.loads(timeline.to_json())
    data["first_steady_step"] = data.pop("first_periodic_step", timeline.first_periodic_step)
    assert Timeline.from_data(data, "old") == timeline
