"""What one operation costs: work counted from a model's shapes, and seconds from a device's profile.

>>> from costmodel import datasheet_profile, forward_work, read_model_spec
>>> from costmodel.estimate import estimate
>>> from topology import load_preset
>>> spec = read_model_spec("opt-13b")
>>> work = forward_work(spec, "block.0", batch=1, seq=2048, dtype="bfloat16")
>>> estimate(work, datasheet_profile(load_preset("h200-1x"), "gpu0")).limiter
'matmul'

:mod:`costmodel.rates.calibration` fits a profile to measurements; it needs scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.lazy import lazy_names

if TYPE_CHECKING:
    from costmodel.devices.datasheet import datasheet_profile as datasheet_profile
    from costmodel.estimate import OperationCost as OperationCost
    from costmodel.formats import FORMATS as FORMATS
    from costmodel.formats import DType as DType
    from costmodel.formats import Format as Format
    from costmodel.memory import MemoryComponent as MemoryComponent
    from costmodel.memory import preflight_host as preflight_host
    from costmodel.models.configs import LoRA as LoRA
    from costmodel.models.configs import Prefix as Prefix
    from costmodel.models.configs import read_model_spec as read_model_spec
    from costmodel.models.configs import shipped_models as shipped_models
    from costmodel.models.configs import spec_of_config as spec_of_config
    from costmodel.models.forward import activation_bytes as activation_bytes
    from costmodel.models.forward import forward_work as forward_work
    from costmodel.models.forward import shared_activation_bytes as shared_activation_bytes
    from costmodel.models.groups import ParameterEntry as ParameterEntry
    from costmodel.models.groups import group_parameters as group_parameters
    from costmodel.models.model_spec import EMBED as EMBED
    from costmodel.models.model_spec import HEAD as HEAD
    from costmodel.models.model_spec import ModelSpec as ModelSpec
    from costmodel.models.model_spec import ParamGroup as ParamGroup
    from costmodel.models.model_spec import block_segment as block_segment
    from costmodel.param_passes import allocation_work as allocation_work
    from costmodel.param_passes import cast_work as cast_work
    from costmodel.param_passes import copy_work as copy_work
    from costmodel.param_passes import perturb_work as perturb_work
    from costmodel.param_passes import sampling_work as sampling_work
    from costmodel.param_passes import update_work as update_work
    from costmodel.rates.profile import Constant as Constant
    from costmodel.rates.profile import Profile as Profile
    from costmodel.rates.profile import load_profile as load_profile
    from costmodel.work import Attention as Attention
    from costmodel.work import Matmul as Matmul
    from costmodel.work import Work as Work
else:
    __getattr__, __all__ = lazy_names(__name__, __file__)
