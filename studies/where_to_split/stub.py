"""Copy this file, write the function, and try it: ``zosim study check where_to_split mine.py``."""

from __future__ import annotations

from studies.where_to_split.cases import BoundaryCase


def bytes_forward(case: BoundaryCase) -> float:
    """Return the bytes that the first stage sends to the second in one step, headers left out.

    `case`: ``hidden``, ``inner`` (widths of the residual stream and of the MLP's activation), ``batch``, ``seq``, ``inside`` (at
    the input of the MLP's second linear, or between blocks), ``activation_bits``, ``residual_bits``, ``num_perturbations``,
    ``difference`` (``"central"`` or ``"forward"``).
    """
    raise NotImplementedError("write it")
