"""The report of a result, written once: shown in a terminal, written as Markdown, handed on as data.

A report is a sequence of elements: paragraphs (plain strings), :class:`Table`, :class:`Bullets`, :class:`Code`,
:class:`Picture`, and reports again, which are its sections::

    >>> made = Report("Steps", "Two plans:", Table(("plan", "ms"), [("zo2", 1.5), ("mezo", 2)], numeric=("ms",)))
    >>> print(made.to_markdown(), end="")
    # Steps
    <BLANKLINE>
    Two plans:
    <BLANKLINE>
    | plan | ms |
    | --- | ---: |
    | zo2 | 1.5 |
    | mezo | 2 |
    >>> made.to_data()
    {'title': 'Steps', 'elements': ['Two plans:', [{'plan': 'zo2', 'ms': 1.5}, {'plan': 'mezo', 'ms': 2}]]}

A report may name what an untrusted file calls itself. So a text is emphasised (``**``) and quoted (backticks) as Markdown
does, but it holds neither links, nor images, nor HTML, and nothing in it reaches what comes after it: in Markdown each text is
one line, whatever ends of lines it has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from topology.errors import ZosimError
from topology.printable import one_line, printable

_MARKUP = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)|\\(?=[!-/:-@\[-`{-~]|$)|[\[<`]|~(?=~~)")
"""What is quoted, which stays; or a character that begins a link, an image, a tag, a quotation that does not end or a block of
code, or that takes the next one's meaning."""


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas frame.

    Raises ZosimError if pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        message = "a frame needs pandas, which is not installed"
        raise ZosimError(message, hint=f"{sys.executable} -m pip install pandas") from error
    return pd.DataFrame(list(rows))


class Table:
    """Rows under headings.

    - `columns`: headings, with their units.
    - `rows`: cells, one for each column, shown as they are; a ``rich.text.Text`` brings its own style.
    - `keeps_words`: whether no word is broken, and no number where there is space, so that names can be copied.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        title: str | None = None,
        numeric: Collection[str] = (),
        keeps_words: bool = False,
    ) -> None:
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.title = title
        self.numeric = frozenset(numeric)
        self.keeps_words = keeps_words

    @classmethod
    def of(cls, rows: Iterable[Any], columns: dict[str, Callable[[Any], Any]], **more: Any) -> Table:
        """Return a table of one row for each item, whose cells functions of the item give, by heading.

        All columns but the first are aligned to the right, unless `numeric` says otherwise.
        """
        cells = [[cell(row) for cell in columns.values()] for row in rows]
        return cls(tuple(columns), cells, **{"numeric": tuple(columns)[1:], **more})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or each row as a record of lines where the console is too narrow for its longest words."""
        rows = [
            [cell if isinstance(cell, Text) else Text(one_line(str(cell))) for cell in row]
            for row in self.rows
        ]
        texts = [[Text(column) for column in self.columns], *rows]
        sizes = [
            [Measurement.get(console, options, cell) for cell in column]
            for column in zip(*texts, strict=True)
        ]
        space = options.max_width - 3 * len(self.columns)
        words = [max(size.minimum for size in column) for column in sizes]
        # Of two columns one is made of names: records of them would say no more.
        if len(self.columns) > 2 and sum(words) > space:
            yield self._as_records(rows)
            return
        yield self._in_columns(
            rows, self._widths(sizes, words, space) if self.keeps_words else [None] * len(words)
        )

    def _widths(
        self, sizes: Sequence[Sequence[Measurement]], words: Sequence[int], space: int
    ) -> list[int | None]:
        widths = [
            max(word, *(size.maximum for size in column[1:])) if name in self.numeric and self.rows else word
            for name, word, column in zip(self.columns, words, sizes, strict=True)
        ]
        # Numbers with their intervals stay whole where words do; columns that lack more share what is left alike.
        widths = widths if sum(widths) <= space else list(words)
        left = max(0, space - sum(widths))
        lacking = [
            max(size.maximum for size in column) - width for column, width in zip(sizes, widths, strict=True)
        ]
        for done, number in enumerate(sorted(range(len(widths)), key=lacking.__getitem__)):
            more = min(lacking[number], left // (len(widths) - done))
            widths[number] += more
            left -= more
        return [*widths]

    def _in_columns(self, rows: Sequence[Sequence[Text]], widths: Sequence[int | None]) -> RichTable:
        shown = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column, width in zip(self.columns, widths, strict=True):
            justify: JustifyMethod = "right" if column in self.numeric else "left"
            shown.add_column(column, justify=justify, overflow="fold", width=width)
        for row in rows:
            shown.add_row(*row)
        return shown

    def _as_records(self, rows: Sequence[Sequence[Text]]) -> Group:
        records: list[RenderableType] = [Text(self.title, style="italic")] if self.title else []
        for row in rows:
            lines = _grid(padding=2)
            for column, cell in zip(self.columns, row, strict=True):
                if cell.plain:
                    lines.add_row(Text(column, style="bold"), cell)
            records += [Text(), lines]
        return Group(*records)

    def to_markdown(self) -> str:
        """Return the table as Markdown, under its title in bold."""
        marks = ["---:" if column in self.numeric else "---" for column in self.columns]
        lines = [[_in_cell(column) for column in self.columns], marks]
        lines += [[_in_cell(cell) for cell in row] for row in self.rows]
        title = f"**{_in_markdown(self.title)}**\n\n" if self.title else ""
        return title + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_data(self) -> list[dict[str, Any]]:
        """Return a mapping from heading to cell for each row."""
        return [
            {
                column: cell.plain if isinstance(cell, Text) else cell
                for column, cell in zip(self.columns, row, strict=False)
            }
            for row in self.rows
        ]


class Bullets:
    """A list of sentences."""

    def __init__(self, items: Iterable[str]) -> None:
        self.items = tuple(items)

    def __rich__(self) -> RichTable:
        listed = _grid(padding=1)
        for item in self.items:
            listed.add_row("-", Text(item))
        return listed

    def to_markdown(self) -> str:
        """Return the list as Markdown."""
        return "\n".join(f"- {_in_markdown(item)}" for item in self.items)

    def to_data(self) -> list[str]:
        """Return the sentences."""
        return list(self.items)


class Code:
    """Commands or data, as they are typed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich__(self) -> Text:
        return Text(self.text)

    def to_markdown(self) -> str:
        """Return the text between fences."""
        text = printable(self.text)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        return f"{fence}\n{text.rstrip()}\n{fence}"

    def to_data(self) -> str:
        """Return the text."""
        return self.text


class Picture:
    """A picture in a file beside the page."""

    def __init__(self, caption: str, file: str) -> None:
        self.caption, self.file = caption, file

    def __rich__(self) -> Text:
        return Text(f"{self.caption}: {self.file}")

    def to_markdown(self) -> str:
        """Return the picture as Markdown shows it."""
        return f"![{_in_markdown(self.caption)}]({self.file})"

    def to_data(self) -> dict[str, str]:
        """Return its caption and file."""
        return {"caption": self.caption, "file": self.file}


class Report:
    """Elements under a title.

    `parts`: what there is to say, in order. Empty strings, lists and tables without rows are left out.
    """

    def __init__(self, title: str, *elements: Element) -> None:
        self.title = title
        self.elements = tuple(element for element in elements if _says_something(element))

    def __rich__(self) -> Group:
        title = [Text(self.title, style="bold")] if self.title else []
        return Group(
            *title, *(Text(element) if isinstance(element, str) else element for element in self.elements)
        )

    def to_markdown(self, level: int = 1) -> str:
        """Return the report as Markdown; its sections are headed one `level` deeper."""
        blocks = [f"{'#' * level} {_in_markdown(self.title)}"] if self.title else []
        for element in self.elements:
            if isinstance(element, Report):
                blocks.append(element.to_markdown(level + 1 if self.title else level).rstrip("\n"))
            else:
                blocks.append(_in_markdown(element) if isinstance(element, str) else element.to_markdown())
        return "\n\n".join(blocks) + "\n"

    def to_html(self) -> str:
        """Return the report as HTML that a notebook shows; their text is never read as markup."""
        from markdown_it import MarkdownIt

        return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(self.to_markdown()))

    def to_data(self) -> dict[str, Any]:
        """Return title and elements in the terms of JSON."""
        return {
            "title": self.title,
            "elements": [
                element if isinstance(element, str) else element.to_data() for element in self.elements
            ],
        }


class Reportable:
    """A result that can be written as one HTML page."""

    heading: ClassVar[str] = ""

    def view(self) -> Report:
        """Return the result as people read it."""
        raise NotImplementedError

    def __rich__(self) -> Report:
        return self.view()

    def _repr_html_(self) -> str:
        return self.view().to_html()

    @property
    def runs(self) -> Mapping[str, Any]:
        """Runs planned whose timelines, memory and links the page shows, by name."""
        return {}

    def report(self, path: str | Path) -> Path:
        """Write the result as one HTML file that needs no network, and return its path.

        Parameters
        ----------
        path : path
            HTML file to write.

        Raises
        ------
        ZosimError
            If the file cannot be written.
        """
        # By the facade: what stands below knows nothing of pages.
        written: Path = import_module("zosim").write_report(self, output=path)
        return written


Element = str | Table | Bullets | Code | Picture | Report


def _grid(padding: int) -> RichTable:
    """Return two columns without lines; words too long for them go on in the next line."""
    return RichTable.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, padding))


def _says_something(element: Element) -> bool:
    match element:
        case str():
            return bool(element)
        case Table():
            return bool(element.rows)
        case Bullets():
            return bool(element.items)
        case Report():
            return bool(element.elements)
    return True


def _in_markdown(text: str) -> str:
    """Return a text as Markdown has it: on one line, what would begin a link, an image, a tag or a block of code escaped."""
    line = one_line(" ".join(text.split("\n")))
    return _MARKUP.sub(lambda match: match[0] if match[1] else f"\\{match[0]}", line)


def _in_cell(cell: Any) -> str:
    """Return a cell as Markdown has it: its bars are escaped, too."""
    return _in_markdown(cell.plain if isinstance(cell, Text) else str(cell)).replace("|", "\\|")
