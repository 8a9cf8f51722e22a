"""Finds a model's blocks, and refuses models that cannot be split between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from topology.errors import ModelError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks in order.

    Raises
    ------
    ModelError
        If it has no single list of them.
    """
    _, _, path = block_list(model)
    return list(model.get_submodule(path).children())


def block_list(model: nn.Module) -> tuple[nn.Module, str, str]:
    """Return the owner of the block list, its name there, and its path from the model.

    Raises
    ------
    ModelError
        If there is no single list, or blocks share parameters.
    """
    wanted = _num_blocks(model)
    # By its length: families call the list `layers`, `h` or `blocks`.
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if len(lists) != 1:
        listed = ", ".join(path for path, _ in lists) or "none"
        raise ModelError(
            f"{type(model).__name__} has no single list of its {wanted} blocks (listed: {listed})",
            hint="zosim runs language models that are one ordered list of blocks",
        )
    path, blocks = lists[0]
    _refuse_shared(model, blocks, path)
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name, path


def _num_blocks(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model", hint="load it with transformers"
        )
    number = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(number, int) or number < 1:
        raise ModelError(f"{type(model).__name__} does not state its number of blocks (num_hidden_layers)")
    return number


def _refuse_shared(model: nn.Module, blocks: nn.ModuleList, path: str) -> None:
    seen: dict[int, str] = {}
    for i, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            other = seen.setdefault(id(parameter), f"{path}.{i}")
            if other != f"{path}.{i}":
                raise ModelError(
                    f"{type(model).__name__} shares {name} between blocks {other} and {path}.{i}",
                    hint="zosim runs models in which every block has its own parameters",
                )


def fills_masks(model: nn.Module) -> bool:
    """Whether a model is a masked language model: one that predicts the tokens at masks, in place of the next ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def refuse_unsupported(model: nn.Module) -> None:
    """Raise ModelError for a model that cannot be run by segments."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder",
            hint="zosim runs causal decoders and masked encoders",
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ModelError(
                f"embedding {path} rescales its rows while it is read (max_norm={module.max_norm})",
                hint="a forward must not change weights; build the model without max_norm",
            )


def linears_of(block: nn.Module) -> Iterator[tuple[str, Any, int, int]]:
    """Yield (path, module, inputs, outputs) of every linear layer of a block or a model, except those of adapters."""
    from transformers.pytorch_utils import Conv1D

    for path, module in block.named_modules():
        if path.rpartition(".")[2].startswith("lora_"):
            continue
        if isinstance(module, nn.Linear):
            yield path, module, module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            yield path, module, inputs, outputs
