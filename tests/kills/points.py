"""Instants that a kill is aimed at, made to last until the kill has come.

The suite starts every process of a run with a ``sitecustomize`` that calls :func:`install`. The process that reaches
the instant first (the n-th call of a function, the n-th file that is opened, renamed or removed under some name, the
n-th write to a log, half of it written) says so in a file, and waits there until the suite has sent its signal.
Nothing of the product knows of this. Standard library only: it is imported before anything else.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ZOSIM_KILL_POINT"
LONGEST_WAIT_S = 1800.0
"""Nothing is waited for longer: an order of magnitude more than a machine takes that others load."""


@dataclass(frozen=True)
class Point:
    """An instant of a run.

    - `name`: In words, such as ``checkpoint/rename``.
    - `event`: An audit event of Python (``open``, ``os.rename``, ``os.remove``), ``write``, or ``call``.
    - `match`: Regular expression: of the file's path; of a call, ``module:qualified name``.
    - `nth`: Which of these events, from 1.
    - `rank`: Of which rank; None for a process that is no rank, or the only one.
    """

    name: str
    event: str
    match: str
    nth: int = 1
    rank: int | None = None

    def variables(self, folder: Path) -> dict[str, str]:
        """Return what a process has to find in its environment."""
        return {VARIABLE: json.dumps({"folder": str(folder), **asdict(self)})}


def install() -> None:
    """Wait at the point that the environment names, if it names one."""
    described = json.loads(os.environ.get(VARIABLE, "{}"))
    if not described:
        return
    folder = Path(described.pop("folder"))
    stop = _Stop(Point(**described), folder)
    if stop.point.event == "call":
        wrapping = _WhenImported(stop)
        if wrapping.module in sys.modules:
            wrapping.wrap(sys.modules[wrapping.module])
        else:
            sys.meta_path.insert(0, wrapping)
    elif stop.point.event == "write":
        os.write = stop.halved(os.write)  # type: ignore[assignment]
    else:
        sys.addaudithook(stop.audit)


class _Stop:
    """Waits in the one process that reaches the point first."""

    def __init__(self, point: Point, folder: Path) -> None:
        self.point = point
        self._folder = folder
        self._num_seen = 0
        self._is_waiting = False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at an audit event of Python."""
        if event != self.point.event or self._is_waiting:
            return
        paths = [os.fsdecode(path) for path in arguments[:2] if isinstance(path, str | bytes)]
        if any(re.search(self.point.match, path) for path in paths):
            self.here()

    def halved(self, write: Any) -> Any:
        """Return a write that is interrupted in the middle of a line of the file."""

        def halved(file: int, data: Any) -> int:
            half = len(data) // 2
            if not half or not re.search(self.point.match, str(Path(f"/proc/self/fd/{file}").readlink())):
                return write(file, data)
            done = write(file, data[:half])
            self.here()
            return done

        return halved

    def called(self, function: Any) -> Any:
        """Return a function at whose beginning the point lies."""

        def called(*arguments: Any, **more: Any) -> Any:
            self.here()
            return function(*arguments, **more)

        return called

    def here(self) -> None:
        """Wait, if this is the event that is meant, until the suite has sent its signal."""
        rank = os.environ.get("RANK")
        if self._is_waiting or (self.point.rank is not None and rank not in (None, str(self.point.rank))):
            return
        self._num_seen += 1
        if self._num_seen != self.point.nth:
            return
        self._is_waiting = True
        try:
            (self._folder / "reached").open("x").write(str(os.getpid()))
        except FileExistsError:  # by another process
            return
        end = time.monotonic() + LONGEST_WAIT_S
        while not (self._folder / "sent").exists() and time.monotonic() < end:
            time.sleep(0.001)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Wraps a function when its module is imported."""

    def __init__(self, stop: _Stop) -> None:
        self._stop = stop
        self.module, self._name = stop.point.match.split(":")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            self.wrap(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def wrap(self, module: Any) -> None:
        """Put the wrapped function in its place."""
        *path, name = self._name.split(".")
        owner = module
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, self._stop.called(getattr(owner, name)))
