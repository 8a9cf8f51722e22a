"""Write ``docs/reference/commands.md`` from the commands themselves, so that the page cannot lag behind them."""

from __future__ import annotations

import enum
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zosim import cli, registry
from zosim.options import EXPERT

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"

INTRODUCTION = """\
# Commands

Written by `python3 .ci/tasks.py docs` from the commands themselves; a test fails where the two differ.

Data goes to stdout, everything said about it to stderr; `--json` makes the data one JSON document. Exit codes:
0 done, 1 a check that was asked for did not hold, 2 a mistake that you can mend (`error:` and `hint:`),
130 interrupted. `NO_COLOR=1` switches colours off. `zosim --version` names the versions that numbers depend on.
"""


def page() -> str:
    """Text of the page.

    Typer's own help pages differ from release to release, so this lays out the same facts itself.
    """
    sections = [INTRODUCTION]
    for name, entry in registry.registered().items():
        sections += _sections(f"zosim {name}", cli.build(name, registry.load(entry)))
    return "\n".join(sections)


def _sections(path: str, command: Any) -> Iterator[str]:
    """Sections of a command and of the commands under it."""
    inner = getattr(command, "commands", None)
    if inner:
        yield f"## {path}\n\n{(command.help or '').strip()}\n"
        for name in sorted(inner):
            yield from _sections(f"{path} {name}", inner[name])
        return
    arguments = [_argument(parameter) for parameter in command.params if _is_argument(parameter)]
    usage = " ".join([path, *arguments, "[OPTIONS]"])
    yield f"## {path}\n\n{(command.help or '').strip()}\n\n    {usage}\n\n{_table(command)}"


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _is_expert(parameter: Any) -> bool:
    return str(getattr(parameter, "rich_help_panel", None)).startswith(EXPERT)


def _argument(parameter: Any) -> str:
    name = parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _table(command: Any) -> str:
    types = typing.get_type_hints(inspect.unwrap(command.callback))
    rows = [
        f"| `{_names(item)}` | {_meaning(item, types[item.name])} |"
        for item in command.params
        if (not item.hidden or _is_expert(item)) and item.name in types
    ]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows, ""]) if rows else ""


def _names(parameter: Any) -> str:
    if _is_argument(parameter):
        return _argument(parameter)
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _meaning(parameter: Any, annotation: Any) -> str:
    facts = [parameter.help or ""]
    if _is_expert(parameter):
        facts.append("Shown by --help-all.")
    choices = list(_choices(annotation))
    if choices:
        facts.append(f"One of {', '.join(choices)}.")
    if parameter.required:
        facts.append("Required.")
    elif isinstance(parameter.default, str | int | float) and parameter.default is not False:
        facts.append(f"Default: {getattr(parameter.default, 'value', parameter.default)}.")
    return " ".join(" ".join(facts).split()).replace("|", "\\|")


def _choices(annotation: Any) -> Iterator[str]:
    """Values that an annotation allows, if it lists them: a ``Literal`` or an ``Enum``, perhaps optional."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from map(str, typing.get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (str(item.value) for item in annotation)
    else:
        for inner in typing.get_args(annotation):
            yield from _choices(inner)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")
