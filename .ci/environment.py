"""The project's virtual environments: made once, kept while what they were made from stays the same.

Standard library only. ``.venv`` lies in the clone and has the locked versions; ``.venv-lowest`` and ``.venv-newest`` have
the lowest that ``pyproject.toml`` allows and the newest there are. Nothing outside them is touched. A stamp in each says
what it was made from, and is written last, so that an interrupted installation is taken up again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

EXTRAS = ("run", "serve", "dev", "gpu")
"""Extras that the environments have."""

DOCS = "docs"
"""The extra that builds the site: of the locked environment alone, as its packages bound versions that zosim does not."""

REQUIREMENTS = {
    "locked": ROOT / "requirements.txt",
    "lowest": ROOT / ".ci" / "requirements-lowest.txt",
    "newest": None,
}
"""What pip installs for each set of versions: hashed requirements that ``.ci/lock.py`` writes, or the newest there are."""

NEEDED_DISK_BYTES = 2_500_000_000

# What pip writes to its log, and what it means for the user. The first that matches is told.
CAUSES = [
    (
        r"No space left on device|Errno 28",
        "the disk is full",
        "free about 3 GB (9 GB where pip chooses torch's CUDA build); TMPDIR and PIP_CACHE_DIR move pip's own files",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|Network is unreachable",
        "no package index could be reached",
        "check the network; behind a proxy set HTTPS_PROXY, for a mirror set PIP_INDEX_URL",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "the package index shows a certificate that this machine does not trust",
        "set PIP_CERT to your organisation's certificate file",
    ),
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES|hash mismatch",
        "a download is not the file that was locked: it arrived damaged, or this index serves another",
        "run the same command again; an index that builds its own files cannot serve the locked ones",
    ),
    (
        r"that satisfies the requirement (\S+) \(from versions: (?!none)",
        "the package index has other versions, but not {0}",
        "python3 .ci/tasks.py test --set newest tries the newest that it has, and python3 .ci/tasks.py lock --upgrade locks them",
    ),
    (
        r"No matching distribution found",
        "a package has no build for this Python and machine",
        "use Python 3.11 to 3.14 on 64-bit Linux, macOS or Windows; the last lines of pip.log name the package",
    ),
]


class SetupError(Exception):
    """The environment could not be made."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Environment:
    """A folder with a Python, and one set of versions in it: "locked", "lowest" or "newest"."""

    def __init__(self, versions: str = "locked") -> None:
        self.versions = versions
        self.folder = ROOT / (".venv" if versions == "locked" else f".venv-{versions}")
        self.bin = self.folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        self.stamp = self.folder / "zosim-setup.json"
        self.pip_log = self.folder / "pip.log"

    def ensure(self) -> None:
        """Make the environment, or bring it up to date, or find that nothing is to be done.

        Raises
        ------
        SetupError
            If this machine cannot make it, with what is missing.
        """
        wanted = _specification(self)
        if self._is_current(wanted):
            return
        if not self._works():
            _create(self)
        _install(self)
        self.stamp.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        print(f"== environment ready: {self.folder}", flush=True)

    def _is_current(self, wanted: dict[str, str]) -> bool:
        try:
            return json.loads(self.stamp.read_text(encoding="utf-8")) == wanted and self._works()
        except (OSError, ValueError):
            return False

    def _works(self) -> bool:
        """Whether the environment has a Python that is new enough and a pip that starts."""
        probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
        try:
            return (
                subprocess.run([self.python, "-c", probe], capture_output=True, check=False).returncode == 0
            )
        except OSError:
            return False


def project() -> dict[str, Any]:
    """Return ``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def digest_of_requirements() -> str:
    """Return a hash of what ``pyproject.toml`` asks for: exported files say which one they were made from."""
    declared = project()
    requested = [declared["build-system"]["requires"], declared["dependency-groups"], *EXTRAS, DOCS]
    requested += [
        declared["project"][name] for name in ("requires-python", "dependencies", "optional-dependencies")
    ]
    return hashlib.sha256(json.dumps(requested, sort_keys=True).encode()).hexdigest()


def _specification(environment: Environment) -> dict[str, str]:
    """What the environment is made from: a change in any of it installs again."""
    declared = project()
    relevant = [declared["build-system"], declared["project"], declared["tool"]["setuptools"]]
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    digest = hashlib.sha256(json.dumps([relevant, packages], sort_keys=True).encode())
    if (requirements := REQUIREMENTS[environment.versions]) is not None:
        digest.update(requirements.read_bytes())
    return {"sha256": digest.hexdigest(), "root": str(ROOT)}


def _create(environment: Environment) -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SetupError(
                f"{sys.executable} comes without its {module} module",
                f"on Debian or Ubuntu: apt install python{version}-venv",
            )
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < NEEDED_DISK_BYTES:
        raise SetupError(
            f"{free_bytes / 1e9:.1f} GB are free under {ROOT}, and the environment takes about"
            f" {NEEDED_DISK_BYTES / 1e9:.1f} GB",
            "free some space (9 GB where pip chooses torch's CUDA build), or clone to a larger disk",
        )
    torch = _torch_of_base_interpreter()
    options = ["--system-site-packages"] if torch else []
    because = f", with the torch {torch} that this Python already has" if torch else ""
    folder = environment.folder
    print(f"== making {folder}{because}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", *options, folder], check=False)
    if made.returncode != 0 or not environment._works():
        raise SetupError(
            f"{sys.executable} -m venv {folder} failed", "its own message stands above; is the disk writable?"
        )


def _torch_of_base_interpreter() -> str | None:
    """Version of a torch that an environment with system packages would see, if the project can use it."""
    return _usable_torch(getattr(sys, "_base_executable", sys.executable))


def _usable_torch(python: str | Path, outside: Path | None = None) -> str | None:
    """Version of the torch that a Python sees, if the project can use it, and if it lies outside a folder."""
    probe = "from importlib.metadata import distribution as d; t = d('torch'); print(t.version, t.locate_file(''))"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()
    version, _, place = found.partition(" ")
    if not version or not _is_in_range(version):
        return None
    return None if outside is not None and Path(place).is_relative_to(outside) else version


def differences(environment: Environment) -> list[tuple[str, str, str]]:
    """Return the name, version and locked version of what the project asks for where an environment has another."""
    requirements = [*project()["project"]["dependencies"]]
    for extra in EXTRAS:
        requirements += project()["project"]["optional-dependencies"][extra]
    names = {re.split(r"[<>=;\s]", line)[0].lower() for line in requirements}
    probe = (
        "from importlib.metadata import distributions as d; print(*{p.name + '==' + p.version for p in d()})"
    )
    declared = subprocess.run(
        [environment.python, "-c", probe], capture_output=True, text=True, check=True
    ).stdout
    has = {
        name.lower().replace("_", "-"): version for name, version in (p.split("==") for p in declared.split())
    }
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    locked: dict[str, list[str]] = {}
    for package in lock["package"]:
        locked.setdefault(package["name"], []).append(package.get("version", ""))
    return [
        (name, has[name], " or ".join(locked[name]))
        for name in sorted(names)
        if name in has and name in locked and has[name].partition("+")[0] not in locked[name]
    ]


def _is_in_range(version: str) -> bool:
    """Whether a torch version is one that ``pyproject.toml`` asks for."""
    run = project()["project"]["optional-dependencies"]["run"]
    (requirement,) = (item for item in run if item.startswith("torch"))
    bounds = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", requirement)
    assert bounds is not None, requirement
    lowest, above = (release(bound) for bound in bounds.groups())
    return lowest <= release(version) < above


def locked_torch() -> str:
    """Version of torch that the other locked versions go with; which build of it, pip's configuration decides."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    (version,) = {package["version"] for package in lock["package"] if package["name"] == "torch"}
    return str(version)


def release(version: str) -> tuple[int, ...]:
    """First two numbers of a version: "2.13.0+cu128" gives (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _install(environment: Environment) -> None:
    """Install other packages, then torch unless this Python brings it, then the project."""
    print(f"== installing the {environment.versions} versions: 1.5 GB, more where torch comes with CUDA")
    environment.pip_log.unlink(missing_ok=True)
    is_brought = _usable_torch(environment.python, outside=environment.folder) is not None
    torch = [] if is_brought else [f"torch=={locked_torch()}"]
    requirements = REQUIREMENTS[environment.versions]
    if requirements is None:
        _pip(environment, *torch, *_newest())
    else:
        # Hashes and exact versions of everything: nothing is left to resolve, and nothing is built.
        _pip(environment, "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", requirements)
        if torch:
            _pip(environment, *torch)
    _pip(environment, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    _compile(environment)


def _compile(environment: Environment) -> None:
    """Compile all modules on all cores, but for those that hardly anybody imports; pip would take a minute of one core for all."""
    print("== compiling what was installed", flush=True)
    unused = r"site-packages.(.*[/\\])?tests?[/\\]|site-packages.transformers.models.(?!auto)"
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    command = [
        environment.python,
        "-m",
        "compileall",
        "-qq",
        "-j",
        "0",
        "-x",
        unused,
        environment.folder,
        *packages,
    ]
    subprocess.run(command, check=False)  # some packages have files for other Pythons


def _newest() -> list[str]:
    """Options and requirements of the newest versions, whatever upper bounds say, torch excepted."""
    declared = project()
    lines = [*declared["build-system"]["requires"], *declared["project"]["dependencies"]]
    for extra in EXTRAS:
        lines += declared["project"]["optional-dependencies"][extra]
    return [
        "--upgrade",
        *(re.sub(r",\s*<[\d.]+", "", line) for line in lines if not line.startswith("torch")),
    ]


def _pip(environment: Environment, *arguments: str | Path) -> None:
    command: Sequence[str | Path] = [
        *(environment.python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--no-compile", "--retries", "3", "--log", environment.pip_log, *arguments),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        errors = _follow(pip)
    if pip.returncode != 0:
        print("\n".join(errors[-20:]), file=sys.stderr)
        raise _explained(environment.pip_log)


def _follow(pip: subprocess.Popen[str]) -> list[str]:
    """Show what pip is doing until it ends, and return what it complained about.

    A terminal gets one line that is written over; elsewhere a line every ten seconds.
    """
    doing, errors = ["starting"], []

    def read() -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            if re.match(r"\s*(Collecting|Downloading|Processing|Building|Installing)\b", line):
                doing[0] = line.strip().partition(" packages:")[0]
            elif "Retrying" in line:
                doing[0] = "the package index does not answer, trying again"
            elif line.startswith(("ERROR", "error")):
                errors.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    started = time.monotonic()
    is_terminal = sys.stdout.isatty()
    while reader.is_alive():
        reader.join(timeout=0.5 if is_terminal else 10)
        columns = shutil.get_terminal_size().columns - 1
        status = f"   {time.monotonic() - started:4.0f} s  {doing[0]}"[:columns]
        print(f"\r{status:{columns}}" if is_terminal else status, end="" if is_terminal else "\n", flush=True)
    if is_terminal:
        print()
    return errors


def _explained(pip_log: Path) -> SetupError:
    log = pip_log.read_text(encoding="utf-8", errors="replace") if pip_log.exists() else ""
    for pattern, message, hint in CAUSES:
        if found := re.search(pattern, log):
            return SetupError(f"the installation stopped: {message.format(*found.groups())}", hint)
    return SetupError("pip could not install the project", f"its messages stand above and in {pip_log}")
