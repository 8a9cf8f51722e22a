"""The format of the weights, and how they come to an evaluation point."""

from __future__ import annotations

from typing import Literal

from zosim.plans.axis import Axis

StorageDType = Literal["float64", "float32", "float16", "bfloat16"]


class Weights(Axis):
    """The weights that are perturbed and updated.

    Attributes
    ----------
    dtype : str
        Format that they are stored in. The products and the transfers have it, too, unless
        :class:`~zosim.plans.ForwardPass` and :class:`~zosim.plans.Residency` name one of their own.
    perturbation : str
        How weights come to an evaluation point. ``"serial"``: one state of them walks from point to point where it lies,
        and back by one more perturbation, whose rounding leaves a drift (the reference loop). ``"copies"``: each point is
        written beside the weights, ``θ + (s·z)·ε`` for its own sign, and read there; only updates change ``θ``. It takes one
        more buffer of the largest segment; under ``"sweep"`` one of all that is trainable for each sign, so that both come
        of one draw.
    """

    dtype: StorageDType = "float32"
    perturbation: Literal["serial", "copies"] = "serial"
