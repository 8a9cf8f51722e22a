"""Copy this file, write the function, and try it: ``zosim study check quzo mine.py``."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(values: Tensor, step: float, highest: int, generator: torch.Generator) -> Tensor:
    """Return values rounded at random to whole multiples of `step`, without a bias, quantized.

    - `values`: any shape, float64. They are not to be changed.
    - `step`: above 0; ``c`` stands for ``c · step``.
    - `highest`: quantized values reach from ``-highest`` to ``highest``; what lies beyond gets the nearest of them.
    - `generator`: where random numbers come from, and nothing else.

    Returns
    -------
    torch.Tensor
        Shape of `values`, int64. A quantized value is one of the two next to ``value / step``, and is ``value / step`` on average.
    """
    raise NotImplementedError("write it")
