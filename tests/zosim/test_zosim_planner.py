"""The planner: best of what fits, by its own simulator, and honest about what does not."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from costmodel import read_model_spec, spec_of_config
from costmodel.models.model_spec import ModelSpec
from tests.support.requests import request_for
from topology import load_preset
from topology.errors import DoesNotFit, PlanError
from zosim.hardware.profiles import profile_for, save_host_profile
from zosim.planning.explain import ALIKE
from zosim.planning.planner import Decision, Request, choose, placements
from zosim.planning.predict import PlannedRun
from zosim.planning.views import prediction_view
from zosim.plans import ForwardPass, Plan, Residency, Weights

GIB = 2**30


def request(
    model: str = "opt-1.3b", hardware: str = "a100-80gb-milan", dtype: str = "float16", **fields
) -> Request:
    topology = load_preset(hardware)
    device = topology.compute_devices[0].id
    fields.setdefault("weights", Weights(dtype=dtype))
    fields = {"batch": 1, "seq": 512} | fields
    return request_for(read_model_spec(model), topology, profile=profile_for(topology, device), **fields)


@cache
def decision_for(max_device_bytes: int | None = None, *, copies: bool = False) -> Decision:
    fixed = {"weights": {"perturbation": "copies"}} if copies else None
    return choose(request(max_device_bytes=max_device_bytes, fixed=fixed))


def simulated_s(requested: Request, plan: Plan) -> float:
    return PlannedRun(plan, requested.hardware.topology, requested.hardware.profile).timeline.step_time_s


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("limit", [None, 2 * GIB])
def test_the_choice_is_the_best_of_a_full_search(limit: int | None) -> None:
    requested = request(max_device_bytes=limit)
    decision = decision_for(limit)
    fitting = [p for p in placements(requested) if p in [c.plan for c in (decision.chosen, *decision.others)]]
    best = min(simulated_s(requested, plan) for plan in fitting)
    # A full search knows no plan with some blocks on the device: one is faster where not all have space.
    is_mixed = decision.plan.residency.num_resident_blocks is not None
    assert is_mixed == (limit is not None)
    assert decision.prediction.step_time_s <= best * (1 + 1e-12)
    assert is_mixed or decision.prediction.step_time_s == pytest.approx(best, rel=1e-12)


def weights_of(decision: Decision) -> dict[tuple[str, bool], float]:
    """Return the least seconds, simulated or bounded, of the ways to the points that were looked at and fit."""
    found: dict[tuple[str, bool], float] = {}
    for candidate in (decision.chosen, *decision.others):
        plan = candidate.plan
        found.setdefault((plan.weights.perturbation, plan.perturbations.sampled_ahead), candidate.seconds)
    return found


@pytest.mark.slow
def test_copies_are_looked_at_where_they_are_asked_for_and_written_ahead_where_that_is_faster() -> None:
    serial = weights_of(decision_for())
    copies = weights_of(decision_for(copies=True))
    assert set(serial) == {("serial", False), ("serial", True)}
    assert set(copies) == {("copies", False), ("copies", True)}
    assert copies["copies", True] < serial["serial", False]
    chosen = decision_for(copies=True).chosen
    assert chosen.seconds == min(copies.values())


def test_copies_are_written_ahead_only_where_memory_admits_it() -> None:
    free = decision_for(copies=True).chosen
    limit = free.footprints.largest.device_bytes - 1
    tight = decision_for(limit, copies=True).chosen
    assert tight.footprints.largest.device_bytes <= limit
    assert tight.seconds >= free.seconds * (1 - ALIKE)
    assert tight.plan != free.plan


def test_a_limit_makes_the_planner_offload_and_the_limit_is_kept() -> None:
    free, tight = decision_for(), decision_for(2 * GIB)
    assert free.chosen.plan.residency.blocks == "resident"
    assert tight.chosen.plan.residency.blocks == "offloaded"
    assert tight.chosen.planned.footprint.device_bytes <= 2 * GIB
    assert any("would be faster but does not fit" in reason for reason in tight.reasons)


@pytest.mark.slow
def test_more_memory_never_makes_the_best_plan_slower() -> None:
    times = []
    for limit_gib in (1.6, 1.8, 2.4, 4, 8):
        prediction = decision_for(int(limit_gib * GIB)).prediction
        assert prediction is not None
        times.append(prediction.step_time_s)
    assert all(more <= less * (1 + ALIKE) for less, more in pairwise(times))


def test_the_interval_holds_the_prediction() -> None:
    prediction = decision_for().prediction
    assert prediction is not None
    assert prediction.low_s < prediction.step_time_s < prediction.high_s


def test_the_interval_of_a_mixture_is_wider_until_its_routing_is_measured() -> None:
    def relative_width(model: ModelSpec) -> float:
        requested = request_for(model, topology, profile=profile_for(topology, "gpu0"), batch=1, seq=32)
        planned = PlannedRun(next(iter(placements(requested))), topology, requested.hardware.profile)
        assert planned.prediction.low_s < planned.step_time_s < planned.prediction.high_s
        shown = dict(prediction_view(planned).rows)["experts"]
        assert ("shares measured" in shown) == bool(model.experts.shares)
        return planned.prediction.low_s / planned.step_time_s

    topology = load_preset("a100-80gb-milan")
    assumed = spec_of_config({"model_type": "olmoe", "num_hidden_layers": 4}, name="mixture")
    row = (1.0,) * 64
    measured = assumed.experts.model_copy(update={"shares": (row,), "share_errors": ((0.0,) * 64,)})
    assert relative_width(assumed) < 0.9 * relative_width(assumed.model_copy(update={"experts": measured}))


def test_the_footprint_bounds_the_simulated_memory_closely() -> None:
    from zosim.program.instructions import Space

    for limit in (None, 2 * GIB):
        planned = decision_for(limit).chosen.planned
        simulated = planned.timeline.peak_memory(Space.DEVICE).size_bytes
        runtime = sum(
            p.size_bytes
            for p in planned.footprint.components
            if p.name in ("runtime context", "allocator slack")
        )
        declared = planned.footprint.device_bytes - runtime
        assert simulated <= declared <= 1.1 * simulated


def test_nothing_fits_names_the_closest_and_what_it_lacks() -> None:
    with pytest.raises(
        DoesNotFit, match=r"closest \(zo2.*, 1 staging buffer.*needs .* more than 512 MiB"
    ) as caught:
        choose(request(max_device_bytes=GIB // 2))
    assert caught.value.hint is not None


@pytest.mark.slow
def test_a_chunked_loss_is_used_only_where_it_is_needed() -> None:
    requested = request(batch=8, seq=2048)
    assert choose(requested).chosen.plan.forward.loss_chunk_tokens is None
    tight = choose(request(batch=8, seq=2048, max_device_bytes=int(5.0 * GIB)))
    assert tight.chosen.plan.forward.loss_chunk_tokens is not None


def test_plans_compute_the_same_thing_unless_loss_is_allowed() -> None:
    requested = request(dtype="float32", method="zo2")
    assert all(not plan.is_transfer_lossy for plan in placements(requested))
    lossy = {
        plan.transfer_dtype for plan in placements(request(dtype="float32", method="zo2", allow_lossy=True))
    }
    assert lossy == {"float32", "float16", "bfloat16", "float8_e4m3"}


def test_a_narrower_transfer_needs_permission() -> None:
    narrow = Residency(transfer_dtype="float16")
    with pytest.raises(PlanError, match="loses precision"):
        choose(request(dtype="float32", residency=narrow))


@pytest.mark.slow
def test_narrower_transfers_help_exactly_where_the_bus_limits() -> None:
    wide = choose(request(dtype="float32", method="zo2", forward=ForwardPass(compute_dtype="tf32"), seq=128))
    lossy = choose(
        request(
            dtype="float32",
            method="zo2",
            forward=ForwardPass(compute_dtype="tf32"),
            seq=128,
            allow_lossy=True,
        )
    )
    assert "pcie" in wide.reasons[0]
    assert "lossy" in lossy.chosen.describe()
    assert lossy.chosen.seconds < 0.6 * wide.chosen.seconds


def test_methods_restrict_the_residency() -> None:
    assert {p.residency.blocks for p in placements(request(method="mezo"))} == {"resident"}
    assert {p.residency.blocks for p in placements(request(method="zo2"))} == {"offloaded"}


@pytest.mark.slow
def test_ablations_are_fixed_fields_and_each_costs_what_it_removes() -> None:
    def seconds(**fixed) -> float:
        return choose(request(method="zo2", fixed=fixed, dtype="float32")).chosen.seconds

    whole = seconds()
    assert seconds(residency={"overlap": False}) > 1.5 * whole
    assert seconds(residency={"reuse_staging_buffers": False}) > whole
    assert seconds(schedule={"update": "immediate"}) > 1.3 * whole
    assert seconds(residency={"num_staging_buffers": 1}) > 1.5 * whole


def test_what_is_fixed_is_never_traded_away() -> None:
    requested = request(fixed={"schedule": {"traversal": "full"}})
    assert {plan.schedule.traversal for plan in placements(requested)} == {"full"}


def test_a_fixed_field_that_no_plan_can_have_is_refused() -> None:
    with pytest.raises(PlanError, match="--traversal full"):
        choose(request(method="zo2", fixed={"schedule": {"traversal": "full"}}))
    with pytest.raises(PlanError, match=r"must be one of 'immediate' or 'delayed'"):
        choose(request(fixed={"schedule": {"update": "later"}}))


def test_a_calibration_that_cannot_be_read_any_more_is_said_and_passed_over(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("ZOSIM_CACHE_DIR", str(tmp_path))
    topology = load_preset("cpu-laptop")
    sheet = profile_for(topology, "cpu0", is_host=True)
    path = save_host_profile(sheet)
    assert profile_for(topology, "cpu0", is_host=True) == sheet
    path.write_text(path.read_text().replace("matmul_half_dim", "matmul_half_life"))
    assert profile_for(topology, "cpu0", is_host=True) == sheet
    assert "predicting from data-sheet figures" in capsys.readouterr().err
