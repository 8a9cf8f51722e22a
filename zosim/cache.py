"""Where files live that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ZOSIM_CACHE_DIR"


def cache_directory() -> Path:
    """Return ``$ZOSIM_CACHE_DIR`` if that is set, else ``zosim`` in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zosim"
