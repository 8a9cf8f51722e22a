"""Sketches against what they stand for: the closed form of the whole program, and its memory to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from costmodel import read_model_spec, spec_of_config
from costmodel.models.model_spec import ModelSpec
from topology import load_preset
from zosim.hardware.machine import Machine
from zosim.hardware.machines import machines_for
from zosim.hardware.profiles import profile_for
from zosim.lowering import lower, lower_all
from zosim.planning.block_bound import BlockBounder, whole_world
from zosim.planning.footprint import footprint
from zosim.plans import Estimator, Mesh, Perturbations, Placement, Plan, Residency, Schedule, Weights
from zosim.simulators.closed_form import step_time_bound, step_time_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import periodic_step_s
from zosim.simulators.world import World, at_own_speeds

HALF = Weights(dtype="float16")
MODELS = ["opt-125m", "opt-350m", "qwen3-0.6b"]


def plan(model: ModelSpec, residency: Residency, **axes: object) -> Plan:
    return Plan.model_validate(
        {
            "model": model,
            "placement": Placement(topology="a100-80gb-milan", devices=("gpu0",)),
            "batch": 2,
            "seq": 64,
            "weights": HALF,
            "residency": residency,
            **axes,
        }
    )


def points() -> Iterator[dict[str, Any]]:
    offloaded, delayed = Residency(blocks="offloaded"), Schedule(update="delayed")
    ahead, kept = Perturbations(sampled_ahead=True), Perturbations(kept=True)
    full_pass, copies = Schedule(traversal="full"), Weights(dtype="float16", perturbation="copies")
    for update in ("immediate", "delayed"):
        schedule = Schedule(update=update)
        yield {"residency": Residency(), "schedule": schedule}
        for num_buffers in (1, 2, 3):
            yield {
                "residency": Residency(blocks="offloaded", num_staging_buffers=num_buffers),
                "schedule": schedule,
            }
    yield {"residency": Residency(), "schedule": full_pass}
    yield {
        "residency": Residency(blocks="offloaded", num_resident_blocks=5),
        "schedule": delayed,
        "perturbations": ahead,
    }
    yield {"residency": Residency(blocks="offloaded", overlap=False), "schedule": delayed}
    yield {"residency": Residency(blocks="offloaded", reuse_staging_buffers=False), "schedule": delayed}
    yield {"residency": offloaded, "schedule": delayed, "perturbations": ahead}
    yield {"residency": Residency(), "perturbations": kept}
    for perturbations in (Perturbations(), ahead):
        yield {"residency": Residency(), "weights": copies, "perturbations": perturbations}
        yield {
            "residency": Residency(),
            "weights": copies,
            "perturbations": perturbations,
            "schedule": full_pass,
        }
        yield {"residency": offloaded, "weights": copies, "perturbations": perturbations, "schedule": delayed}
    yield {"residency": offloaded, "schedule": delayed, "perturbations": kept}
    yield {"residency": Residency(), "schedule": full_pass, "perturbations": kept}


@pytest.fixture(scope="module")
def machine() -> Machine:
    topology = load_preset("a100-80gb-milan")
    return Machine.from_topology(topology, "gpu0", profile_for(topology, "gpu0"))


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize(
    ("name", "point"),
    list(product(MODELS[:1], points())) + [(m, p) for m in MODELS[1:] for p in list(points())[2:4]],
)
def test_a_sketch_bounds_the_closed_form_and_knows_the_memory(
    machine: Machine, name: str, point: dict[str, Any]
) -> None:
    whole = plan(read_model_spec(name), **point)
    made, program = BlockBounder(whole.model).bound(whole, 0, machine), lower(whole)
    closed_s = step_time_bound(program, machine)
    # Equal but for what full passes wait for in the pass before: draws and copies ahead of their turn.
    is_apart = whole.perturbations.sampled_ahead and whole.schedule.traversal == "full"
    share = 0.5 if is_apart else 1 - 1e-9
    assert share * closed_s <= made.period_s <= closed_s * (1 + 1e-9)
    assert made.footprint == footprint(program, machine.profile)
    assert made.num_instructions == len(program.step)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("difference", ["central", "forward"])
def test_it_holds_for_other_estimators(machine: Machine, queries: int, difference: str) -> None:
    estimator = Estimator(num_perturbations=queries, difference=difference)
    whole = plan(
        read_model_spec("opt-125m"),
        Residency(blocks="offloaded"),
        schedule=Schedule(update="delayed"),
        estimator=estimator,
    )
    made = BlockBounder(whole.model).bound(whole, 0, machine)
    assert made.period_s == pytest.approx(step_time_bound(lower(whole), machine), rel=1e-9)


def test_blocks_that_are_unlike_are_written_out(machine: Machine) -> None:
    model = read_model_spec("opt-125m")
    frozen = tuple(
        g.model_copy(update={"num_trainable": 0, "num_trainable_tensors": 0, "largest_trainable_tensor": 0})
        if g.name == "block.3"
        else g
        for g in model.param_groups
    )
    unlike = ModelSpec(**{**dict(model), "param_groups": frozen})
    whole = plan(unlike, Residency(blocks="offloaded"), schedule=Schedule(update="delayed"))
    made, program = BlockBounder(unlike).bound(whole, 0, machine), lower(whole)
    assert made.num_instructions == len(program.step)
    assert made.period_s == pytest.approx(step_time_bound(program, machine), rel=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
        {
            "model_type": "qwen2_moe",
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0, 3],
        },
    ],
    ids=["windows", "experts"],
)
def test_blocks_of_other_windows_or_without_experts_are_unlike(
    machine: Machine, config: dict[str, Any]
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 7,
        "vocab_size": 500,
    }
    model = spec_of_config({**sizes, **config}, name="mixed")
    whole = plan(model, Residency(blocks="offloaded"), schedule=Schedule(update="delayed"))
    made, program = BlockBounder(model).bound(whole, 0, machine), lower(whole)
    blocks = {
        item.work.flops for item in program.step if item.id.startswith("block") and "/forward" in item.id
    }
    assert len(blocks) == 2
    assert made.period_s == pytest.approx(step_time_bound(program, machine), rel=1e-9)
    assert made.footprint == footprint(program, machine.profile)


@pytest.mark.parametrize("transfers", ["private", "shared", "sliced"])
def test_ranks_are_sketched_with_their_exchanges(transfers: str) -> None:
    topology = load_preset("h20-4x-milan")
    devices = ("gpu0", "gpu1", "gpu2", "gpu3")
    whole = plan(
        read_model_spec("opt-125m"),
        Residency(blocks="offloaded", transfers=transfers),
        schedule=Schedule(update="delayed"),
        mesh=Mesh(data=2, perturb=2),
        placement=Placement(topology="h20-4x-milan", devices=devices),
        batch=3,
    )
    profile = profile_for(topology, "gpu0")
    machines = machines_for(topology, devices, profile, whole.process_groups)
    bounder, programs = BlockBounder(whole.model), lower_all(whole)
    block_bounds = [bounder.bound(whole, rank, machines[rank]) for rank in range(4)]
    for rank, made in enumerate(block_bounds):
        assert made.footprint == footprint(programs.program_of(rank), profile)
    simulated_s = periodic_step_s(World.of(programs, machines))
    longest_s = max(made.period_s for made in block_bounds)
    assert 0.5 * simulated_s < longest_s <= simulated_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mesh", "residency", "perturbations"),
    [
        # Every copy takes as long as its link, which both ranks share, lets it: the closed form.
        (Mesh(data=2), Residency(blocks="offloaded", num_resident_blocks=5), Perturbations()),
        # What is drawn ahead takes its share of the device; ranks at unlike points meet at every block.
        (
            Mesh(data=2, perturb=2),
            Residency(blocks="offloaded", num_staging_buffers=2, transfers="sliced"),
            Perturbations(sampled_ahead=True),
        ),
    ],
    ids=["closed", "events"],
)
def test_few_blocks_written_out_take_as_long_as_the_lowered_plan(
    mesh: Mesh, residency: Residency, perturbations: Perturbations
) -> None:
    topology = load_preset("h20-4x-milan")
    devices = tuple(f"gpu{number}" for number in range(mesh.world_size))
    whole = plan(
        read_model_spec("opt-125m"),
        residency,
        schedule=Schedule(update="delayed"),
        mesh=mesh,
        perturbations=perturbations,
        placement=Placement(topology="h20-4x-milan", devices=devices),
    )
    machines = machines_for(topology, devices, profile_for(topology, "gpu0"), whole.process_groups)
    world = whole_world(whole, BlockBounder(whole.model), machines)
    lowered = fold(World.of(lower_all(whole), machines))
    assert world is not None
    assert world.counts == lowered.counts
    assert (at_own_speeds(world) is not None) == (perturbations == Perturbations())
    expected_s = periodic_step_s(lowered)
    assert step_time_of(world) == pytest.approx(expected_s, rel=1e-9)
    assert periodic_step_s(world) == pytest.approx(expected_s, rel=1e-9)
