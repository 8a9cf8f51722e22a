"""A model's parameters by name and place, whether or not they have memory.

Here alone it is known that a parameter's values are a float tensor in ``parameter.data``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from costmodel.low_bits import Coding
from executors.low_bits.coded import Coded, KnownFormat
from executors.low_bits.linear import CodedLayer, coded_layers, is_of_adapter
from topology.errors import ModelError

Held = Tensor | Coded
"""What a parameter is: numbers, or codes."""

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
    layer : CodedLayer or None
        Where the parameter may be codes, the layer whose weight it is; of several the first.
    known_format : KnownFormat
        Of its codes, wherever they lie in a program's buffers.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    index: int
    decays: bool
    layer: CodedLayer | None = None
    known_format: KnownFormat = field(default_factory=KnownFormat, compare=False, repr=False)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return self.shape.numel()

    @property
    def values(self) -> Tensor:
        """What the model computes with; of a parameter that is codes, NaNs without memory."""
        return self.parameter.data

    @property
    def held(self) -> Held:
        """What the model computes with."""
        coded = None if self.layer is None else self.layer.coded
        return self.values if coded is None else coded

    def hold(self, values: Held) -> None:
        """Let the model compute with `values`, which are not copied."""
        if isinstance(values, Coded):
            assert self.layer is not None
            self.layer.coded = values
            values = _nothing(self.shape, values.scales.dtype, values.device)
        elif self.layer is not None:
            self.layer.coded = None
        self.parameter.data = values

    def coding_within(self, coding: Coding) -> Coding | None:
        """Return how it is kept in a model whose linear layers are kept as `coding`; None where it is numbers."""
        if self.layer is None:
            return None
        return coding.of_adapters if is_of_adapter(self.name) else coding

    def held_at(self, device: torch.device, dtype: torch.dtype) -> Held:
        """Return what the model computes with on a device: numbers in a format, codes as they are."""
        held = self.held
        return held.to(device) if isinstance(held, Coded) else held.to(device, dtype)

    @property
    def trainable(self) -> bool:
        """Whether it is perturbed and updated."""
        return self.index >= 0


def bind(tensors: Sequence[NamedTensor], views: Sequence[Held]) -> None:
    """Let parameters be what lies in as many pieces of memory."""
    for tensor, view in zip(tensors, views, strict=True):
        tensor.hold(view)


def take_over(place: Held, tensor: NamedTensor) -> None:
    """Copy a parameter into its place, making codes of numbers where the place is for codes."""
    held = tensor.held
    if not isinstance(place, Coded):
        place.copy_(tensor.values)
    elif isinstance(held, Coded):
        place.copy_(held)
    else:
        place.encode(held, tensor.name)


def stand_in(tensor: NamedTensor, device: torch.device) -> Tensor:
    """Return what a parameter is while its values are elsewhere: a forward that reads it makes no number."""
    return _nothing(tensor.shape, tensor.values.dtype, device)


@contextmanager
def absent(tensors: Sequence[NamedTensor], device: torch.device) -> Iterator[None]:
    """Let stand-ins take the places of parameters for a while."""
    held = [tensor.held for tensor in tensors]
    bind(tensors, [stand_in(tensor, device) for tensor in tensors])
    try:
        yield
    finally:
        bind(tensors, held)


def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or the lowest whole numbers, in a shape that takes no memory."""
    value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def named_tensors(model: nn.Module) -> tuple[NamedTensor, ...]:
    """Return a model's parameters in registration order.

    Raises
    ------
    ModelError
        If none is trainable.
    """
    layers = dict(coded_layers(model))
    tensors = []
    num_trainable = 0
    for name, parameter in model.named_parameters():
        index = num_trainable if parameter.requires_grad else -1
        num_trainable += parameter.requires_grad
        tensors.append(NamedTensor(name, parameter, parameter.shape, index, decays(name), layers.get(name)))
    if not num_trainable:
        raise ModelError(
            "the model has no trainable parameter", hint="set requires_grad on what is to be tuned"
        )
    return tuple(tensors)
