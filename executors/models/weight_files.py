"""Weights on disk: written one by one under Hugging Face's names, and hashed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executors.files import replacing
from executors.formats import SAFETENSORS_NAMES, TORCH_DTYPES

WEIGHTS_NAME = "model.safetensors"


def weights_digest(model: nn.Module, dtype: str | None = None, *, trainable_only: bool = False) -> str:
    """Return a hash over names, formats, shapes and bits of all parameters, in registration order.

    Parameters
    ----------
    model : torch.nn.Module
    dtype : str, optional
        Format to read the parameters in; by default their own.
    trainable_only : bool
        Leave frozen parameters out.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trainable_only:
            update_digest(digest, name, parameter.data.to(TORCH_DTYPES[dtype] if dtype else parameter.dtype))
    return digest.hexdigest()


def update_digest(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    """Add one named tensor to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes_of(tensor))


def save_weights(
    model: nn.Module,
    path: str | Path,
    dtype: str | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    trainable_only: bool = False,
) -> None:
    """Write a model's parameters as safetensors under their names, a tied one once.

    Parameters
    ----------
    model : torch.nn.Module
    path : path
        Replaced only when everything has been written.
    dtype : str, optional
        Format to write floating-point tensors in; by default their own.
    metadata : mapping, optional
        What to say about the weights in the file.
    trainable_only : bool
        Leave frozen parameters and buffers out.

    Notes
    -----
    Tensors are written one by one: the buckets that they lie in are neither copied nor written.
    """
    tensors = _trainable_tensors(model) if trainable_only else _saved_tensors(model)
    write_tensors(tensors, path, dtype, metadata)


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors as safetensors, in one instant; parameters as :func:`save_weights`."""
    wanted = TORCH_DTYPES[dtype] if dtype else None
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        to = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        end = offset + tensor.numel() * to.itemsize
        entry = {"dtype": SAFETENSORS_NAMES[to], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(Path(path)) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            to = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
            file.write(_bytes_of(tensor.to(to)))


def save_pretrained(model: nn.Module, directory: str | Path, dtype: str | None = None) -> None:
    """Write a directory that transformers loads: weights and configuration."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    save_weights(model, directory / WEIGHTS_NAME, dtype)


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, each once."""
    persistent = set(model.state_dict().keys())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in persistent}


def _trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).cpu().numpy().data if math.prod(tensor.shape) else memoryview(b"")
