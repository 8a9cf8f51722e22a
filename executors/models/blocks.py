"""Finds a model's blocks, and refuses models that cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from executors.low_bits.linear import is_linear
from topology.errors import ModelError


class UnsplitError(ModelError):
    """A model that runs, and of which no segment can be run by itself."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        super().__init__(
            f"{type(model).__name__} cannot be run block by block: {reason}",
            hint="keep it resident on one device, without stages, packed forwards or loss chunks",
        )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks in order.

    Raises ModelError if it has no list of them.
    """
    return list(block_list(model)[1])


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of a model's blocks and its path: the longest that is in no other, or of their stated number.

    Raises ModelError if there is none.
    """
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    decoder = get_decoder()
    # Some models call another part of theirs their decoder.
    parts = [decoder, model] if isinstance(decoder, nn.Module) else [model]
    lists = next(filter(None, (list(_outermost_lists(part)) for part in parts)), [])
    if not lists:
        raise UnsplitError(model, "it has no list of blocks")
    declared = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[operator, union-attr]
    blocks = max(lists, key=lambda one: (len(one) == declared, len(one)))
    return next(path for path, module in model.named_modules() if module is blocks), blocks


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def fills_masks(model: nn.Module) -> bool:
    """Whether a model is a masked language model: one that predicts the tokens at masks, in place of the next ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def refuse_unsupported(model: nn.Module) -> None:
    """Raise ModelError for a model whose loss is no language model's, or whose forward changes weights."""
    if getattr(model, "config", None) is None or not hasattr(model, "get_input_embeddings"):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model", hint="load it with transformers"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder, which is not supported",
            hint="zosim supports causal decoders and masked encoders",
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ModelError(
                f"embedding {path} rescales its rows when it is read (max_norm={module.max_norm})",
                hint="a forward must not change weights: build the model without max_norm",
            )


def linears_of(block: nn.Module) -> Iterator[tuple[str, Any, int, int]]:
    """Yield (path, module, inputs, outputs) of every linear layer of a block or a model, except those of adapters."""
    for path, module in block.named_modules():
        if path.rpartition(".")[2].startswith("lora_") or not is_linear(module):
            continue
        if isinstance(module, nn.Linear):
            yield path, module, module.in_features, module.out_features
        else:  # transformers' Conv1D, whose weight lies transposed
            weight: Any = module.weight
            yield path, module, *weight.shape
