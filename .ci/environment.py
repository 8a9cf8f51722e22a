"""The project's virtual environment: made once, kept while what it was made from stays the same.

Standard library only. ``.venv`` lies in the clone; nothing outside it is touched. A stamp in it says what it was
made from, and is written last, so that an interrupted installation is taken up again.
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

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / "zosim-setup.json"
PIP_LOG = VENV / "pip.log"

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
        "a download arrived damaged",
        "run the same command again",
    ),
    (
        r"No matching distribution found",
        "a package has no build for this Python and machine",
        "use Python 3.11 to 3.13 on 64-bit Linux, macOS or Windows; the last lines of .venv/pip.log name the package",
    ),
]


class SetupError(Exception):
    """The environment could not be made."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def ensure() -> None:
    """Make the environment, or bring it up to date, or find that nothing is to be done.

    Raises
    ------
    SetupError
        If this machine cannot make it, with what is missing.
    """
    wanted = _specification()
    if _is_current(wanted):
        return
    if not _works():
        _create()
    _install(wanted["extras"])
    STAMP.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    print(f"== environment ready: {VENV}", flush=True)


def _specification() -> dict[str, str]:
    """What the environment is made from: a change in any of it installs again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    relevant = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    digest = hashlib.sha256(json.dumps([relevant, packages], sort_keys=True).encode()).hexdigest()
    extras = ["run", "dev"] + (["gpu"] if shutil.which("nvidia-smi") else [])
    return {"sha256": digest, "extras": ",".join(extras), "root": str(ROOT)}


def _is_current(wanted: dict[str, str]) -> bool:
    try:
        return json.loads(STAMP.read_text(encoding="utf-8")) == wanted and _works()
    except (OSError, ValueError):
        return False


def _works() -> bool:
    """Whether the environment has a Python that is new enough and a pip that starts."""
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _create() -> None:
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
    print(f"== making {VENV}{because}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", *options, VENV], check=False)
    if made.returncode != 0 or not _works():
        raise SetupError(
            f"{sys.executable} -m venv {VENV} failed", "its own message stands above; is the disk writable?"
        )


def _torch_of_base_interpreter() -> str | None:
    """Version of a torch that an environment with system packages would see, if the project can use it."""
    base = getattr(sys, "_base_executable", sys.executable)
    probe = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([base, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()
    return found if found and _is_in_range(found) else None


def _is_in_range(version: str) -> bool:
    """Whether a torch version is one that ``pyproject.toml`` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (requirement,) = (
        item for item in project["project"]["optional-dependencies"]["run"] if item.startswith("torch")
    )
    bounds = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", requirement)
    assert bounds is not None, requirement
    lowest, above = (release(bound) for bound in bounds.groups())
    return lowest <= release(version) < above


def release(version: str) -> tuple[int, ...]:
    """First two numbers of a version: "2.13.0+cu128" gives (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _install(extras: str) -> None:
    print(f"== installing zosim with [{extras}]: about a minute and 1.5 GB, more where torch comes with CUDA")
    PIP_LOG.unlink(missing_ok=True)
    command: Sequence[str | Path] = [
        *(
            PYTHON,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            "--retries",
            "3",
        ),
        *("--log", PIP_LOG, "--editable", f"{ROOT}[{extras}]"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        errors = _follow(pip)
    if pip.returncode != 0:
        print("\n".join(errors[-20:]), file=sys.stderr)
        raise _explained(PIP_LOG.read_text(encoding="utf-8", errors="replace") if PIP_LOG.exists() else "")


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


def _explained(log: str) -> SetupError:
    for pattern, message, hint in CAUSES:
        if re.search(pattern, log):
            return SetupError(f"the installation stopped: {message}", hint)
    return SetupError("pip could not install the project", f"its messages stand above and in {PIP_LOG}")
