"""JSON files that say whether they were damaged or edited: their content, and a digest of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topology.errors import ZosimError

_DIGEST = "sha256"


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with its digest."""
    return {**content, _DIGEST: _digest(content)}


def save_checksummed(
    content: Mapping[str, Any], path: str | Path, what: str, error: type[ZosimError]
) -> None:
    """Write `content` with its digest as a JSON file (`what`: what messages call the file, such as ``"profile"``)."""
    try:
        Path(path).write_text(json.dumps(with_digest(content), indent=1) + "\n", encoding="utf-8")
    except OSError as reason:
        raise error(f"cannot write the {what} to {path}: {reason}") from reason


def without_digest(content: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return what :func:`with_digest` was given, and whether it still is that.

    >>> without_digest(with_digest({"a": 1}))
    ({'a': 1}, True)
    >>> without_digest(with_digest({"a": 1}) | {"a": 2})
    ({'a': 2}, False)
    """
    bare = {name: value for name, value in content.items() if name != _DIGEST}
    return bare, content.get(_DIGEST) == _digest(bare)


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
