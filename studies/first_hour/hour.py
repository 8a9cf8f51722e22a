"""The parts one after the other, each in a process of its own; what is done is kept and not done again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from studies.checkout import commit
from studies.first_hour.parts import Part, parts_of
from studies.first_hour.setting import Content, Setting
from topology.errors import ZosimError
from topology.reading import read_json_object

Run = Callable[[Part, float], Content | None]
"""Does a part within some seconds and returns its results; None where the seconds ran out, and a later call may have more of them."""


def spend(setting: Setting, run: Run, *, stop_after_s: float, say: Callable[[str], None]) -> bool:
    """Do what has not been done, and return whether all of it is.

    Parameters
    ----------
    setting : Setting
    run : callable
    stop_after_s : float
        Parts that are not done by then wait for the next call. A part that had all these seconds to itself and did not end
        is recorded as an error, so that the parts behind it get their turn; a call with more seconds tries it again.
    say : callable
        Called with a line about each part that is done.
    """
    setting.folder.mkdir(parents=True, exist_ok=True)
    began, is_first = time.monotonic(), True
    for part in parts_of(setting):
        path = setting.folder / f"{part.name}.json"
        start = time.monotonic()
        left_s = stop_after_s - (start - began)
        if path.exists() and not _deserves_more(path, left_s):
            continue
        content = run(part, left_s) if left_s > 0 else None
        if content is None and is_first and left_s > 0:
            content = {"error": f"not done in {left_s:.0f} s, which is all that it had", _HAD_S: left_s}
        if content is None:
            return False
        is_first = False
        seconds = time.monotonic() - start
        kept = {"commit": commit(), "seconds": round(seconds, 1), **content}
        _write(path, kept)
        say(f"{part.title}: {_verdict(kept)}, {seconds:.0f} s")
    return True


_HAD_S = "had_s"
"""Key of the seconds after which a part was given up."""


def _deserves_more(path: Path, left_s: float) -> bool:
    """Whether a part was given up for want of time, and has more now."""
    kept = read_json_object(path, "what a part found", ZosimError, hint="remove it, and it is made again")
    return left_s > float(kept.get(_HAD_S, float("inf"))) + 1


def contents_of(setting: Setting) -> dict[str, Content]:
    """Return what was found, by part, as far as it was done."""
    paths = {part.name: setting.folder / f"{part.name}.json" for part in parts_of(setting)}
    hint = "remove it, and it is made again"
    return {
        name: read_json_object(path, "what a part found", ZosimError, hint=hint)
        for name, path in paths.items()
        if path.exists()
    }


def in_this_process(setting: Setting) -> Run:
    """Return what does a part here; an error is what it found."""

    def run(part: Part, left_s: float) -> Content:  # noqa: ARG001 - nothing ends it
        try:
            return part.make(setting)
        except Exception as error:  # noqa: BLE001 - the parts that follow are worth having
            return {"error": f"{type(error).__name__}: {error}"}

    return run


def in_processes(command: Sequence[str], folder: Path, part_s: float) -> Run:
    """Return what does each part in a process of its own, which neither a crash nor a hang takes the others with.

    Parameters
    ----------
    command : sequence of str
        Does a part, if it is told which with ``--only`` and where to leave what it found with ``--left``.
    folder : Path
    part_s : float
        After so long the process is ended.
    """

    def run(part: Part, left_s: float) -> Content | None:
        left = folder / f"{part.name}.part"
        left.unlink(missing_ok=True)
        own = ["--only", part.name, "--left", str(left)]
        try:
            done = subprocess.run(
                [*command, *own], timeout=min(part_s, left_s), stderr=subprocess.PIPE, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            if left_s < part_s:
                return None
            return {"error": f"not done after {part_s:.0f} s"}
        if not left.exists():
            lines = done.stderr.splitlines()[-8:]
            return {"error": f"ended with exit status {done.returncode}: " + " / ".join(lines)}
        content = read_json_object(left, "what a part found", ZosimError)
        left.unlink()
        return content

    return run


def leave(setting: Setting, name: str, path: Path) -> None:
    """Do one part here, and write what it found.

    Raises
    ------
    ZosimError
        If there is no such part.
    """
    part = next((part for part in parts_of(setting) if part.name == name), None)
    if part is None:
        names = ", ".join(part.name for part in parts_of(setting))
        raise ZosimError(f"there is no part {name!r}", hint=f"parts are {names}")
    _write(path, in_this_process(setting)(part, float("inf")) or {})


def _write(path: Path, content: Content) -> None:
    partial = path.with_suffix(".writing")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _verdict(content: Content) -> str:
    if "error" in content:
        return f"FAILED: {content['error']}"
    if "left_out" in content:
        return f"left out: {content['left_out']}"
    return "WRONG" if content.get("is_right") is False else "done"
