"""Percent scripts as notebooks: ``# %%`` begins a cell of code, ``# %% [markdown]`` a cell of text in comments."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_CELL = re.compile(r"^# %%(?P<text> \[markdown\])?\n", re.MULTILINE)


def cells(script: str) -> Iterator[tuple[str, str]]:
    r"""Yield type and source of each cell; what stands before the first belongs to none.

    >>> list(cells("# %% [markdown]\n# A sum\n# %%\n1 + 1\n"))
    [('markdown', 'A sum'), ('code', '1 + 1')]
    """
    _, *pieces = _CELL.split(script)
    for marked, source in zip(pieces[::2], pieces[1::2], strict=True):
        if marked:
            yield "markdown", re.sub(r"^# ?", "", source.strip(), flags=re.MULTILINE)
        elif source.strip():
            yield "code", source.strip()


def text(script: str) -> str:
    """Return a script's cells as Markdown."""
    return (
        "\n\n".join(
            source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells(script)
        )
        + "\n"
    )


def notebook(script: str) -> str:
    """Return a script as the text of an ``.ipynb`` file of format 4.5."""
    listed: list[dict[str, object]] = [
        {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, source) in enumerate(cells(script))
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": listed, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        made = Path(name).read_text(encoding="utf-8")
        Path(name).with_suffix(".md").write_text(text(made), encoding="utf-8")
        Path(name).with_suffix(".ipynb").write_text(notebook(made), encoding="utf-8")
