"""What has to be true of a model and of torch before a plan can run on them."""

from __future__ import annotations

import torch
from torch import nn

from costmodel.formats import FORMATS
from executors.devices import ACCELERATORS, check_device, own_index
from executors.formats import TORCH_DTYPES
from executors.models.mapped import moves_mapped, to_storage
from executors.models.transformers_interface import attention_of
from executors.ranks.rank_info import RankInfo
from topology.errors import PlanError
from zosim.plans import Plan


def own_device(device: str) -> str:
    """Return a device's name, with the number of this rank's own where none is given.

    Raises PlanError if it is no device that runs know.
    """
    check_device(device)
    return f"{device}:{own_index(device, RankInfo.here().local_rank)}" if device in ACCELERATORS else device


def prepare(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Give the model the plan's format, at once or as it moves, and attention, and torch the plan's matrix products."""
    if not moves_mapped(plan):
        to_storage(model, plan)
    config = getattr(model, "config", None)
    wanted = attention_of(type(model), plan.forward.attention)
    if getattr(config, "_attn_implementation", wanted) != wanted:
        model.set_attn_implementation(wanted)  # type: ignore[operator]
    # A format of NVIDIA's alone.
    if plan.compute_dtype == "tf32" and device.type != "cuda":
        raise PlanError("compute=tf32 needs a CUDA device", hint="use compute=float32")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.compute_dtype == "tf32" else "highest")


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the format of matrix products where it is not that of the weights."""
    compute, storage = plan.compute_dtype, plan.storage_dtype
    if compute in (storage, "tf32"):
        return None
    if (
        compute not in ("float16", "bfloat16")
        or FORMATS[compute].element_bytes > FORMATS[storage].element_bytes
    ):
        raise PlanError(
            f"compute={compute} does not support storage={storage}",
            hint=f"use compute={storage}, or bfloat16 or float16 with wider storage",
        )
    return TORCH_DTYPES[compute]


def move_module_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what a model keeps beside its parameters."""
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = tensor.to(device)
