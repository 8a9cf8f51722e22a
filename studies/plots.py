"""A picture of a study: axes to draw on, and the file that they become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(
    path: Path,
    num_rows: int = 1,
    num_columns: int = 1,
    *,
    dpi: float | None = None,
    layout: str = "tight",
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and write what was drawn when the block ends; matplotlib is imported here.

    - `path`: Its ending says the format, such as ``.svg``.
    - `num_rows`, `num_columns`: Of axes; where both are 1, the axes themselves are yielded, otherwise an array as of
      ``pyplot.subplots``.
    - `dpi`: Dots per inch of a bitmap.
    - `**options`: Of ``pyplot.subplots``, such as ``figsize`` in inches and ``sharey``.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(num_rows, num_columns, layout=layout, **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi or "figure")
    finally:
        plt.close(figure)
