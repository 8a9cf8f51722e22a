"""The pages of the documentation against what they describe."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from statistics import quantiles
from types import ModuleType

import pytest

from costmodel.devices.prices import PriceTable
from costmodel.rates.profile import Profile
from topology import Topology
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("studies/**/*.md"), *ROOT.glob("tests/*.md")]
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def commands_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("commands_page", ROOT / ".ci" / "commands_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_commands_page_is_what_the_commands_say(commands_page: ModuleType) -> None:
    written = commands_page.PAGE.read_text(encoding="utf-8")
    assert written == commands_page.page(), "run: python3 .ci/tasks.py docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


KEYS_OF = {
    "Topology": set(Topology.model_fields),
    "Profile": set(Profile.model_fields),
    "Plan": set(Plan.model_fields),
    "Programs": {field.name for kind in (ProgramSet, Program) for field in fields(kind)},
    "Timeline": {field.name for field in fields(Timeline)},
    "Price table": set(PriceTable.model_fields),
}


@pytest.mark.parametrize("heading", KEYS_OF)
def test_the_page_of_files_has_every_key(heading: str) -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert {key for cell in cells for key in re.findall(r"`(\w+)`", cell)} == KEYS_OF[heading]


NOT_PROSE = re.compile(
    r"^---\n.*?^---$|```.*?```|<!--.*?-->|\$\$.*?\$\$|^ {4}.*?$|^[|#!].*?$", re.MULTILINE | re.DOTALL
)
ONE_WORD = re.compile(r"`[^`]*`|\$[^$]+\$")


def words_of_sentences(text: str) -> list[int]:
    """Return how many words each sentence of a page has; a formula or a piece of code is one word, a link its text."""
    prose = ONE_WORD.sub("CODE", NOT_PROSE.sub("\n\n", text))
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\\\n", prose)
    sentences = [part for paragraph in paragraphs for part in re.split(r"(?<=[.!?])\)?\s", paragraph)]
    return [count for part in sentences if (count := len(re.findall(r"\w[^\s]*", part)))]


def test_sentences_are_counted_as_a_reader_would() -> None:
    page = "# A title of words\n\nOne two `a b c`. Three $x + y$ [four](five six)!\n\n| a | b |\n\n- Six\n- 7 8\n"
    assert words_of_sentences(page) == [3, 3, 1, 2]


def test_sentences_of_the_pages_are_short() -> None:
    """Half of them have at most 16 words, nine in ten at most 28."""
    counts = [
        count
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        for count in words_of_sentences(page.read_text(encoding="utf-8"))
    ]
    median, nine_in_ten = quantiles(counts, n=2)[0], quantiles(counts, n=10)[8]
    print(f"{len(counts)} sentences, median {median:g}, 90th percentile {nine_in_ten:g} words")
    assert (median <= 16, nine_in_ten <= 28) == (True, True)
