"""The speed study times what it says it times."""

from __future__ import annotations

import copy

import pytest
import torch

from studies.speed import __main__ as speed
from studies.speed.reference import literal_step, two_forwards


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    monkeypatch.setitem(speed.SHAPES, "tiny", shape)
    return speed.model_of_shape("tiny", torch.float32)


def test_every_contender_is_timed_every_round_beside_its_two_baselines(tiny) -> None:
    times = speed.measure(tiny, 2, 8, "float32", rounds=2)
    assert {len(own.seconds) for own in times.values()} == {2}
    assert {"literal loop", "two forwards", "mezo (default)", "counter, rademacher"} < times.keys()
    assert times["counter, rademacher"].median_s > 0


def test_the_reference_takes_a_real_step(tiny) -> None:
    tokens = torch.arange(16).reshape(2, 8)
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    before, stepped = copy.deepcopy(tiny), copy.deepcopy(tiny)
    g = literal_step(stepped, data, 3, 0.1, 1e-3)
    assert g != 0
    assert two_forwards(stepped, data) != two_forwards(before, data)


@pytest.mark.slow
def test_tables_name_their_setting(tiny, capsys) -> None:
    threads = torch.get_num_threads()
    setting = speed.SpeedSetting("tiny", "bfloat16", 1, 2, 8)
    try:
        speed.report(setting, speed.timed(setting, rounds=1))
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("OPT-tiny shape, bfloat16, batch 2 x 8, 1 thread(s), torch ")
    rows = {line.strip().split("  ")[0]: line.split()[-2:] for line in lines}
    assert rows["literal loop"][0] == rows["two forwards"][1] == "1.000"
    assert "mezo (default)" in rows
