"""LoZO and factorised perturbations: the literal loop bit for bit, wherever weights lie, and at any instant of a lazy window."""

from __future__ import annotations

import copy

import pytest
import torch

from executors.runs.session import Session
from tests.support.reference_lozo import LiteralLozo
from tests.support.reference_mezo import differing
from tests.support.tiny import batches, model_of, plan_of
from zosim.plans import Plan

EPSILON, RATE, NUM_STEPS = 1e-3, 1e-2, 7
PLACEMENTS = {
    "blockwise": {},
    "full": {"schedule": {"traversal": "full"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "kept": {"perturbations": {"kept": True}},
}


def lozo_plan(model, placement=None, *, sampler="lozo", rng="mezo", dtype="float32", lazy_steps=3, rank=2):
    axes = dict(PLACEMENTS[placement or "blockwise"])
    declared = {"distribution": sampler, "rank": rank, "lazy_steps": lazy_steps, "rng": rng}
    return plan_of(model, dtype=dtype, **(axes | {"perturbations": declared | axes.get("perturbations", {})}))


def tuned(plan, model, *, num_steps=NUM_STEPS, decay=0.0):
    """Return records and the model after some steps."""
    model = copy.deepcopy(model)
    with Session(plan, model, learning_rate=RATE, weight_decay=decay, seed=5) as session:
        records = [session.step(batch) for batch in batches(num_steps)]
        session.flush()
    return records, model


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("shape", "sampler", "placement", "decay"),
    [
        ("opt", "lozo", "blockwise", 0.1),
        ("llama", "lozo", "offloaded", 0.0),
        ("opt", "lozo", "kept", 0.0),
        ("opt", "factorised", "offloaded", 0.1),
        ("llama", "lozo-released", "blockwise", 0.0),
        ("opt", "lozo-released", "full", 0.1),
        ("opt", "lozo-released", "offloaded", 0.0),
    ],
)
def test_the_literal_loop_bit_for_bit(shape, sampler, placement, decay):
    base = model_of(shape, num_hidden_layers=2)
    reference = copy.deepcopy(base)
    loop = LiteralLozo(
        reference,
        epsilon=EPSILON,
        rank=2,
        lazy_steps=3,
        scaling=sampler.removeprefix("lozo-"),
        weight_decay=decay,
    )
    records, model = tuned(lozo_plan(base, placement, sampler=sampler), base, decay=decay)
    for record, batch in zip(records, batches(NUM_STEPS), strict=True):
        plus, minus, g = loop.step(batch, record.seeds[0], RATE)
        assert (record.losses_plus[0], record.losses_minus[0], record.projected_gradients[0]) == (
            plus,
            minus,
            g,
        )
    assert differing(model, reference) == []


def test_the_update_of_a_window_has_its_rank():
    base = model_of("opt", torch.float64, num_hidden_layers=1)
    _, model = tuned(lozo_plan(base, dtype="float64", lazy_steps=3), base, num_steps=6)
    name = "model.decoder.layers.0.fc1.weight"
    change = dict(model.named_parameters())[name] - dict(base.named_parameters())[name]
    assert torch.linalg.matrix_rank(change, rtol=1e-9) == 4  # two windows of rank 2 each


def test_lozo_is_factorised_at_another_radius():
    """Of matrices: at ε·√r; the step that it takes is the same but for rounding."""
    base = model_of("opt", torch.float64, num_hidden_layers=1)
    for parameter in base.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    plan = lozo_plan(base, dtype="float64", rank=4)
    other = lozo_plan(base, dtype="float64", rank=4, sampler="factorised")
    data = other.model_dump(mode="json")
    data["estimator"]["epsilon"] = plan.estimator.epsilon * 2
    (_, one), (_, same) = tuned(plan, base), tuned(Plan.model_validate(data), base)
    for (name, left), right in zip(one.named_parameters(), same.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-9), name
