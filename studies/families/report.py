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


def page(found: Found, version: str) -> str:
    """Return the page of the documentation."""
    counts = ", ".join(f"{way} {num} of {every}" for way, (num, every) in shares(found).items())
    notes: dict[str, list[str]] = {}
    rows = []
    for family, ways in found.items():
        cells = []
        for way in ("model", *WAYS):
            verdict = ways.get(way)
            cells.append("" if verdict is None else _WORDS[verdict["word"]])
            if verdict is not None and verdict["word"] != "yes":
                notes.setdefault(f"{verdict['word']}: {verdict['why']}", []).append(f"{family} ({way})")
        rows.append((f"`{family}`", *cells))
    head = ("family", "tiny model", *WAYS)
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    why = [f"- {', '.join(cases)}: {_quoted(reason)}" for reason, cases in notes.items()]
    made = [
        f"- `{family}`: {exception_of(family)['reason']}" for family in families() if exception_of(family)
    ]
    return _PAGE.format(
        version=version, counts=counts, table="\n".join(lines), why="\n".join(why), made="\n".join(made)
    )


def _quoted(reason: str) -> str:
    word, _, why = reason.partition(": ")
    why = why.replace("`", "'")
    return f"{word}: `{why}`"


_PAGE = """# Families of language models

What zosim does with each causal language model that transformers {version} knows. `python -m studies.families --write` made this
page: it tried a tiny model of each family. Re-run it after an update of transformers.

| column | what was tried |
| --- | --- |
| tiny model | a model with random weights and small sizes is built, and has a finite loss |
| plan | parameters are counted as the model has them |
| resident | 3 steps are the literal MeZO loop, bit for bit |
| offload | the same with blocks in host memory |
| stages | the same on two stages |
| packed | 3 steps with all evaluation points in one packed forward |
| quantized | 3 steps on int8 weights |
| adapters | as resident, tuning LoRA adapters on all linear layers of the blocks |

Of the families with a tiny model: {counts}.

A model that cannot be run block by block is tuned resident, as one segment. The other columns need blocks.

{table}

## Why not

{why}

## How tiny models were made

Sizes of a family's default configuration become small. These families needed more:

{made}
"""
