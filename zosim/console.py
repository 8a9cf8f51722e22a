"""What commands print: data on stdout, messages on stderr.

rich leaves colours and animation out where the stream is not a terminal or ``NO_COLOR`` is set.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from topology.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress


class PlainConsole(Console):
    """Console that shows what it is given: no markup, no emoji, and control characters as what they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield what is to be written."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


stdout = PlainConsole()
# In a notebook it is a stream, too: its bars would want ipywidgets, and warn where that is missing.
stderr = PlainConsole(stderr=True, force_jupyter=False)

_PIPE_COLUMNS = 100
"""Width of what is piped, unless ``COLUMNS`` says another: a pipe has none of its own."""


def emit(data: Any, *, json: bool, text: RenderableType | None = None) -> None:
    """Print a command's result to stdout.

    `text`: what people see: a string or a rich table. By default the JSON document, too.
    """
    if json or text is None:
        stdout.print(jsonlib.dumps(to_jsonable_python(data), indent=2, allow_nan=False), soft_wrap=True)
        return
    shown = Text(text) if isinstance(text, str) else text
    if stdout.is_terminal:
        stdout.print(shown)
        return
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else _PIPE_COLUMNS
    console = PlainConsole(width=width)
    with console.capture() as written:
        console.print(shown)
    # Cells are padded to the width of their column; nobody who reads a file wants these spaces.
    console.out("\n".join(line.rstrip() for line in written.get().split("\n")), end="")


def progress() -> Progress:
    """Progress bars on stderr, gone when done; used as a context manager."""
    # Bars, spinners and live displays are a good part of what rich imports, and few commands show one.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        # A notebook keeps every picture of a bar.
        refresh_per_second=10 if sys.stderr.isatty() else 1,
    )
