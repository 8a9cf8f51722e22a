"""Copy this file, write the function, and try it: ``zosim study check zoinfer mine.py``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from studies.zoinfer.exercise import LoggedStep


def adapter(
    rows: Sequence[LoggedStep], probe: LoggedStep, epsilon: float, sign: int
) -> tuple[Tensor, Tensor]:
    """Return the factors ``A`` (outputs, columns) and ``B`` (inputs, columns) of the one adapter that a probe is.

    - `rows`: what each step so far was: ``left`` is ``U`` (outputs, rank), ``right`` is ``V`` (inputs, rank), the same tensor for
      all steps of a window; ``projected_gradient`` and ``learning_rate``.
    - `probe`: the step that is being taken; its projected gradient is not known yet.
    - `sign`: 1 or -1.
    """
    raise NotImplementedError("write it")
