"""What one operation costs: work counted from a model's shapes, and seconds from a device's profile.

>>> from topology import load_preset
>>> spec = read_model_spec("opt-13b")
>>> work = forward_work(spec, "block.0", batch=1, seq=2048, dtype="bfloat16")
>>> estimate(work, datasheet_profile(load_preset("h200-1x"), "gpu0")).limiter
'matmul'

:mod:`costmodel.calibration` fits a profile to measurements; it is imported by name, because scipy takes a while.
"""

from costmodel.configs import LoRA, Prefix, read_model_spec, shipped_models, spec_of_config
from costmodel.datasheet import datasheet_profile
from costmodel.estimate import OperationCost, estimate
from costmodel.formats import FORMATS, DType, Format
from costmodel.forward import activation_bytes, forward_work, shared_activation_bytes
from costmodel.groups import ParameterEntry, group_parameters
from costmodel.memory import MemoryPart, preflight_host
from costmodel.model_spec import EMBED, HEAD, ModelSpec, ParameterGroup, block_segment
from costmodel.profile import Constant, Profile, load_profile
from costmodel.sweeps import allocation_work, cast_work, copy_work, draw_work, perturb_work, update_work
from costmodel.work import Attention, Matmul, Work

__all__ = [
    "EMBED",
    "FORMATS",
    "HEAD",
    "Attention",
    "Constant",
    "DType",
    "Format",
    "LoRA",
    "Matmul",
    "MemoryPart",
    "ModelSpec",
    "OperationCost",
    "ParameterEntry",
    "ParameterGroup",
    "Prefix",
    "Profile",
    "Work",
    "activation_bytes",
    "allocation_work",
    "block_segment",
    "cast_work",
    "copy_work",
    "datasheet_profile",
    "draw_work",
    "estimate",
    "forward_work",
    "group_parameters",
    "load_profile",
    "perturb_work",
    "preflight_host",
    "read_model_spec",
    "shared_activation_bytes",
    "shipped_models",
    "spec_of_config",
    "update_work",
]
