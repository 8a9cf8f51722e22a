from __future__ import annotations

import copy

import pytest
import torch

from executors.runs.session import Session
from executors.steps.streams import Ticket, backend_for
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of
from topology.errors import RunError

PLACEMENTS = {
    "resident": {},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
    "sample-ahead": {
        "residency": {"blocks": "offloaded"},
        "perturbations": {"sampled_ahead": True},
        "schedule": {"update": "delayed"},
    },
    "fresh-buffers": {
        "residency": {"blocks": "offloaded", "reuse_staging_buffers": False},
        "schedule": {"update": "delayed"},
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_equals_the_literal_loop_bit_for_bit(placement, dtype):
    reference = model_of("opt", getattr(torch, dtype))
    tuned = copy.deepcopy(reference)
    reference.cuda()
    loop = LiteralMezo(reference, epsilon=1e-3, weight_decay=0.01)
    plan = plan_of(tuned, dtype=dtype, **placement)
    with Session(plan, tuned, learning_rate=1e-3, weight_decay=0.01, device="cuda:0") as session:
        for step, batch in enumerate(batches(8)):
            moved = {name: tensor.cuda() for name, tensor in batch.items()}
            ((plus, minus, g),) = loop.step(moved, (step,), 1e-3)
            record = session.step(batch, seeds=(step,))
            assert (record.losses_plus[0], record.losses_minus[0]) == (plus, minus)
            assert record.projected_gradients == (g,)
        timeline = session.timeline()
        with session.unsharded_model() as whole:
            assert differing(reference, whole) == []
    assert timeline.step_time_s > 0


@pytest.mark.gpu
def test_counter_perturbations_on_cuda_do_not_depend_on_the_placement():
    found = []
    for placement in PLACEMENTS.values():
        model = model_of("llama-tied")
        plan = plan_of(model, perturbations={"rng": "counter"}, **placement)
        with Session(plan, model, learning_rate=1e-3, device="cuda:0") as session:
            found.append([session.step(batch).projected_gradients for batch in batches(4)])
    assert all(gradients == found[0] for gradients in found)


class _Near(Ticket):
    """Stands for another rank that is always as far."""

    def wait(self):
        """Return at once."""


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["offloaded", "sample-ahead", "fresh-buffers"])
def test_issuing_from_a_thread_per_stream_changes_no_bit(placement, monkeypatch):
    found, reported = [], []
    for far in (False, True):
        model = model_of("opt")
        plan = plan_of(model, **PLACEMENTS[placement])
        with Session(plan, model, learning_rate=1e-3, device="cuda:0") as session:
            real = session.interpreter._task

            def task(item, *arguments, real=real):
                made = real(item, *arguments)
                made.after = [*made.after, _Near()]
                made.done = lambda: reported.append(made.instruction.id)
                return made

            if far:
                monkeypatch.setattr(session.interpreter, "_task", task)
            found.append(
                [session.step(batch).projected_gradients for batch in batches(6)] + [session.digest()]
            )
            assert bool(session.interpreter.backend._threads) == far
    assert found[0] == found[1]
    assert {i.id for i in session.program.step} <= set(reported)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RunError, match="device 'cuda:97' does not exist") as caught:
        backend_for("cuda:97")
    assert "--device cpu" in caught.value.hint
