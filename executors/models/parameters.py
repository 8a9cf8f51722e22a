"""A model's parameters by name and place, whether or not they have memory.

Here alone it is known that a parameter's values are a float tensor in ``parameter.data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from costmodel.formats.low_bits import QuantConfig
from executors.low_bits.linear import QuantizedLinear, quantized_layers
from executors.low_bits.quantized import QuantizedTensor, shapes_of
from executors.low_bits.stored import DenseTensor, Stored, View, nothing
from topology.errors import ModelError

Arrays = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and format of each tensor that a parameter is, by what files add to its name."""

_NO_DECAY = ("bias", "layer_norm", "layernorm")


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter called `name`, as the reference loop decides it."""
    return not any(word in name for word in _NO_DECAY)


@dataclass(frozen=True)
class NamedTensor:
    """One stored parameter."""

    name: str  # as `named_parameters()` spells it; a tied parameter under its first name
    parameter: nn.Parameter
    shape: torch.Size  # the parameter's, also while it has no memory
    index: int  # position among all trainable parameters, or -1 where it is frozen
    decays: bool
    # Where the parameter may be quantized, the layer whose weight it is; of several the first.
    layer: QuantizedLinear | None = None

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return self.shape.numel()

    @property
    def values(self) -> Tensor:
        """What the model computes with; of a parameter that is quantized, NaNs without memory."""
        return self.parameter.data

    @property
    def held(self) -> Stored:
        """What the model computes with."""
        quantized = None if self.layer is None else self.layer.quantized
        return DenseTensor(self.values) if quantized is None else quantized

    def hold(self, view: View) -> None:
        """Let the model compute with `view`, which is not copied."""
        view.bind(self)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return a copy on the CPU, as numbers in the shape that files have."""
        if self.layer is not None and self.layer.quantized is not None:
            return self.layer.numbers(dtype).cpu()
        return self.values.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)

    @property
    def quant_config(self) -> QuantConfig | None:
        """How it is stored in a program's buffers and in checkpoints; None for numbers."""
        return None if self.layer is None else self.layer.quant_config

    @property
    def is_numbers(self) -> bool:
        """Whether it is stored as numbers."""
        return self.quant_config is None

    def arrays(self, dtype: torch.dtype) -> Arrays:
        """Return the tensors that it is stored as; `dtype` is the format of numbers."""
        return (
            {"": (self.shape, dtype)}
            if self.quant_config is None
            else shapes_of(self.quant_config, self.shape)
        )

    def stored_in(self, arrays: Iterable[Tensor]) -> Stored:
        """Return it as it is stored in these, which are in the order of :meth:`arrays`."""
        if self.quant_config is None:
            return DenseTensor(*arrays)
        return QuantizedTensor(self.quant_config, self.shape, *arrays)

    @property
    def trainable(self) -> bool:
        """Whether it is perturbed and updated."""
        return self.index >= 0


def bind(tensors: Sequence[NamedTensor], views: Sequence[View]) -> None:
    """Let parameters be what lies in as many arrays."""
    for tensor, view in zip(tensors, views, strict=True):
        view.bind(tensor)


def side_path_format(tensors: Iterable[NamedTensor]) -> str | None:
    """Return the format of numbers in a model some of whose parameters are none, which have it for their scales; None if all are."""
    return next((tensor.quant_config.dtype for tensor in tensors if tensor.quant_config is not None), None)


def stand_in(tensor: NamedTensor, device: torch.device) -> DenseTensor:
    """Return what a parameter is while its values are elsewhere: a forward that reads it makes no number."""
    return DenseTensor(nothing(tensor.shape, tensor.values.dtype, device))


@contextmanager
def absent(tensors: Sequence[NamedTensor], device: torch.device) -> Iterator[None]:
    """Let stand-ins take the places of parameters for a while."""
    held = [tensor.held for tensor in tensors]
    bind(tensors, [stand_in(tensor, device) for tensor in tensors])
    try:
        yield
    finally:
        bind(tensors, held)


def stored_parameters(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield a model's parameters in registration order, a tied one once."""
    layers = dict(quantized_layers(model))
    num_trainable = 0
    for name, parameter in model.named_parameters():
        index = num_trainable if parameter.requires_grad else -1
        num_trainable += parameter.requires_grad
        yield NamedTensor(name, parameter, parameter.shape, index, decays(name), layers.get(name))


def named_tensors(model: nn.Module) -> tuple[NamedTensor, ...]:
    """Return a model's parameters in registration order.

    Raises ModelError if none is trainable.
    """
    tensors = tuple(stored_parameters(model))
    if not any(tensor.trainable for tensor in tensors):
        raise ModelError(
            "the model has no trainable parameter", hint="set requires_grad on the parameters to tune"
        )
    return tensors


def are_same(one: Any, other: Any) -> bool:
    """Whether two trees of arguments hold the same, NaNs too; of tensors without values, the same shapes."""
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_same, leaves, others))


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and bool(one == other))
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.is_meta or other.is_meta:
        return True
    same = one == other
    return bool((same | (one.isnan() & other.isnan()) if one.is_floating_point() else same).all())
