from __future__ import annotations

import copy

import pytest
import torch

from executors.models.model import CutModel
from executors.steps.interpreter import Hyperparameters, Interpreter
from executors.steps.streams import CpuBackend
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of, plan_of
from zosim.lowering import lower
from zosim.program.points import BASE, Point

RESIDENT = {"residency": {"blocks": "resident"}, "schedule": {"update": "immediate"}}
SWEEP = {"residency": {"blocks": "resident"}, "schedule": {"update": "immediate", "traversal": "sweep"}}
OFFLOADED = {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}}
PLACEMENTS = {
    "sweep": SWEEP,
    "resident": RESIDENT,
    "resident-delayed": {"residency": {"blocks": "resident"}, "schedule": {"update": "delayed"}},
    "offloaded": OFFLOADED,
    "offloaded-draw-ahead": {
        "residency": {"blocks": "offloaded"},
        "directions": {"drawn_ahead": True},
        "schedule": {"update": "delayed"},
    },
    "offloaded-one-slot": {
        "residency": {"blocks": "offloaded", "num_slots": 1},
        "schedule": {"update": "delayed"},
    },
    "offloaded-serial": {
        "residency": {"blocks": "offloaded", "overlap": False},
        "schedule": {"update": "delayed"},
    },
    "offloaded-fresh-slots": {
        "residency": {"blocks": "offloaded", "reuse_slots": False},
        "schedule": {"update": "delayed"},
    },
    "offloaded-immediate": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "immediate"}},
}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def schedule(step, num_steps=12):
    return 1e-3 * (1 - step / num_steps)


def run_both(
    name, placement, *, dtype="float32", steps=12, decay=0.01, epsilon=1e-3, flush_at=(), estimator=None
):
    """Run the literal loop and the lowered program; return (reference rows, rows, reference, tuned model)."""
    reference = model_of(name, DTYPES[dtype])
    tuned = copy.deepcopy(reference)
    plan = plan_of(reference, dtype=dtype, estimator={"epsilon": epsilon, **(estimator or {})}, **placement)
    central = plan.estimator.difference == "central"
    queries = plan.estimator.num_queries
    loop = LiteralMezo(reference, epsilon=epsilon, weight_decay=decay, central=central)
    interpreter = Interpreter(lower(plan), CutModel(tuned), Hyperparameters(epsilon, decay), CpuBackend())
    expected, rows = [], []
    for step, batch in enumerate(batches(steps)):
        seeds = [1000 * step + query + 7 for query in range(queries)]
        expected.append(loop.step(batch, seeds, schedule(step)))
        frame = interpreter.step(batch, seeds, schedule(step))
        other = (
            (lambda q, f=frame: f.losses[Point(q, -1)]) if central else (lambda q, f=frame: f.losses[BASE])
        )
        rows.append(
            [(frame.losses[Point(q, 1)].item(), other(q).item(), frame.gradients[q]) for q in range(queries)]
        )
        if step in flush_at:
            interpreter.flush()
            assert differing(reference, tuned) == []
    interpreter.flush()
    interpreter.close()
    return expected, rows, reference, tuned


def assert_same(name, placement, **options):
    expected, rows, reference, tuned = run_both(name, placement, **options)
    assert rows == expected
    assert differing(reference, tuned) == []


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_every_placement_equals_the_literal_loop_bit_for_bit(name, placement):
    assert_same(name, placement, flush_at=(4,))


@pytest.mark.parametrize("name", ["opt-untied", "opt-projected", "llama-tied", "gpt2"])
@pytest.mark.parametrize("placement", [RESIDENT, OFFLOADED], ids=["resident", "offloaded"])
def test_every_shape_equals_the_literal_loop_bit_for_bit(name, placement):
    assert_same(name, placement, steps=6)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("placement", [SWEEP, RESIDENT, OFFLOADED], ids=["sweep", "resident", "offloaded"])
def test_every_format_equals_the_literal_loop_bit_for_bit(dtype, placement):
    assert_same("opt", placement, dtype=dtype, steps=6)


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("placement", [SWEEP, RESIDENT, OFFLOADED], ids=["sweep", "resident", "offloaded"])
@pytest.mark.parametrize("difference", ["central", "forward"])
def test_several_queries_equal_the_literal_loop_bit_for_bit(difference, placement):
    estimator = {"num_queries": 3, "difference": difference}
    for name in ("opt", "opt-untied"):
        assert_same(name, placement, steps=4, estimator=estimator, flush_at=(1,))


def test_decay_goes_on_where_the_gradient_is_zero():
    model = model_of("opt")
    plan = plan_of(model, **OFFLOADED)
    interpreter = Interpreter(lower(plan), CutModel(model), Hyperparameters(1e-3, 0.5), CpuBackend())
    batch = batches(1)[0] | {"labels": torch.full((3, 9), 5)}
    frame = interpreter.step(batch, [3], 0.1)
    frame.gradients[0] = 0.0
    before = model.model.decoder.layers[0].fc1.weight.detach().clone()
    interpreter.flush()
    interpreter.close()
    after = model.model.decoder.layers[0].fc1.weight
    assert torch.allclose(after, before * (1 - 0.1 * 0.5), atol=1e-6)
