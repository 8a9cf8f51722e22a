"""Where a model may be cut into stages, what crosses there, and a forward through cuts that change what crosses.

Between blocks the hidden state crosses. Inside a block, at the input of the MLP's second linear, two tensors do: that
input (``relu(fc1 x)`` in OPT, GELU of it in GPT-2, ``silu(gate)·up`` in Llama and Qwen3), and the residual stream that
its product is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from executors.model import Batch, CutModel, StepCache
from topology.errors import ModelError

Crossing = Literal["hidden", "activation", "residual"]

Change = Callable[[Crossing, Tensor], Tensor]
"""What a cut does to a tensor that crosses it."""

_SECOND_LINEARS = {
    "fc2": "final_layer_norm",
    "mlp.c_proj": "ln_2",
    "mlp.down_proj": "post_attention_layernorm",
}
"""By the path within a block of the MLP's second linear: the norm before the MLP, whose input is the residual stream."""


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """A place to cut at.

    Attributes
    ----------
    block : int
    inside : bool
        Within the block, or after it.
    """

    block: int
    inside: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"{'inside' if self.inside else 'after'} block {self.block}"


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
    found: dict[Cut, dict[Crossing, Tensor]] = {}

    def keep(cut: Cut) -> Change:
        def kept(name: Crossing, tensor: Tensor) -> Tensor:
            found.setdefault(cut, {})[name] = tensor.detach().reshape(*_rows(batch), -1).clone()
            return tensor

        return kept

    loss_through(model, batch, {cut: keep(cut) for cut in cuts_of(model)})
    return found


def loss_through(model: CutModel, batch: Batch, changes: Mapping[Cut, Change]) -> Tensor:
    """Return the loss of a forward in which every cut in `changes` changes what crosses it.

    Raises
    ------
    ModelError
        If the MLP of a block that is cut is none of those that are known, or its residual stream is not added last.
    """
    cache = StepCache()
    hidden = model.embed(batch, cache)
    for i, block in enumerate(model.blocks):
        inner, after = changes.get(Cut(i, inside=True)), changes.get(Cut(i))
        if inner is None:
            hidden = model.block(i, hidden, cache)
        else:
            with _changed_inside(block, inner) as residuals:
                hidden = model.block(i, hidden, cache)
            # The residual stream is added to the block's output last, so that a change of it is, too.
            (residual,) = residuals
            moved = inner("residual", residual) - residual
            hidden = hidden + moved.reshape(hidden.shape)
        if after is not None:
            hidden = after("hidden", hidden)
    return model.head(hidden, batch)


@contextmanager
def _changed_inside(block: nn.Module, change: Change) -> Iterator[list[Tensor]]:
    """Change the input of the MLP's second linear while the block runs, and note the residual stream."""
    linear, norm = _second_linear(block)
    residuals: list[Tensor] = []
    hooks = [
        norm.register_forward_pre_hook(lambda _module, args: residuals.append(args[0])),
        linear.register_forward_pre_hook(lambda _module, args: (change("activation", args[0]), *args[1:])),
    ]
    try:
        yield residuals
    finally:
        for hook in hooks:
            hook.remove()


def _second_linear(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    modules = dict(block.named_modules())
    for path, norm in _SECOND_LINEARS.items():
        if path in modules and norm in modules:
            if getattr(block, "do_layer_norm_before", True):
                return modules[path], modules[norm]
            raise ModelError(
                f"{type(block).__name__} normalises after its MLP, so that a cut inside it leaves a norm behind",
                hint="cut between its blocks",
            )
    raise ModelError(
        f"{type(block).__name__} has no MLP whose second linear is one of {', '.join(_SECOND_LINEARS)}",
        hint="zosim cuts inside blocks of OPT, GPT-2, Llama, Mistral and Qwen",
    )


def _rows(batch: Batch) -> tuple[int, int]:
    sequences, tokens = batch["input_ids"].shape
    return sequences, tokens
