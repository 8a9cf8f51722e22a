"""The subcommands of ``zosim``, found in entry points and described without importing them.

A package adds a command with one line in its ``pyproject.toml``::

    [project.entry-points."zosim.commands"]
    run = "executors.cli:run"

The object is a function (a command) or a ``typer.Typer`` (a group of commands). It is imported only when the
command is invoked, so that ``zosim plan`` never pays for torch; the one line that ``zosim --help`` shows is read
from the source text instead.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from topology.errors import ZosimError

GROUP = "zosim.commands"


class CommandUnavailable(ZosimError):  # noqa: N818 - reads as the statement it makes
    """A command that is registered, but whose code is missing."""


CALIBRATIONS = "zosim.calibrations"
"""What else `zosim calibrate` can learn from, by the option's name: such code may stand to the right of the command."""


FUNCTIONS = "zosim.functions"
"""Functions of `zosim` whose code stands to the right of it, by name."""


def registered(group: str = GROUP) -> dict[str, EntryPoint]:
    """Entry point of every subcommand, or of another group, by name in alphabetical order.

    Where two distributions claim a name, zosim's own wins: a plug-in adds commands, it does not replace them.
    """
    known = entry_points(group=group)
    # A source tree may be newer than what was recorded when it was installed, or never have been installed.
    own = _of_source_tree(group) or [entry for entry in known if _is_own(entry)]
    by_name = {entry.name: entry for entry in (*(entry for entry in known if not _is_own(entry)), *own)}
    return dict(sorted(by_name.items()))


def _of_source_tree(group: str) -> list[EntryPoint]:
    """Return zosim's own, where it is a source tree."""
    import tomllib

    project = Path(__file__).parents[1] / "pyproject.toml"
    if not project.is_file():
        return []
    entries = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"].get(group, {})
    return [EntryPoint(name, value, group) for name, value in entries.items()]


def _is_own(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == "zosim"


def load(entry: EntryPoint) -> Any:
    """Import the object behind an entry point.

    Raises CommandUnavailable if the module, or the object in it, does not exist. A module that exists and fails to import
    something else keeps its own exception.
    """
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        is_own_name = error.name is not None and f"{entry.module}.".startswith(f"{error.name}.")
        if not is_own_name:
            raise
        raise _unavailable(entry, f"there is no module {error.name}") from None
    try:
        return attrgetter(entry.attr)(module)
    except AttributeError:
        raise _unavailable(entry, f"module {entry.module} has no {entry.attr!r}") from None


def _unavailable(entry: EntryPoint, reason: str) -> CommandUnavailable:
    return CommandUnavailable(
        f"the command {entry.name!r} is registered as {entry.value}, but {reason}",
        hint="reinstall, so that commands and code have the same version: python -m pip install -e .",
    )


def summary(entry: EntryPoint) -> str:
    """One line about a subcommand, read from its source without running it.

    The first line of the function's docstring, of the ``help=`` that a ``typer.Typer`` is built with, or else
    of the module's docstring.
    """
    source = _source_file(entry.module)
    if source is None:
        return "(not installed)"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    text = _described(tree, entry.attr) or ast.get_docstring(tree) or ""
    return text.strip().partition("\n")[0]


def _source_file(module: str) -> Path | None:
    """File of a module, found without importing any package on the way to it."""
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None:
        return None
    if not rest:
        return None if spec.origin is None else Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        stem = Path(folder).joinpath(*rest)
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _described(tree: ast.Module, name: str) -> str | None:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=defined) if defined == name:
                return ast.get_docstring(node)
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(keywords=keywords)) if (
                target == name
            ):
                return _help_argument(keywords)
    return None


def _help_argument(keywords: list[ast.keyword]) -> str | None:
    for keyword in keywords:
        match keyword:
            case ast.keyword(arg="help", value=ast.Constant(value=str(text))):
                return text
    return None
