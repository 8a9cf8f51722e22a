"""Exercises: a solution in a file of its own, tried by its study's ``check``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topology.errors import ZosimError


@dataclass(frozen=True)
class Grade:
    """How a solution did.

    Attributes
    ----------
    passed : bool
    message : str
        What was seen, and where to look if it did not pass.
    """

    passed: bool
    message: str


def function_in(path: Path, name: str) -> Callable[..., Any]:
    """Return the function called `name` in a Python file.

    Raises
    ------
    ZosimError
        If there is no such file, it cannot be run, or it does not define the function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ZosimError(f"there is no Python file {path}", hint="copy the exercise's stub.py and fill it in")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ZosimError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ZosimError(f"{path} defines no function {name!r}", hint="keep the name that the stub gives it")
    return function  # type: ignore[no-any-return]


def tried(check: Callable[[Callable[..., Any]], Grade], solution: Callable[..., Any]) -> Grade:
    """Return the verdict on `solution`; an error that it raises is one."""
    try:
        return check(solution)
    except Exception as error:  # noqa: BLE001 - a student's code may raise anything
        return Grade(False, f"it raised {type(error).__name__}: {error}")
