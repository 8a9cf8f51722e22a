"""What an audit of printed cells says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuditFinding:
    """Something that cannot be, or two things that cannot both be."""

    rule: str  # what is violated
    places: tuple[str, ...]  # cells concerned: paper, table and cell
    arithmetic: str  # the numbers
    # Whether the first cell is scored apart. Off where the numbers do not say which of several cells is wrong.
    sets_apart: bool = True
