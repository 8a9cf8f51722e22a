"""Every axis of a plan has one home: what its fields are is declared there, and everything else is derived."""

from __future__ import annotations

import ast
import json
import typing
from pathlib import Path

import pytest

from zosim import cli, registry
from zosim.config import PlanConfig
from zosim.options import config_of, options_of
from zosim.plans import AXES, Plan
from zosim.plans.setting import Changes, fields_of

ROOT = Path(__file__).resolve().parents[2]
HOMES = (
    "zosim/plans/",  # what a value is
    "zosim/lowering/",  # what it does to a step
    "zosim/planning/space.py",  # which values are tried
    "zosim/planning/block_bound.py",  # the closed form of a step, whose copies overlap or do not
    "zosim/planning/disks.py",  # how many blocks lie on drives
    "zosim/planning/resolve.py",  # a config laid over a plan
    "zosim/planning/split_options.py",  # what a config asks of split points
    "executors/runs/planning.py",  # what a run fixes of a config before the planner is asked
)
PASSED_ON = {
    # The names of devices are all that a placement is: who wants a device's profile asks for it by name.
    ("placement", "topology"),
    ("placement", "devices"),
    ("placement", "hosts"),
    # Named to torch and to the cost model, which know what it means; a Work has a field of the same name.
    ("forward", "attention"),
    # The name of the format goes to torch where a model is loaded that no plan is made of.
    ("weights", "dtype"),
    # The number of tokens goes to the model that makes logits, which alone divides them.
    ("forward", "loss_chunk_tokens"),
    # The number of tokens goes to what generates them for a reward.
    ("forward", "num_new_tokens"),
    # Numbers of formulas: the estimate's, of the draws that it takes, of factors.
    ("estimator", "epsilon"),
    ("estimator", "num_perturbations"),
    ("perturbations", "rank"),
    ("perturbations", "lazy_steps"),
}
"""Fields that are read elsewhere, and why: what reads them does not decide by them how a step is made."""

_FACTS = {"num_labels", "num_tokens", "num_shared", "num_answers", "num_attended"}
WITHOUT_AN_OPTION = {"densities", "embedding_and_head", "reuse_staging_buffers"} | _FACTS
"""Fields that a command does not set: the planner, a plan's file, an ablation or a run's data does."""

OF_A_PLAN = {option.name for option in options_of(PlanConfig)}


def options(command: str) -> dict[str, object]:
    entry = registry.registered()[command]
    parameters = cli.build(command, registry.load(entry)).params
    return {parameter.name: parameter for parameter in parameters if parameter.name in OF_A_PLAN}


@pytest.mark.parametrize("axis", AXES)
def test_every_field_has_a_setting(axis: str) -> None:
    kind = AXES[axis]
    fields = fields_of(kind)
    assert set(fields) == set(kind.model_fields)
    for name, field in fields.items():
        assert field.setting.help.endswith("."), name
        assert field.setting.changes in typing.get_args(Changes)
        is_named = field.setting.flag.startswith("--") or kind.setting or axis == "placement"
        assert is_named or name in WITHOUT_AN_OPTION


def test_no_two_fields_have_one_name_in_a_runs_identity_or_one_option() -> None:
    names = [field.identity for kind in (PlanConfig, *AXES.values()) for field in fields_of(kind).values()]
    assert len(set(names)) == len(names)
    flags = [option.flag for option in options_of(PlanConfig)]
    assert len(set(flags)) == len(flags)


def test_plan_and_run_have_the_same_options_for_a_plan() -> None:
    pytest.importorskip("torch")
    planning, running = options("plan"), options("run")
    assert set(planning) == set(running) == OF_A_PLAN
    for name, option in planning.items():
        other = running[name]
        assert (option.opts, option.secondary_opts, option.help) == (
            other.opts,
            other.secondary_opts,
            other.help,
        )
        assert option.default is other.default is None


def test_what_is_typed_arrives_in_its_field() -> None:
    typed = {
        "keep_perturbations": True,
        "dtype": "fp16",
        "split_points": ["block.1,block.3.mlp", "block.5"],
        "batch": 3,
    }
    assert config_of(PlanConfig, typed).set_fields() == {
        "perturbations": {"kept": True},
        "weights": {"dtype": "float16"},
        "split": {"split_points": ("block.1", "block.3.mlp", "block.5")},
        "batch": 3,
    }


def test_plans_of_version_1_are_read(tmp_path: typing.Any) -> None:
    from costmodel import read_model_spec
    from zosim.plans import Placement

    plan = Plan.model_validate(
        {
            "model": read_model_spec("opt-125m"),
            "placement": Placement(topology="a100-80gb-milan", devices=("gpu0",)),
            "batch": 2,
            "seq": 16,
            "perturbations": {"rng": "counter", "kept": True},
            "weights": {"dtype": "float16", "perturbation": "copies"},
            "residency": {"blocks": "offloaded", "transfer_dtype": "float8_e4m3"},
            "schedule": {"update": "delayed"},
        }
    )
    old = json.loads(plan.model_dump_json())
    old |= {"version": 1}
    for axis in ("perturbations", "weights", "schedule", "forward"):
        del old[axis]
    del old["residency"]["transfer_dtype"]
    old["estimator"] |= {"direction": "gaussian", "rng": "counter", "order": "registration"}
    old["precision"] = {"storage": "float16", "compute": "float16", "transfer": "float8_e4m3"}
    old["runtime"] = {
        "traversal": "blockwise",
        "update": "delayed",
        "attention": "sdpa",
        "loss_chunk_tokens": None,
        "draw_ahead": False,
        "keep_directions": True,
        "weights": "copies",
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(old))
    assert Plan.load(path) == plan


def test_plans_are_read_in_the_words_of_version_2() -> None:
    from costmodel import read_model_spec
    from zosim.plans import Placement

    model, placement = read_model_spec("opt-125m"), Placement(topology="cpu-laptop", devices=("cpu0",))
    fields = {"model": model, "placement": placement, "batch": 2, "seq": 16}
    old = Plan.model_validate(
        fields
        | {
            "directions": {"distribution": "rademacher", "drawn_ahead": True},
            "estimator": {"num_queries": 3},
            "low_bits": {"weights": "int8", "direction_bits": 4, "update_rounding": "query"},
        }
    )
    assert old == Plan.model_validate(
        fields
        | {
            "perturbations": {"distribution": "rademacher", "sampled_ahead": True},
            "estimator": {"num_perturbations": 3},
            "low_bits": {"weights": "int8", "perturbation_bits": 4, "update_rounding": "perturbation"},
        }
    )


def test_what_a_field_means_is_known_in_its_homes_alone() -> None:
    fields = {(axis, name) for axis, kind in AXES.items() for name in fields_of(kind)}
    assert fields > PASSED_ON
    known, readers = fields - PASSED_ON, []
    for package in ("topology", "costmodel", "zosim", "executors"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(HOMES):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name)):
                    continue
                axis = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                if (axis, node.attr) in known:
                    readers.append(f"{name}:{node.lineno} reads {axis}.{node.attr}")
    assert not readers, "ask the plan a question in place of reading its axes: " + "; ".join(readers)
