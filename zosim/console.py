"""What commands print: data on stdout, messages on stderr.

rich leaves colours and animation out where the stream is not a terminal or ``NO_COLOR`` is set.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from topology.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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


class LateBar:
    """A bar for what seldom takes long, begun after its first second; used as a context manager.

    It is drawn where somebody looks: on a terminal or in a notebook, and not by workers of a pool.
    """

    def __init__(self, task: str) -> None:
        self._name, self._begin_s = task, monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """Count one thing more as done."""
        self._num_done += 1
        if self._bar is None and monotonic() - self._begin_s > 1 and stderr.is_terminal:
            from multiprocessing import parent_process

            from rich.errors import LiveError

            if parent_process() is None:
                self._bar = progress()
                self._task = self._bar.add_task(self._name, total=None)
                with suppress(LiveError):  # within another bar, where rich is older than 14.1
                    self._bar.start()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._num_done)
