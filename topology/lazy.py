"""Names of a package that are loaded when they are first asked for, so that importing the package costs nothing.

What a package offers is said once, as imports that a type checker reads and that are not carried out::

    if TYPE_CHECKING:
        from topology.figures import Figure as Figure
    else:
        __getattr__, __all__ = lazy_names(__name__, __file__)

A function that bears its module's name cannot be offered so: once the module is loaded, it has the name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, **others: Callable[[], Any]
) -> tuple[Callable[[str], Any], list[str]]:
    """Return a package's ``__getattr__`` and ``__all__``, from the imports under ``if TYPE_CHECKING:`` of its file.

    - `package`, `file`: its ``__name__`` and ``__file__``.
    - `**others`: what calls make, by name.

    Raises AttributeError by the function that is returned, for any other name.
    """
    homes: dict[str, str] = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                listed = [item for item in body if isinstance(item, ast.ImportFrom) and item.module]
                homes |= {
                    name.asname: item.module or "" for item in listed for name in item.names if name.asname
                }

    def load(name: str) -> Any:
        if name in others:
            return others[name]()
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load, sorted((*homes, *others))
