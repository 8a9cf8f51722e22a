"""Which directions are drawn, from which random numbers, and how long they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from costmodel.distributions import DistributionName
from zosim.plans.axis import Axis
from zosim.plans.setting import Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


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

    distribution: Annotated[
        DistributionName,
        Setting("--direction", "Distribution of the directions.", changes="numbers", recorded_as="direction"),
    ] = "gaussian"
    rng: Annotated[
        Literal["mezo", "counter"],
        Setting("--rng", "One generator for all, or a keyed stream for each parameter.", changes="numbers"),
    ] = "mezo"
    order: Annotated[
        Literal["registration", "execution"],
        Setting("--order", "Order of draws under --rng mezo: MeZO's or ZO2's.", changes="numbers"),
    ] = "registration"
    kept: Annotated[
        bool,
        Setting(
            "--keep-directions",
            "Draw every direction once and keep it until its update, in one more copy of the trainable weights.",
        ),
    ] = False
    drawn_ahead: Annotated[
        bool,
        Setting(
            "--draw-ahead",
            "Draw directions, and write copies of weights, on a stream of their own, ahead of the forwards.",
            planned=True,
        ),
    ] = False

    @property
    def draws_by_halves(self) -> bool:
        """Whether the order of draws depends on which blocks are cut inside: one generator passes halves in turn."""
        return (self.rng, self.order) == ("mezo", "execution")

    def words(self, plan: Plan) -> Iterator[str]:
        """Yield how directions are drawn, where it is not when they are needed."""
        if self.drawn_ahead and plan.weights.perturbation == "serial":
            yield "draws ahead"
        if self.kept:
            yield "directions kept"
