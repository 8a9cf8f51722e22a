"""A block in two halves, split at the input of its MLP's second linear, each by the model's own modules.

The front half is the block's own forward, stopped there. The back half is what the families' code does from there on:
the second linear, the residual stream added, and the norm behind where there is one (OPT-350M).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from executors.models.parameters import are_same
from executors.models.recording_blocks import Call
from topology.errors import ModelError

_NORMS_BEFORE = {
    "fc2": "final_layer_norm",
    "mlp.c_proj": "ln_2",
    "mlp.down_proj": "post_attention_layernorm",
}
"""By the path within a block of the MLP's second linear: the norm before the MLP, whose input is the residual stream."""


class Halfway(NamedTuple):
    """What passes from the front half of a block to the back half, each of shape (sequences, tokens, width)."""

    activation: Tensor  # input of the MLP's second linear
    residual: Tensor  # what the MLP's output is added to


def as_tensor(handed: object) -> Tensor:
    """Return what a whole block handed on."""
    assert isinstance(handed, Tensor)
    return handed


class _FrontIsDone(Exception):  # noqa: N818 - not an error: the front half is done
    """Carries the second linear's input out of the block."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class HalvedBlock:
    """Runs either half of one block.

    Raises ModelError if its MLP is none of those that are known.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        modules = dict(block.named_modules())
        path = next((p for p, norm in _NORMS_BEFORE.items() if p in modules and norm in modules), None)
        if path is None:
            raise ModelError(
                f"{type(block).__name__} has no MLP whose second linear is one of {', '.join(_NORMS_BEFORE)}",
                hint="zosim splits inside the blocks of OPT, GPT-2, Llama, Mistral and Qwen; split others "
                "between blocks",
            )
        self._linear, norm = modules[path], modules[_NORMS_BEFORE[path]]
        self._norm_behind = norm if normalises_last(block) else None
        self._takes_residual = modules["fc1"] if self._norm_behind is not None else norm
        self._is_flat = path == "fc2"

    def front(self, rows: torch.Size, call: Call) -> Halfway:
        """Run the block up to its MLP's second linear, on tokens in the shape `rows`."""
        # The block runs its own code, until a hook stops it by an exception.
        residuals: list[Tensor] = []

        def stop(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _FrontIsDone(inputs[0])

        hooks = [
            self._takes_residual.register_forward_pre_hook(lambda _module, given: residuals.append(given[0])),
            self._linear.register_forward_pre_hook(stop),
        ]
        try:
            self._block(*call[0], **call[1])
        except _FrontIsDone as stopped:
            (residual,) = residuals
            return Halfway(stopped.activation.reshape(*rows, -1), residual.reshape(*rows, -1))
        finally:
            for hook in hooks:
                hook.remove()
        raise ModelError(f"{type(self._block).__name__} does not run the second linear of its MLP")

    def back(self, halfway: Halfway) -> Tensor:
        """Return the block's output."""
        activation, residual = halfway
        shape = residual.shape
        # OPT's MLP sees tokens in one row, and products of other shapes may have other bits.
        if self._is_flat:
            activation, residual = (tensor.reshape(-1, tensor.shape[-1]) for tensor in halfway)
        hidden = (residual + self._linear(activation)).view(shape)
        return hidden if self._norm_behind is None else self._norm_behind(hidden)  # type: ignore[no-any-return]

    def check(self, rows: torch.Size, call: Call) -> Halfway:
        """Raise unless both halves together are the block, bit for bit; return what passes between them.

        Raises ModelError if they are not.
        """
        output = self._block(*call[0], **call[1])
        whole = output[0] if isinstance(output, tuple) else output
        halfway = self.front(rows, call)
        joined = self.back(halfway)
        # NaNs are equal here: damaged weights are not this check's to find.
        if not are_same(joined, whole):
            raise ModelError(
                f"{type(self._block).__name__} does more after the second linear of its MLP than add the "
                "residual stream",
                hint="split the model between its blocks",
            )
        return halfway


def normalises_last(block: nn.Module) -> bool:
    """Whether a block's last norm comes behind its MLP."""
    return not getattr(block, "do_layer_norm_before", True)
