"""Every claim, in the order in which they are listed and checked: by paper, page and place on the page."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import proofs_checks
from proofs_checks.claims import Check, Claim
from proofs_checks.pages import pages
from proofs_checks.papers import PAPERS
from topology.errors import ZosimError
from topology.validation import did_you_mean

_FOLDERS = ("promises", "zo2", "distzo2", "sparq", "quzo", "zoinfer")
"""Folders whose modules say in ``CHECKS`` what is run for claims."""


def _checks() -> dict[str, tuple[Check, ...]]:
    found: dict[str, tuple[Check, ...]] = {}
    for folder in _FOLDERS:
        package = import_module(f"{proofs_checks.__name__}.{folder}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, checks in getattr(import_module(module.name), "CHECKS", {}).items():
                assert name not in found, f"{module.name} checks {name}, and another module does"
                found[name] = checks if isinstance(checks, tuple) else (checks,)
    return found


def _claims() -> tuple[Claim, ...]:
    checks = _checks()
    claims = [claim for page in pages() for claim in page.claims(checks)]
    assert len(claims) == len({claim.name for claim in claims}), "two pages state claims of one name"
    if unstated := checks.keys() - {claim.name for claim in claims}:
        raise ValueError(f"no page of docs/theory states these claims: {', '.join(sorted(unstated))}")
    return tuple(sorted(claims, key=lambda claim: list(PAPERS).index(claim.paper)))


CLAIMS: tuple[Claim, ...] = _claims()
"""By paper, in the order of :data:`~proofs_checks.papers.PAPERS`."""


def claims_named(*names: str, paper: str | None = None) -> tuple[Claim, ...]:
    """Return the claims of these names, or all of them, of one paper or of all.

    Raises ZosimError if there is no claim of a name, no such paper, or none of the named claims is of that paper.
    """
    known = [claim.name for claim in CLAIMS]
    for name in names:
        if name not in known:
            raise ZosimError(f"unknown claim {name!r}", hint=did_you_mean(name, known))
    if paper is not None and paper not in PAPERS:
        raise ZosimError(f"unknown paper {paper!r}", hint=did_you_mean(paper, list(PAPERS)))
    chosen = tuple(
        claim
        for claim in CLAIMS
        if (not names or claim.name in names) and (paper is None or claim.paper == paper)
    )
    if not chosen:
        raise ZosimError(
            f"--paper {paper}: none of the named claims is from it",
            hint="leave --paper out, or name claims of that paper",
        )
    return chosen
