"""Versions of an adapter: keep them, compare one with the served one, promote it, roll back."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.datasets.prompts import Example
from executors.files import write_atomically
from executors.models.lora import PEFT_CONFIG
from executors.serving.runner import ServingRunner, mean_losses
from topology.errors import RunError
from topology.reading import read_json_object, refuse_irregular

_STATE_NAME = "served.json"
_CANDIDATE = "zosim-candidate"


@dataclass(frozen=True)
class Canary:
    """Losses of two versions on the same examples."""

    # served, candidate: mean losses over labelled tokens, of the version that is served (the base where none is) and of
    # the candidate.
    served: float
    candidate: float
    num_tokens: int

    @property
    def difference(self) -> float:
        """Loss of the candidate minus that of the served version."""
        return self.candidate - self.served


class Versions:
    """A directory of adapters, of which one is served under a name.

    - `directory`: has a directory for each version, and a file that names the one that is served and those before it.
    - `name`: what the server calls the version that is served.

    The server is asked first, the file is written then: whoever is stopped between the two asks the server again with :meth:`serve_again`.
    """

    def __init__(self, directory: Path, runner: ServingRunner, name: str) -> None:
        self.directory = directory
        self.runner = runner
        self.name = name
        self._promoted: str | None = None
        directory.mkdir(parents=True, exist_ok=True)

    # -- what there is -----------------------------------------------------------------------------------------

    def kept(self) -> tuple[str, ...]:
        """Return the names of all versions."""
        return tuple(sorted(path.parent.name for path in self.directory.glob(f"*/{PEFT_CONFIG}")))

    @property
    def served(self) -> str | None:
        """The version that is served; None for the base."""
        history = self._history()
        return history[-1] if history else None

    def _history(self) -> list[str]:
        path = self.directory / _STATE_NAME
        if not path.is_file():
            return []
        state: Mapping[str, Any] = read_json_object(path, "state of versions", RunError)
        history = state.get("history")
        if not isinstance(history, list) or not all(isinstance(version, str) for version in history):
            raise RunError(f"{path} is damaged: it has no list of versions")
        return history

    def _path(self, version: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", version):
            raise RunError(
                f"{version!r} is not a valid name of a version", hint="use letters, digits, '.', '_' and '-'"
            )
        return self.directory / version

    def keep(self, version: str, adapter: Path) -> None:
        """Copy an adapter as a version. Raises RunError if there is one of that name, or `adapter` is none."""
        path = self._path(version)
        if path.exists():
            raise RunError(f"{path} already exists", hint="versions do not change: choose another name")
        if not (adapter / PEFT_CONFIG).is_file():
            raise RunError(f"{adapter} holds no adapter: {PEFT_CONFIG} is missing")
        refuse_irregular(
            (path for path in adapter.rglob("*") if not path.is_dir() or path.is_symlink()),
            RunError,
            links=True,
        )
        # A copy that was interrupted is no version yet.
        partial = self.directory / f".{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(adapter, partial)
        partial.rename(path)

    @contextmanager
    def trying(self, version: str, adapter: Path) -> Iterator[None]:
        """Keep an adapter as a version; remove it if the block fails before it is served."""
        self.keep(version, adapter)
        try:
            yield
        except BaseException:
            if version not in (self._promoted, *self._history()):
                shutil.rmtree(self._path(version))
            raise

    # -- serving -----------------------------------------------------------------------------------------------

    def compare(self, version: str, examples: Sequence[Example]) -> Canary:
        """Return the losses of the served version and another on examples, scored together.

        Raises
        ------
        ModelError
            If the version belongs beside another base.
        RunError
            If there is no such version, or nothing is asked of the examples.
        """
        if self.served is not None and self.name not in self.runner.adapters():
            self.serve_again()  # the server was started anew: the base is not what has been served
        self._load(_CANDIDATE, version)
        try:
            served = None if self.served is None else self.name
            (loss_served, loss), num_tokens = mean_losses(self.runner, (served, _CANDIDATE), examples)
        finally:
            self.runner.unload(_CANDIDATE)
        return Canary(loss_served, loss, num_tokens)

    def promote(self, version: str, examples: Sequence[Example], *, tolerance: float = 0.0) -> Canary:
        """Serve a version if its loss exceeds the served one's by at most `tolerance`.

        Raises RunError if it does; what was served goes on being served.
        """
        if math.isnan(tolerance):
            raise RunError("--tolerance nan is not a number", hint="such as 0.01")
        canary = self.compare(version, examples)
        # So put, NaN does not pass.
        if not canary.difference <= tolerance:
            raise RunError(
                f"version {version} has a loss of {canary.candidate:.6g} on the canary's {canary.num_tokens} "
                f"tokens, the served one of {canary.served:.6g}: it is not promoted",
                hint=f"a --tolerance above {tolerance:g} would accept it",
            )
        self._promoted = version
        self._load(self.name, version)
        self._write([*self._history(), version])
        return canary

    def roll_back(self) -> str | None:
        """Serve the version that was served before, and return it; None for the base.

        Raises RunError if none is served.
        """
        history = self._history()
        if not history:
            raise RunError(f"{self.directory} has no earlier version to roll back to")
        before = history[-2] if len(history) > 1 else None
        if before is not None:
            self._load(self.name, before)
        elif self.name in self.runner.adapters():
            self.runner.unload(self.name)
        self._write(history[:-1])
        return before

    def serve_again(self) -> str | None:
        """Load the version that the file names into a newly started server, and return its name."""
        if self.served is not None:
            self._load(self.name, self.served)
        return self.served

    def _load(self, name: str, version: str) -> None:
        path = self._path(version)
        if not (path / PEFT_CONFIG).is_file():
            raise RunError(
                f"{self.directory} has no version {version!r}",
                hint="versions are " + (", ".join(self.kept()) or "none"),
            )
        self.runner.load(name, path)

    def _write(self, history: list[str]) -> None:
        write_atomically(
            self.directory / _STATE_NAME, json.dumps({"name": self.name, "history": history}) + "\n"
        )
