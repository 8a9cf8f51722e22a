"""Plans, programs and timelines as files: read once, refused readably."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topology.errors import MachineError, ZosimError
from topology.reading import read_json_object


def read_document(
    path: str | Path,
    what: str,
    version: int,
    error: type[ZosimError],
    *,
    make: str,
    oldest: int | None = None,
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : path
    what : str
        What the file should be, such as ``"plan"``.
    version : int
        The newest that can be read.
    error : type
        Raised with a message and a hint.
    make : str
        How to make such a file, for a path that is empty.
    oldest : int, optional
        That can be read; by default `version` alone.

    Raises
    ------
    ZosimError
        Of type `error`, if the file is missing, is not a JSON object, or is of another version.
    """
    data = read_json_object(path, what, error, hint=make)
    if data.get("version") not in range(version if oldest is None else oldest, version + 1):
        raise error(
            f"{path} is a {what} of version {data.get('version')!r}, this zosim reads {version}",
            hint=make,
        )
    return data


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the minutes that it takes to have something to write.

    Raises
    ------
    MachineError
        If a directory has that name, or the directory that it is in is missing or may not be written to.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise MachineError(f"{path}: Is a directory", hint="name a file")
    if not folder.is_dir():
        raise MachineError(f"{path}: there is no directory {folder}", hint=f"mkdir -p {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise MachineError(f"{path} may not be written", hint="choose another path")


def json_by_lines(data: Mapping[str, Any]) -> str:
    """Return an object as JSON, every element of its lists on a line of its own, so that it can be edited by hand."""
    lines = [f"  {json.dumps(key)}: {_list_by_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _list_by_lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
