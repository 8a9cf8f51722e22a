"""One word for one thing: a class name means the same wherever it stands, and words that only we used stay away."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topology", "costmodel", "zosim", "executors", "proofs_checks", "studies")

ONE_IDEA = {
    "Perturbations": "the axis: in a plan, and in what it is lowered to",
    "Forwards": "the forwards of a step: as they are listed, and as they are done",
}
"""Names of several classes that are one idea in several layers."""

SEVERAL_IDEAS = {
    "Case": "of a study's measurements, of another's, and of an executed check",
    "Communicator": "NCCL's, as the cost model has it, and the one that ranks exchange by",
    "Context": "of operations in the interpreter, and of a check's outcome",
    "Estimate": "of a check's statistic, and of a gradient in a study",
    "Request": "to the planner, and to a server",
    "Setting": "of a plan's field, and the surroundings of a study",
}
"""Names that mean more than one thing, at most ten of them: each package has its own, and none imports the other's."""

PRIVATE_WORDS = {"asking", "crew", "found", "heart", "heed", "leg", "legs", "told"}
"""Words that this code once had for things that have names."""

PRIVATE_IN_ZOSIM = PRIVATE_WORDS | {"present", "way", "ways"}
"""Elsewhere `present` is what is there, and a `way` one of a kernel's or of NCCL's."""

PRIVATE_PHRASES = re.compile(r"\bheed(s|ed)?\b|\b(is|are|was|were) told\b|\bTold (of|the)\b|\btold (of|by)\b")
"""The same in docstrings and comments."""


@cache
def trees() -> dict[str, ast.Module]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def test_a_class_name_means_one_thing() -> None:
    """Names that begin with an underscore are of one module alone."""
    homes = defaultdict(list)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file)
    several = {name: files for name, files in homes.items() if len(files) > 1}
    known = {**ONE_IDEA, **SEVERAL_IDEAS}
    new = {name: files for name, files in several.items() if name not in known}
    assert not new, "find another name, or say in which layers it is the same idea"
    assert set(known) <= set(several), "these are gone, and may be forgotten"
    assert len(SEVERAL_IDEAS) <= 10


def names_in(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names |= set(re.split("_+", node.name.lower()))
    return names


def test_names_are_words_of_the_field() -> None:
    used = {
        f"{file}: {name}"
        for file, tree in trees().items()
        if file.startswith(("costmodel/", "executors/", "zosim/"))
        for name in names_in(tree) & (PRIVATE_IN_ZOSIM if file.startswith("zosim/") else PRIVATE_WORDS)
    }
    # What was found when an evidence file was made again is a key of what `zosim evidence check --json` prints. An option that was
    # renamed has an earlier and a present spelling.
    assert used <= {"zosim/applications/evidence/file.py: found", "zosim/renamed.py: present"}


def test_texts_are_in_words_of_the_field() -> None:
    lines = {
        f"{file}:{number}: {line.strip()}"
        for file in trees()
        if file.startswith(("costmodel/", "executors/", "zosim/"))
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if PRIVATE_PHRASES.search(line) and "told apart" not in line
    }
    # The title of a module about what an anonymous file says.
    assert {
        line for line in lines if not line.startswith("zosim/applications/evidence/anonymous.py")
    } == set()


@dataclass(frozen=True)
class Retired:
    """A word that was retired: a row of ``retired_words.toml``, which says what its fields are."""

    was: str
    now: str
    names: str = ""
    texts: str = ""
    stays: dict[str, str] = field(default_factory=dict)


RETIRED = [
    Retired(**row)
    for row in tomllib.loads((Path(__file__).parent / "retired_words.toml").read_text(encoding="utf-8"))[
        "word"
    ]
]
READS_EARLIER_NAMES = ("RENAMED", "OPTIONS", "VALUES")
"""Tables of names that earlier files and command lines have."""


def present(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module without those of the tables that read earlier names."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(
            isinstance(target, ast.Name) and target.id.endswith(READS_EARLIER_NAMES) for target in targets
        ):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def names_of(node: Any) -> Iterator[str]:
    """Yield the names that a node gives or uses, attributes also with their dot.

    A text of one word may be a key of a file, or an option's value.
    """
    for attribute in ("id", "arg", "name", "attr"):
        if isinstance(name := getattr(node, attribute, None), str):
            yield from name.split(".")
    if isinstance(node, ast.Attribute):
        yield f".{node.attr}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w-]+", node.value):
        yield node.value


@cache
def pages() -> dict[str, str]:
    """Return the pages that people read, without the older names of the glossary."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").partition("## Older names")[0]
        for file in files
    }


CODE = re.compile(r"^ *```.*?^ *```|^    .*?$|`[^`]*`", re.MULTILINE | re.DOTALL)


@cache
def used_names() -> dict[str, set[str]]:
    """Return where each name stands: in code, as an option, and in pages as code within a line."""
    homes = defaultdict(set)
    for file, tree in trees().items():
        for node in present(tree):
            for name in names_of(node):
                homes[name].add(file)
    for page, text in pages().items():
        for code in re.findall(r"`([^`\n]*)`", text):
            for name in re.findall(r"[\w-]+", code):
                homes[name.strip("-")].add(page)
    return homes


@cache
def used_texts() -> dict[str, str]:
    """Return what people read, by file: messages, help texts, docstrings, comments, pages."""
    said: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for node in present(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                said[file].append(node.value)
        said[file] += re.findall(r"(?:^|  )# (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {file: "\n".join(texts) for file, texts in said.items()} | {
        page: CODE.sub("CODE", text) for page, text in pages().items()
    }


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word.was)
def test_no_retired_word_is_a_name(word: Retired) -> None:
    found = {
        f"{name}: {file}"
        for name, files in used_names().items()
        if word.names and re.search(word.names, name)
        for file in files
        if not any(re.search(stays, name.lstrip(".")) or re.search(stays, file) for stays in word.stays)
    }
    assert not found, f"say {word.now}, or say in retired_words.toml why it stays"


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word.was)
def test_no_retired_word_is_read(word: Retired) -> None:
    found = set()
    for file, text in used_texts().items():
        for match in re.finditer(word.texts, text) if word.texts else ():
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            if not any(re.search(stays, around) or re.search(stays, file) for stays in word.stays):
                found.add(f"{file}: {around}")
    assert not found, f"say {word.now}, or say in retired_words.toml why it stays"


def test_every_exception_is_needed() -> None:
    """Nothing stays for a name, a file or a text that is gone."""
    names, files = "\n".join(used_names()), "\n".join(used_texts())
    texts = " ".join(" ".join(text.split()) for text in used_texts().values())
    spare = {
        f"{word.was}: {stays}"
        for word in RETIRED
        for stays in word.stays
        if not any(re.search(stays, where, re.MULTILINE) for where in (names, files, texts))
    }
    assert not spare


def test_the_glossary_lists_the_retired_words() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## Older names")[2], re.MULTILINE)
    assert rows == [("older name", "now"), ("---", "---"), *((word.was, word.now) for word in RETIRED)]
