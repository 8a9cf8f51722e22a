"""The choice of what runs the forwards of a plan."""

from __future__ import annotations

import torch
from torch import nn

from costmodel.models.model_spec import block_index
from executors.models.batched import BatchedModel
from executors.models.model import (
    LossDType,
    Objective,
    SegmentedModel,
    SuspendedModel,
    TextObjective,
    UnsplitModel,
    in_segments,
)
from executors.models.quantized import make_layers_quantizable
from topology.errors import ModelError
from zosim.lowering.split import is_encoded
from zosim.plans import Plan


def forward_runner_for(
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    *,
    loss_dtype: LossDType,
    autocast_dtype: torch.dtype | None,
    objective: Objective | TextObjective | None = None,
) -> SegmentedModel:
    """Return what runs the forwards of `plan` on `model`.

    Raises ModelError if the model cannot be run so.
    Raises PlanError if the device lacks what multiplies by the plan's quantized values.
    """
    make_layers_quantizable(model, plan, device)
    if plan.perturbs_by_adapters:
        if objective is not None:
            raise ModelError(
                "an objective needs the logits of all tokens, but --weights adapters computes only those with "
                "labels",
                hint="leave --objective out, or use --weights serial or copies",
            )
        return BatchedModel(model, loss_dtype=loss_dtype, autocast_dtype=autocast_dtype)
    forward_runner = in_segments(
        model,
        loss_dtype=loss_dtype,
        loss_chunk_tokens=plan.forward.loss_chunk_tokens,
        autocast_dtype=autocast_dtype,
        objective=objective,
        split_blocks=plan.model.split_blocks,
    )
    if isinstance(forward_runner, SuspendedModel):
        _end_stages(forward_runner, plan)
    elif isinstance(forward_runner, UnsplitModel) and (plan.split_points or plan.is_offloaded):
        raise forward_runner.reason
    return forward_runner


def _end_stages(model: SuspendedModel, plan: Plan) -> None:
    """Let stages of a suspended model end where the plan's do.

    Raises ModelError if a codec is to encode what they pass on, or it is not all that the next stage needs.
    """
    if not plan.split_points:
        return
    if any(is_encoded(plan, boundary) for boundary in range(len(plan.split_points))):
        raise ModelError(
            f"{type(model.model).__name__} hands several tensors from block to block, which no codec encodes",
            hint="use --codec none --residual-codec none",
        )
    model.end_stages_at([block_index(name) for name in plan.split_points])
