"""What holds for the sources as a whole: docstrings, directions of imports, planning without torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topology", "costmodel", "zosim", "executors", "proofs_checks", "studies")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_says_what_it_is_for() -> None:
    # What stands in front of the first statement is read, not all of it.
    assert [
        relative(path) for path in MODULES if not path.read_text("utf-8").startswith(('"""', 'r"""'))
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_one(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file(), "without it, an installed copy leaves the package out"


def test_imports_point_one_way() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run(
        [linter, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


PLAN_WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "tokenizers"):
            raise ModuleNotFoundError(f"planning imported {name}", name=name)

sys.meta_path.insert(0, Hidden())
for package in ("topology", "costmodel", "zosim"):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
from zosim.cli import main
for sys.argv[1:] in (["--help"], ["plan", "--help"], ["topology", "list"]):
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""


def test_planning_needs_no_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PLAN_WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert all(output in result.stdout for output in ("Usage: zosim", "--hardware", "dgx-1v")), result.stdout


@pytest.mark.parametrize(
    ("statement", "not_loaded"),
    [
        ("import zosim", {"pydantic", "typer", "numpy"}),
        ("import zosim.commands", {"numpy", "zosim.planning.planner", "zosim.simulators.lockstep"}),
        ("import zosim.planning.views", {"scipy", "networkx", "simpy"}),
        ("import topology.hardware", {"networkx", "psutil", "topology.detection"}),
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_needed(statement: str, not_loaded: set[str]) -> None:
    code = f"{statement}, sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not not_loaded & set(result.stdout.split())


@pytest.mark.parametrize("package", ["topology", "costmodel", "zosim"])
def test_every_name_that_a_package_offers_is_there(package: str) -> None:
    module = importlib.import_module(package)
    offered = {name: getattr(module, name) for name in module.__all__ if (package, name) != ("zosim", "run")}
    assert all(value is not None for value in offered.values())
    with pytest.raises(AttributeError, match=f"{package}.*nothing_of_the_kind"):
        _ = module.nothing_of_the_kind


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name.partition("-")[0]) for path in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("path", DECISIONS, ids=relative)
def test_a_decision_has_context_decision_and_consequences(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert sections[:3] == ["Context", "Decision", "Consequences"]
