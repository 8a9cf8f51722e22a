"""A training loop of one's own, in the few lines that the README shows."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from executors import Session, plan_of_model
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches, model_of
from topology.errors import DataError
from zosim import Residency


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", ["resident", "offloaded"])
def test_a_loop_of_ones_own_is_the_literal_loop(tmp_path, dtype, blocks):
    model, reference = model_of("opt", dtype), model_of("opt", dtype)
    plan = plan_of_model(model, batch=3, seq=9, residency=Residency(blocks=blocks))
    literal = LiteralMezo(reference, epsilon=plan.estimator.epsilon)
    with Session(plan, model, learning_rate=1e-3) as session:
        for number, batch in enumerate(batches(3)):
            ((loss_plus, _, _),) = literal.step(batch, session.seeds_of(number), learning_rate=1e-3)
            assert session.step(batch).loss == loss_plus
        session.save_pretrained(tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=dtype)
    assert differing(tuned, reference) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": None}, "the batch's labels is missing"),
        ({"input_ids": [[1, 2]]}, "the batch's input_ids is a list, not a tensor"),
        ({"labels": torch.ones(3, 4)}, "of shape"),
        ({"attention_mask": torch.ones(3)}, "of shape"),
    ],
)
def test_batches_that_cannot_be_are_refused(change, says):
    model = model_of("opt")
    (batch,) = batches(1)
    with Session(plan_of_model(model, batch=3, seq=9), model) as session:
        with pytest.raises(DataError, match=says):
            session.step({name: value for name, value in (batch | change).items() if value is not None})
        session.step(batch)


def test_sequences_end_where_the_models_positions_do():
    model = model_of("opt")
    (batch,) = batches(1, seq=model.config.max_position_embeddings + 1)
    with (
        Session(plan_of_model(model, batch=3, seq=9), model) as session,
        pytest.raises(DataError, match="positions"),
    ):
        session.step(batch)
