"""JSON files that say whether they were damaged or edited: their content, and a digest of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DIGEST = "sha256"


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with its digest."""
    return {**content, _DIGEST: _digest(content)}


def without_digest(content: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return what :func:`with_digest` was given, and whether it still is that.

    Examples
    --------
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
