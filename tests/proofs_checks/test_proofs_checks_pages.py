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


COMMANDS = frozenset(
    re.findall(
        r"\w+",
        """
        Bigl Bigr Delta Phi Psi Theta alpha approx bar beta cdot circ cos cosh delta dots ell epsilon eta frac ge gg hat in int kappa lVert
        langle lceil le left leftarrow lfloor log lvert mathbb mathcal max mid min mu nabla ne odot operatorname partial pi pm prod qquad quad
        rVert rangle rceil rfloor rho right rvert sigma sim sin sqrt star sum sup tanh tau text tfrac theta times to top varepsilon varphi xi
        """,
    )
)
"""Commands of LaTeX that the site writes as MathML; MathJax, which GitHub uses, has all of them."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(THEORY).as_posix())
def test_formulas_are_closed_and_have_commands_that_are_rendered(page):
    text = Page.of(page.relative_to(THEORY).as_posix()).text
    prose = re.sub(r"```.*?```|`[^`\n]*`", "code", text, flags=re.DOTALL)
    formulas = re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", prose, re.DOTALL)
    left = re.sub(r"\$\$.+?\$\$|\$[^$\n]+\$", "", prose, flags=re.DOTALL)
    assert "$" not in left
    assert not re.search(r"^#.*\$", prose, re.MULTILINE)  # a heading's anchor has no formula
    for formula in ("".join(pair) for pair in formulas):
        assert {name or mark for name, mark in re.findall(r"\\(?:([A-Za-z]+)|(.))", formula)} <= COMMANDS, (
            formula
        )
        assert formula.count("{") == formula.count("}"), formula
        assert not re.search(r"[bB]ig[lr]?\\[lr][vV]ert", formula), formula  # the site would print the name


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
        ("claims: []", "must end with a line of ---"),
        ("claims: [\n---\n", "is not YAML"),
        ("rows: []\n---\n", "must hold a list `claims` and nothing else"),
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

    refused("no check tests no-such-claim", name="no-such-claim")
    refused("statement", statement=None)
    refused("colour", colour="red")
    refused("no paper 'zo3'", paper="zo3")
    refused("the page states 'fails'", verdict="fails")
