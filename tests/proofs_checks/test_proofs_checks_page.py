"""The page of the ledger: well formed, offline, and it opens with what does not hold as printed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import typer
from typer.testing import CliRunner

from proofs_checks import ledger
from proofs_checks.claims import Claim, counterexample, printed
from proofs_checks.cli import check
from proofs_checks.outcomes import Context, Estimate, Outcome
from proofs_checks.page import page_of
from proofs_checks.planting import Fault

FAULT = Fault(
    "halved",
    "executors.steps.arithmetic:projected_gradient",
    lambda shipped, *given, **named: shipped(*given, **named) / 2,
)


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "line", "circle"):
            self.open.append(tag)
        assert not [value for name, value in attributes if name in ("src", "href") and "//" in (value or "")]

    def handle_startendtag(self, tag, attributes):
        """Nothing stays open."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def so(_context):
    """Compare <this> & that."""
    return Outcome(0.1, 1.0, "distance", ("a < b",), (Estimate("mean", 1.0, 1.1, 0.8, 1.2, 0.3, 0.02, 100),))


def claims():
    texts = {"quotation": "E[x] < y & z", "statement": "It holds.", "hypotheses": "none"}
    broken = {"breaks": "Line 3.", "consequence": "Beware of <b>."}
    yield Claim(name="right", paper="zo2", where=("Eq. 1",), checks=(printed(so, FAULT),), **texts)
    yield Claim(
        name="wrong", paper="quzo", where=("Eq. 5",), checks=(counterexample(so, FAULT),), **texts, **broken
    )


def test_the_page_is_well_formed_offline_and_opens_with_what_fails():
    entries = list(ledger.run(tuple(claims()), Context(size="quick"), mutate=True))
    page = page_of(entries, Context(size="quick"), Path.cwd())
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"https?://|<script|@import", page)
    opening = page.partition("<h2>By paper")[0]
    assert "Beware of &lt;b&gt;." in opening
    assert "quzo, Eq. 5" in opening
    assert "zo2, Eq. 1" not in opening
    assert "E[x] &lt; y &amp; z" in page
    assert "not reached: halved" in page
    assert "[0.8, 1.2], theory 1.1" in page


def invoke(*arguments):
    app = typer.Typer(add_completion=False)
    app.command()(check)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_the_page_and_shows_one_verdict(tmp_path):
    out = tmp_path / "ledger.html"
    names = ("stochastic-rounding-unbiased", "codec-nearest-blind")
    result = invoke(*names, "--quick", "--verdict", "condition", "--report", str(out))
    assert result.exit_code == 0
    page = out.read_text(encoding="utf-8")
    assert 'id="stochastic-rounding-unbiased"' in page
    assert 'id="codec-nearest-blind"' not in page
    assert "codec-nearest-blind" not in result.stdout


def test_what_cannot_be_chosen_or_written_is_refused(tmp_path):
    for arguments in (
        ("--paper", "zo3"),
        ("--verdict", "true"),
        ("no-such-claim",),
        ("codec-nearest-blind", "--paper", "zo2"),
        ("--report", str(tmp_path / "missing" / "page.html")),
    ):
        result = invoke("--quick", *arguments)
        assert type(result.exception).__name__ == "ZosimError", arguments
