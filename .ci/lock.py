"""Resolves the versions that belong together, and writes them down for every installer. Standard library only, and pip.

``uv.lock`` is the source: all versions with their hashes, for every Python and platform. ``requirements.txt`` is what pip
installs of it, and ``pylock.toml`` what other installers read. ``requirements-lowest.txt`` has the lowest versions that
``pyproject.toml`` allows, for the oldest Python, with which tests run, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import environment
from environment import DOCS, EXTRAS, REQUIREMENTS, ROOT, SetupError

UV = "uv==0.13.9"
"""What resolves; installed in a folder that is removed afterwards."""

_OLDEST_PYTHON = "3.11"

_OF_TORCH = re.compile(r"torch|triton|(cuda|nvidia)-.*")
"""torch and what its CUDA builds bring: which build fits is the machine's to say, so they are in no requirements."""


def lock(arguments: Sequence[str]) -> int:
    """Write uv.lock and what is exported of it."""
    with tempfile.TemporaryDirectory() as folder:
        _install_uv(Path(folder))
        uv = _Uv(Path(folder))
        uv.run("lock", *arguments)
        names = _names()
        left_out = [word for name in names if _is_of_torch(name) for word in ("--no-emit-package", name)]
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        exported = ["export", "--frozen", "--no-header", "--no-emit-project", *extras, "--extra", DOCS]
        uv.write(REQUIREMENTS["locked"], *exported, "--group", "build", *left_out)
        uv.write(ROOT / "pylock.toml", *exported, "--format", "pylock.toml")
        constraint = Path(folder) / "torch.txt"
        constraint.write_text(f"torch=={environment.locked_torch()}\n", encoding="utf-8")
        resolved = [
            "pip",
            "compile",
            "pyproject.toml",
            *extras,
            "--group",
            "pyproject.toml:build",
            "--no-header",
        ]
        lowest = ["--resolution", "lowest-direct", "--universal", "--python-version", _OLDEST_PYTHON]
        lowest += ["--only-binary", ":all:"]
        uv.write(
            REQUIREMENTS["lowest"], *resolved, *lowest, "--generate-hashes", "-c", str(constraint), *left_out
        )
    return 0


def _is_of_torch(name: str) -> bool:
    return _OF_TORCH.fullmatch(name) is not None and name != "nvidia-ml-py"


def _names() -> list[str]:
    """Return the names of all locked packages."""
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    return sorted({package["name"] for package in locked})


def _install_uv(folder: Path) -> None:
    print(f"== installing {UV} for this command", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), UV]
    if subprocess.run(command, check=False).returncode != 0:
        raise SetupError(f"pip could not install {UV}", "its own message stands above")


class _Uv:
    """Runs uv as this project wants it: the public index, whatever this machine is configured to use."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "bin" / "uv"
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")} | {
            "UV_CACHE_DIR": str(folder / "cache")
        }
        if "PIP_CERT" in os.environ:
            self._environment.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])

    def run(self, *arguments: str) -> str:
        """Return what uv prints."""
        command = [str(self._program), *arguments, "--no-config", "--python", sys.executable]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            raise SetupError(f"uv {' '.join(arguments[:2])} failed", "its own message stands above")
        return done.stdout

    def write(self, path: Path | None, *arguments: str) -> None:
        """Write what uv prints behind a line that says what it was made from."""
        assert path is not None
        text = self.run(*arguments, "--quiet")
        head = f"# Made by `python3 .ci/tasks.py lock` from requirements of sha256 {environment.digest_of_requirements()}"
        path.write_text(f"{head}\n{text}", encoding="utf-8")
        print(f"== {path.relative_to(ROOT)}", flush=True)
