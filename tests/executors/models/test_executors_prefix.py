"""Prefixes against transformers' own cache, and what a run leaves of them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from costmodel.models.configs import Prefix
from executors.models.loading import load_model
from executors.models.prefix import CONFIG_NAME, WEIGHTS_NAME, attach_prefix, load_prefix, save_prefix
from executors.models.transformers_interface import AttentionArguments
from tests.support import command
from tests.support.command import rows_of, zosim
from tests.support.reference_mezo import CACHE, CachedPrefix, differing
from tests.support.tiny import CONFIGS, SHAPE, SPECIAL, batches, model_of
from topology.errors import ModelError

QWEN3 = Qwen3Config(
    hidden_size=32, intermediate_size=48, num_key_value_heads=1, head_dim=24, **SHAPE, **SPECIAL
)
SHAPES = {
    **{name: CONFIGS[name] for name in ("opt", "llama", "llama-tied", "gpt2")},
    "qwen3": QWEN3,
}
PREFIX = Prefix(num_tokens=4)


def plain(name, attention="sdpa"):
    if name != "qwen3":
        return model_of(name, attention=attention)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(QWEN3), attn_implementation=attention).eval()


def parts_of(model):
    return [p for name, p in model.named_parameters() if name.endswith(("prefix_keys", "prefix_values"))]


def prefixed(name, attention="sdpa", prefix=PREFIX):
    """Return a model with a prefix, and the same through transformers' cache."""
    model = plain(name, attention)
    attach_prefix(model, prefix.model_copy(update={"seed": 1}))
    return model, CachedPrefix(plain(name, attention), parts_of(model))


def unpadded():
    (batch,) = batches(1)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prefix_is_what_a_cache_of_it_is_to_transformers(name, attention):
    model, reference = prefixed(name, attention)
    for batch in (*batches(1), unpadded()):
        with torch.no_grad():
            found, expected, bare = (m(**batch) for m in (model, reference, plain(name, attention)))
        kept = batch["attention_mask"].bool()
        assert torch.equal(found.logits[kept], expected.logits[kept])
        assert found.loss == expected.loss
        assert (found.logits - bare.logits)[kept].abs().max() > 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_it_begins_as_what_real_tokens_leave_in_the_cache(name):
    model, _ = prefixed(name)
    tokens = torch.randint(0, 96, (1, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        layers = plain(name)(input_ids=tokens, use_cache=True)[CACHE].layers
    parts = parts_of(model)
    for i, layer in enumerate(layers):
        for part, states in zip(parts[2 * i : 2 * i + 2], (layer.keys, layer.values), strict=True):
            assert torch.equal(part, states[0].permute(1, 0, 2).reshape(4, -1))
    assert sum(p.requires_grad for p in model.parameters()) == len(parts)


def test_generation_with_a_cache_sees_the_prefix():
    model, _ = prefixed("llama")
    tokens = torch.tensor([[5, 6, 7]])
    for _ in range(6):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    generated = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=True
    )
    assert torch.equal(generated, tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_a_saved_prefix_is_loaded_with_the_same_bits(tmp_path, name):
    model, _ = prefixed(name)
    save_prefix(model, tmp_path, "float32")
    loaded = plain(name)
    load_prefix(loaded, tmp_path)
    assert differing(model, loaded) == []
    (batch,) = batches(1)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, loaded(**batch).logits)
    assert json.loads((tmp_path / CONFIG_NAME).read_text())["num_virtual_tokens"] == 4


def test_what_cannot_be_a_prefix_is_refused(tmp_path):
    with pytest.raises(ModelError, match="exceeds the 32 positions"):
        attach_prefix(plain("opt"), Prefix(num_tokens=33))
    with pytest.raises(ModelError, match="cannot read the prefix"):
        load_prefix(plain("opt"), tmp_path)
    save_prefix(prefixed("llama")[0], tmp_path)
    with pytest.raises(ModelError, match="does not match OPTForCausalLM"):
        load_prefix(plain("opt"), tmp_path)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "past_key_value", "layer_past"])
def test_the_cache_goes_by_the_name_that_an_attention_module_has_for_it(name):
    class Attention(torch.nn.Module):
        pass

    Attention.forward = eval(f"lambda self, hidden_states, attention_mask=None, {name}=None, **rest: None")
    arguments = AttentionArguments(Attention())
    assert arguments.cache == name
    assert arguments.named((1, 2), {name: 3}) == {"hidden_states": 1, "attention_mask": 2, name: 3}


def test_an_attention_module_that_knows_no_cache_is_refused():
    class Renamed(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None, kept=None, **rest):
            pass

    with pytest.raises(ModelError, match=r"Renamed of transformers .* takes .*kept, rest\)"):
        AttentionArguments(Renamed())


def test_an_attention_module_that_reads_no_cache_does_not_pass_for_one():
    model, _ = prefixed("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs | {arguments.cache: None})
    arguments = AttentionArguments(model.model.layers[0].self_attn)
    with pytest.raises(ModelError, match="LlamaAttention ignores its prefix"):
        model(input_ids=torch.tensor([[5]]))


def train(inputs, out, *more):
    options = {"steps": 8, "batch": 3, "lr": 1e-2, "eps": 1e-2, "digest_every": 4, "checkpoint_every": 4}
    return command.train(*inputs, out, *more, **options)


def prefix_in(run):
    return load_file(run / "prefix" / WEIGHTS_NAME)


@pytest.mark.slow
def test_a_run_is_replayed_and_resumed_to_the_same_prefix(inputs, tmp_path):
    whole, died = tmp_path / "whole", tmp_path / "died"
    evaluated = ("--eval-data", inputs[1])
    assert train(inputs, whole, "--prefix", 3, "--residency", "offloaded", *evaluated) == 0
    assert not (whole / "model.safetensors").exists()
    assert (
        zosim("replay", whole, "--model", inputs[0], "-o", tmp_path / "again", "--residency", "resident") == 0
    )
    expected = prefix_in(whole)
    assert all(torch.equal(expected[name], part) for name, part in prefix_in(tmp_path / "again").items())

    assert train(inputs, died, "--prefix", 3, "--residency", "offloaded", "--steps", 5) == 0
    assert train(inputs, died, "--resume", "--residency", "resident") == 0
    assert all(torch.equal(expected[name], part) for name, part in prefix_in(died).items())
    assert [row["loss_plus"] for row in rows_of(died)] == [row["loss_plus"] for row in rows_of(whole)]

    tuned = load_model(inputs[0])
    load_prefix(tuned, whole / "prefix")
    losses = []
    for line in map(json.loads, inputs[1].read_text().splitlines()):
        ids = torch.tensor([line["input_ids"]])
        with torch.no_grad():
            log_probabilities = tuned(input_ids=ids).logits[0, 1:-1].double().log_softmax(-1)
        losses.append(-log_probabilities.gather(1, ids[0, 2:, None]).mean().item())
    finished = json.loads((whole / "run.json").read_text())["finished"]["evaluation"]
    assert finished["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_replay_begins_with_the_prefix_that_the_run_began_with(inputs, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    assert train(inputs, run, "--prefix", 3, "--residency", "resident") == 0

    def another(*_args, **_options):
        raise AssertionError

    monkeypatch.setattr("executors.runs.adapters.attach_prefix", another)
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 0
    assert all(torch.equal(prefix_in(run)[n], p) for n, p in prefix_in(tmp_path / "again").items())
    path = run / "prefix" / "initial" / WEIGHTS_NAME
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 2
    assert "hashes differ" in capsys.readouterr().err


def test_the_planner_plans_it(inputs, tmp_path):
    assert train(inputs, tmp_path / "out", "--prefix", 3) == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["model"]["num_prefix_tokens"] == 3
    trainable = {group["name"]: group["num_trainable"] for group in plan["model"]["param_groups"]}
    assert trainable["block.0"] == 2 * 3 * 32
    assert trainable["embed.tokens"] == 0


def test_not_beside_adapters_and_not_another_on_resuming(inputs, tmp_path, capsys):
    both = ("--prefix", 3, "--lora-rank", 2, "--lora-targets", "q_proj")
    assert train(inputs, tmp_path / "out", *both) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert train(inputs, tmp_path / "out", "--prefix", 3, "--residency", "resident") == 0
    assert train(inputs, tmp_path / "out", "--resume", "--prefix", 4) == 2
    assert capsys.readouterr().err
