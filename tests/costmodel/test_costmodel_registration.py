"""Groups derived from a configuration against the parameters that transformers registers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from costmodel import group_parameters, spec_of_config
from costmodel.families import FAMILIES

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 32,
}
SMALL_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 32}
CASES = [
    ("opt", {**SMALL, "ffn_dim": 100}),
    ("opt", {**SMALL, "ffn_dim": 100, "tie_word_embeddings": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gpt2", SMALL_GPT2),
    ("gpt2", {**SMALL_GPT2, "n_inner": 70, "tie_word_embeddings": False}),
    ("llama", {**SMALL, "intermediate_size": 100, "num_key_value_heads": 2}),
    ("llama", {**SMALL, "intermediate_size": 100, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {**SMALL, "intermediate_size": 100, "tie_word_embeddings": True}),
    ("qwen2", {**SMALL, "intermediate_size": 100, "num_key_value_heads": 2}),
    ("qwen3", {**SMALL, "intermediate_size": 100, "num_key_value_heads": 2, "head_dim": 20}),
    ("mistral", {**SMALL, "intermediate_size": 100, "num_key_value_heads": 1}),
]


def _segments(name: str, *, tied: bool) -> tuple[str, ...]:
    """Segments that read a parameter, told from its name alone."""
    parts = name.split(".")
    for marker in ("layers", "h"):
        if marker in parts:
            return (f"block.{parts[parts.index(marker) + 1]}",)
    if {"embed_tokens", "wte"} & set(parts):
        return ("embed", "head") if tied else ("embed",)
    return ("embed",) if {"embed_positions", "wpe", "project_in"} & set(parts) else ("head",)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_groups_are_those_of_the_real_model(family, overrides):
    config = AutoConfig.for_model(family, pad_token_id=None, **overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    spec = spec_of_config({"model_type": family, **overrides}, name="small")
    registered = list(model.named_parameters())
    derived = list(FAMILIES[family].tensors(_architecture(family, overrides)))
    assert [(t.name, t.shape) for t in derived] == [(name, tuple(p.shape)) for name, p in registered]
    real = group_parameters(
        (name, _segments(name, tied=spec.tied_head), p.numel(), True) for name, p in registered
    )
    assert spec.groups == real


def _architecture(family, overrides):
    known = FAMILIES[family]
    return known.architecture({**known.defaults, **overrides})


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(family):
    config = AutoConfig.for_model(family)
    same_meaning = {"word_embed_proj_dim", "num_key_value_heads", "head_dim", "n_inner"}
    for name, default in FAMILIES[family].defaults.items():
        if default is not None and hasattr(config, name):
            assert getattr(config, name) == default, name
        else:
            assert name in same_meaning | {"attention_bias", "mlp_bias"}, name
