"""One word for one thing: a class name means the same wherever it stands, and words that only we used stay away."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topology", "costmodel", "zosim", "executors", "proofs_checks", "studies")

ONE_IDEA = {
    "Perturbation": "a perturbation of one query: what a buffer holds of it, and how it is drawn",
    "Perturbations": "the axis: in a plan, and in what it is lowered to",
    "Forwards": "the forwards of a step: as they are listed, and as they are done",
}
"""Names of several classes that are one idea in several layers."""

SEVERAL_IDEAS = {
    "Architecture": "of a model (its family's shapes), and of a GPU",
    "Case": "of a study's measurements, of another's, and of an executed check",
    "Communicator": "NCCL's, as the cost model has it, and the one that ranks exchange by",
    "Context": "of operations in the interpreter, and of a check's outcome",
    "Estimate": "of a check's statistic, and of a gradient in a study",
    "Part": "of a buffer, and of a page in a study",
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
