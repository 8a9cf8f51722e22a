"""The interface of what runs the forwards of a program, and the choice of one for a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from costmodel.models.model_spec import ParamGroup, block_index
from executors.models.batched import BatchedModel
from executors.models.model import (
    Batch,
    Handed,
    LossDType,
    Objective,
    SuspendedModel,
    TextObjective,
    UnsplitModel,
    in_segments,
)
from executors.models.parameters import NamedTensor
from executors.models.quantized import make_layers_quantizable
from executors.models.recording_blocks import StepCache
from topology.errors import ModelError
from zosim.lowering.split import is_encoded
from zosim.plans import Plan


class ForwardRunner(Protocol):
    """Runs segments of a model at the weights that its tensors currently hold.

    :class:`executors.models.model.SegmentedModel` is one, by running the model's own modules. Before a segment runs at an
    evaluation point, the interpreter lets the tensors that the segment reads hold that point's weights
    (:meth:`NamedTensor.hold`).

    Attributes
    ----------
    device : torch.device
        Where segments run.
    segments : tuple of str
        In the order in which they run.
    param_groups : tuple of ParamGroup
        The parameters by the segments that read them, as the plan's model has them.
    tensors : tuple of NamedTensor
        All parameters in registration order.
    hidden_size, inner_size : int
        Widths of the hidden state, and of what goes into the second linear of a block that is split (0 without one).
    """

    device: torch.device
    segments: tuple[str, ...]
    param_groups: tuple[ParamGroup, ...]
    tensors: tuple[NamedTensor, ...]
    hidden_size: int
    inner_size: int

    def tensors_of(self, group: str) -> tuple[NamedTensor, ...]:
        """Return the parameters of a group in registration order."""

    def run(self, segment: str, batch: Batch, cache: StepCache, handed: Handed | None) -> Handed:
        """Return what `segment` makes of a batch and of what the segment before it handed on: from the last, the loss.

        What is the same at all points of a step may be kept in `cache`.
        """

    def logits(self, hidden: Handed) -> Tensor:
        """Return the logits of every position for the label of the next, given what the last block left."""

    def gathered_rows(
        self, tensor: NamedTensor, rows: Tensor, positions: Tensor
    ) -> AbstractContextManager[None]:
        """Let the token table be read as `rows` at `positions` for the length of the block."""

    def loss_format(self) -> torch.dtype:
        """Return the format that losses have."""


def forward_runner_for(
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    *,
    loss_dtype: LossDType,
    autocast_dtype: torch.dtype | None,
    objective: Objective | TextObjective | None = None,
) -> ForwardRunner:
    """Return what runs the forwards of `plan` on `model`.

    Raises
    ------
    ModelError
        If the model cannot be run so.
    PlanError
        If the device lacks what multiplies by the plan's quantized values.
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

    Raises
    ------
    ModelError
        If a codec is to encode what they pass on, or it is not all that the next stage needs.
    """
    if not plan.split_points:
        return
    if any(is_encoded(plan, boundary) for boundary in range(len(plan.split_points))):
        raise ModelError(
            f"{type(model.model).__name__} hands several tensors from block to block, which no codec encodes",
            hint="use --codec none --residual-codec none",
        )
    model.end_stages_at([block_index(name) for name in plan.split_points])
