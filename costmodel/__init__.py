"""What one operation costs: work counted from a model's shapes, and seconds from a device's profile."""

from costmodel.configs import LoRA, read_model_spec, shipped_models, spec_of_config
from costmodel.groups import ParameterEntry, group_parameters
from costmodel.model_spec import EMBED, HEAD, ModelSpec, ParameterGroup, block_segment
from costmodel.work import DTYPE_BYTES, Attention, DType, Matmul, Work

__all__ = [
    "DTYPE_BYTES",
    "EMBED",
    "HEAD",
    "Attention",
    "DType",
    "LoRA",
    "Matmul",
    "ModelSpec",
    "ParameterEntry",
    "ParameterGroup",
    "Work",
    "block_segment",
    "group_parameters",
    "read_model_spec",
    "shipped_models",
    "spec_of_config",
]
