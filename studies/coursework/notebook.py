"""Percent scripts as notebooks: ``# %%`` begins a cell of code, ``# %% [markdown]`` a cell of text in comments."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Described:
    """A matplotlib figure with words and numbers for those who do not see it; the last line of a cell.

    Jupyter gives a figure that it draws by itself no alternative text, so this one is closed and drawn here.
    """

    figure: Any
    says: str  # what one sees in it

    def __post_init__(self) -> None:
        from matplotlib import pyplot

        pyplot.close(self.figure)

    def _repr_html_(self) -> str:
        drawn = io.BytesIO()
        self.figure.savefig(drawn, format="png", bbox_inches="tight")
        (axes,) = self.figure.axes
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", axes.get_xlabel(), axes.get_ylabel()))
        rows = "".join(
            f"<tr><th>{escape(label)}</th><td>{x:.4g}</td><td>{y:.4g}</td></tr>"
            for label, x, y in _points(axes)
        )
        picture = base64.b64encode(drawn.getvalue()).decode()
        return (
            f'<img alt="{escape(self.says)}" src="data:image/png;base64,{picture}">'
            f"<details><summary>Numbers of the figure</summary><table><tr>{head}</tr>{rows}</table></details>"
        )


def _points(axes: Any) -> Iterator[tuple[str, float, float]]:
    """Yield label, x and y of at most some ten points of each curve, ends among them, and of each bar."""
    for number, line in enumerate(axes.lines, 1):
        label = str(line.get_label())
        points = list(zip(*line.get_data(orig=False), strict=True))
        thinned = points[:: max(1, len(points) // 8)]
        for x, y in thinned + [points[-1]] * (thinned[-1] != points[-1]):
            yield f"curve {number}" if label.startswith("_") else label, x, y
    for bar in axes.patches:
        yield "", bar.get_x() + bar.get_width() / 2, bar.get_height()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        made = Path(name).read_text(encoding="utf-8")
        Path(name).with_suffix(".md").write_text(text(made), encoding="utf-8")
        Path(name).with_suffix(".ipynb").write_text(notebook(made), encoding="utf-8")
