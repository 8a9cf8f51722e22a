"""Pages of docs/theory name claims, tests and headings that exist, and every claim of a paper has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proofs_checks.papers import PAPERS
from proofs_checks.registry import CLAIMS

THEORY = Path(__file__).parents[2] / "docs" / "theory"
PAGES = sorted(THEORY.glob("*.md"))
NAMES = {claim.name for claim in CLAIMS}
TESTS = set(
    re.findall(r"def (test_\w+)", Path(__file__).with_name("test_proofs_checks_algebra.py").read_text())
)


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    claims = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", text))
    assert claims - NAMES == set()
    assert set(re.findall(r"`(test_[a-z]\w+)`", text)) - TESTS == set()


def test_derivations_lead_to_headings():
    for claim in CLAIMS:
        page, _, anchor = claim.derivation.partition("#")
        if anchor:
            assert anchor in anchors((THEORY / page).read_text(encoding="utf-8")), claim.name


def test_places_are_those_of_the_paper():
    for claim in CLAIMS:
        for place in claim.where:
            PAPERS[claim.paper].check(place)
