"""What an audit of printed cells says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuditFinding:
    """Something that cannot be, or two things that cannot both be.

    Attributes
    ----------
    rule : str
        What is violated.
    places : tuple of str
        Cells concerned: paper, table and cell.
    arithmetic : str
        The numbers.
    sets_apart : bool
        Whether the first cell is scored apart. Off where the numbers do not say which of several cells is wrong.
    """

    rule: str
    places: tuple[str, ...]
    arithmetic: str
    sets_apart: bool = True
