"""Write ``docs/commands.md`` from the commands themselves, so that the page cannot lag behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zosim import cli, registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"

INTRODUCTION = """\
# Commands

Written by `python3 .ci/tasks.py docs` from the commands themselves; a test fails where the two differ.

Data goes to stdout, everything said about it to stderr; `--json` makes the data one JSON document. Exit codes:
0 done, 1 a check that was asked for did not hold, 2 a mistake that you can mend (`error:` and `hint:`),
130 interrupted. `NO_COLOR=1` switches colours off. `zosim --version` names the versions that numbers depend on.
"""


def page() -> str:
    """Text of the page."""
    sections = [INTRODUCTION]
    for name, entry in registry.registered().items():
        sections += _sections(f"zosim {name}", cli.build(name, registry.load(entry)), parent=None)
    return "\n".join(sections)


def _sections(path: str, command: Any, parent: Any) -> Iterator[str]:
    """Sections of a command and of the commands under it."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    heading = f"## {path}\n\n{(command.help or '').strip()}\n\n    {usage}\n"
    yield f"{heading}\n{_options(command, context)}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _sections(f"{path} {name}", inner, parent=None)


def _options(command: Any, context: Any) -> str:
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, records)]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows, ""]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")
