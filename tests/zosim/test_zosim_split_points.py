from tests.support.requests import request_for, set_in

"""Where models are split into stages, and what the planner makes of it."""

import json
from dataclasses import replace

import pytest

from costmodel import read_model_spec
from costmodel.formats.codecs import codec_spec
from costmodel.formats.symbols import TensorSymbols
from topology import load_preset
from topology.errors import PlanError
from zosim.planning.pipelining import pipelining
from zosim.planning.planner import candidates, choose
from zosim.planning.space import pipeline_of
from zosim.planning.split_options import (
    SplitOptions,
    read_densities,
    sparsest_near_the_middle,
    split_options_of,
)
from zosim.planning.split_search import Ranking
from zosim.plans import Mesh, Placement, Split

MODEL = "opt-125m"


def request(hardware, split_options=None, *, mesh=None, perturbations=2, **fields):
    topology = load_preset(hardware)
    fixed = {
        "estimator": {"num_perturbations": perturbations},
        "directions": {"rng": "counter"},
        **fields.pop("fixed", {"residency": {"blocks": "resident"}}),
    }
    return request_for(
        read_model_spec(MODEL),
        topology,
        batch=4,
        seq=64,
        method="sparq",
        mesh=mesh or Mesh(stage=2),
        split_options=split_options or split_options_of(MODEL),
        fixed=fixed,
        **fields,
    )


def ranking(hardware, split_options, mesh):
    requested = request(hardware, split_options, mesh=mesh)
    devices = tuple(node.id for node in requested.hardware.topology.compute_devices[: mesh.world_size])
    placement = Placement(topology=requested.hardware.name, devices=devices)
    return Ranking(pipeline_of(requested, mesh, placement), split_options)


def test_without_split_points_the_stages_are_balanced():
    fixed = {"residency": {"blocks": "resident"}, "schedule": {"traversal": "full"}}
    decision = choose(request("dgx-h100", fixed=fixed))
    (split_point,) = decision.chosen.plan.split.split_points
    assert split_point in {"block.4", "block.5", "block.6"}
    assert any(candidate.is_simulated for candidate in decision.others)


@pytest.mark.slow
def test_bounds_of_candidates_are_below_what_is_simulated():
    listed = list(
        candidates(
            request("cpu-cluster-1gbit", split_options_of(MODEL, Split(split_points=("block.5.mlp",))))
        )
    )
    assert {candidate.plan.schedule.traversal for candidate in listed} == {"full", "blockwise"}
    for candidate in listed:
        assert candidate.seconds <= candidate.planned.step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_codec_pays_on_a_slow_link_and_not_on_a_fast_one():
    fixed = {"residency": {"blocks": "resident"}, "schedule": {"traversal": "full"}}

    def step(hardware, codec):
        split = Split(split_points=("block.5.mlp",), codec=codec, residual_codec=codec)
        chosen = choose(
            request(hardware, split_options_of(MODEL, split), allow_lossy=True, fixed=fixed)
        ).chosen
        return chosen.seconds, chosen.plan.split.codec

    assert step("cpu-cluster-1gbit", "q4")[0] < step("cpu-cluster-1gbit", "none")[0]
    seconds, codec = step("dgx-h100", "q4")
    assert seconds > 0.999 * step("dgx-h100", "none")[0]
    # Over NVLink the cheapest to run is chosen, dense; never one that works for fewer bytes.
    assert codec.endswith(":dense")


def test_a_codec_needs_leave_to_lose():
    split_options = split_options_of(MODEL, Split(codec="q4"))
    with pytest.raises(PlanError, match="are lossy"):
        choose(request("cpu-cluster-1gbit", split_options))


def test_each_stage_takes_its_own_memory():
    ranks = choose(
        request("dgx-h100", split_options_of(MODEL, Split(split_points=("block.2",))))
    ).chosen.footprints.ranks
    weights = [
        next(
            part.size_bytes for part in taken.components if part.name == "weights" and part.where == "device"
        )
        for taken in ranks
    ]
    spec = read_model_spec(MODEL)
    first = {"embed", *(f"block.{index}" for index in range(3))}
    expected = [
        4 * sum(group.num_parameters for group in spec.param_groups if first & set(group.segments)),
        4 * sum(group.num_parameters for group in spec.param_groups if set(group.segments) - first),
    ]
    # Both hold a tied table.
    # Buffers are padded, tensor by tensor.
    assert weights == pytest.approx(expected, rel=1e-4)


def test_stages_stand_beside_data_and_perturb():
    for text in ("data=2,stage=2", "perturb=2,stage=2"):
        fixed = {"residency": {"blocks": "resident"}, "schedule": {"traversal": "full"}}
        split_options = split_options_of(MODEL, Split(split_points=("block.5",)))
        plan = choose(request("dgx-h100", split_options, mesh=Mesh.parse(text), fixed=fixed)).chosen.plan
        assert plan.placement.world_size == 4
        assert len(plan.split.split_points) == 1


@pytest.mark.parametrize("num_stages", [3, 4])
def test_split_points_found_one_after_the_other_are_the_best_of_all(num_stages):
    import itertools

    split_options = split_options_of(MODEL)
    ranked = ranking("dgx-h100", split_options, Mesh(stage=num_stages))
    between = [name for name in ranked._costs.names if not name.endswith(".mlp")]
    all_of_them = itertools.combinations(between, num_stages - 1)
    least = min(ranked.bound_s(split_points) for split_points in all_of_them)
    found = min(ranked.bound_s(split_points) for split_points in ranked.best())
    assert found <= least * (1 + 1e-9)


def test_the_papers_choice_is_the_sparsest_near_the_middle():
    names = [f"block.{index}{part}" for index in range(12) for part in (".mlp", "")]
    densities = {f"block.{index}.mlp": 0.5 for index in range(12)}
    densities |= {"block.0.mlp": 0.01, "block.7.mlp": 0.1}
    assert sparsest_near_the_middle(names, densities, 2) == ("block.7.mlp",)
    assert sparsest_near_the_middle(names, {}, 2) == ()


@pytest.mark.parametrize("names", [("split_point", "tensor"), ("cut", "crossing")], ids=["now", "earlier"])
def test_densities_are_read_from_a_probe(tmp_path, names):
    path = tmp_path / "probe.json"
    entries = [
        {
            **dict(zip(names, (split_point, tensor), strict=True)),
            "codec": codec,
            "nonzero": 0.3,
            "kept": kept,
            "entropy_bits": entropy,
        }
        for split_point, tensor, codec, kept, entropy in [
            ("block.5.mlp", "residual", "q8", 0.9, 5.0),
            ("block.5.mlp", "residual", "q4", 0.6, 2.5),
            ("block.5.mlp", "activation", "q4:bitmap", 0.2, 0.7),
            ("block.5", "hidden", "q4", 0.8, 3.0),
        ]
    ]
    path.write_text(json.dumps({"tensors": entries}))
    split_options = SplitOptions(densities=read_densities(path))
    assert sparsest_near_the_middle(["block.5.mlp"], split_options.densities, 2) == ("block.5.mlp",)
    q4, q8 = codec_spec("q4:entropy"), codec_spec("q8")
    # Each tensor as its own codec leaves it, whatever the encoding.
    inside = split_options.symbols("block.5.mlp", q4, q8)
    assert inside.first == TensorSymbols(density=0.2, entropy_bits=0.7)
    assert inside.residual == TensorSymbols(density=0.9, entropy_bits=5.0)
    behind = split_options.symbols("block.5", q8, q4)
    assert (behind.first, behind.residual) == (TensorSymbols(density=0.8, entropy_bits=3.0), None)
    with pytest.raises(PlanError, match=r"block\.5\.mlp: the probe did not measure codec q8:.* only q4:"):
        split_options.symbols("block.5.mlp", q8, q8)
    path.write_text(json.dumps({"inside block 5": 0.2}))
    with pytest.raises(PlanError, match="'inside block 5' is not the name of a split point"):
        SplitOptions(densities=read_densities(path))
    path.write_text("[1]")
    with pytest.raises(PlanError, match="it holds no JSON object"):
        read_densities(path)


def test_a_saved_model_is_split_between_its_blocks():
    whole = read_model_spec(MODEL)
    with pytest.raises(PlanError, match="was saved with split points inside"):
        SplitOptions().split(whole, ("block.3.mlp",))
    assert SplitOptions().split(whole, ("block.3",)) is whole


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(("difference", "per_boundary"), [("forward", 3), ("central", 4)])
def test_a_step_sends_as_many_activations_as_print_counts(difference, per_boundary):
    fixed = {"residency": {"blocks": "resident"}, "schedule": {"traversal": "full"}}
    requested = request(
        "dgx-h100",
        split_options_of(MODEL, Split(split_points=("block.3", "block.7"))),
        mesh=Mesh(stage=3),
        fixed=fixed,
    )
    requested = requested.over(set_in(estimator={"num_perturbations": 2, "difference": difference}))
    decision = choose(requested)
    planned = decision.chosen.planned
    found = pipelining(planned)
    # (P + 1)(M - 1) and 2P(M - 1), for P = 2 and M = 3.
    assert sum(boundary.num_messages for boundary in found.boundaries) == 2 * per_boundary
    assert any(f"(M - 1) gives {2 * per_boundary}" in reason for reason in decision.reasons)
    # The residual stream, 4 sequences of 64 tokens in float32, and a header.
    least = 4 * 64 * planned.plan.model.hidden_size * 4
    for boundary in found.boundaries:
        assert (
            least
            <= boundary.size_bytes / boundary.num_messages
            <= boundary.most_bytes / boundary.num_messages
            < least + 100
        )
    assert all(0 < share < 1 for share in found.bubbles)
    assert any("bubble" in reason for reason in decision.reasons)


@pytest.mark.slow
def test_the_papers_choice_is_held_against_the_chosen_one():
    densities = {"block.5.mlp": 0.5, "block.6.mlp": 0.1}
    fixed = {"residency": {"blocks": "resident"}, "schedule": {"traversal": "full"}}
    split_options = replace(split_options_of(MODEL), densities=densities)
    decision = choose(request("cpu-cluster-1gbit", split_options, fixed=fixed))
    assert decision.printed_split_points == ("block.6.mlp",)
    assert any("SparQ's rule" in reason for reason in decision.reasons)
    assert any("second best split point" in reason for reason in decision.reasons)


def test_split_points_need_stages():
    with pytest.raises(PlanError, match="needs several stages"):
        request_for(
            read_model_spec(MODEL),
            load_preset("dgx-h100"),
            split_options=split_options_of(MODEL, Split(split_points=("block.5",))),
        )
