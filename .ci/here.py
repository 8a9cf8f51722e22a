"""What this Python has of what the project needs, for a machine without a package index. Standard library only."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import environment

PACKAGES = environment.ROOT / "build" / "here"
"""Where packages out of a folder of wheels are put."""

_UNUSED = {"markdown-it-py", "matplotlib", "constriction"}
"""Dependencies that no part of a first hour imports."""

_WITHOUT = {
    "nvidia-ml-py": "clocks and power are not read",
    "pytest": "the tests that need a device are left out",
}
"""What is missing where a package is that no part has to have."""

FIND_LINKS = "--find-links"

_MODULES = {"pyyaml": "yaml"}
"""What packages are imported as, where that is another name."""

_FIRST_HOUR = "studies.first_hour.parts"
_IMPORTING = """
import importlib, sys
lacking = set()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking.add(error.name)
print(*sorted(lacking))
"""


def prepared(arguments: list[str]) -> list[str]:
    """Return the other arguments, once this Python has what a first hour needs: out of a folder of wheels, if one is named.

    What it can do without is said, too.

    Raises
    ------
    environment.SetupError
        Naming what is not there, and how to bring it.
    """
    rest = list(arguments)
    folder = None
    if FIND_LINKS in rest:
        place = rest.index(FIND_LINKS)
        folder = Path(rest[place + 1]) if len(rest) > place + 1 else None
        del rest[place : place + 2]
        if folder is None or not folder.is_dir():
            raise environment.SetupError(
                f"{FIND_LINKS} {folder or ''} is no folder", "name one with wheels in it"
            )
    sys.path.insert(0, str(PACKAGES))
    if folder is not None and missing():
        _install_from(folder.resolve())
    if lacking := missing() or not_importable():
        words = " ".join([*(f"'{requirement}'" for requirement in lacking), *_WITHOUT])
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise environment.SetupError(
            f"{sys.executable} lacks {', '.join(lacking)}, without which no part can begin",
            f"with Python {version} on a machine like this one that has an index: pip download --dest wheels {words}\n"
            f"      then bring that folder here: python3 .ci/tasks.py gpu {FIND_LINKS} wheels",
        )
    for name, consequence in _WITHOUT.items():
        if _version_of(name) is None:
            print(f"== without {name}: {consequence}", file=sys.stderr, flush=True)
    return rest


def missing() -> list[str]:
    """Return requirements that this Python does not meet."""
    return [line for line in _requirements() if not _is_met(line)]


def _requirements() -> list[str]:
    project = tomllib.loads((environment.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["run"]]
    requirements = [line.partition(";")[0].strip() for line in lines]
    return [line for line in requirements if _name(line) not in _UNUSED]


def not_importable() -> list[str]:
    """Return modules that what is there imports and does not find, such as those of a wheel that was not brought along."""
    modules = [_MODULES.get(name, name.replace("-", "_")) for name in map(_name, _requirements())]
    paths = [str(environment.ROOT), str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _IMPORTING, *modules, _FIRST_HOUR]
    tried = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        last = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        raise environment.SetupError(
            f"{sys.executable} cannot import what it has: {last}",
            "bring wheels of releases that go together, and of this Python",
        )
    return tried.stdout.split()


def _name(requirement: str) -> str:
    return re.split(r"[<>=]", requirement)[0]


def _is_met(requirement: str) -> bool:
    version = _version_of(_name(requirement))
    if version is None:
        return False
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    has = environment.release(version)
    return all(
        has >= environment.release(bound) if kind == ">=" else has < environment.release(bound)
        for kind, bound in bounds
    )


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install_from(folder: Path) -> None:
    """Put what this Python lacks beside the source tree: a package that it has, such as torch for its device, stays its own."""
    wanted = {_name(requirement) for requirement in missing()}
    wheels = {
        path: path.name.split("-")[0].lower().replace("_", "-") for path in sorted(folder.glob("*.whl"))
    }
    chosen = [str(path) for path, name in wheels.items() if name in wanted or _version_of(name) is None]
    print(f"== {len(chosen)} of {len(wheels)} wheels in {folder} go to {PACKAGES}", flush=True)
    if not chosen:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    done = subprocess.run([*command, "--target", str(PACKAGES), *chosen], check=False)
    if done.returncode != 0:
        raise environment.SetupError(
            f"pip could not unpack the wheels in {folder}",
            "its own message stands above; wheels are for one Python and one kind of machine",
        )
    importlib.invalidate_caches()
