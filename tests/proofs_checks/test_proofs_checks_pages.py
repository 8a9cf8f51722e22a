"""Pages of docs/theory name claims, tests and headings that exist, and every claim of a paper has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proofs_checks.pages import THEORY, Page
from proofs_checks.papers import PAPERS
from proofs_checks.registry import CLAIMS

PAGES = sorted(THEORY.rglob("*.md"))
NAMES = {claim.name for claim in CLAIMS}
TESTS = set(
    re.findall(r"def (test_\w+)", Path(__file__).with_name("test_proofs_checks_algebra.py").read_text())
)


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(THEORY).as_posix())
def test_what_a_page_names_is_there(page):
    text = Page.of(page.relative_to(THEORY).as_posix()).text
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


@pytest.mark.parametrize(
    ("matter", "what"),
    [
        ("claims: []", "does not end with a line of ---"),
        ("claims: [\n---\n", "is no YAML"),
        ("rows: []\n---\n", "is a list `claims`, and nothing else"),
    ],
)
def test_front_matter_that_is_none_is_refused_with_its_page(matter, what, tmp_path, monkeypatch):
    monkeypatch.setattr("proofs_checks.pages.THEORY", tmp_path)
    (tmp_path / "page.md").write_text(f"---\n{matter}")
    with pytest.raises(ValueError, match=f"page.md: .*{re.escape(what)}"):
        Page.of("page.md")


def test_an_entry_needs_checks_all_fields_and_the_verdict_that_its_checks_lead_to():
    page = next(page for page in map(Page.of, ["zo2/overlap.md"]) if page.entries)
    checks = {claim.name: claim.checks for claim in CLAIMS}

    def refused(what, **changed):
        entry = {key: value for key, value in {**page.entries[0], **changed}.items() if value is not None}
        with pytest.raises(ValueError, match=f"zo2/overlap.md: .*{what}"):
            list(Page(page.path, "", (entry,)).claims(checks))

    refused("nothing checks no-such-claim", name="no-such-claim")
    refused("statement", statement=None)
    refused("colour", colour="red")
    refused("no paper 'zo3'", paper="zo3")
    refused("the page says 'fails'", verdict="fails")
