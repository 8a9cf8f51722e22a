"""Write ``docs/reference/commands.md`` from the commands themselves, so that the page cannot lag behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zosim import cli, help_pages, registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"

INTRODUCTION = """\
# Commands

`python3 .ci/tasks.py docs` writes this page from the commands. A test fails if the two differ.

Data goes to stdout, messages go to stderr; `--json` prints the data as one JSON document. Exit status:
0 done, 1 a requested check failed, 2 invalid input (`error:` and `hint:`), 130 interrupted
([all](exit-codes.md)). `NO_COLOR=1` turns colours off. `zosim --version` prints the versions of zosim,
Python, torch and transformers.
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
    arguments = [help_pages.argument_name(item) for item in command.params if _is_argument(item)]
    usage = " ".join([path, *arguments, "[OPTIONS]"])
    text = (
        (command.help or "").strip().replace("For example:\n", "For example:\n\n").replace("\n  ", "\n    ")
    )
    yield f"## {path}\n\n{text}\n\n    {usage}\n"
    yield from _tables(command)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _tables(command: Any) -> Iterator[str]:
    """Tables of arguments and of options, those of each heading together, as a help page has them."""
    types = help_pages.types_of(command)
    shown = [item for item in command.params if not item.hidden or help_pages.is_expert(item)]
    arguments = [item for item in shown if _is_argument(item)]
    if arguments:
        rows = [f"| `{help_pages.argument_name(item)}` | {_meaning(item, types)} |" for item in arguments]
        yield "\n".join(["| argument | meaning |", "| --- | --- |", *rows, ""])
    options = [item for item in shown if not _is_argument(item) and item.name != "help"]
    for heading, items in help_pages.sections(options).items():
        rows = [f"| `{help_pages.names(item)}` | {_meaning(item, types)} |" for item in items]
        yield "\n".join([f"| {heading} | meaning |", "| --- | --- |", *rows, ""])


def _meaning(parameter: Any, types: dict[str, Any]) -> str:
    experts = " Shown by --help-all." if help_pages.is_expert(parameter) else ""
    return (help_pages.meaning(parameter, types.get(parameter.name)) + experts).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")
