"""Weights in few bits among what the planner looks at, where loss is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel import read_model_spec
from costmodel.devices.prices import shipped_prices
from tests.support.requests import request_for, set_in
from topology.documents import load_preset
from topology.errors import PlanError
from zosim.applications.buying.machine import Job
from zosim.applications.buying.offers import BuyerLimits, Market
from zosim.applications.buying.search import OfferSearch
from zosim.config import merge
from zosim.lowering import lower
from zosim.planning.planner import Request, choose, placements
from zosim.plans import Mesh
from zosim.program.instructions import Stream

GIB = 1 << 30
A100 = load_preset("a100-80gb-milan")


def request(model="opt-13b", **more) -> Request:
    options = {"batch": 1, "seq": 128, "fixed": {"weights": {"dtype": "float16"}}} | more
    return request_for(read_model_spec(model), A100, **options)


def quantized(plans):
    return {plan.low_bits.weights for plan in plans}


def test_qvalues_are_looked_at_only_where_loss_is_allowed():
    assert quantized(placements(request("opt-1.3b"))) == {"none"}
    assert quantized(placements(request("opt-1.3b", allow_lossy=True))) == {"none", "int8", "int4"}


def test_stages_may_be_quantized():
    """Of two devices none holds half of the model in 16 bits."""
    fixed = {
        "weights": {"dtype": "float16"},
        "residency": {"blocks": "resident"},
        "perturbations": {"sampled_ahead": False, "kept": False},
        "schedule": {"traversal": "blockwise", "update": "immediate"},
    }
    requested = request_for(
        read_model_spec("opt-1.3b"),
        load_preset("rtx4090-2x"),
        batch=1,
        seq=32,
        max_ranks=2,
        mesh=Mesh(stage=2),
        max_device_bytes=9 * GIB // 4,
        allow_lossy=True,
        fixed=fixed,
    )
    plan = choose(requested).chosen.plan
    assert (plan.num_stages, plan.low_bits.weights) in {(2, "int8"), (2, "int4")}


def test_a_format_that_is_fixed_stays():
    for weights in ("none", "int8"):
        fixed = {"weights": {"dtype": "float16"}, "low_bits": {"weights": weights}}
        assert quantized(placements(request("opt-1.3b", allow_lossy=True, fixed=fixed))) == {weights}


def test_layers_that_a_model_keeps_transposed_are_quantized_too():
    assert quantized(placements(request("gpt2", allow_lossy=True))) == {"none", "int8", "int4"}


@pytest.mark.slow
def test_qvalues_are_chosen_where_the_bus_limits_and_memory_is_short():
    """Half the bytes over PCIe, and staging buffers that fit where those of fp16 beside fp8 staging do not."""
    requested = request(max_device_bytes=3 * GIB, allow_lossy=True)
    decision = choose(requested)
    plan = decision.chosen.plan
    assert (plan.low_bits.weights, plan.residency.blocks) == ("int8", "offloaded")
    plain = choose(requested.over(set_in(allow_lossy=False)))
    assert "pcie" in plain.reasons[0]
    assert decision.chosen.seconds < 0.85 * plain.chosen.seconds
    (words,) = [reason for reason in decision.reasons if reason.startswith("with float16 linear layers")]
    assert "slower" in words
    assert "int_mm of int8 per token inputs" in decision.reasons[0]


def test_transfers_of_qvalues_are_half_or_a_quarter():
    plain, qvalues = {}, {}
    for plan in placements(request(method="zo2", allow_lossy=True)):
        (qvalues if plan.low_bits.quantizes_weights else plain)[
            plan.low_bits.weights, plan.transfer_dtype
        ] = plan

    def moved(plan):
        return sum(item.work.copy_bytes for item in lower(plan).step if item.stream is Stream.D2H)

    whole = moved(plain["none", "float16"])
    assert moved(qvalues["int8", "float16"]) / whole == pytest.approx(0.5, rel=0.01)
    assert moved(qvalues["int4", "float16"]) / whole == pytest.approx(0.25 + 1 / 128, rel=0.01)


def test_a_machine_too_small_for_half_precision_is_an_offer_in_few_bits():
    job = Job(set_in(model=read_model_spec("llama-2-70b"), seq=128, method="mezo"), num_steps=10)
    refused, offered = (
        OfferSearch(
            Market(
                replace(job, config=merge(job.config, set_in(allow_lossy=lossy))),
                shipped_prices(),
                BuyerLimits(),
            ),
            [("a100-80gb-milan", A100)],
            (1,),
            1,
        ).planned
        for lossy in (False, True)
    )
    assert not refused
    assert quantized([offered[0].machine.best.plan]) <= {"int8", "int4"}


def test_e4m3_products_are_planned_where_a_data_sheet_has_them():
    float8 = {"weights": "float8_e4m3", "activations": "float8-token", "perturbation_bits": 5}
    with pytest.raises(PlanError, match="has no float8 matrix units"):
        request("opt-1.3b", fixed={"low_bits": float8})
    replaced = request("opt-1.3b", fixed={"low_bits": float8 | {"fallback": True}})
    assert replaced.config.low_bits.kernel == "dequantize"
    h200 = load_preset("h200-1x")
    hopper = request_for(read_model_spec("opt-1.3b"), h200, seq=128, low_bits=float8)
    plan = choose(hopper).chosen.plan
    kinds = {product.format for instruction in lower(plan).step for product in instruction.work.matmuls}
    assert (plan.low_bits.product, "float8_e4m3" in kinds) == ("scaled_mm", True)
