"""Routing of mixtures of experts, measured on data, against what the models' own routers say."""

from __future__ import annotations

import json

import pytest
import torch

from costmodel import forward_work, read_model_spec
from executors.models.routing import measure_routing
from studies.families.tiny import tiny_model
from tests.support.command import zosim
from tests.support.tiny import batches
from topology.errors import ModelError


def test_shares_are_those_that_the_router_chose():
    model, data = tiny_model("mixtral"), batches(3, size=2)
    spec, report = measure_routing(model, data)
    experts = spec.experts
    by_sequence = []
    for batch in data:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            logits = model(**given, output_router_logits=True).router_logits
        chosen = torch.stack([of_block.topk(experts.num_per_token).indices for of_block in logits])
        visits = torch.nn.functional.one_hot(chosen, experts.num_experts).sum(2)
        by_sequence.append(visits.unflatten(1, (2, -1)).sum(2))
    counts = torch.cat(by_sequence, 1).double()  # (blocks, sequences, experts)
    shares = counts / counts.sum(-1, keepdim=True)
    assert torch.allclose(torch.tensor(experts.shares, dtype=torch.float64), shares.mean(1))
    errors = shares.std(1) / shares.shape[1] ** 0.5
    assert torch.allclose(torch.tensor(experts.share_errors, dtype=torch.float64), errors)
    assert report.num_sequences == 6
    for own in report.blocks:
        assert own.visited <= experts.num_experts
        assert abs(own.visited - own.predicted) <= 1


def test_who_has_no_experts_is_told_so():
    with pytest.raises(ModelError, match="have no experts"):
        measure_routing(tiny_model("llama"), batches(1))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_5_moe_text"])
def test_code_of_other_families_tells_who_visits_whom(family):
    spec, report = measure_routing(tiny_model(family), batches(1))
    assert [own.block for own in report.blocks] == [i for i, row in enumerate(spec.experts.shares) if row]
    assert all(abs(sum(row) - 1) < 1e-9 for row in spec.experts.shares if row)


def test_a_measured_model_is_planned_with_its_shares(tmp_path, capsys):
    tiny_model("mixtral").save_pretrained(tmp_path / "model")
    rows = ({"input_ids": [3 + i, 5, 7, 11], "labels": [3 + i, 5, 7, 11]} for i in range(8))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data, target = tmp_path / "train.jsonl", tmp_path / "spec.json"
    assert (
        zosim("probe", "--model", tmp_path / "model", "--data", data, "--batch", 4, "--experts", target) == 0
    )
    out = capsys.readouterr().out
    assert "experts that 16 tokens visit, of 8 sequences" in out
    measured = read_model_spec(tmp_path / "spec.json")
    even = read_model_spec(tmp_path / "model")
    assert measured.experts.shares
    assert even.model_copy(update={"experts": measured.experts, "name": measured.name}) == measured
    visited = [forward_work(model, "block.0", batch=1, seq=1).flops for model in (measured, even)]
    assert visited[0] == visited[1]
    assert zosim("plan", "--model", target, "--hardware", "cpu-laptop", "--batch", 1, "--seq", 4) == 0
