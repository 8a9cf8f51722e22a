"""Small models with random weights, for measurements that want a model's shape and none of its knowledge."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def random_model(
    family: str,
    *,
    hidden: int,
    num_blocks: int,
    num_heads: int,
    vocab: int,
    max_positions: int,
    tied: bool = True,
) -> nn.Module:
    """Return a model with random weights, always the same for one shape.

    - `family`: MLPs are four times as wide as the hidden state; Llama's gated ones 8/3 times, and several of its heads share keys
      and values: two where they are even in number.
    - `tied`: whether the head reads the table of embeddings.
    """
    import transformers

    shared = {"vocab_size": vocab, "tie_word_embeddings": tied, **_TOKENS}
    make: type[nn.Module]
    config: Any
    if family == "opt":
        make = transformers.OPTForCausalLM
        config = transformers.OPTConfig(
            hidden_size=hidden,
            word_embed_proj_dim=hidden,
            ffn_dim=4 * hidden,
            num_hidden_layers=num_blocks,
            num_attention_heads=num_heads,
            max_position_embeddings=max_positions,
            **shared,
        )
    elif family == "gpt2":
        make = transformers.GPT2LMHeadModel
        config = transformers.GPT2Config(
            n_embd=hidden, n_layer=num_blocks, n_head=num_heads, n_positions=max_positions, **shared
        )
    else:
        make = transformers.LlamaForCausalLM
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=(8 * hidden // 3 + 31) // 32 * 32,
            num_hidden_layers=num_blocks,
            num_attention_heads=num_heads,
            num_key_value_heads=max(n for n in range(1, num_heads // 2 + 1) if num_heads % n == 0),
            max_position_embeddings=max_positions,
            **shared,
        )
    # The caller's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make(config)
    return model
