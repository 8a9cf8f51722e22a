"""Updates that rounding undoes: counted in runs, against counts made by hand."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from executors.runs.session import Session
from tests.support.command import saved_lines, saved_model, train
from tests.support.distributed import OFFLOADED
from tests.support.tiny import batches, model_of, plan_of


def moved_as(transfer):
    """Return the axes of offloaded blocks that cross the bus in a format of their own."""
    return OFFLOADED | {"residency": OFFLOADED["residency"] | {"transfer_dtype": transfer}}


def lost(model, rate, *, steps=3, **plan):
    with Session(plan_of(model, **plan), model, learning_rate=rate) as session:
        for batch in batches(steps):
            session.step(batch)
        session.flush()
        return session.lost_updates()


@pytest.mark.parametrize("transfer", ["float16", "bfloat16", "float8_e4m3"])
def test_a_narrow_transfer_loses_small_updates_and_keeps_large_ones(transfer):
    plan = moved_as(transfer)
    small, large = (lost(model_of("opt"), rate, **plan) for rate in (1e-8, 1e-1))
    assert (small.storage, small.transfer) == ("float32", transfer)
    assert small.lost_in_transfer + small.lost_in_storage > 0.95
    assert large.lost < 0.7 if transfer == "float8_e4m3" else large.lost < 0.2
    # Every trainable element of the blocks is looked at where there are few.
    blocks = sum(p.numel() for name, p in model_of("opt").named_parameters() if ".layers." in name)
    assert small.num_sampled == 3 * blocks


def test_the_share_is_that_of_a_count_by_hand():
    """One step at a bfloat16 transfer, redone with torch on the weights before and after."""
    rate = 1e-4
    model = model_of("opt")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    tuned = copy.deepcopy(model)
    with Session(plan_of(tuned, **moved_as("bfloat16")), tuned, learning_rate=rate) as session:
        record = session.step(batches(1)[0])
        session.flush()
        found = session.lost_updates()
    torch.manual_seed(record.seeds[0])
    num = unchanged = vanished = 0
    for name, parameter in model.named_parameters():
        z = torch.normal(0, 1, size=parameter.shape)
        if ".layers." not in name:
            continue
        # The restore of the first step drifts; what is offloaded after it is a bfloat16 number again.
        start = parameter.data
        for scale in (1, -2, 1):
            start = start + (scale * z) * 1e-3
        start = start.bfloat16().float()
        after = start - rate * (record.projected_gradients[0] * z)
        num += after.numel()
        unchanged += (after == start).sum().item()
        vanished += ((after != start) & (after.bfloat16().float() == start)).sum().item()
    assert found.num_sampled == num
    assert found.lost_in_storage == unchanged / num
    assert found.lost_in_transfer == vanished / num
    assert 0.1 < found.lost < 0.99


def test_a_sample_tells_the_share_of_all(monkeypatch):
    plan = moved_as("bfloat16")
    every = lost(model_of("opt"), 1e-4, **plan)
    monkeypatch.setattr("executors.steps.update_watch.SAMPLED_ELEMENTS", 500)
    sampled = lost(model_of("opt"), 1e-4, **plan)
    assert sampled.num_sampled < every.num_sampled / 10
    error = (every.lost * (1 - every.lost) / sampled.num_sampled) ** 0.5
    assert abs(sampled.lost - every.lost) < 4 * error


def test_a_run_says_at_its_end_how_many_updates_were_lost(tmp_path, capsys):
    saved_lines(tmp_path / "data.jsonl")
    where = saved_model("opt", tmp_path), tmp_path / "data.jsonl", tmp_path / "out"
    offloaded = {"residency": "offloaded", "transfer_dtype": "float16"}
    assert train(*where, "--allow-lossy", steps=4, batch=3, **offloaded) == 0
    found = json.loads((tmp_path / "out" / "run.json").read_text())["finished"]["lost_updates"]
    assert (found["storage"], found["transfer"]) == ("float32", "float16")
    assert found["lost_in_transfer"] > 0.5
    assert "vanished in rounding to float16" in " ".join(capsys.readouterr().out.split())


def test_half_precision_storage_is_watched_too_and_float32_is_not():
    found = lost(model_of("opt", torch.bfloat16), 1e-8, dtype="bfloat16")
    assert (found.storage, found.transfer, found.lost_in_transfer) == ("bfloat16", "bfloat16", 0)
    assert found.lost_in_storage > 0.95
    assert lost(model_of("opt"), 1e-8, **OFFLOADED) is None


def test_steps_that_update_nothing_do_not_count():
    assert lost(model_of("opt"), 0.0, **moved_as("bfloat16")) is None
