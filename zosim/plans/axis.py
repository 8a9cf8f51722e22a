"""What all axes of a plan have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from zosim.plans.setting import Setting

if TYPE_CHECKING:
    from zosim.plans import Plan

Conflict = tuple[str, str]
"""What cannot stand together in a plan, and what to do about it."""


class Axis(BaseModel):
    """Fields that are chosen together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: ClassVar[Setting | None] = None
    """Of an axis that is named as a whole, with one option for all of its fields; its class method ``parse`` reads what was typed."""

    def words(self, plan: Plan) -> Iterator[str]:
        """Yield what :meth:`~zosim.plans.Plan.describe` says of these values in `plan`, where they differ from MeZO's."""
        del plan
        return iter(())

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield every reason why these values cannot stand in `plan`, with its remedy."""
        del plan
        return iter(())
