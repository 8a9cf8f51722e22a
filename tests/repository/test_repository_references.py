"""What docstrings and pages name is there: modules, functions and classes by their dotted names, files by their paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topology", "costmodel", "zosim", "executors", "proofs_checks", "studies")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([A-Za-z_][\w.]*)`")
PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n-{3,}|\Z)", re.DOTALL | re.MULTILINE)
SOURCE_PATH = re.compile(rf"(?<![\w/])((?:{'|'.join((*PACKAGES, 'tests'))})/[\w/]+\.py)\b")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def module(name: str) -> ast.Module | None:
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def bound(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that statements bind; those of conditional blocks included."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = statement
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(item.asname or item.name).partition(".")[0]: statement for item in names}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = statement
            case ast.Assign(targets=targets):
                found |= {
                    node.id: statement for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)
                }
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                found |= bound(inner) | bound(other)
    return found


def is_in(path: list[str], body: list[ast.stmt]) -> bool:
    """Whether `path` leads somewhere from what `body` binds; through classes that inherit, any name may."""
    if not path:
        return True
    statement = bound(body).get(path[0])
    if isinstance(statement, ast.ClassDef) and path[1:]:
        return is_in(path[1:], statement.body) or bool(statement.bases) or is_set(path[1], statement)
    return statement is not None


def is_set(name: str, of: ast.ClassDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(of))


def resolves(name: str, here: ast.Module) -> bool:
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        # What this module does not bind is a library's, or a method of the class that speaks.
        return (
            is_in(parts, here.body)
            if parts[0] in bound(here.body)
            else len(parts) > 1 or is_named(name, here)
        )
    for length in range(len(parts), 0, -1):
        if (found := module(".".join(parts[:length]))) is not None:
            return is_in(parts[length:], found.body)
    return False


def is_named(name: str, here: ast.Module) -> bool:
    """Whether a function, a class or a variable anywhere in a module has a name, or a library does."""
    named = {getattr(node, field, None) for node in ast.walk(here) for field in ("name", "id", "attr", "arg")}
    return name in named or name in sys.stdlib_module_names


def broken(text: str) -> list[str]:
    here = ast.parse(text)
    return [name for name in REFERENCE.findall(text) if not resolves(name, here)]


def test_references_in_docstrings_lead_somewhere() -> None:
    found = {relative(path): broken(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("gone", ["zosim.validator", "zosim.plans.Plane", "Plan.safe", "PRESETS"])
def test_a_reference_that_leads_nowhere_is_found(gone: str) -> None:
    assert broken(f'"""See :class:`{gone}`."""\nclass Plan:\n    def save(self): ...\n') == [gone]


def unknown_parameters(text: str) -> list[str]:
    """Return what docstrings of functions describe as parameters that the functions do not have."""
    unknown = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and (
            listed := PARAMETERS.search(ast.get_docstring(function) or "")
        ):
            heads = [line.partition(" :")[0] for line in listed[1].splitlines() if line[:1].strip()]
            named = {name.strip(" *") for head in heads for name in head.split(",")}
            taken = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            unknown += [f"{function.name}: {name}" for name in sorted(named - taken)]
    return unknown


def test_docstrings_describe_parameters_that_functions_have() -> None:
    found = {relative(path): unknown_parameters(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_parameter_that_a_function_does_not_have_is_found() -> None:
    docstring = "First line.\n\n    Parameters\n    ----------\n    old, new : int\n        Both.\n    "
    assert unknown_parameters(f'def f(new, *, other=1):\n    """{docstring}"""\n') == ["f: old"]


def test_paths_of_sources_in_docs_and_comments_are_there() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    missing = {
        (path, named)
        for path in listed.stdout.split()
        for named in SOURCE_PATH.findall((ROOT / path).read_text(encoding="utf-8"))
        if not (ROOT / named).is_file()
    }
    assert missing == set()
