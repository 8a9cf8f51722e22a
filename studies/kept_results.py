"""Results of a study, kept in a folder, a file each, so that it can be stopped and continued."""

from __future__ import annotations

import json
import re
import subprocess
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from costmodel.scoring import Row
from topology.errors import ZosimError
from topology.reading import read_json_object


def commit() -> str:
    """Return the commit of this checkout, marked where files differ from it; ``unknown`` outside of one."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        output = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.stdout.strip()


Content = dict[str, Any]

MORE_TO_DO = 75
"""Exit status of a command that is to be run again."""


class OutOfTimeError(Exception):
    """The time for one go is over; what is done has been kept."""


class KeptResults:
    """What has been done so far.

    - `folder`: where results are kept, one file each; without one they are all made anew.
    - `stop_after_s`: no result is begun once so much time has passed.
    - `say`: told of each result that is begun.
    """

    def __init__(
        self,
        folder: Path | None = None,
        stop_after_s: float = float("inf"),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = folder
        self._until = time.monotonic() + stop_after_s
        self._say = say
        self.commits: set[str] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def of(self, name: str, make: Callable[[], Content]) -> Content:
        """Return a result: what a file holds already, or what `make` returns, which is then kept.

        Raises OutOfTimeError if it is still to be made and there is no time.
        Raises ZosimError if the file is no such result.
        """
        content = self.known(name)
        if content is None:
            if time.monotonic() > self._until:
                raise OutOfTimeError
            self._say(name)
            content = self.keep(name, make())
        self.commits.add(content["commit"])
        return content

    def row(self, case: str, make: Callable[[], Row]) -> Row:
        """Return the row of a case, as :meth:`of` returns a result; the result is called after the case."""
        name = f"{re.sub('[^a-z0-9]+', '-', case.lower())}-{zlib.crc32(case.encode()):08x}"
        return Row(**self.of(name, lambda: {"row": asdict(make())})["row"])

    def known(self, name: str) -> Content | None:
        """Return a result that has been done, None if it has not. Raises ZosimError if the file is no such result."""
        if self.folder is None or not (path := self.folder / f"{name}.json").exists():
            return None
        hint = "delete it to make it again"
        content: Content = read_json_object(path, "result of a study", ZosimError, hint=hint)
        if "commit" not in content:
            raise ZosimError(f"{path} is not part of a study: it names no commit", hint=hint)
        return content

    def keep(self, name: str, content: Content) -> Content:
        """Keep a result with the commit that made it, and return it as it will be read."""
        text = json.dumps({"commit": commit(), **content}, indent=1) + "\n"
        if self.folder is not None:
            partial = self.folder / f"{name}.writing"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / f"{name}.json")
        kept: Content = json.loads(text)
        return kept
