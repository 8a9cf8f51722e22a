"""A model's parameters by name and place, whether or not they have memory.

Here alone it is known that a parameter's values are a float tensor in ``parameter.data``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from topology.errors import ModelError

_NO_DECAY = ("bias", "layer_norm", "layernorm")


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter called `name`, as the reference loop decides it."""
    return not any(word in name for word in _NO_DECAY)


@dataclass(frozen=True)
class NamedTensor:
    """One stored parameter.

    Attributes
    ----------
    name : str
        As ``named_parameters()`` spells it; a tied parameter under its first name.
    parameter : torch.nn.Parameter
    shape : torch.Size
        The parameter's, also while it has no memory.
    index : int
        Position among all trainable parameters, or -1 where it is frozen.
    decays : bool
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    index: int
    decays: bool

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return self.shape.numel()

    @property
    def values(self) -> Tensor:
        """What the model computes with."""
        return self.parameter.data

    def hold(self, values: Tensor) -> None:
        """Let the model compute with `values`, which are not copied."""
        self.parameter.data = values

    @property
    def trainable(self) -> bool:
        """Whether it is perturbed and updated."""
        return self.index >= 0


def bind(tensors: Sequence[NamedTensor], views: Sequence[Tensor]) -> None:
    """Let parameters be what lies in as many pieces of memory."""
    for tensor, view in zip(tensors, views, strict=True):
        tensor.hold(view)


def stand_in(tensor: NamedTensor, device: torch.device) -> Tensor:
    """Return zeros in the shape of a parameter that take no memory."""
    return torch.zeros((), dtype=tensor.values.dtype, device=device).expand(tensor.shape)


def named_tensors(model: nn.Module) -> tuple[NamedTensor, ...]:
    """Return a model's parameters in registration order.

    Raises
    ------
    ModelError
        If none is trainable.
    """
    tensors = []
    num_trainable = 0
    for name, parameter in model.named_parameters():
        index = num_trainable if parameter.requires_grad else -1
        num_trainable += parameter.requires_grad
        tensors.append(NamedTensor(name, parameter, parameter.shape, index, decays(name)))
    if not num_trainable:
        raise ModelError(
            "the model has no trainable parameter", hint="set requires_grad on what is to be tuned"
        )
    return tuple(tensors)
