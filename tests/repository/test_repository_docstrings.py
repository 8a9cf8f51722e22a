"""Docstrings of what packages export: parameters, exceptions and units are named, and no entry only repeats its type."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topology", "costmodel", "zosim", "executors", "proofs_checks.judging")

ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$")
NUMBER = re.compile(
    r"\b(?:int|float|Extent|ElementsOrNone|Elements|Blocks|Ranks|(?:Non)?[A-Z]\w*(?:Int|Float))\b"
)
QUANTITY_NAME = re.compile(
    r"^(?:num|largest)_|_(?:s|bytes|bits|share|rank|id|size|dim|flop|watts|usd)$|^(?:seed|rank|seconds|width|bits)$"
)
QUANTITY = re.compile(
    r"\b(?:numbers?|count|share|part|factor|ratio|scale|rank|index|seconds?|steps?|bytes?|bits?|tokens?|sequences?|elements?|rows|"
    r"columns?|dimension|degrees|kernels|FLOP|USD|GB|probability|radius|rate|version|port|watts|joules|times|`unit`)\b",
    re.IGNORECASE,
)  # fmt: skip


@cache
def parsed(module: str) -> ast.Module:
    base = ROOT.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(package: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the definitions behind the names that a package imports from the packages here, to pass them on."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for node in ast.walk(parsed(package)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and ROOT.joinpath(node.module.split(".")[0]).is_dir()
        ):
            for alias in node.names:
                is_passed_on = alias.asname or package == "proofs_checks.judging"
                if is_passed_on and (definition := defined(alias.name, node.module)):
                    found[f"{package}.{alias.name}"] = definition
    return found


def defined(name: str, module: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the function or class `name` of a module, or of the module that it has the name from; None for a value."""
    for node in parsed(module).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.ImportFrom(module=str(other), names=names) if name in {
                item.asname or item.name for item in names
            }:
                return defined(name, other)
    return None


def entries(docstring: str) -> dict[str, str]:
    """Return what the entries of Parameters and Attributes say, by name; entries of several names stand under each."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.splitlines():
        if head := ENTRY.match(line):
            names = [name.strip(" *") for name in head[1].split(",")]
        elif line[:1].strip():
            names = []
        for name in names if line.strip() else []:
            found[name] = found.get(name, "") + line.strip() + "\n"
    return found


def gaps(docstring: str, values: dict[str, str], node: ast.AST) -> list[str]:
    """Return what a docstring does not say of values (name to annotation) and of what `node` raises."""
    listed = entries(docstring)
    missing = []
    for name, annotation in values.items():
        told = listed.get(name, docstring)
        if not re.search(rf"\b{name}\b", docstring):
            missing.append(f"{name} is not named")
        elif name in listed and told.count("\n") < 2 and not QUANTITY_NAME.search(name):
            missing.append(f"{name}: the entry only repeats the type")
        elif NUMBER.search(annotation) and not QUANTITY_NAME.search(name) and not QUANTITY.search(told):
            missing.append(f"{name}: no unit, and no count")
    raised = {
        name
        for found in ast.walk(node)
        if isinstance(found, ast.Raise) and found.exc
        if (name := ast.unparse(found.exc).partition("(")[0].rpartition(".")[2])[:1].isupper()
    }
    raised = (
        set() if "ZosimError\n" in docstring else raised
    )  # the base of all errors that a user's mistake leads to
    return missing + [
        f"{name} is raised and not named"
        for name in sorted(raised)
        if not re.search(rf"\b{name}\b", docstring)
    ]


def arguments(node: ast.FunctionDef) -> dict[str, str]:
    """Return the annotation of each parameter, by name."""
    return {
        found.arg: ast.unparse(found.annotation) if found.annotation else ""
        for found in ast.walk(node.args)
        if isinstance(found, ast.arg) and found.arg not in ("self", "cls", "_")
    }


def of_function(node: ast.FunctionDef) -> list[str]:
    return gaps(ast.get_docstring(node) or "", arguments(node), node)


def of_class(node: ast.ClassDef) -> list[str]:
    fields = {
        item.target.id: ast.unparse(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not item.target.id.startswith("_") and "ClassVar" not in ast.unparse(item.annotation)
    }
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    made_by = next((arguments(method) for method in methods if method.name == "__init__"), {})
    return gaps(ast.get_docstring(node) or "", fields | made_by, ast.Pass()) + [
        f"{method.name}: {gap}"
        for method in methods
        if not method.name.startswith("_")
        for gap in of_function(method)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_what_a_package_exports_are_complete(package: str) -> None:
    offered = exported(package)
    assert len(offered) >= 5
    assert {
        name: found
        for name, node in offered.items()
        if (found := of_class(node) if isinstance(node, ast.ClassDef) else of_function(node))
    } == {}


COMPLETE = """Return the cost.

    Parameters
    ----------
    batch : int
        Number of sequences.

    Raises
    ------
    PlanError
        If it is too large.
    """


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ("batch :", "size :", "batch is not named"),
        ("PlanError", "", "PlanError is raised and not named"),
        ("Number of sequences", "What it sees", "batch: no unit, and no count"),
        ("        Number of sequences.\n", "", "batch: the entry only repeats the type"),
    ],
)
def test_a_gap_in_a_docstring_is_found(old: str, new: str, gap: str) -> None:
    source = f'def cost(batch: int):\n    """{COMPLETE}"""\n    raise PlanError("batch")\n'
    whole, broken = (ast.parse(text).body[0] for text in (source, source.replace(old, new, 1)))
    assert isinstance(whole, ast.FunctionDef)
    assert isinstance(broken, ast.FunctionDef)
    assert (of_function(whole), of_function(broken)) == ([], [gap])
