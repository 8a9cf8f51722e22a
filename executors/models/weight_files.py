"""Writes weights to disk one by one under Hugging Face's names, and hashes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import CONFIG_NAME
from executors.files import replacing, write_atomically
from executors.formats import SAFETENSORS_NAMES, TORCH_DTYPES, WEIGHTS_NAME
from executors.low_bits.linear import Deferred, deferred_numbers
from executors.models.parameters import NamedTensor, stored_parameters
from topology.errors import RunError
from topology.reading import refuse_irregular


def weights_digest(
    model: nn.Module, dtype: str | None = None, *, trainable_only: bool = False, base_only: bool = False
) -> str:
    """Return a hash over names, formats, shapes and bits of all parameters, in registration order.

    - `dtype`: format to read numbers in; by default their own. Other parameters are read as the tensors that they are stored as.
    - `trainable_only`: leave frozen parameters out.
    - `base_only`: leave adapters out.
    """
    digest, wanted = hashlib.blake2b(digest_size=16), TORCH_DTYPES[dtype] if dtype else None
    for tensor in stored_parameters(model):
        if (trainable_only and not is_tuned(tensor)) or (base_only and ".lora_" in tensor.name):
            continue
        held = tensor.held
        for suffix, array in held.to(held.device, wanted).dump().items():
            update_digest(digest, tensor.name + suffix, array)
    return digest.hexdigest()


def is_tuned(tensor: NamedTensor) -> bool:
    """Whether a run changes a parameter: it is trainable, or part of an adapter that is drawn anew."""
    return tensor.trainable or ".lora_" in tensor.name


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

    - `path`: replaced only when everything has been written.
    - `dtype`: format to write floating-point tensors in; by default their own.
    - `metadata`: what to say about the weights in the file.
    - `trainable_only`: leave frozen parameters and buffers out, and write the tensors that others are stored as; else numbers.

    Tensors are written one by one: the buckets that they lie in are neither copied nor written.
    """
    if not trainable_only:
        write_tensors(saved_tensors(model) | deferred_numbers(model, dtype), path, dtype, metadata)
        return
    named: dict[str, Tensor | Deferred] = {}
    for tensor in filter(is_tuned, stored_parameters(model)):
        for suffix, array in tensor.held.dump().items():
            # Numbers of 8 bits, as a host may hold them, are not quantized.
            wanted = TORCH_DTYPES[dtype] if dtype and tensor.is_numbers else array.dtype
            named[tensor.name + suffix] = Deferred(array.shape, wanted, partial(array.to, wanted))
    write_tensors(named, path, dtype, metadata)


def write_tensors(
    tensors: Mapping[str, Tensor | Deferred],
    path: str | Path,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors as safetensors, atomically; parameters as of :func:`save_weights`."""
    # The layout of safetensors: eight bytes of length, a JSON header padded with spaces to a multiple of eight, then the tensors'
    # bytes one after the other.
    wanted = TORCH_DTYPES[dtype] if dtype else None
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        to = _written_format(tensor, wanted)
        end = offset + tensor.shape.numel() * to.itemsize
        entry = {"dtype": SAFETENSORS_NAMES[to], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(Path(path)) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            to = _written_format(tensor, wanted)
            file.write(_bytes_of(tensor.make() if isinstance(tensor, Deferred) else tensor.to(to)))


def _written_format(tensor: Tensor | Deferred, wanted: torch.dtype | None) -> torch.dtype:
    """Return the format in which a tensor is written; quantized values keep theirs."""
    is_number = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    return wanted if wanted is not None and is_number and not isinstance(tensor, Deferred) else tensor.dtype


def save_pretrained(model: nn.Module, directory: str | Path, dtype: str | None = None) -> None:
    """Write a directory that transformers loads: weights and configuration."""
    save_configuration(model, Path(directory))
    save_weights(model, Path(directory) / WEIGHTS_NAME, dtype)


def save_configuration(model: nn.Module, directory: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write a model's configuration files, and further fields of ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    refuse_irregular((directory / name for name in (CONFIG_NAME, "generation_config.json")), RunError)
    config = model.config
    config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    if more:
        path = directory / CONFIG_NAME
        fields = json.loads(path.read_text(encoding="utf-8")) | more
        write_atomically(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, each once."""
    persistent = set(model.state_dict().keys())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in persistent}


def _bytes_of(tensor: Tensor) -> memoryview:
    # As bytes, since numpy has no bfloat16 and no 8-bit floats.
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).cpu().numpy().data if math.prod(tensor.shape) else memoryview(b"")
