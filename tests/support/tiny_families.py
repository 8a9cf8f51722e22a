"""Tiny models of every family that is planned from its configuration: fields of the configuration, the usual case of a family first."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 32,
}
WIDE = {**SMALL, "intermediate_size": 104}
SHARED = {**WIDE, "num_key_value_heads": 2}
SMALL_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 32}
EXPERTS = {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {**SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **WIDE, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
FALCON = {**SMALL, "num_kv_heads": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("opt", {**SMALL, "ffn_dim": 100}),
    ("opt", {**SMALL, "ffn_dim": 100, "tie_word_embeddings": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    ("opt", {**SMALL, "ffn_dim": 100, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gpt2", SMALL_GPT2),
    ("gpt2", {**SMALL_GPT2, "n_inner": 70, "tie_word_embeddings": False}),
    ("llama", SHARED),
    ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {**WIDE, "tie_word_embeddings": True}),
    ("qwen2", SHARED),
    ("qwen3", {**SHARED, "head_dim": 20}),
    ("mistral", {**WIDE, "num_key_value_heads": 1}),
    ("roberta", WIDE),
    ("roberta", {**WIDE, "tie_word_embeddings": False, "type_vocab_size": 1}),
    ("xlm-roberta", WIDE),
    ("xlm-roberta", {**WIDE, "tie_word_embeddings": False}),
    ("bert", WIDE),
    ("bert", {**WIDE, "tie_word_embeddings": False}),
    ("gemma", {**SHARED, "head_dim": 20}),
    ("gemma2", {**SHARED, "head_dim": 20, "attention_bias": True}),
    ("gemma3_text", {**SHARED, "head_dim": 20}),
    ("phi", WIDE),
    ("phi", {**SHARED, "qk_layernorm": True, "tie_word_embeddings": True}),
    ("phi3", SHARED),
    ("falcon", SMALL),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "bias": True}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**SMALL, "parallel_attn": False, "multi_perturbation": False, "alibi": True, "ffn_hidden_size": 70}),
    ("bloom", {"hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96}),
    ("gpt_neo", {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "vocab_size": 96}),
    ("gpt_neox", WIDE),
    ("gpt_neox", {**WIDE, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}),
    ("gptj", {**SMALL_GPT2, "rotary_dim": 4}),
    ("codegen", {**SMALL_GPT2, "rotary_dim": 4}),
    ("gpt_bigcode", SMALL_GPT2),
    ("gpt_bigcode", {**SMALL_GPT2, "multi_perturbation": False}),
    ("mpt", {"d_model": 48, "n_layers": 3, "n_heads": 4, "vocab_size": 96, "max_seq_len": 32}),
    ("stablelm", {**SHARED, "partial_rotary_factor": 0.5}),
    ("stablelm", {**SHARED, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}),
    ("starcoder2", SHARED),
    ("starcoder2", {**SHARED, "use_bias": False, "tie_word_embeddings": False}),
    ("cohere", SHARED),
    ("cohere", {**SHARED, "use_qk_norm": True, "attention_bias": True}),
    ("cohere2", SHARED),
    ("olmo", SHARED),
    ("olmo2", SHARED),
    ("olmo3", SHARED),
    ("granite", {**SHARED, "mlp_bias": True}),
    ("smollm3", SHARED),
    ("glm", {**SHARED, "head_dim": 12}),
    ("glm4", {**SHARED, "head_dim": 12}),
    ("seed_oss", {**SHARED, "head_dim": 12}),
    ("nemotron", SHARED),
    ("mixtral", EXPERTS),
    ("qwen2_moe", {**SMALL_EXPERTS, "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {**SMALL_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ("qwen3_moe", {**SMALL_EXPERTS, "head_dim": 20}),
    ("olmoe", {**SHARED, "num_experts": 4, "num_experts_per_tok": 2}),
    ("phimoe", EXPERTS),
    ("phimoe", {**EXPERTS, "lm_head_bias": True, "attention_bias": True}),
    ("granitemoe", EXPERTS),
    ("gpt_oss", {**EXPERTS, "head_dim": 12}),
    ("deepseek_v2", {**LATENT, "n_group": None, "topk_group": None}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
]  # fmt: skip

TINY: dict[str, dict[str, Any]] = {}
"""The usual case of each family."""
for _family, _fields in CASES:
    TINY.setdefault(_family, _fields)


def skip_earlier_attention(family: str) -> None:
    """Skip the test of a family whose attention the installed transformers has in an earlier form than the planner counts."""
    if family in ("codegen", "gptj") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"before transformers 5.24 the attention of {family} has other kernels")
