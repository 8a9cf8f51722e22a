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
from executors.models.halves import Halfway, HalvedBlock
from executors.models.model import Batch, CutModel
from executors.models.recording_blocks import StepCache
from zosim.plans import INSIDE

Crossing = Literal["hidden", "activation", "residual"]

Change = Callable[[Crossing, Tensor], Tensor]
"""What a cut does to a tensor that crosses it."""


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """A stage boundary.

    Attributes
    ----------
    inside : bool
        Within the block, or after it.
    """

    block: int
    inside: bool = False

    @property
    def name(self) -> str:
        """Name of the cut in plans."""
        return block_segment(self.block) + (INSIDE if self.inside else "")


def cuts_of(model: CutModel) -> tuple[Cut, ...]:
    """Return every place to cut at, in the order of the forward."""
    return tuple(Cut(i, inside) for i in range(len(model.blocks)) for inside in (True, False))


def crossings(model: CutModel, batch: Batch) -> dict[Cut, dict[Crossing, Tensor]]:
    """Return copies of the tensors that cross each cut, in the model's format.

    Raises
    ------
    ModelError
        If a block's MLP is none of those that are known.
    """
    crossed: dict[Cut, dict[Crossing, Tensor]] = {}

    def keep(cut: Cut) -> Change:
        def kept(name: Crossing, tensor: Tensor) -> Tensor:
            crossed.setdefault(cut, {})[name] = tensor.detach().reshape(*batch["input_ids"].shape, -1).clone()
            return tensor

        return kept

    loss_through(model, batch, {cut: keep(cut) for cut in cuts_of(model)})
    return crossed


def loss_through(model: CutModel, batch: Batch, changes: Mapping[Cut, Change]) -> Tensor:
    """Return the loss of a forward in which every cut in `changes` changes what crosses it.

    Raises
    ------
    ModelError
        If the MLP of a block that is cut is none of those that are known.
    """
    cache = StepCache()
    hidden = model.embed(batch, cache)
    for i, block in enumerate(model.blocks):
        inner, after = changes.get(Cut(i, inside=True)), changes.get(Cut(i))
        if inner is None:
            hidden = model.block(i, hidden, cache)
        else:
            halves = HalvedBlock(block)
            args, kwargs = cache.calls[i]
            activation, residual = halves.front(hidden, *args, **kwargs)
            hidden = halves.back(Halfway(inner("activation", activation), inner("residual", residual)))
        if after is not None:
            hidden = after("hidden", hidden)
    return model.head(hidden, batch)
