"""Claims as data: what the pages of ``docs/theory`` say of them before their text.

A page begins with front matter in YAML: a list ``claims``, each with its ``name``, the place in its paper (``where``), its
``quotation``, ``statement`` and ``hypotheses``, the ``verdict`` that its checks have to lead to, the ``section`` of the page that
derives it, and what :class:`~proofs_checks.claims.Claim` names besides. The folder of the page is the paper, unless an
entry names another. What is run for a claim is in ``CHECKS`` of a module in the folder of this package that bears the same name;
of a claim about a printed table, the entry itself says it in rows (:mod:`proofs_checks.printed.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from proofs_checks.claims import Check, Claim
from proofs_checks.papers import PAPERS
from proofs_checks.printed.cells import PrintedError
from proofs_checks.printed.rows import checks_of

_SHIPPED = Path(__file__).parent / "theory"
THEORY = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[1] / "docs" / "theory"
"""The folder of pages: of this package, a link to that of the documentation where links are followed."""

_OWN = ("section", "verdict", "where", "cells", "checks")
"""What an entry says that a claim is not given as it stands."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Page:
    """A page of ``docs/theory``."""

    path: str  # within ``docs/theory``
    text: str  # behind the front matter
    entries: tuple[Mapping[str, Any], ...]  # what the front matter says of each claim

    @classmethod
    def of(cls, path: str) -> Page:
        """Read a page.

        Raises ValueError if its front matter does not end, is no YAML, or says anything but ``claims``.
        """
        text = (THEORY / path).read_text(encoding="utf-8")
        if not text.startswith("---\n"):
            return cls(path, text, ())
        matter, end, rest = text[4:].partition("\n---\n")
        if not end:
            raise ValueError(f"{path}: the front matter must end with a line of ---")
        try:
            found = yaml.load(matter, _LOADER)  # noqa: S506 - one of the two safe loaders
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: the front matter is not YAML: {error}") from None
        if not isinstance(found, dict) or set(found) != {"claims"}:
            raise ValueError(f"{path}: the front matter must hold a list `claims` and nothing else")
        return cls(path, rest.lstrip("\n"), tuple(found["claims"]))

    def claims(self, checks: Mapping[str, tuple[Check, ...]]) -> Iterator[Claim]:
        """Yield the page's claims, each with its checks.

        Raises ValueError if an entry lacks a field or has one too many, nothing checks it, or its checks lead to
        another verdict.
        """
        for entry in self.entries:
            name = entry.get("name", "a claim without a name")
            fields = {key: value for key, value in entry.items() if key not in _OWN}
            fields.setdefault(
                "paper", folder if (folder := self.path.partition("/")[0]) in PAPERS else "zosim"
            )
            try:
                found = (*checks_of(entry), *checks.get(name, ()))
            except PrintedError as error:
                hint = f" ({error.hint})" if error.hint else ""
                raise ValueError(f"{self.path}: {name}: {error.message}{hint}") from None
            if not found:
                raise ValueError(
                    f"{self.path}: no check tests {name}; add one to CHECKS of a module of its paper, or rows to its `checks`"
                )
            anchor = f"#{entry['section']}" if "section" in entry else ""
            try:
                claim = Claim(
                    **fields,
                    where=tuple(entry.get("where", ())),
                    checks=found,
                    derivation=f"{self.path}{anchor}",
                )
            except (TypeError, AssertionError) as error:
                raise ValueError(f"{self.path}: {name}: {error}") from None
            if (led := claim.verdict_if_settled.name.lower()) != (declared := entry.get("verdict")):
                raise ValueError(
                    f"{self.path}: {name}: its checks give the verdict {led!r}, but the page states {declared!r}"
                )
            yield claim


@cache
def pages() -> tuple[Page, ...]:
    """Return all pages: by paper, then by name."""
    paths = (path.relative_to(THEORY).as_posix() for path in THEORY.rglob("*.md"))
    return tuple(Page.of(path) for path in sorted(paths))
