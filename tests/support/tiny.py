"""Tiny models, batches and plans."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    RobertaConfig,
)

from executors.models.model import SegmentedModel
from executors.models.spec import spec_of_model
from zosim.plans import Placement, Plan

SHAPE = {"vocab_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CONFIGS = {
    "opt": OPTConfig(hidden_size=32, ffn_dim=52, word_embed_proj_dim=32, **SHAPE, **SPECIAL),
    "opt-untied": OPTConfig(
        hidden_size=32, ffn_dim=48, word_embed_proj_dim=32, tie_word_embeddings=False, **SHAPE, **SPECIAL
    ),
    "opt-projected": OPTConfig(
        hidden_size=32, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False, **SHAPE, **SPECIAL
    ),
    "llama": LlamaConfig(hidden_size=40, intermediate_size=36, **SHAPE, **SPECIAL),
    "llama-tied": LlamaConfig(
        hidden_size=32, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=True, **SHAPE, **SPECIAL
    ),
    "gpt2": GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        **SPECIAL,
    ),
    "qwen3": Qwen3Config(
        hidden_size=32, intermediate_size=44, num_key_value_heads=1, head_dim=20, tie_word_embeddings=False, **SHAPE,
        **SPECIAL,
    ),
    "roberta": RobertaConfig(
        hidden_size=32, intermediate_size=52, vocab_size=96, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=34, bos_token_id=0, pad_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


def model_of(name, dtype=torch.float32, attention="sdpa", seed=0, **changed):
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    config.update(changed)
    auto = AutoModelForMaskedLM if name == "roberta" else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():  # the initial zeros and ones would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(dtype).eval()


def batches(count, *, size=3, seq=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, 96, (size, seq), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, seq - 3 :] = 0
        ids[mask == 0] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def plan_of(model, *, size=3, seq=9, dtype="float32", **axes):
    spec = spec_of_model(SegmentedModel(copy.deepcopy(model)), name="tiny")
    return Plan(
        model=spec,
        placement=Placement(topology="test", devices=("cpu0",)),
        batch=size,
        seq=seq,
        **(axes | {"weights": {"dtype": dtype, **axes.get("weights", {})}}),
    )
