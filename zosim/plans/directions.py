"""Which directions are drawn, from which random numbers, and how long they are kept."""

from __future__ import annotations

from typing import Literal

from costmodel.distributions import DistributionName
from zosim.plans.axis import Axis


class Directions(Axis):
    """The directions ``z`` of perturbations and updates.

    Attributes
    ----------
    distribution : str
    rng : str
        ``"mezo"``: one torch generator walked in parameter order, the reference loop's stream.
        ``"counter"``: every (seed, step, query, parameter) keys its own stream, sliceable at any offset.
    order : str
        Order in which ``mezo`` walks parameters: ``"registration"`` (MeZO) or ``"execution"`` (ZO2).
    kept : bool
        Whether every direction is drawn once in a step and kept until its update, for as many more bytes on the device
        as the trainable weights take, for each query. Off, a direction is drawn again whenever it is needed anew.
    drawn_ahead : bool
        Whether directions are drawn on a stream of their own, one block ahead of their use, for one more
        block-sized buffer. Where weights are copied, that stream writes the copies, too, and applies updates: what a
        forward finds is prepared while the one before runs.
    """

    distribution: DistributionName = "gaussian"
    rng: Literal["mezo", "counter"] = "mezo"
    order: Literal["registration", "execution"] = "registration"
    kept: bool = False
    drawn_ahead: bool = False
