"""The config tree: what is set stays set, what is not stays open, and a plan comes of both."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from costmodel import read_model_spec
from topology.hardware import resolve as topology_named
from zosim.config import PlanConfig, filled, merge
from zosim.options import config_of, with_settings
from zosim.planning.request import Hardware
from zosim.planning.resolve import even_split_points, laid_over, resolve, spread
from zosim.plans import Mesh, Placement, Plan, Residency

MODEL = read_model_spec("opt-125m")
HERE = Placement(topology="cpu-laptop", devices=("cpu0",))


def plan(**fields: object) -> Plan:
    return Plan.model_validate({"model": MODEL, "batch": 4, "seq": 16, "placement": HERE, **fields})


def test_only_what_is_set_is_laid_over() -> None:
    file = config_of(
        PlanConfig, {"batch": 4, "staging_buffers": 2, "distribution": "lozo", "perturbation_rank": 3}
    )
    typed = config_of(PlanConfig, {"staging_buffers": 3, "eps": 1e-2, "seq": None})
    merged = merge(file, typed)
    assert merged.set_fields() == {
        "batch": 4,
        "estimator": {"epsilon": 1e-2},
        "residency": {"num_staging_buffers": 3},
        "perturbations": {"distribution": "lozo", "rank": 3},
    }
    assert (merged.given("seq"), merged.residency.blocks) == (None, "resident")
    assert merge(merged, PlanConfig()) == merged == merge(PlanConfig(), merged)


def test_a_length_that_nobody_set_fits_the_model() -> None:
    short = MODEL.model_copy(update={"max_positions": 256})
    assert filled(PlanConfig(model=MODEL)).seq == 2048
    assert filled(PlanConfig(model=short)).seq == 256


def test_a_mesh_replaces_another_as_a_whole() -> None:
    wide, narrow = (config_of(PlanConfig, {"mesh": text}) for text in ("data=2,perturb=2", "perturb=2"))
    assert merge(wide, narrow).mesh == Mesh(perturb=2)


def test_a_plan_is_a_config_with_nothing_open() -> None:
    made = plan(residency={"blocks": "offloaded"}, schedule={"update": "delayed"})
    assert resolve(PlanConfig.of(made)) == made


def test_what_depends_on_a_changed_field_is_put_right() -> None:
    made = plan(
        residency={"blocks": "offloaded", "num_staging_buffers": 2},
        schedule={"update": "delayed"},
        forward={"compute_dtype": "bfloat16"},
    )
    typed = config_of(PlanConfig, {"residency": "resident", "dtype": "float64"})
    again = resolve(laid_over(made, typed, lambda _: MODEL))
    assert (again.residency, again.schedule.update) == (Residency(), "immediate")
    assert (again.storage_dtype, again.compute_dtype) == ("float64", "float64")
    staged = resolve(
        laid_over(
            made.model_copy(update={"residency": Residency(), "schedule": again.schedule}),
            config_of(PlanConfig, {"mesh": "stage=2"}),
            lambda blocks: read_model_spec("opt-125m", split_blocks=blocks),
        )
    )
    assert (staged.split_points, staged.placement.devices) == (
        even_split_points(MODEL.num_blocks, 2),
        ("cpu0", "cpu0"),
    )


def test_what_is_open_is_chosen_and_what_is_set_is_kept() -> None:
    config = merge(PlanConfig(model=MODEL), config_of(PlanConfig, {"batch": 2, "seq": 16, "ranks": 2}))
    made = resolve(config, lambda: Hardware.of(topology_named("cpu-laptop"), "cpu-laptop"))
    assert (made.placement.world_size, made.batch, made.seq) == (2, 2, 16)


def test_fewer_ranks_keep_the_devices_of_the_first_ones() -> None:
    placed = Placement(
        topology="a100-80gb-3x4",
        devices=tuple(f"node{node}/gpu{gpu}" for node in (0, 1) for gpu in range(2)),
        hosts=("node0", "node0", "node1", "node1"),
    )
    config = PlanConfig(model=MODEL, mesh=Mesh(data=2), placement=placed)
    spread_out = spread(config, lambda _: MODEL).placement
    assert spread_out is not None
    assert (spread_out.devices, spread_out.hosts) == (("node0/gpu0", "node0/gpu1"), ("node0", "node0"))


def test_only_resolve_asks_the_planner_to_choose() -> None:
    root = Path(__file__).parents[2]
    asking = [
        path.relative_to(root)
        for package in ("zosim", "executors")
        for path in (root / package).rglob("*.py")
        if re.search(r"\bchoose\(", path.read_text())
    ]
    # A search among machines plans one after another, with bounds that they share.
    many = Path("zosim/applications/buying/machine.py")
    assert sorted(asking) == [many, Path("zosim/planning/planner.py"), Path("zosim/planning/resolve.py")]


def test_a_command_may_have_defaults_of_its_own_for_declared_options() -> None:
    usual = PlanConfig(batch=8)

    @with_settings(PlanConfig, only=("batch", "seq", "eps"), usual=usual)
    def command(**settings: object) -> None: ...

    options = inspect.signature(command).parameters
    assert list(options) == ["batch", "seq", "eps"]
    shown = {name: option.annotation.__metadata__[0].show_default for name, option in options.items()}
    assert (shown["batch"], shown["eps"]) == ("8", "0.001")
    assert merge(usual, config_of(PlanConfig, {"seq": 5})).set_fields() == {"batch": 8, "seq": 5}
