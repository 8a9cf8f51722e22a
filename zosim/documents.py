"""Plans, programs and timelines as files: read once, refused readably."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topology.errors import ZosimError


def read_document(
    path: str | Path, what: str, version: int, error: type[ZosimError], *, make: str
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : path
    what : str
        What the file should be, such as ``"plan"``.
    version : int
        The one that can be read.
    error : type
        Raised with a message and a hint.
    make : str
        How to make such a file, for a path that is empty.

    Raises
    ------
    ZosimError
        Of type `error`, if the file is missing, is not a JSON object, or is of another version.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise error(f"no {what} at {path}", hint=make) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise error(f"{path} is not a {what}: {problem}") from None
    if not isinstance(data, dict):
        raise error(f"{path} is not a {what}: it holds no JSON object", hint=make)
    if data.get("version") != version:
        raise error(
            f"{path} is a {what} of version {data.get('version')!r}, this zosim reads {version}",
            hint=make,
        )
    return data


def json_by_lines(data: Mapping[str, Any]) -> str:
    """Return an object as JSON, every element of its lists on a line of its own, so that it can be edited by hand."""
    lines = [f"  {json.dumps(key)}: {_list_by_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _list_by_lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
