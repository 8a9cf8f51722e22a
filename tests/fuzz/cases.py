"""What is fuzzed: cases, which are files and arguments, and targets, which take them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True)
class Case:
    """One input.

    - `files`: Contents by path below the folder that the target is called in. These are changed.
    - `argv`: Arguments of a command.
    - `kept`: Files that the target needs beside them and that stay as they are.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    kept: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the files below a folder."""
        for name, content in {**self.kept, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def to_json(self, target: str, finding: str) -> str:
        """Return the case as a file of the corpus, without the files that stay as they are."""
        files = {name: _as_text(content) for name, content in self.files.items()}
        data = {"target": target, "finding": finding, "argv": list(self.argv), "files": files}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def of_json(cls, text: str, kept: Mapping[str, bytes]) -> Case:
        """Return the case in a file of the corpus."""
        data: dict[str, Any] = json.loads(text)
        files = {name: _as_bytes(content) for name, content in data["files"].items()}
        others = {name: content for name, content in kept.items() if name not in files}
        return cls(files, tuple(data["argv"]), others)


def _as_text(content: bytes) -> dict[str, str]:
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _as_bytes(stored: Mapping[str, str]) -> bytes:
    return stored["text"].encode() if "text" in stored else base64.b64decode(stored["base64"])


@dataclass(frozen=True)
class Target:
    """A reader or a command.

    - `name`: Unique; the corpus knows it by this name.
    - `make_seeds`: Returns valid cases. It is called once in a process, before any case is made.
    - `call`: Takes a case and the folder that holds its files, which is also the working directory. It may return, or raise a
      ``ZosimError`` or a ``SystemExit``; anything else is a finding.
    - `mutate`: Returns a broken case, from a generator and a valid one.
    - `quick`: Cases that the quick run takes.
    """

    name: str
    make_seeds: Callable[[], Sequence[Case]]
    call: Callable[[Case, Path], None]
    mutate: Callable[[Random, Case], Case]
    quick: int = 6

    @cached_property
    def seeds(self) -> Sequence[Case]:
        """Valid cases."""
        return self.make_seeds()

    @cached_property
    def kept(self) -> Mapping[str, bytes]:
        """Files of any seed, for cases of the corpus, which hold only what was changed."""
        return {name: content for seed in self.seeds for name, content in {**seed.files, **seed.kept}.items()}

    def case(self, number: int) -> Case:
        """Return a case; the same for the same number in every process."""
        generator = Random(f"{self.name}/{number}")
        return self.mutate(generator, generator.choice(self.seeds))
