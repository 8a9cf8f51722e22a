"""Copy this file, write the function, and try it: ``zosim study check why_seeds_suffice mine.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from studies.why_seeds_suffice.training import LogRow


def rebuild(base: Mapping[str, Tensor], log: Sequence[LogRow], epsilon: float) -> Mapping[str, Tensor]:
    """Return the weights after the run whose base weights and log these are.

    Every bit counts, so the order of the products does, too: a perturbation adds ``(s * z) * epsilon``, an update subtracts
    ``learning_rate * (projected_gradient * z)``.

    - `base`: by name, in registration order. They are yours: change them if you like.
    - `log`: ``seed``, ``projected_gradient`` and ``learning_rate`` of each step.
    - `epsilon`: ``ε``.
    """
    raise NotImplementedError("write it")
