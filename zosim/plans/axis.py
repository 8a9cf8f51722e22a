"""What all axes of a plan have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from zosim.plans import Plan

Conflict = tuple[str, str]
"""What cannot stand together in a plan, and what to do about it."""


class Axis(BaseModel):
    """Fields that are chosen together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield every reason why these values cannot stand in `plan`, with its remedy."""
        del plan
        return iter(())
