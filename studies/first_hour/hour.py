"""The parts one after the other, each in a process of its own; what is done is kept and not done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from studies.first_hour.parts import Part, parts_of
from studies.first_hour.setting import Content, Setting
from studies.kept_results import KeptResults
from topology.errors import ZosimError
from topology.reading import read_json_object

Run = Callable[[Part, float], Content | None]
"""Does a part within some seconds and returns its results; None where the seconds ran out, and a later call may have more of them."""


def spend(setting: Setting, run: Run, *, stop_after_s: float, say: Callable[[str], None]) -> bool:
    """Do what has not been done, and return whether all of it is.

    - `stop_after_s`: parts that are not done by then wait for the next call. A part that had all these seconds to itself and did
      not end is recorded as an error, so that the parts behind it get their turn; a call with more seconds tries it again.
    - `say`: called with a line about each part that is done.
    """
    kept_results = KeptResults(setting.folder)
    began, is_first = time.monotonic(), True
    for part in parts_of(setting):
        start = time.monotonic()
        left_s = stop_after_s - (start - began)
        known = kept_results.known(part.name)
        if known is not None and not _deserves_more(known, left_s):
            continue
        content = run(part, left_s) if left_s > 0 else None
        if content is None and is_first and left_s > 0:
            content = {"error": f"not done in {left_s:.0f} s, which is all that it had", _HAD_S: left_s}
        if content is None:
            return False
        is_first = False
        seconds = time.monotonic() - start
        kept = kept_results.keep(part.name, {"seconds": round(seconds, 1), **content})
        say(f"{part.title}: {_verdict(kept)}, {seconds:.0f} s")
    return True


_HAD_S = "had_s"
"""Key of the seconds after which a part was given up."""


def _deserves_more(kept: Content, left_s: float) -> bool:
    """Whether a part was given up for want of time, and has more now."""
    return left_s > float(kept.get(_HAD_S, float("inf"))) + 1


def contents_of(setting: Setting) -> dict[str, Content]:
    """Return what was found, by part, as far as it was done, in the order of the parts."""
    kept_results = KeptResults(setting.folder)
    found = {part.name: kept_results.known(part.name) for part in parts_of(setting)}
    return {name: content for name, content in found.items() if content is not None}


def in_this_process(setting: Setting) -> Run:
    """Return what does a part here; an error is what it found."""

    def run(part: Part, left_s: float) -> Content:  # noqa: ARG001 - nothing ends it
        return list(_so_far(setting, part))[-1]

    return run


def _so_far(setting: Setting, part: Part) -> Iterator[Content]:
    """Yield what a part has found so far, as often as it says, and at its end; an error is what it found, too."""
    content: Content = {}
    try:
        made = part.make(setting)
        for content in [made] if isinstance(made, dict) else made:
            yield content
    except Exception as error:  # noqa: BLE001 - the parts that follow are worth having
        yield {**content, "error": f"{type(error).__name__}: {error}"}


def in_processes(command: Sequence[str], folder: Path, part_s: float) -> Run:
    """Return what does each part in a process of its own, which neither a crash nor a hang takes the others with.

    What a part has started ends with it: all of it is one group of processes. What it had found by then is kept.

    - `command`: does a part, if it is told which with ``--only`` and where to leave what it found with ``--left``.
    - `part_s`: after so long the process is ended; earlier if the part has a limit of its own.
    """

    def run(part: Part, left_s: float) -> Content | None:
        left = folder / f"{part.name}.part"
        left.unlink(missing_ok=True)
        own = ["--only", part.name, "--left", str(left)]
        limit_s = min(part_s, part.limit_s)
        reported = folder / f"{part.name}.stderr"
        with _group_of([*command, *own], reported) as process:
            try:
                process.wait(min(limit_s, left_s))
            except subprocess.TimeoutExpired:
                if left_s < limit_s:
                    return None
                return {**_left_in(left), "error": f"not done after {limit_s:.0f} s"}
        if process.returncode != 0:
            last = " / ".join(reported.read_text(errors="replace").splitlines()[-8:])
            return {**_left_in(left), "error": f"ended with exit status {process.returncode}: {last}"}
        return _left_in(left) or {"error": "ended without a word of what it found"}

    return run


@contextmanager
def _group_of(command: Sequence[str], reported: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program as the first of a group of processes, which ends with the block; what it says of errors goes to a file.

    Not to a pipe: whatever it leaves running would hold it open.
    """
    with reported.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _left_in(path: Path) -> Content:
    """Return what a part's process has left; nothing if it has not come so far."""
    if not path.exists():
        return {}
    content = read_json_object(path, "what a part found", ZosimError)
    path.unlink()
    return content


def leave(setting: Setting, name: str, path: Path) -> None:
    """Do one part here, and write what it found. Raises ZosimError if there is no such part."""
    part = next((part for part in parts_of(setting) if part.name == name), None)
    if part is None:
        names = ", ".join(part.name for part in parts_of(setting))
        raise ZosimError(f"unknown part {name!r}", hint=f"known: {names}")
    for content in _so_far(setting, part):
        _write(path, content)


def take_over(setting: Setting, report: Path) -> None:
    """Put what an earlier report found where nothing has been found yet, so that it is not done again.

    `report`: the JSON file beside the page: what is left of a machine whose folder is gone.

    Raises ZosimError if it cannot be read.
    """
    found = read_json_object(report, "a first hour's report", ZosimError, hint="name its JSON file")
    kept_results = KeptResults(setting.folder)
    for part in parts_of(setting):
        content = found.get(part.name)
        if isinstance(content, dict) and kept_results.known(part.name) is None:
            kept_results.keep(part.name, content)
    profile = found.get("calibration", {}).get("profile")
    if isinstance(profile, dict) and not setting.kept_profile.exists():
        _write(setting.kept_profile, profile)


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
