"""The claims of a page of ``docs/theory``, which its front matter holds as data, as a box below its heading that opens on a click."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from proofs_checks.claims import Verdict

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def _plain(text: str) -> str:
    """Return a text in which no character is Markdown, formulas in ``$...$`` excepted."""
    pieces = re.split(r"(\$[^$]+\$)", " ".join(str(text).split()))
    return "".join(
        piece
        if piece.startswith("$") and len(piece) > 1
        else re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", piece)
        for piece in pieces
    )


def _entry(claim: dict[str, Any]) -> list[str]:
    """Return the lines of one claim: name, verdict, statement, and what the statement takes."""
    verdict = Verdict[claim["verdict"].upper()]
    lines = [f"- `{claim['name']}`: *{verdict}*. {_plain(claim.get('statement', ''))}"]
    taken = [key for key in ("hypotheses", "amendment") if claim.get(key)]
    return [*lines, *(f"  {key.capitalize()}: {_plain(claim[key])}" for key in taken)]


def put_box(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Move the claims from the front matter to a box."""
    found = re.match(r"---\n(.*?)\n---\n+(# [^\n]*\n)?", source[0], re.DOTALL)
    if found is None:
        return
    claims = (yaml.safe_load(found[1]) or {}).get("claims", [])
    lines = [line for claim in claims for line in _entry(claim)]
    number = f"{len(claims)} claim" + "s" * (len(claims) != 1)
    summary = f"<summary>{number}, checked by <code>zosim check</code></summary>"
    box = ["", f'<details class="admonition claims">{summary}', "", *lines, "", "</details>", ""]
    source[0] = (found[2] or "") + ("\n".join(box) if claims else "") + source[0][found.end() :]


def setup(app: Sphinx) -> dict[str, Any]:
    """Rewrite pages as they are read."""
    app.connect("source-read", put_box)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
