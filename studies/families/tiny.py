"""Tiny models of every family: the family's own default configuration with small numbers in its fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import nn

from topology.reading import shipped_yaml

NUM_LAYERS = 4
"""Even, so that families that alternate two types of layers have two of each."""

MAX_PARAMETERS = 20_000_000


def families() -> dict[str, str]:
    """Return every family of transformers' causal language models, and the class of its model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        name: made if isinstance(made, str) else made[0]
        for name, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


@cache
def _rows() -> Mapping[str, Any]:
    file = resources.files("studies.families") / "tiny.yaml"
    rows: Mapping[str, Any] = shipped_yaml(file.read_text(encoding="utf-8"))
    return rows


def exception_of(family: str) -> Mapping[str, Any]:
    """Return what a family's tiny model needs besides the general sizes: ``fields``, and the ``reason``."""
    found: Mapping[str, Any] = _rows()["exceptions"].get(family, {})
    return found


def tiny_config(family: str) -> Any:
    """Return a family's default configuration with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class, exception = CONFIG_MAPPING[family], exception_of(family)
    usual = {} if exception.get("has_no_default") else config_class().to_dict()
    fields = _laid_over(_shrunk(usual, num_layers=_num_layers(usual)), exception.get("fields", {}))
    return config_class(**fields)


def tiny_model(family: str, *, seed: int = 0) -> nn.Module:
    """Return a tiny model of a family with random weights, in float32 and evaluation mode.

    All parameters are moved away from what they begin as: zeros and ones would hide mistakes.
    """
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(family)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        message = f"the tiny {family} has {num_parameters} parameters, more than {MAX_PARAMETERS}"
        raise ValueError(message)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_().clamp_(-1, 1).add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def _num_layers(fields: Mapping[str, Any]) -> set[int]:
    """Return the lengths that lists with one entry a layer may have."""
    return {fields[name] for name in _rows()["layers"] if isinstance(fields.get(name), int)}


def _shrunk(fields: Mapping[str, Any], num_layers: set[int]) -> dict[str, Any]:
    """Return those fields of a configuration that are other in a tiny one."""
    sizes: Mapping[str, Any] = _rows()["sizes"]
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _rows()["layers"] and isinstance(value, int):
            changed[name] = NUM_LAYERS
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool):
            changed[name] = min(value, sizes[name]) if value > 0 else value
        elif isinstance(value, list) and len(value) in num_layers:
            # One entry a layer: some of each type.
            types = list(dict.fromkeys(map(str, value)))
            by_name = {str(entry): entry for entry in value}
            changed[name] = [by_name[types[i % len(types)]] for i in range(NUM_LAYERS)]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            changed[name] = {int(key): own for key, own in value.items() if int(key) < NUM_LAYERS}  # by layer
        elif isinstance(value, dict) and "model_type" in value:
            changed[name] = {**value, **_shrunk(value, num_layers=_num_layers(value))}
    for name, others in _rows()["with"].items():
        changed |= others if fields.get(name) else {}
    return changed


def _laid_over(fields: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in over.items():
        is_nested = isinstance(value, Mapping) and isinstance(fields.get(name), dict)
        fields[name] = _laid_over(dict(fields[name]), value) if is_nested else value
    return fields
