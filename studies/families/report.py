"""The table of families, in a terminal and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from studies.families.tiny import exception_of, families
from studies.families.trying import WAYS, Verdict
from zosim.report import Table

Found = Mapping[str, Mapping[str, Verdict]]
_WORDS = {"yes": "yes", "refused": "refused", "differs": "**differs**", "fails": "**fails**"}


def table(found: Found) -> Table:
    """Return one row a family: a word for each way, and the first reason that is no yes."""
    rows = []
    for family, ways in found.items():
        first = next((f"{way}: {own['why']}" for way, own in ways.items() if own["word"] != "yes"), "")
        rows.append((family, *(ways[way]["word"] if way in ways else "-" for way in ("model", *WAYS)), first))
    return Table(("family", "model", *WAYS, "why not"), rows)


def shares(found: Found) -> dict[str, tuple[int, int]]:
    """Return of each way how many families with a tiny model can be run so, and how many there are."""
    there = [ways for ways in found.values() if ways["model"]["word"] == "yes"]
    return {way: (sum(ways[way]["word"] == "yes" for ways in there), len(there)) for way in WAYS}


def page(found, version):
    return ""
