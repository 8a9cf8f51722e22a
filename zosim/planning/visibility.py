"""Whether a smoothing radius is large enough for what crosses a boundary in few bits: as measured on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from costmodel.formats.codecs import CodecSpec, codec_spec
from zosim.plans import Plan

_RESIDUAL: Mapping[str, Mapping[int, float]] = {
    "nearest": {1: 1e-2, 2: 3e-2, 3: 3e-3, 4: 5e-4, 6: 1e-4, 8: 3e-5},
    "stochastic": {1: 1e-2, 2: 2.3e-3, 4: 3e-4, 8: 2.5e-5},
}
"""By rounding and bits: ε at which an encoded hidden state adds to ``g`` as much as ``g`` is, in the root mean square over
perturbations; one grid per tensor (studies/sparq/training_epsilon.csv)."""

_ACTIVATION: Mapping[str, Mapping[int, float]] = {
    "nearest": {1: 1e-5, 2: 3e-5, 4: 1e-5},
    "stochastic": {2: 1e-5, 4: 1.5e-5},
}
"""The same of an MLP's activation beside a residual stream in full: most of ``g`` does not pass through it."""


def least_epsilon(codec: CodecSpec, *, residual: bool) -> float:
    """Return the ε below which a codec adds more to a projected gradient than there is; 0 without bits.

    `residual`: whether the hidden state goes through it; else an MLP's activation alone.

    Of one model (4 blocks of 128, OPT) on one task: another's may be several times larger or smaller, and grids per token
    need less. ``zosim probe`` measures a model's own.

    >>> from costmodel.formats.codecs import codec_spec
    >>> least_epsilon(codec_spec("q4"), residual=True)
    0.0005
    """
    if codec.bits is None:
        return 0.0
    known = (_RESIDUAL if residual else _ACTIVATION)[codec.rounding]
    log_epsilon = np.interp(codec.bits, list(known), np.log(list(known.values())))
    return float(np.format_float_scientific(np.exp(log_epsilon), 1))


def about_epsilon(plan: Plan) -> Iterator[str]:
    """Yield a warning for each codec of a plan that does not see its ε."""
    epsilon = plan.estimator.epsilon
    for what, name in reversed(plan.split.codecs_in_use.items()):
        least = least_epsilon(codec_spec(name), residual=what == "residual stream")
        if epsilon < least:
            yield (
                f"at ε = {epsilon:g} codec {name} of the {what} adds more to a projected gradient than there is of it: on "
                f"the embedded model below ε = {least:g}; use more bits, a larger --eps, or see `zosim probe`"
            )
