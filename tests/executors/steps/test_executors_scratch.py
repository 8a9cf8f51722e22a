"""What a resident step keeps beside the weights and the forwards: one segment's perturbation, and scratch that is stated."""

from __future__ import annotations

import pytest
import torch

from executors.runs.session import Session
from executors.steps.arithmetic import CHUNK_ELEMENTS, ParamPass
from tests.support.tiny import batches, model_of, plan_of
from zosim.lowering.weights import SCRATCH_ELEMENTS
from zosim.program.instructions import Space

ALIGNMENT_BYTES = 64
ESTIMATORS = (
    {},
    {"perturbations": {"rng": "counter"}},
    {"perturbations": {"rng": "counter", "distribution": "rademacher"}},
    {"estimator": {"num_perturbations": 2}},
)


def _segment_bytes(plan) -> int:
    """Bytes of the largest segment's parameters, of which a token table that is read again later is left out."""
    found = []
    for segment in plan.model.segments:
        groups = [
            g for g in plan.model.param_groups_of(segment) if not (g.is_tied and segment == g.segments[0])
        ]
        elements = sum(4 * group.num_trainable for group in groups)
        found.append(elements + ALIGNMENT_BYTES * (1 + sum(g.num_trainable_tensors for g in groups)))
    return max(found)


@pytest.mark.crossed(quick=9, slow=4)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("update", ["immediate", "delayed"])
@pytest.mark.parametrize("name", ["opt", "opt-untied", "gpt2", "llama"])
def test_a_resident_step_keeps_the_perturbation_of_one_segment(name, update, estimator):
    model = model_of(name)
    plan = plan_of(model, **estimator, schedule={"update": update})
    with Session(plan, model, weight_decay=0.1, num_sampling_threads=2) as session:
        for batch in batches(3):
            session.step(batch)
        arena = session.memory().arena_bytes
        scratch = session.interpreter._actions.param_passes.param_pass.scratch_bytes
        declared = session.program.buffer("scratch").size_bytes
    assert {key for key, size in arena.items() if size} == {
        (Space.DEVICE, "weights"),
        (Space.DEVICE, "perturbations"),
    }
    assert arena[Space.DEVICE, "perturbations"] <= _segment_bytes(plan)
    assert 0 < scratch <= declared


def test_a_tied_table_bounds_what_is_kept():
    """OPT's largest segment is its head: the token table, and beside it the final norm alone."""
    model = model_of("opt", vocab_size=4000)
    table = 4 * model.get_input_embeddings().weight.numel()
    norm = 4 * 2 * model.config.hidden_size
    with Session(plan_of(model), model) as session:
        session.step(batches(1)[0])
        perturbations = session.memory().arena_bytes[Space.DEVICE, "perturbations"]
    assert table <= perturbations <= table + norm + 4 * ALIGNMENT_BYTES


def test_scratch_is_what_is_planned_for():
    assert CHUNK_ELEMENTS["cpu"] == SCRATCH_ELEMENTS
    param_pass, theta = ParamPass(), torch.zeros(3 * SCRATCH_ELEMENTS)
    param_pass.perturb(theta, theta.clone(), 1, 1e-3)
    assert param_pass.scratch_bytes == 4 * SCRATCH_ELEMENTS
    param_pass.update(theta, theta.clone(), gradient=1.0, learning_rate=1e-3, weight_decay=0.1)
    assert param_pass.scratch_bytes == 4 * SCRATCH_ELEMENTS
