"""Formats of numbers as torch and safetensors call them; what they are is said in :mod:`costmodel.formats`."""

from __future__ import annotations

import torch

from costmodel.formats import CAST_FORMATS, COMPUTE_FORMATS, FORMATS, DType
from topology.errors import PlanError

_NAMES_IN_TORCH = {"tf32": "float32", "float8_e4m3": "float8_e4m3fn"}
"""Of the formats that torch calls something else."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _NAMES_IN_TORCH.get(name, name))
    for name, declared in FORMATS.items()
    if name in (*CAST_FORMATS, "float8_e5m2", "int8", "int64", "uint8")
}
"""What a tensor's elements are, by format; narrower ones than a byte lie packed in bytes."""

WEIGHTS_NAME = "model.safetensors"
"""File of a model's weights in its directory."""

SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What files of weights call the formats of their tensors."""


def format_of(dtype: torch.dtype) -> DType:
    """Return the format whose elements torch calls `dtype`. Raises PlanError if nothing is computed in it."""
    for name in COMPUTE_FORMATS:
        if TORCH_DTYPES[name] == dtype and name != "tf32":
            return name
    raise PlanError(
        f"{dtype} is not a compute format", hint="load the model in one of " + ", ".join(COMPUTE_FORMATS)
    )
