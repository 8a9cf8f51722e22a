"""Planted faults: small changes of shipped code, in force while a context lasts.

A :class:`Fault` names a function and what runs in its place, which is handed the shipped function first. It is put into the shipped
function's code object, so that every caller sees it, however it imported the function. A fault of a constant names its
module and its name, and replaces the value in every module that imported it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from topology.errors import ZosimError


class FaultError(ZosimError):
    """A planted fault that no longer fits the code it was written for."""


@dataclass
class InForce:
    """A fault that is planted."""

    # Whether what it changes has been called since; of a constant always, since nothing tells who reads it.
    is_reached: bool


@dataclass(frozen=True)
class Fault:
    """A small change of shipped code that a claim's check must notice."""

    name: str  # what is wrong with it, in words
    # ``module:function``, ``module:Class.method``, ``module:Class.property``, or ``module:CONSTANT``.
    target: str
    # Of a function: takes the shipped function, then what the function is called with, by the function's own names,
    # behind an underscore where it is not used. Of a constant: takes its value and returns another.
    change: Callable[..., Any]

    @property
    def description(self) -> str:
        """The change in words."""
        return f"{self.target}: {self.name}"

    def is_reached_by(self, codes: AbstractSet[CodeType]) -> bool:
        """Return whether functions that were called, while the fault was not in force, run or read what it changes."""
        shipped = _target(self.target)
        if isinstance(shipped, FunctionType):
            return shipped.__code__ in codes
        return any(self.target.rpartition(":")[2] in code.co_names for code in codes)

    def apply(self) -> AbstractContextManager[InForce]:
        """Return a context in which the shipped code has the fault.

        Raises FaultError if there is no such target (any more), its parameters have other names than those of the
        change, or the change of a constant changes nothing.
        """
        shipped = _target(self.target)
        if isinstance(shipped, FunctionType):
            return self._in_place_of(shipped)
        changed = self.change(shipped)
        if changed == shipped:
            raise FaultError(
                f"the planted fault {self.name!r} leaves {self.target} at {shipped!r}", hint=_ADAPT
            )
        return _bound(self.target, shipped, changed)

    @contextmanager
    def _in_place_of(self, shipped: FunctionType) -> Iterator[InForce]:
        known = inspect.signature(shipped).parameters
        taken = list(inspect.signature(self.change).parameters.values())[1:]
        named = (each.name for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
        for name in named:
            if name not in known and name.removeprefix("_") not in known:
                raise FaultError(
                    f"the planted fault {self.name!r} takes {name!r}, but {self.target} has no such parameter",
                    hint=_ADAPT,
                )
        code = shipped.__code__
        original = FunctionType(
            code, shipped.__globals__, shipped.__name__, shipped.__defaults__, shipped.__closure__
        )
        original.__kwdefaults__ = shipped.__kwdefaults__
        number, in_force = next(_NUMBERS), InForce(is_reached=False)

        def instead(*given: Any, **named: Any) -> Any:
            in_force.is_reached = True
            return self.change(original, *given, **named)

        _INSTEAD[number] = instead
        shipped.__code__ = _call_of(number).replace(co_freevars=code.co_freevars)
        try:
            yield in_force
        finally:
            shipped.__code__ = code
            del _INSTEAD[number]


def planted(target: str, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """Return a decorator that makes a :class:`Fault` of what runs in place of `target`.

    >>> @planted("executors.randomness.rng:seed_of", "seeds that are one too large")
    ... def larger_seeds(shipped, *args):
    ...     return shipped(*args) + 1
    >>> larger_seeds.name
    'seeds that are one too large'
    """
    return lambda change: Fault(name, target, change)


def altered(whole: Any, **attributes: Any) -> Any:
    """Return a shallow copy of an object with other attributes, even of one that is frozen or would refuse them."""
    other = copy(whole)
    for name, value in attributes.items():
        object.__setattr__(other, name, value)
    return other


def called_with(target: str, name: str, /, **arguments: Any) -> Fault:
    """Return a fault by which a function is called with other arguments: each a value, or a function of the shipped call's.

    >>> called_with("executors.runs.records:seed_of", "steps counted from 1", step=lambda step: step + 1).name
    'steps counted from 1'
    """

    def change(shipped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _signature_of(shipped).bind(*args, **kwargs)
        call.apply_defaults()
        for key, value in arguments.items():
            call.arguments[key] = value(call.arguments[key]) if callable(value) else value
        return shipped(*call.args, **call.kwargs)

    # So that an argument that the function does not have (any more) is noticed before it runs.
    taken = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in arguments]
    shipped = inspect.Parameter("shipped", inspect.Parameter.POSITIONAL_ONLY)
    change.__signature__ = inspect.Signature([shipped, *taken])  # type: ignore[attr-defined]
    return Fault(name, target, change)


_signature_of = cache(inspect.signature)


def returning(target: str, name: str, result_of: Callable[[Any], Any]) -> Fault:
    """Return a fault by which a function returns something else, made of what it returns."""
    return Fault(name, target, lambda shipped, *args, **kwargs: result_of(shipped(*args, **kwargs)))


def scaled(target: str, factor: Any, name: str, *, entry: str | None = None) -> Fault:
    """Return a fault by which what a function returns, or one entry of it, is so many times as large.

    >>> scaled("proofs_checks.oracles.statements:exchange_share", 1.03, "three percent").description
    'proofs_checks.oracles.statements:exchange_share: three percent'
    """
    if entry is None:
        return returning(target, name, lambda result: factor * result)
    return returning(target, name, lambda result: {**result, entry: factor * result[entry]})


_ADAPT = "adapt the planted fault to the code as it is now"
_NUMBERS = itertools.count()
_INSTEAD: dict[int, Callable[..., Any]] = {}
"""What runs in place of shipped functions, by number."""


def _call_of(number: int) -> CodeType:
    """Return the code of a function that calls what is in force under a number, in whatever module the code lies."""
    found = f"__import__({__name__!r}, fromlist=['_'])._INSTEAD[{number}]"
    module = compile(f"def planted(*args, **kwargs): return {found}(*args, **kwargs)", "<planted>", "exec")
    (code,) = (each for each in module.co_consts if isinstance(each, CodeType))
    return code


def _target(target: str) -> Any:
    module, _, path = target.partition(":")
    try:
        owner: Any = import_module(module)
        for name in path.split("."):
            owner = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
    except (ModuleNotFoundError, AttributeError):
        raise FaultError(
            f"the planted fault's target {target} does not exist", hint="name where the code went"
        ) from None
    if isinstance(owner, property):
        owner = owner.fget
    owner = getattr(owner, "__func__", owner)
    return inspect.unwrap(owner) if callable(owner) else owner


@contextmanager
def _bound(target: str, value: Any, changed: Any) -> Iterator[InForce]:
    """Replace a constant wherever it was imported under its name."""
    name = target.rpartition(":")[2]
    importers = [module for module in list(sys.modules.values()) if module.__dict__.get(name) is value]
    for module in importers:
        setattr(module, name, changed)
    try:
        yield InForce(is_reached=True)
    finally:
        for module in importers:
            setattr(module, name, value)
