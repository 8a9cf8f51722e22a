"""Which commit a report was made from."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """Return the commit of this checkout, marked where files differ from it; ``unknown`` outside of one."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        output = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.stdout.strip()
