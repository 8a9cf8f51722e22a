"""Memory of runs whose weights are codes: predicted from the program, beside what the run held at most."""

from __future__ import annotations

import pytest
import torch

from costmodel.datasheet import datasheet_profile
from executors.models.loading import load_model
from executors.runs.session import Session
from tests.support.tiny import batches, plan_of
from topology.documents import load_preset
from zosim.lowering import lower
from zosim.planning.footprint import footprint

LAPTOP = load_preset("cpu-laptop")
INT8 = {"weights": "int8", "activations": "int8-token"}
INT4 = {"weights": "int4", "scales": "group", "group_elements": 32}
PLACEMENTS = {
    "resident": {},
    "offloaded": {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}},
}


def held_and_predicted(name, low_bits, placement, *, seq=16):
    model = load_model(name, random_weights=True)
    plan = plan_of(model, seq=seq, low_bits=low_bits, **PLACEMENTS[placement])
    predicted = footprint(lower(plan), datasheet_profile(LAPTOP, LAPTOP.of_kind("cpu")[0].id)).device_bytes
    with torch.no_grad(), Session(plan, model, learning_rate=1e-3, seed=3) as session:
        for batch in batches(3, seq=seq):
            session.step(batch)
        session.flush()
        return session.memory().device_bytes, predicted


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("low_bits", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("name", ["opt-1m", "llama-1m"])
def test_the_peak_is_predicted_and_never_too_low(name, low_bits, placement):
    held, predicted = held_and_predicted(name, low_bits, placement)
    assert held <= predicted <= 1.05 * held, (held, predicted)
