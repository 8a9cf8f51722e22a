"""The programs that a run keeps beside its log, so that a replay does what ran even where the lowering has changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topology.errors import RunError
from zosim.program.program_set import ProgramSet

PROGRAM_NAME = "program.json"
PROGRAM_DIGEST = "program_digest"
"""What a run's header calls the hash of that file."""


def program_digest(text: str) -> str:
    """Return the hash of a program file."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def recorded_programs(directory: str | Path, header: Mapping[str, Any]) -> ProgramSet | None:
    """Return the programs in a run's directory.

    Raises RunError if they were edited by hand, so that nothing else can take their place.

    Returns
    -------
    ProgramSet or None
        None where there are none, or not those that the header speaks of: a process that died may have left others. The
        plan is lowered again then, which computes the same numbers.
    """
    path = Path(directory) / PROGRAM_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = None
    if text is not None and program_digest(text) == header.get(PROGRAM_DIGEST):
        return ProgramSet.load(path)
    if header.get("run", {}).get("edited_program", False):
        raise RunError(
            f"{path} is missing or damaged, but the run used an edited program",
            hint="restore the file from a copy, or resume with the program again (--program)",
        )
    return None
