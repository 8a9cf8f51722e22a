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
        ``"sweep"`` perturbs all parameters, then runs the whole model (the reference loop: four draws of
        every direction). ``"blockwise"`` runs both signs of one segment before the next, so that one draw
        serves all three perturbations. ``"querywise"`` does so for one query after the other, so that the next stage
        can begin with the first while this one runs the second.
    update : str
        ``"immediate"`` after the projected gradient is known, or ``"delayed"`` until each segment's turn in
        the next step (ZO2's efficient update), with a flush at the end.
    """

    traversal: Annotated[
        Literal["sweep", "blockwise", "querywise"],
        Setting(
            "--traversal",
            "Perturb everything first, or block by block, or that for one query at a time.",
            changes="numbers where transfers round",
            planned=True,
            shown="expert",
        ),
    ] = "blockwise"
    update: Annotated[
        Literal["immediate", "delayed"],
        Setting(
            "--update",
            "Apply a step's update at once, or in the next.",
            changes="numbers where transfers round",
            planned=True,
            shown="expert",
        ),
    ] = "immediate"

    def first_unfinished(self, query: int) -> int:
        """Return the first query that still has segments to visit when `query` visits one: 0, or itself where queries take turns."""
        return query if self.traversal == "querywise" else 0

    def words(self, plan: Plan) -> Iterator[str]:
        """Yield the traversal, which of offloaded blocks goes without saying."""
        if plan.residency.blocks == "resident":
            yield self.traversal

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what the traversal cannot do."""
        if plan.residency.blocks == "offloaded" and self.traversal == "sweep":
            yield (
                "traversal=sweep needs every block at once, but residency.blocks=offloaded",
                "use traversal=blockwise",
            )
        if self.traversal == "sweep" and self.update == "delayed":
            yield (
                "update=delayed is fused into a segment's turn, which traversal=sweep does not have",
                "use traversal=blockwise or update=immediate",
            )
        if self.traversal == "querywise" and self.update == "delayed":
            yield (
                "traversal=querywise visits a block once per query, so update=delayed has no one turn",
                "use update=immediate",
            )
        if self.traversal == "querywise" and plan.residency.blocks == "offloaded":
            yield "traversal=querywise would upload every block once per query", "use traversal=blockwise"
