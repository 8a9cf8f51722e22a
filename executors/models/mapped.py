"""Base weights that are mapped from their files until they move into a program's buffers, so that a host holds them once.

transformers leaves weights in their files, mapped, where they are wanted in the format that they are kept in there; in
another format it would make a copy, beside which buffers do not fit: and every rank one of its own. They are
therefore read as they are, and converted, or quantized, one group at a time as they move.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from costmodel.formats import DType
from costmodel.models.configs import stored_quantization_in
from executors.formats import SAFETENSORS_NAMES, TORCH_DTYPES, format_of
from executors.models.loading import load_model
from executors.models.parameters import stored_parameters
from executors.models.quantized import load_quantized, make_layers_quantizable
from executors.models.weight_files import weights_digest
from zosim.plans import Plan


def moves_mapped(plan: Plan) -> bool:
    """Whether weights keep the format of their files until they move into a program's buffers, or become quantized there.

    Stages compute with parameters before that.
    """
    return plan.num_stages == 1 or plan.is_shared_out or plan.storage.quant_config is not None


def load_weights(
    source: str,
    plan: Plan,
    *,
    is_mapped: bool = True,
    random_weights: bool = False,
    allow_download: bool = False,
) -> nn.Module:
    """Return a model with its base weights as a run begins with them: in the plan's format, quantized, or mapped in their own.

    - `is_mapped`: whether weights may stay in their files until they move.
    - `random_weights`, `allow_download`: as of :func:`executors.models.loading.load_model`.
    """
    if not random_weights and stored_quantization_in(source) is not None:
        return load_quantized(source, plan)
    is_mapped = is_mapped and moves_mapped(plan) and not random_weights
    storage = plan.storage_dtype
    model = load_model(
        source,
        dtype=(own_format(source) if is_mapped else None) or storage,
        attention=plan.forward.attention,
        random_weights=random_weights,
        allow_download=allow_download,
    )
    make_layers_quantizable(model, plan)
    # What becomes quantized stays as it lies in its files until then, one weight after the other.
    becoming = [tensor.parameter for tensor in stored_parameters(model) if not tensor.is_numbers]
    if is_mapped:
        model.config.dtype = TORCH_DTYPES[storage]  # what is saved of it
    if becoming or not is_mapped:
        to_storage(model, plan, but=becoming if is_mapped else ())
    return model


def to_storage(model: nn.Module, plan: Plan, but: Iterable[torch.Tensor] = ()) -> None:
    """Give the model's parameters, but for some, the plan's format."""
    storage, left_out = TORCH_DTYPES[plan.storage_dtype], {id(parameter) for parameter in but}
    for parameter in model.parameters():
        if parameter.dtype != storage and id(parameter) not in left_out:
            parameter.data = parameter.data.to(storage)


def own_format(source: str | Path) -> DType | None:
    """Return the format that all weights in a directory are kept in; None where there are several, or none to read."""
    names = set()
    try:
        for path in sorted(filter(Path.is_file, Path(source).glob("*.safetensors"))):
            with safe_open(path, framework="pt") as file:
                names |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError):
        return None  # whoever loads the model says what is wrong with it
    kept_in = next((dtype for dtype, name in SAFETENSORS_NAMES.items() if names == {name}), None)
    return format_of(kept_in) if kept_in is not None and kept_in.is_floating_point else None


def digest_of_files(source: str | Path, dtype: str | None = None) -> str | None:
    """Return the digest of the weights in a directory, read in `dtype` (by default their own); None where there are none to read.

    Raises ModelError if the weights cannot be read.
    """
    if not (Path(source).is_dir() and any(Path(source).glob("*.safetensors"))):
        return None
    own = own_format(source) or "float32"
    return weights_digest(load_model(source, dtype=own), dtype or own)
