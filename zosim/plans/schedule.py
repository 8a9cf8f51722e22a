"""In which order a step visits segments and points, and when it updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


class Schedule(Axis):
    """The order of a step.

    Attributes
    ----------
    traversal : str
        ``"full"`` perturbs all parameters, then runs the whole model (the reference loop: four draws of
        every perturbation). ``"blockwise"`` runs both signs of one segment before the next, so that one draw
        serves all three perturbations.
    update : str
        ``"immediate"`` after the projected gradient is known, or ``"delayed"`` until each segment's turn in
        the next step (ZO2's efficient update), with a flush at the end.
    """

    heading = "Placement"

    traversal: Annotated[
        Literal["full", "blockwise"],
        Setting(
            "--traversal",
            "Order of the perturbations: the whole model before each forward, or block by block within it.",
            changes="numbers where transfers round",
            planned=True,
            expert=True,
        ),
    ] = "blockwise"
    update: Annotated[
        Literal["immediate", "delayed"],
        Setting(
            "--update",
            "When a step's update is applied: at its end (immediate), or block by block in the next step "
            "(delayed).",
            changes="numbers where transfers round",
            planned=True,
            expert=True,
        ),
    ] = "immediate"

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the traversal of `plan`; that of offloaded blocks goes without saying."""
        if plan.residency.blocks == "resident":
            yield "full pass" if self.traversal == "full" else self.traversal

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what in `plan` contradicts the traversal."""
        if plan.is_offloaded and self.traversal == "full":
            yield (
                f"schedule.traversal=full needs all blocks on the device, but residency.blocks={plan.residency.blocks}",
                "use schedule.traversal=blockwise",
            )
        if self.traversal == "full" and self.update == "delayed":
            yield (
                "schedule.update=delayed needs schedule.traversal=blockwise",
                "use schedule.traversal=blockwise, or schedule.update=immediate",
            )
