"""The families of causal language models that can be read from a configuration alone.

For each family: what its configuration fields mean and which tensors it registers, in the order in which
transformers 5 registers them. The order matters: the reference MeZO loop draws directions in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from costmodel.model_spec import EMBED, HEAD, block_segment

Config = Mapping[str, Any]


class TensorSpec(NamedTuple):
    """One stored tensor: its name, its shape and the segments that read it.

    ``linear`` holds (inputs, outputs) where the tensor is the weight of a linear layer, which is what an
    adapter can be put on.
    """

    name: str
    shape: tuple[int, ...]
    segments: tuple[str, ...]
    linear: tuple[int, int] | None = None

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """A configuration in one vocabulary, whatever its family calls things."""

    num_blocks: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    embed_dim: int
    tied_head: bool
    activation: str
    mlp: Literal["plain", "gated"]
    norm: Literal["layernorm", "rmsnorm"]
    positions: Literal["learned", "rotary"]
    qk_norm: bool = False
    fused_qkv: bool = False
    final_norm: bool = True
    attention_bias: tuple[bool, bool] = (False, False)
    """Biases of q, k, v and of the output projection."""
    mlp_bias: bool = False
    norm_affine: bool = True
    norm_after_mlp: bool = False
    """Whether a block's last norm follows its MLP."""

    @property
    def token_segments(self) -> tuple[str, ...]:
        """Segments that read the token table."""
        return (EMBED, HEAD) if self.tied_head else (EMBED,)


@dataclass(frozen=True)
class Family:
    """How to read one ``model_type``: field defaults, meaning, tensors in registration order."""

    defaults: Mapping[str, Any]
    architecture: Callable[[Config], Architecture]
    tensors: Callable[[Architecture], Iterator[TensorSpec]]


def _linear(
    name: str, inputs: int, outputs: int, segment: str, *, bias: bool, transposed: bool = False
) -> Iterator[TensorSpec]:
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    yield TensorSpec(f"{name}.weight", shape, (segment,), (inputs, outputs))
    if bias:
        yield TensorSpec(f"{name}.bias", (outputs,), (segment,))


def _layer_norm(name: str, width: int, segment: str, *, affine: bool = True) -> Iterator[TensorSpec]:
    if affine:
        yield TensorSpec(f"{name}.weight", (width,), (segment,))
        yield TensorSpec(f"{name}.bias", (width,), (segment,))


def _opt_architecture(config: Config) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        num_blocks=config["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=config["ffn_dim"],
        num_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        embed_dim=config["word_embed_proj_dim"] or hidden,
        tied_head=config["tie_word_embeddings"],
        activation=config["activation_function"],
        mlp="plain",
        norm="layernorm",
        positions="learned",
        final_norm=config["do_layer_norm_before"] and not config["_remove_final_layer_norm"],
        attention_bias=(config["enable_bias"], config["enable_bias"]),
        mlp_bias=config["enable_bias"],
        norm_affine=config["layer_norm_elementwise_affine"],
        norm_after_mlp=not config["do_layer_norm_before"],
    )


_OPT_POSITION_OFFSET = 2
"""Rows at the head of OPT's position table that no position uses."""


def _opt_tensors(arch: Architecture) -> Iterator[TensorSpec]:
    root, hidden = "model.decoder", arch.hidden_size
    yield TensorSpec(f"{root}.embed_tokens.weight", (arch.vocab_size, arch.embed_dim), arch.token_segments)
    rows = arch.max_positions + _OPT_POSITION_OFFSET
    yield TensorSpec(f"{root}.embed_positions.weight", (rows, hidden), (EMBED,))
    if arch.embed_dim != hidden:
        yield from _linear(f"{root}.project_out", hidden, arch.embed_dim, HEAD, bias=False)
        yield from _linear(f"{root}.project_in", arch.embed_dim, hidden, EMBED, bias=False)
    if arch.final_norm:
        yield from _layer_norm(f"{root}.final_layer_norm", hidden, HEAD, affine=arch.norm_affine)
    for i in range(arch.num_blocks):
        yield from _opt_block(arch, f"{root}.layers.{i}", block_segment(i))
    if not arch.tied_head:
        yield from _linear("lm_head", arch.embed_dim, arch.vocab_size, HEAD, bias=False)


def _opt_block(arch: Architecture, root: str, segment: str) -> Iterator[TensorSpec]:
    hidden, inner, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from _linear(f"{root}.self_attn.{name}", hidden, hidden, segment, bias=arch.attention_bias[0])
    yield from _layer_norm(f"{root}.self_attn_layer_norm", hidden, segment, affine=arch.norm_affine)
    yield from _linear(f"{root}.fc1", hidden, inner, segment, bias=bias)
    yield from _linear(f"{root}.fc2", inner, hidden, segment, bias=bias)
    yield from _layer_norm(f"{root}.final_layer_norm", hidden, segment, affine=arch.norm_affine)


def _gpt2_architecture(config: Config) -> Architecture:
    hidden, heads = config["n_embd"], config["n_head"]
    return Architecture(
        num_blocks=config["n_layer"],
        hidden_size=hidden,
        intermediate_size=config["n_inner"] or 4 * hidden,
        num_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=config["vocab_size"],
        max_positions=config["n_positions"],
        embed_dim=hidden,
        tied_head=config["tie_word_embeddings"],
        activation=config["activation_function"],
        mlp="plain",
        norm="layernorm",
        positions="learned",
        fused_qkv=True,
        attention_bias=(True, True),
        mlp_bias=True,
    )


def _gpt2_tensors(arch: Architecture) -> Iterator[TensorSpec]:
    root, hidden = "transformer", arch.hidden_size
    yield TensorSpec(f"{root}.wte.weight", (arch.vocab_size, hidden), arch.token_segments)
    yield TensorSpec(f"{root}.wpe.weight", (arch.max_positions, hidden), (EMBED,))
    for i in range(arch.num_blocks):
        yield from _gpt2_block(arch, f"{root}.h.{i}", block_segment(i))
    yield from _layer_norm(f"{root}.ln_f", hidden, HEAD)
    if not arch.tied_head:
        yield from _linear("lm_head", hidden, arch.vocab_size, HEAD, bias=False)


def _gpt2_block(arch: Architecture, root: str, segment: str) -> Iterator[TensorSpec]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    yield from _layer_norm(f"{root}.ln_1", hidden, segment)
    for name, outputs in (("attn.c_attn", 3 * hidden), ("attn.c_proj", hidden)):
        yield from _linear(f"{root}.{name}", hidden, outputs, segment, bias=True, transposed=True)
    yield from _layer_norm(f"{root}.ln_2", hidden, segment)
    for name, inputs, outputs in (("mlp.c_fc", hidden, inner), ("mlp.c_proj", inner, hidden)):
        yield from _linear(f"{root}.{name}", inputs, outputs, segment, bias=True, transposed=True)


def _llama_like(config: Config, **particular: Any) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    fields: dict[str, Any] = {
        "num_blocks": config["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"] or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "embed_dim": hidden,
        "tied_head": config["tie_word_embeddings"],
        "activation": config["hidden_act"],
        "mlp": "gated",
        "norm": "rmsnorm",
        "positions": "rotary",
        "attention_bias": (bias, bias),
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }
    return Architecture(**(fields | particular))


def _qwen2_architecture(config: Config) -> Architecture:
    return _llama_like(config, attention_bias=(True, False))


def _qwen3_architecture(config: Config) -> Architecture:
    return _llama_like(config, qk_norm=True)


def _llama_tensors(arch: Architecture) -> Iterator[TensorSpec]:
    root, hidden = "model", arch.hidden_size
    yield TensorSpec(f"{root}.embed_tokens.weight", (arch.vocab_size, hidden), arch.token_segments)
    for i in range(arch.num_blocks):
        yield from _llama_block(arch, f"{root}.layers.{i}", block_segment(i))
    yield TensorSpec(f"{root}.norm.weight", (hidden,), (HEAD,))
    if not arch.tied_head:
        yield from _linear("lm_head", hidden, arch.vocab_size, HEAD, bias=False)


def _llama_block(arch: Architecture, root: str, segment: str) -> Iterator[TensorSpec]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    in_bias, out_bias = arch.attention_bias
    for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"{root}.self_attn.{name}", hidden, outputs, segment, bias=in_bias)
    yield from _linear(f"{root}.self_attn.o_proj", queries, hidden, segment, bias=out_bias)
    if arch.qk_norm:
        yield TensorSpec(f"{root}.self_attn.q_norm.weight", (arch.head_dim,), (segment,))
        yield TensorSpec(f"{root}.self_attn.k_norm.weight", (arch.head_dim,), (segment,))
    for name, inputs, outputs in (("gate", hidden, inner), ("up", hidden, inner), ("down", inner, hidden)):
        yield from _linear(f"{root}.mlp.{name}_proj", inputs, outputs, segment, bias=arch.mlp_bias)
    yield TensorSpec(f"{root}.input_layernorm.weight", (hidden,), (segment,))
    yield TensorSpec(f"{root}.post_attention_layernorm.weight", (hidden,), (segment,))


_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

FAMILIES: dict[str, Family] = {
    "opt": Family(
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        _opt_architecture,
        _opt_tensors,
    ),
    "gpt2": Family(
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_new",
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        _gpt2_architecture,
        _gpt2_tensors,
    ),
    "llama": Family(_LLAMA_DEFAULTS, _llama_like, _llama_tensors),
    "qwen2": Family(_QWEN_DEFAULTS, _qwen2_architecture, _llama_tensors),
    "qwen3": Family(_QWEN_DEFAULTS | {"head_dim": 128}, _qwen3_architecture, _llama_tensors),
    "mistral": Family(
        _LLAMA_DEFAULTS
        | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        _llama_like,
        _llama_tensors,
    ),
}
"""By ``model_type``. Defaults are those of transformers' configuration classes, which leave them out of files."""
