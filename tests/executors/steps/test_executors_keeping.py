"""Perturbations kept from their draw to their update: the same bits as drawing them again, from fewer draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from executors.runs.session import Session
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import Hazard
from zosim.lowering import lower
from zosim.program import Program
from zosim.program.instructions import Space
from zosim.program.operations import Sample, Update
from zosim.program.validate import validate

PLACEMENTS = {
    "full": {"schedule": {"traversal": "full"}},
    "resident": {},
    "sample-ahead": {"perturbations": {"sampled_ahead": True}},
    "delayed": {"schedule": {"update": "delayed"}},
    "delayed-sample-ahead": {"perturbations": {"sampled_ahead": True}, "schedule": {"update": "delayed"}},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "offloaded-immediate": {"residency": {"blocks": "offloaded", "num_staging_buffers": 1}},
    "copies": {"weights": {"perturbation": "copies"}},
}


@pytest.fixture(scope="module")
def model():
    return model_of("opt")


def plan_for(placement, model, *, estimator=None, perturbations=None):
    axes = dict(PLACEMENTS[placement])
    axes["perturbations"] = axes.get("perturbations", {}) | {"kept": True} | (perturbations or {})
    return plan_of(model, estimator=estimator or {}, **axes)


def samples(program: Program) -> Counter[tuple[str, int]]:
    sampled = [i.op for _, i in program.instructions() if isinstance(i.op, Sample)]
    return Counter((op.param_group, op.perturbation) for op in sampled if op.keep != "none")


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(("perturbations", "rng"), [(1, "mezo"), (3, "mezo"), (1, "counter")])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_perturbation_is_drawn_once(model, placement, perturbations, rng):
    program = lower(
        plan_for(placement, model, estimator={"num_perturbations": perturbations}, perturbations={"rng": rng})
    )
    validate(program)
    groups = [group for group in plan_of(model).model.param_groups if group.num_trainable]
    assert samples(program) == {
        (group.name, perturbation): 1 for group in groups for perturbation in range(perturbations)
    }
    assert not [i for i in program.flush if isinstance(i.op, Sample)]
    kept = [buffer for buffer in program.buffers if buffer.role == "perturbations"]
    assert {buffer.name for buffer in kept} == {
        f"perturbations.{group.name}.q{perturbation}"
        for group in groups
        for perturbation in range(perturbations)
    }
    # The generator's state is kept where the generator has passed a group that is drawn later: OPT's final norm.
    states = [
        buffer for buffer in program.buffers if buffer.name.startswith("rng.") and "head" not in buffer.name
    ]
    assert len(states) == (perturbations if rng == "mezo" else 0)


@pytest.mark.parametrize("placement", ["resident", "delayed", "offloaded"])
def test_the_memory_that_is_planned_is_what_is_taken(placement):
    model = model_of("opt")
    plan = plan_for(placement, model, estimator={"num_perturbations": 2})
    planned = sum(buffer.size_bytes for buffer in lower(plan).buffers if buffer.role == "perturbations")
    weights = sum(4 * group.num_trainable for group in plan.model.param_groups)
    with Session(plan, model) as session:
        session.step(batches(1)[0])
        taken = session.memory().arena_bytes[Space.DEVICE, "perturbations"]
    assert taken == planned
    tensors = sum(group.num_trainable_tensors for group in plan.model.param_groups)
    assert 2 * weights <= planned <= 2 * (weights + 64 * (tensors + len(plan.model.param_groups)))


@pytest.mark.parametrize("placement", ["resident", "delayed"])
def test_a_perturbation_that_is_overwritten_before_its_last_reader_is_a_hazard(placement):
    program = lower(plan_for(placement, model_of("opt"), perturbations={"rng": "counter"}))
    step = list(program.step)
    update = next(k for k, i in enumerate(step) if isinstance(i.op, Update) and i.op.param_group == "block.1")
    resample = next(i for i in step if isinstance(i.op, Sample) and i.op.param_group == "block.1")
    other = replace(resample, id="too-early", writes=tuple(replace(a, step=1) for a in resample.writes))
    with pytest.raises(Hazard, match=r"block\.1/update.* needs z:block\.1"):
        validate(replace(program, step=(*step[:update], other, *step[update:])))


def test_a_perturbation_that_another_stream_draws_waits_for_the_update_before():
    program = lower(plan_for("delayed-sample-ahead", model_of("opt")))
    position = next(k for k, i in enumerate(program.step) if i.id == "block.1/sample[q0]")
    assert program.step[position].after
    for edge in program.step[position].after:
        kept = tuple(other for other in program.step[position].after if other != edge)
        freed = replace(program.step[position], after=kept)
        with pytest.raises(Hazard, match="nothing orders"):
            validate(replace(program, step=(*program.step[:position], freed, *program.step[position + 1 :])))
