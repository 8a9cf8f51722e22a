"""Weights after a step's perturbations: the copy brings every bit back, arithmetic drifts."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from reference_mezo import LiteralMezo, differing
from tiny import batches, model_of, plan_of

from executors.runs.session import Session
from zosim.lowering import lower
from zosim.operations import Perturb
from zosim.validate import validate

PLACEMENTS = {
    "sweep": {"runtime": {"traversal": "sweep"}},
    "resident": {},
    "querywise": {"runtime": {"traversal": "querywise"}},
    "resident-delayed": {"runtime": {"update": "delayed"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "runtime": {"update": "delayed"}},
    "offloaded-draw-ahead": {
        "residency": {"blocks": "offloaded", "num_slots": 2},
        "runtime": {"update": "delayed", "draw_ahead": True},
    },
    "offloaded-immediate": {"residency": {"blocks": "offloaded"}},
    "offloaded-fresh-slots": {"residency": {"blocks": "offloaded", "reuse_slots": False}},
}
EDGES = {"residency": {"blocks": "offloaded", "edges": "offloaded"}, "runtime": {"update": "delayed"}}


def restoring(placement, how="copy"):
    return placement | {"runtime": placement.get("runtime", {}) | {"restore": how}}


def root_mean_square_drift(dtype, how, placement, *, steps=6):
    """Return how far the weights are from where they began after steps at learning rate 0."""
    model = model_of("opt", getattr(torch, dtype))
    start = copy.deepcopy(model)
    plan = plan_of(model, dtype=dtype, **restoring(placement, how))
    with Session(plan, model, learning_rate=0.0) as session:
        for batch in batches(steps):
            session.step(batch)
        session.flush()
    theirs = dict(start.named_parameters())
    squares = [(p.double() - theirs[name].double()).square().mean() for name, p in model.named_parameters()]
    return (sum(squares) / len(squares)).sqrt().item(), differing(start, model)


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [*((name, "bfloat16") for name in PLACEMENTS), ("resident", "float32"), ("offloaded", "float32")],
)
def test_the_copy_drifts_by_nothing_and_arithmetic_by_roundings(placement, dtype):
    placement = PLACEMENTS[placement]
    assert root_mean_square_drift(dtype, "copy", placement) == (0.0, [])
    drift, changed = root_mean_square_drift(dtype, "arithmetic", placement)
    # A rounding is off by 2^-25 (float32) or 2^-9 (bfloat16) of a weight at most; weights here are 0.05 to 1.
    unit = {"float32": 2**-25, "bfloat16": 2**-9}[dtype]
    assert 0.05 * unit < drift < 3 * 6 * unit
    assert len(changed) > 20


@pytest.mark.parametrize(("queries", "difference"), [(3, "central"), (2, "forward")])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_equals_the_literal_loop_with_a_copy(placement, difference, queries):
    reference = model_of("opt")
    model = copy.deepcopy(reference)
    estimator = {"num_queries": queries, "difference": difference}
    plan = plan_of(model, estimator=estimator, **restoring(placement))
    loop = LiteralMezo(
        reference, epsilon=1e-3, weight_decay=0.1, central=difference == "central", restore="copy"
    )
    with Session(plan, model, learning_rate=1e-3, weight_decay=0.1) as session:
        for batch in batches(3):
            record = session.step(batch)
            expected = loop.step(batch, record.seeds, 1e-3)
            assert list(record.losses_plus) == [plus for plus, _, _ in expected]
            assert list(record.projected_gradients) == [g for _, _, g in expected]
        session.flush()
    assert differing(reference, model) == []


def test_both_restores_begin_with_the_same_losses():
    """Points are reached by the same operations, so that one step's losses do not tell them apart."""
    found = []
    for how in ("arithmetic", "copy"):
        model = model_of("opt")
        with Session(plan_of(model, **restoring({}, how)), model, learning_rate=1e-3) as session:
            record = session.step(batches(1)[0])
            found.append((record.losses_plus, record.losses_minus, session.digest()))
    arithmetic, copied = found
    assert arithmetic[:2] == copied[:2]
    assert arithmetic[2] != copied[2]


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), EDGES], ids=[*PLACEMENTS, "offloaded-edges"])
def test_programs_hold_one_more_buffer_and_one_sweep_less(placement):
    model = model_of("opt-untied")
    plain, copied = (lower(plan_of(model, **restoring(placement, how))) for how in ("arithmetic", "copy"))
    validate(copied)
    (clean,) = [buffer for buffer in copied.buffers if buffer.name == "clean"]
    assert all(buffer.name != "clean" for buffer in plain.buffers)
    groups = plan_of(model).model.groups
    bytes_of = {group.name: 4 * group.num_trainable for group in groups}
    is_sweep = placement.get("runtime", {}).get("traversal") == "sweep"
    at_least = sum(bytes_of.values()) if is_sweep else max(bytes_of.values())
    assert at_least <= clean.size_bytes < 1.2 * sum(bytes_of.values()) + 64 * 100
    sweeps = [sum(isinstance(i.op, Perturb) for i in p.step) for p in (plain, copied)]
    assert sweeps[1] == sweeps[0] * 2 // 3


def test_an_unchanged_block_is_not_sent_back():
    """Without a pending update, what was uploaded and restored need not be offloaded after the forwards."""
    model = model_of("opt-untied")
    plain, copied = (
        lower(plan_of(model, **restoring(PLACEMENTS["offloaded-immediate"], how)))
        for how in ("arithmetic", "copy")
    )
    offloads = [[i.id for i in p.step if i.label == "offload"] for p in (plain, copied)]
    assert set(offloads[1]) == {name for name in offloads[0] if name.endswith(":update")}
    assert len(offloads[0]) == 2 * len(offloads[1])
