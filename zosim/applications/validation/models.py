"""The model of a row: a known size, or the configuration that the row brings, whatever its family calls its sizes.

A prediction needs a model's shapes and no code that runs it. So a family of which nothing but sizes is known stands as one of two
others with the same sizes: a Llama, or a GPT-2 where MLPs are not gated and every head has keys of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.models.configs import read_model_spec, shipped_config, spec_of_config
from costmodel.models.families import FAMILIES
from costmodel.models.model_spec import ModelSpec
from topology.errors import ModelError
from topology.reading import parse_json
from zosim.applications.validation.rows import MeasuredRow, Unpredictable

_GATED = frozenset(
    {"baichuan", "deepseek", "exaone", "internlm", "internlm2", "minicpm", "orion", "qwen", "xverse", "yi"}
)
_PLAIN = frozenset({"persimmon"})
"""Values of ``model_type`` by their MLP: three matrices, or two."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "inner": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "head_dim": ("head_dim", "kv_channels"),
}
"""What families call a size."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_of(row: MeasuredRow) -> ModelSpec:
    """Return the model of a row, with position tables long enough for its sequences.

    Raises ModelError if it is no known size, and the row has no configuration.
    Raises Unpredictable if it has experts, or a configuration does not tell its sizes.
    """
    # What was measured brings kernels of its own.
    model = _model(row["model"], row["model_config"]).model_copy(update={"stores_scores": "never"})
    longest = row.count_or("seq", 1) + row.count_or("generated_tokens", 1)
    if longest <= model.max_positions:
        return model
    return model.model_copy(update={"max_positions": longest})


def likeness(row: MeasuredRow) -> str:
    """Return in words as what a row's model is predicted, where that is another family; else nothing."""
    if _is_file(row["model"], row["model_config"]):
        return ""
    family = _config(row["model"], row["model_config"]).get("model_type", "")
    if family in FAMILIES or family not in _GATED | _PLAIN:
        return ""
    return f"model_type {family} as {_model(row['model'], row['model_config']).family} of its sizes"


@cache
def _model(name: str, config: str) -> ModelSpec:
    if _is_file(name, config):
        return read_model_spec(name)
    data = _config(name, config)
    family = data.get("model_type")
    if family in FAMILIES:
        return spec_of_config(data, name=name)
    if any(data.get(key) for key in _EXPERTS):
        raise Unpredictable(
            f"model {name} has experts, and zosim does not know how models of type {family} use them"
        )
    if family in _GATED or family in _PLAIN:
        return spec_of_config(_translated(data, family, name), name=name)
    return spec_of_config(data, name=name)


def _is_file(name: str, config: str) -> bool:
    """Whether a row names a file or directory with a model's configuration, and brings none itself."""
    return not config and Path(name).exists()


def _config(name: str, config: str) -> dict[str, Any]:
    if not config:
        return shipped_config(name)
    data = parse_json(config, f"the configuration of {name}", ModelError)
    if not isinstance(data, dict):
        raise ModelError(f"the configuration of {name} is not a JSON object")
    return data


def _translated(data: Mapping[str, Any], family: str, name: str) -> dict[str, Any]:
    """Return the configuration of a Llama or a GPT-2 with the sizes of another family's."""

    def size(what: str, default: int | None = None) -> int:
        for key in _NAMES[what]:
            if isinstance(value := data.get(key), int) and value > 0:
                return value
        if default is None:
            raise Unpredictable(
                f"the configuration of {name} has no {what}, under none of {', '.join(_NAMES[what])}"
            )
        return default

    hidden, heads = size("hidden"), size("heads")
    kv_heads = size("kv_heads", heads)
    # Qwen's first generation states both matrices of a gate together.
    inner = size("inner", 4 * hidden) // (2 if family == "qwen" else 1)
    common = {
        "vocab_size": size("vocab"),
        "max_position_embeddings": size("positions", 2048),
        "hidden_size": hidden,
        "num_hidden_layers": size("blocks"),
        "num_attention_heads": heads,
        "tie_word_embeddings": bool(data.get("tie_word_embeddings", False)),
    }
    head_dim = size("head_dim", hidden // heads)
    if family in _PLAIN and kv_heads == heads and head_dim * heads == hidden:
        return {**common, "model_type": "gpt2", "n_inner": inner}
    return {
        **common,
        "model_type": "llama",
        # Two matrices multiply and weigh as much as three of two thirds.
        "intermediate_size": inner if family in _GATED else -(-2 * inner // 3),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
