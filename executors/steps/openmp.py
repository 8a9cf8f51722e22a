"""torch's own threads, sent home before other threads need their cores.

libgomp's threads wait for their next piece of work in a loop, for milliseconds: on a machine of few cores they take
from whatever runs beside them what it needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOFT = 1
"""``omp_pause_soft``: threads may end, all else is kept."""


def end_waiting_threads() -> None:
    """Let the threads that wait for the caller's next parallel operation end; it starts them anew.

    Notes
    -----
    OpenMP 5.0's ``omp_pause_resource_all``. Where torch brings another runtime than libgomp, or lives on another
    system than Linux, nothing happens.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().split() if maps.exists() else []
    library = next((word for word in loaded if Path(word).name.startswith("libgomp")), None)
    return getattr(ctypes.CDLL(library), "omp_pause_resource_all", None) if library else None
