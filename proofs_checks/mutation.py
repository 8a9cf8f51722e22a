"""Planted faults: one-line changes of shipped code, in force while a context lasts.

A fault names a function and a piece of its source, and what to put in its place. The changed source is compiled and
its code object put into the shipped function, so that every caller sees it, however it imported the function. A
fault of a constant names its module and its name, and replaces the value in every module that imported it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from topology.errors import ZosimError


class MutantError(ZosimError):
    """A planted fault that no longer fits the code it was written for."""


@dataclass(frozen=True)
class Mutant:
    """A one-line change of shipped code that a claim's check must catch.

    Attributes
    ----------
    name : str
    target : str
        ``module:function``, ``module:Class.method``, or ``module:CONSTANT``.
    old, new : str
        Source text that stands exactly once in the target, and its replacement; of a constant, text of its ``repr``.
    """

    name: str
    target: str
    old: str
    new: str

    @property
    def description(self) -> str:
        """The change in words."""
        return f"{self.target}: `{self.old}` becomes `{self.new}`"

    def is_reached_by(self, codes: AbstractSet[CodeType]) -> bool:
        """Return whether functions that were called, while the fault was not in force, run or read what it changes."""
        shipped = _target(self.target)
        if isinstance(shipped, FunctionType):
            return shipped.__code__ in codes
        name = self.target.rpartition(":")[2]
        return any(name in code.co_names for code in codes)

    def apply(self) -> AbstractContextManager[None]:
        """Return a context in which the shipped function has the fault.

        Raises
        ------
        MutantError
            If the target, or the text in it, does not exist (any more).
        """
        shipped = _target(self.target)
        return _swapped(shipped, self) if isinstance(shipped, FunctionType) else _replaced(shipped, self)


def _target(target: str) -> Any:
    module, _, path = target.partition(":")
    try:
        owner: Any = import_module(module)
        for name in path.split("."):
            owner = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
    except (ModuleNotFoundError, AttributeError):
        raise MutantError(
            f"there is no {target}", hint="point the planted fault at where the code went"
        ) from None
    if isinstance(owner, property):
        owner = owner.fget
    owner = getattr(owner, "__func__", owner)
    return inspect.unwrap(owner) if callable(owner) else owner


@contextmanager
def _replaced(value: Any, mutant: Mutant) -> Iterator[None]:
    """Replace a constant wherever it was imported under its name."""
    name = mutant.target.rpartition(":")[2]
    written = repr(value)
    if written.count(mutant.old) != 1:
        raise _unfit(mutant, written.count(mutant.old))
    changed = ast.literal_eval(written.replace(mutant.old, mutant.new))
    importers = [module for module in list(sys.modules.values()) if module.__dict__.get(name) is value]
    for module in importers:
        setattr(module, name, changed)
    try:
        yield
    finally:
        for module in importers:
            setattr(module, name, value)


@contextmanager
def _swapped(function: FunctionType, mutant: Mutant) -> Iterator[None]:
    code = function.__code__
    function.__code__ = _changed(function, mutant)
    try:
        yield
    finally:
        function.__code__ = code


def _unfit(mutant: Mutant, count: int) -> MutantError:
    return MutantError(
        f"{mutant.target} contains `{mutant.old}` {count} times, the planted fault {mutant.name!r} needs exactly one",
        hint="adapt the planted fault to the code as it is now",
    )


def _changed(function: FunctionType, mutant: Mutant) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise _unfit(mutant, source.count(mutant.old))
    source = source.replace(mutant.old, mutant.new)
    if "__class__" in function.__code__.co_freevars:  # of `super()`, which needs a class around it
        source = f"class Around:\n{textwrap.indent(source, '    ')}"
    lazy = "from __future__ import annotations\n"  # as every module here: annotations are not evaluated
    module = compile(lazy + source, mutant.target, "exec", dont_inherit=True)
    outer = [code for code in module.co_consts if isinstance(code, CodeType)]
    within = [code for each in outer for code in each.co_consts if isinstance(code, CodeType)]
    codes = [
        code
        for code in (*outer, *within)
        if code.co_qualname in (function.__name__, f"Around.{function.__name__}")
    ]
    assert len(codes) == 1
    assert codes[0].co_freevars == function.__code__.co_freevars, (
        "a fault must not change what a function closes over"
    )
    return codes[0]
