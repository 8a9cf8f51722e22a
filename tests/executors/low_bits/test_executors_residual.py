"""One point a perturbation: a projected gradient is made with the loss of the step before, in a session, in runs and of several ranks."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from executors.runs.session import Session
from tests.support.command import rows_of, zosim
from tests.support.recorded import options, saved_inputs
from tests.support.tiny import batches, model_of, plan_of
from zosim.lowering import lower
from zosim.program.operations import Forward
from zosim.program.validate import validate

RATE, EPSILON = 1e-4, 1e-2
RESIDUAL = {"difference": "residual", "epsilon": EPSILON}


def test_steps_are_a_literal_loops():
    model = model_of("opt", torch.float64, num_hidden_layers=2)
    literal = copy.deepcopy(model)
    plan = plan_of(model, dtype="float64", estimator=RESIDUAL)
    before = None
    with Session(plan, model, learning_rate=RATE, seed=5) as session:
        for batch in batches(4):
            record = session.step(batch)
            generator = torch.Generator().manual_seed(record.seeds[0])
            along = [
                torch.normal(0.0, 1.0, p.shape, generator=generator, dtype=p.dtype)
                for p in literal.parameters()
            ]
            with torch.no_grad():
                for parameter, z in zip(literal.parameters(), along, strict=True):
                    parameter.add_(z, alpha=EPSILON)
                loss = float(literal(**batch).loss)
                gradient = 0.0 if before is None else (loss - before) / EPSILON
                for parameter, z in zip(literal.parameters(), along, strict=True):
                    parameter.sub_(z, alpha=EPSILON + RATE * gradient)
            assert record.losses_minus is None
            assert record.losses_plus == pytest.approx((loss,), rel=1e-6)
            assert record.losses_before == pytest.approx((loss if before is None else before,), rel=1e-6)
            assert record.projected_gradients == pytest.approx((gradient,), rel=1e-3, abs=1e-4)
            before = loss
        state = session.state_dict()
    assert all(torch.allclose(state[n], p, atol=1e-7) for n, p in literal.named_parameters())


@pytest.mark.parametrize("update", ["immediate", "delayed"])
def test_a_step_has_one_forward_of_each_segment(update):
    model = model_of("opt", num_hidden_layers=2)
    blocks = "offloaded" if update == "delayed" else "resident"
    plan = plan_of(model, estimator=RESIDUAL, schedule={"update": update}, residency={"blocks": blocks})
    program = lower(plan)
    validate(program)
    assert sum(isinstance(instruction.op, Forward) for instruction in program.step) == 4
    assert "one evaluation point per perturbation" in plan.describe()


def test_a_loss_of_the_step_before_that_is_another_is_damage(tmp_path, capsys):
    inputs, run = saved_inputs(tmp_path), tmp_path / "run"
    assert zosim(*options(inputs, run, "--difference", "residual", "--lr", 1e-6)) == 0
    rows = rows_of(run)
    rows[7]["loss_before"] += 0.125
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 2
    assert "line 8 is damaged" in " ".join(capsys.readouterr().err.split())
