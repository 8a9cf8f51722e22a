"""Copy this file, write the function, and try it: ``zosim study check reading_predictions mine.py``."""

from __future__ import annotations

from collections.abc import Sequence

from studies.reading_predictions.cases import Reading


def diagnose(rows: Sequence[Reading]) -> tuple[str, float]:
    """Return which cause is predicted wrongly, and how many times as long as predicted it takes.

    `rows`: the instructions of one step on a CPU, one after the other: ``instruction``, ``label``, ``predicted_s``,
    ``measured_s`` (with a noise of one percent), and ``terms``, the seconds by cause that the prediction adds up.

    Returns
    -------
    (str, float)
        One of ``matmul``, ``param_pass``, ``sampling``, ``elementwise``, ``dispatch``; and its factor, within ten percent.
    """
    raise NotImplementedError("write it")
