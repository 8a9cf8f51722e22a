"""Waits that end when something happens. The only limit is one on hanging: nothing fails for being slow."""

from __future__ import annotations

import time

HANG_S = 900.0
"""What goes on at all takes less on any machine, however busy."""


def wait_until(happens, what, *, nap_s=0.02):
    """Return when ``happens()`` holds; it may raise where it cannot happen any more."""
    end = time.monotonic() + HANG_S
    while not happens():
        assert time.monotonic() < end, f"waited {HANG_S:.0f} s in vain for {what}"
        time.sleep(nap_s)
