"""Stage boundaries of a model, the activations that cross them, and a forward that changes these.

Between blocks the hidden state crosses. Inside a block, at the input of the MLP's second linear, two tensors do: that
input (``relu(fc1 x)`` in OPT, GELU of it in GPT-2, ``silu(gate)·up`` in Llama and Qwen3), and the residual stream that
its product is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from costmodel.models.model_spec import block_segment
from executors.models.halves import Halfway, HalvedBlock, as_tensor
from executors.models.model import Batch, SegmentedModel
from executors.models.recording_blocks import StepCache
from zosim.plans import INSIDE

BoundaryTensor = Literal["hidden", "activation", "residual"]

Change = Callable[[BoundaryTensor, Tensor], Tensor]
"""What a boundary does to a tensor that crosses it."""


@dataclass(frozen=True, slots=True, order=True)
class SplitPoint:
    """A stage boundary."""

    block: int
    inside: bool = False  # within the block, or after it

    @property
    def name(self) -> str:
        """Name of the split point in plans."""
        return block_segment(self.block) + (INSIDE if self.inside else "")


def split_points_of(model: SegmentedModel) -> tuple[SplitPoint, ...]:
    """Return every split point, in the order of the forward."""
    return tuple(SplitPoint(i, inside) for i in range(len(model.blocks)) for inside in (True, False))


def boundary_tensors(model: SegmentedModel, batch: Batch) -> dict[SplitPoint, dict[BoundaryTensor, Tensor]]:
    """Return copies of the tensors that cross each boundary, in the model's format.

    Raises ModelError if a block's MLP is none of those that are known.
    """
    tensors: dict[SplitPoint, dict[BoundaryTensor, Tensor]] = {}

    def keep(split_point: SplitPoint) -> Change:
        def kept(name: BoundaryTensor, tensor: Tensor) -> Tensor:
            tensors.setdefault(split_point, {})[name] = (
                tensor.detach().reshape(*batch["input_ids"].shape, -1).clone()
            )
            return tensor

        return kept

    loss_through(model, batch, {split_point: keep(split_point) for split_point in split_points_of(model)})
    return tensors


def loss_through(model: SegmentedModel, batch: Batch, changes: Mapping[SplitPoint, Change]) -> Tensor:
    """Return the loss of a forward in which every split point in `changes` changes what crosses it.

    Raises ModelError if the MLP of a block that is split is none of those that are known.
    """
    cache = StepCache()
    hidden = as_tensor(model.embed(batch, cache))
    for i, block in enumerate(model.blocks):
        inner, after = changes.get(SplitPoint(i, inside=True)), changes.get(SplitPoint(i))
        if inner is None:
            hidden = as_tensor(model.block(i, hidden, cache))
        else:
            halves = HalvedBlock(block)
            activation, residual = halves.front(hidden.shape[:-1], model.call(i, hidden, cache))
            hidden = halves.back(Halfway(inner("activation", activation), inner("residual", residual)))
        if after is not None:
            hidden = after("hidden", hidden)
    return model.head(hidden, batch)
