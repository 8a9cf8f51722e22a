"""Answers on the host to questions that a model's code asks of small integer tensors on an accelerator.

Transformers decide with the numbers of a batch which mask attention needs: ``if mask.all()``. Asked of a tensor on an
accelerator, such a question holds the host until the device has done all that it was given, at every evaluation point.
But a batch comes from the host, and integers are the same on both, whatever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_QUESTIONS = frozenset(
    {"__bool__", "__int__", "__index__", "__contains__", "item", "tolist", "equal", "is_nonzero"}
)
"""Functions whose caller waits for a number."""

_MADE_OF_NUMBERS = frozenset({"arange", "full", "ones", "zeros"})
"""Functions that make a tensor of their arguments alone."""

_KNOWN = _MADE_OF_NUMBERS | {
    "add", "all", "and", "any", "argmax", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "cat", "clone", "contiguous",
    "count_nonzero", "cumsum", "diff", "eq", "expand", "flatten", "flip", "ge", "getitem", "gt", "int", "invert", "isin",
    "le", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "min", "mod", "mul", "ne", "new_full", "new_ones",
    "new_zeros", "ones_like", "or", "pad", "permute", "radd", "remainder", "repeat", "reshape", "roll", "rsub", "squeeze", "stack", "sub",
    "sum", "to", "transpose", "unsqueeze", "view", "where", "zeros_like",
}  # fmt: skip
"""Functions, by name without underscores, whose integers depend on nothing but their arguments, which they do not change."""

_HOST = torch.device("cpu")


class _Mirror:
    """A host tensor equal to one on the accelerator, computed on demand."""

    __slots__ = ("_args", "_function", "_kwargs", "_made")

    def __init__(
        self, function: Callable[..., Any] | None, args: Any, kwargs: Any, made: Tensor | None = None
    ) -> None:
        self._function, self._args, self._kwargs, self._made = function, args, kwargs, made

    def numbers(self) -> Tensor:
        """Return the tensor."""
        if self._made is None:
            assert self._function is not None
            args, kwargs = tree_map(_numbers_of, (self._args, self._kwargs))
            self._made = self._function(*args, **kwargs)
            self._args = self._kwargs = None
        return self._made


class HostMirrors(TorchFunctionMode):
    """Answers questions about integers of a batch, and about integers computed from them, without waiting for the accelerator.

    `known`: tensors of the accelerator, each with one of the host that holds the same.

    Of each integer or boolean tensor that known ones become while the mode is on, it notes how; only what a question
    depends on is ever computed on the host. A function that is not on its list leaves its result without a mirror,
    and a change of integers in place all tensors, since views share memory: then the device is asked as ever. On the meta
    device, where nothing can be asked, it answers for what is made of ranges and constants while it is on.
    """

    def __init__(self, known: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._mirrors = WeakTensorKeyDictionary()
        for there, here in known:
            self._mirrors[there] = _Mirror(None, None, None, here)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or answer for it."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _QUESTIONS:
            mirrored = self._with_mirrors(args, kwargs)
            if mirrored is not None:
                args, kwargs = tree_map(_numbers_of, mirrored)
            return func(*args, **kwargs)
        if _changes(name) or "out" in kwargs:
            changed = kwargs.get("out", args[0] if args else None)
            if not (isinstance(changed, Tensor) and changed.is_floating_point()):
                self._mirrors.clear()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        is_there = isinstance(result, Tensor) and result.device.type != "cpu"
        # Integers alone: sums of floating-point numbers have other bits on the host.
        if (
            is_there
            and not result.dtype.is_floating_point
            and not result.dtype.is_complex
            and name.strip("_") in _KNOWN
        ):
            mirrored = self._with_mirrors(args, kwargs)
            if mirrored is not None:
                self._mirrors[result] = _Mirror(func, *mirrored)
        return result

    def _with_mirrors(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return arguments with mirrors for tensors, and the host for devices; None if a tensor has no mirror."""

        def mirror(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._mirrors.get(value, value)
            return _HOST if isinstance(value, torch.device) else value

        mirrored = tree_map(mirror, (args, {**kwargs}))
        if "device" in mirrored[1]:
            mirrored[1]["device"] = _HOST
        return None if tree_any(lambda value: isinstance(value, Tensor), mirrored) else mirrored


def host_mirrors(
    device: torch.device, batch: Mapping[str, Tensor] | None = None, host: Mapping[str, Tensor] | None = None
) -> AbstractContextManager[Any]:
    """Answer questions about a batch on an accelerator from its tensors on the host; on a CPU do nothing.

    `batch`, `host`: the batch's tensors there, and those of them that the host has.
    """
    if device.type == "cpu":
        return nullcontext()
    batch, host = batch or {}, host or {}
    return HostMirrors((batch[name], tensor) for name, tensor in host.items() if name in batch)


def _numbers_of(value: Any) -> Any:
    return value.numbers() if isinstance(value, _Mirror) else value


def _changes(name: str) -> bool:
    """Whether a function changes its first argument: ``add_``, ``x += y`` or ``x[i] = y``."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name.strip("_") in _IN_PLACE)


_IN_PLACE = frozenset({
    "iadd", "iand", "idiv", "ifloordiv", "ilshift", "imod", "imul", "ior", "irshift", "isub", "itruediv", "ixor",
})  # fmt: skip
