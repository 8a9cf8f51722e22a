"""Stages among the plans of ``--method auto``: when they are chosen, with which codecs, and at what cost of planning."""

from __future__ import annotations

import pytest

import zosim
from costmodel import read_model_spec
from tests.support.requests import request_for
from topology import load_preset
from topology.errors import PlanError
from zosim.planning.planner import Request, choose
from zosim.planning.split_options import split_options_of
from zosim.planning.variants import shapes
from zosim.plans import Estimator, Perturbations, Split, Weights

HALF = Weights(dtype="float16")
SINGLE = Weights()
COUNTER = {"estimator": Estimator(num_perturbations=4), "perturbations": Perturbations(rng="counter")}


def request(hardware: str, model: str = "opt-125m", *, codec: str = "none", **fields) -> Request:
    topology = load_preset(hardware)
    most = len(topology.compute_devices)
    fields = {"batch": 4, "seq": 64, "weights": HALF, "max_ranks": most} | fields
    split_options = split_options_of(model, Split(codec=codec, residual_codec=codec))
    return request_for(read_model_spec(model), topology, split_options=split_options, **fields)


def test_a_model_too_large_for_one_device_is_split_in_place_of_offloaded() -> None:
    """26 GB of weights on two cards of 24 GB each, which are fed over PCIe."""
    decision = choose(request("rtx4090-2x", "opt-13b", batch=1, seq=512))
    plan = decision.chosen.plan
    assert (plan.mesh.stage, plan.residency.blocks, plan.schedule.traversal) == (2, "resident", "full")
    whole = min(c.seconds for c in decision.others if c.plan.mesh.stage == 1)
    assert whole > 2 * decision.chosen.seconds
    assert not plan.split.is_lossy


@pytest.mark.slow
def test_stages_are_told_of_where_they_lose() -> None:
    decision = choose(request("dgx-h100", "opt-1.3b", seq=2048, batch=64))
    assert decision.chosen.plan.mesh.stage == 1
    (line,) = (reason for reason in decision.reasons if reason.startswith("other meshes"))
    assert "stage=" in line


@pytest.mark.crossed(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "rng"),
    [
        ("dgx-h100", "counter"),
        pytest.param("cpu-cluster-1gbit", "mezo", marks=pytest.mark.slow),
        pytest.param("dgx-h100", "mezo", marks=pytest.mark.slow),
        pytest.param("cpu-cluster-1gbit", "counter", marks=pytest.mark.slow),
    ],
)
def test_bounds_of_pipelines_hold_and_are_close(hardware: str, rng: str) -> None:
    requested = request(
        hardware,
        estimator=Estimator(num_perturbations=2),
        perturbations=Perturbations(rng=rng),
        weights=SINGLE,
        max_ranks=4,
    )
    decision = choose(requested)
    staged = [c for c in (decision.chosen, *decision.others) if c.plan.mesh.stage > 1]
    assert staged
    for candidate in staged:
        simulated_s = candidate.planned.step_time_s
        assert candidate.bound.seconds <= simulated_s * (1 + 1e-9)
        # What ranks of one host take from each other is all that a bound leaves out.
        assert candidate.bound.seconds >= 0.8 * simulated_s


def test_a_plan_is_sought_among_few_meshes_of_stages() -> None:
    meshes = {shape.mesh for shape in shapes(request("dgx-h100")) if shape.mesh.stage > 1}
    assert 1 <= len(meshes) <= 4


def codecs(requested: Request) -> set[str]:
    """Return the codecs of the shapes of several stages."""
    staged = (shape for shape in shapes(requested) if shape.mesh.stage > 1)
    return {shape.split.residual_codec.split(":")[0] for shape in staged}


def test_a_codec_is_tried_only_if_it_is_asked_for() -> None:
    requested = request("cpu-cluster-1gbit", **COUNTER, weights=SINGLE, allow_lossy=True)
    assert codecs(requested) == {"none"}
    with pytest.raises(PlanError, match="are lossy"):
        choose(request("cpu-cluster-1gbit", codec="q8", weights=SINGLE))


@pytest.mark.slow
def test_over_a_slow_link_stages_send_by_the_codec_that_is_asked_for() -> None:
    slow = request(
        "cpu-cluster-1gbit",
        codec="q4",
        **COUNTER,
        weights=SINGLE,
        batch=16,
        allow_lossy=True,
    )
    assert codecs(slow) == {"q4"}
    chosen = choose(slow).chosen.plan
    assert chosen.mesh.stage > 1
    assert chosen.split.is_lossy


def test_sparq_without_a_mesh_finds_one() -> None:
    plan = choose(request("rtx4090-2x", method="sparq")).chosen.plan
    assert plan.mesh.stage == 2
    with pytest.raises(PlanError, match="needs at least 2 ranks"):
        choose(request("h200-1x", method="sparq"))


@pytest.mark.parametrize(
    "settings", [{"mesh": "stage=2"}, {"method": "sparq"}, {"mesh": "stage=2", "traversal": "full"}]
)
def test_text_is_refused_for_the_stages_that_were_asked_for_and_not_for_where_blocks_might_be(settings):
    with pytest.raises(PlanError, match="text cannot be generated with split points or stages"):
        zosim.plan("opt-125m", "rtx4090-2x", batch=2, seq=16, max_new_tokens=4, **settings)
