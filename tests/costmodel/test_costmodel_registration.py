"""Groups derived from a configuration against the parameters that transformers registers."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from costmodel import group_parameters, spec_of_config
from costmodel.models.families import FAMILIES, Activation, RopeType
from costmodel.models.groups import ParameterEntry
from executors.models.blocks import linears_of
from tests.support.tiny_families import CASES, skip_earlier_attention


def test_every_family_has_a_case():
    assert {family for family, _ in CASES} == set(FAMILIES)


def _segments(name: str, *, tied: bool) -> tuple[str, ...]:
    """Segments that read a parameter, told from its name alone."""
    parts = name.split(".")
    for marker in ("layers", "layer", "blocks", "h"):
        if marker in parts:
            return (f"block.{parts[parts.index(marker) + 1]}",)
    if {"embed_tokens", "wte", "word_embeddings", "embed_in"} & set(parts) or (
        tied and "decoder.weight" in name
    ):
        return ("embed", "head") if tied else ("embed",)
    before = {"embed_positions", "wpe", "project_in", "embeddings", "word_embeddings_layernorm"}
    return ("embed",) if before & set(parts) else ("head",)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_groups_are_those_of_the_real_model(family, overrides):
    skip_earlier_attention(family)
    config = AutoConfig.for_model(family, pad_token_id=None, **overrides)
    with torch.device("meta"):
        auto = AutoModelForCausalLM if FAMILIES[family].is_causal else AutoModelForMaskedLM
        model = auto.from_config(config)
        model.tie_weights()
    spec = spec_of_config({"model_type": family, **overrides}, name="small")
    registered = list(model.named_parameters())
    derived = list(FAMILIES[family].model_validate(overrides).tensors())
    assert [(t.name, t.shape) for t in derived] == [(name, tuple(p.shape)) for name, p in registered]
    linears = {id(layer.weight): (outputs, inputs) for _, layer, inputs, outputs in linears_of(model)}
    real = group_parameters(
        ParameterEntry(
            name,
            _segments(name, tied=spec.tied_head),
            tuple(p.shape),
            linear=linears.get(id(p)),
        )
        for name, p in registered
    )
    assert spec.param_groups == real


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(family):
    config = AutoConfig.for_model(family)
    # Where nothing is said, transformers fills in what the sizes imply, or what no family's shape depends on.
    implied = {
        "word_embed_proj_dim",
        "num_key_value_heads",
        "head_dim",
        "num_kv_heads",
        "n_inner",
        "ffn_hidden_size",
        "layer_types",
        "rope_theta",
        "rope_parameters",
    }
    implied |= {
        "per_layer_config",
        "rope_scaling",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "torch_dtype",
    }
    for name, field in FAMILIES[family].model_fields.items():
        theirs = field.validation_alias if isinstance(field.validation_alias, str) else name
        if field.default is not None and hasattr(config, theirs):
            assert getattr(config, theirs) == field.default, name
        else:
            assert name in implied or not getattr(config, theirs, None), name


def test_activations_are_those_that_transformers_knows_without_parameters_of_their_own():
    bring_parameters = {"prelu", "xielu"}
    assert set(ACT2CLS) - bring_parameters == set(get_args(Activation))


def test_rotary_positions_are_those_that_transformers_knows():
    assert set(get_args(RopeType)) == {"default", *ROPE_INIT_FUNCTIONS}
