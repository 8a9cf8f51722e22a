"""Help pages of commands: plain text under headings, in the order in which people decide.

Without colour, boxes or anything beyond ASCII, so that a page reads the same in a narrow terminal, a pipe and a log.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.core import TyperCommand, TyperGroup

from zosim.headings import COMMANDS, HEADINGS, LEADING
from zosim.renamed import in_present_spelling

EXPERT = "expert"
"""Panel of an option that only ``--help-all`` shows, before its heading: ``"expert: Precision"``."""

SHOW_ALL = "zosim.help_all"
"""Key of a context whose help page shows such options."""

_OTHERS, _HELP = "Options", "Help"
_MAX_WIDTH, _NAMES_WIDTH = 100, 26
_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH"}


class Command(TyperCommand):
    """A command with such a help page, which also takes earlier spellings of its options (:mod:`zosim.renamed`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line."""
        return super().parse_args(ctx, list(in_present_spelling(args, self.get_params(ctx))))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        formatter.write("\n".join(_page(self, ctx)) + "\n")


class Group(TyperGroup):
    """A group of commands with such a help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        formatter.write("\n".join(_page(self, ctx)) + "\n")


def heading_of(parameter: Any) -> str:
    """Return the heading under which an option stands."""
    if parameter.name in ("help", "help_all", "versions"):
        return _HELP
    return str(parameter.rich_help_panel or _OTHERS).removeprefix(f"{EXPERT}: ")


def is_expert(parameter: Any) -> bool:
    """Whether only ``--help-all`` shows an option."""
    return str(getattr(parameter, "rich_help_panel", None)).startswith(EXPERT)


def sections(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return options by their headings, both in the order of a help page."""
    order = {heading: index for index, heading in enumerate((_OTHERS, *HEADINGS, _HELP))}
    leading = {flag: index for index, flag in enumerate(LEADING)}
    by_heading: dict[str, list[Any]] = {}
    for parameter in sorted(parameters, key=lambda one: leading.get(one.opts[0], len(leading))):
        by_heading.setdefault(heading_of(parameter), []).append(parameter)
    return dict(sorted(by_heading.items(), key=lambda item: order.get(item[0], 0)))


def names(parameter: Any) -> str:
    """Return an option as it is typed."""
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def types_of(command: Any) -> dict[str, Any]:
    """Return the types of a command's parameters by name; typer says them otherwise from release to release."""
    return {} if command.callback is None else get_type_hints(inspect.unwrap(command.callback))


def meaning(parameter: Any, typed: Any) -> str:
    """Return an option's help with its choices and its default, each in one form."""
    facts = [" ".join((parameter.help or "").split())]
    if choices := list(_choices(typed)):
        facts.append(f"Choices: {', '.join(choices)}.")
    if parameter.required:
        facts.append("Required.")
    elif (default := _default(parameter)) is not None:
        facts.append(f"Default: {default}.")
    return " ".join(facts)


def _choices(typed: Any) -> Iterator[str]:
    """Yield the values that a type lists: a ``Literal`` or an ``Enum``, perhaps optional."""
    if get_origin(typed) is Literal:
        yield from map(str, get_args(typed))
    elif isinstance(typed, type) and issubclass(typed, Enum):
        yield from (str(item.value) for item in typed)
    else:
        for inner in get_args(typed):
            yield from _choices(inner)


def _metavar(typed: Any) -> str:
    if next(_choices(typed), None) is not None:
        return "CHOICE"
    inner = [_metavar(item) for item in get_args(typed) if item is not type(None)]
    return inner[0] if inner else _METAVARS.get(typed, "TEXT")


def _default(parameter: Any) -> str | None:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    match parameter.default:
        case bool(switch) if parameter.secondary_opts or switch:
            return ("off", "on")[switch]
        case Enum():
            return str(parameter.default.value)
        case (int() | float() | str() | Path()) as value if value != "" and not isinstance(value, bool):
            return str(value)
    return None


def _page(command: Any, ctx: Any) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    everything = [*command.get_params(ctx)]
    types = types_of(command)
    arguments = [item for item in everything if item.param_type_name == "argument"]
    shown = [
        item
        for item in everything
        if item.param_type_name == "option"
        and (not item.hidden or (is_expert(item) and ctx.meta.get(SHOW_ALL)))
    ]
    usage = [argument_name(item) for item in arguments]
    commands = getattr(command, "commands", None)
    ends = ["COMMAND ..."] if commands else []
    yield from _wrapped(
        f"Usage: {' '.join([ctx.command_path, *usage, '[OPTIONS]', *ends])}", width, "       "
    )
    for paragraph in (command.help or "").strip().split("\n\n"):
        yield ""
        if paragraph.startswith("For example:\n"):  # lines to copy
            yield from paragraph.splitlines()
        else:
            yield from _wrapped(" ".join(paragraph.split()), width, "")
    if commands:
        listed = [command.get_command(ctx, name) for name in command.list_commands(ctx)]
        summaries = {item.name: (item.help or "").strip().partition("\n")[0] for item in listed}
        headings = COMMANDS if "plan" in summaries else {"Commands": tuple(summaries)}
        for heading, members in headings.items():
            yield from _section(
                heading, [(name, summaries[name]) for name in members if name in summaries], width
            )
    if arguments:
        rows = [(argument_name(item), meaning(item, types.get(item.name))) for item in arguments]
        yield from _section("Arguments", rows, width)
    for heading, items in sections(shown).items():
        rows = [
            (
                names(item) if item.is_flag else f"{names(item)} {_metavar(types.get(item.name))}",
                meaning(item, types.get(item.name)),
            )
            for item in items
        ]
        yield from _section(heading, rows, width)


def argument_name(parameter: Any) -> str:
    """Return an argument as usage lines write it."""
    name = str(parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def _section(heading: str, rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    yield f"\n{heading}:"
    indent = " " * _NAMES_WIDTH
    for name, text in rows:
        first = f"  {name}"
        lines = _wrapped(text, width, indent, indent)
        if len(first) + 2 > _NAMES_WIDTH:
            yield first
        else:
            lines[:1] = [first.ljust(_NAMES_WIDTH) + line.lstrip() for line in lines[:1]] or [first]
        yield from lines


def _wrapped(text: str, width: int, later: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
