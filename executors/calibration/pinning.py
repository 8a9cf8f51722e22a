"""How fast memory of the host is pinned for a device, measured where torch has pinned none before.

torch keeps pinned blocks that were given back, and hands them out again at once: where a calibration has pinned and freed
buffers, a new one of such a size takes microseconds. So a process of its own measures.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from executors.devices import device_named
from topology.errors import RunError

_TIMEOUT_S = 120.0


def pin_bytes_per_s(device: str, size_bytes: int) -> float:
    """Return the bytes per second at which memory of the host is pinned, in a process that has pinned none before."""
    torch.zeros(1, device=device_named(device))  # starts the device's runtime, which takes far longer
    torch.empty(1, dtype=torch.uint8, pin_memory=True)
    begin = time.perf_counter()
    torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return size_bytes / (time.perf_counter() - begin)


def in_fresh_process(device: str, size_bytes: int) -> float:
    """Return what :func:`pin_bytes_per_s` does in a new process.

    Raises RunError if the process ends without an answer.
    """
    command = [sys.executable, "-m", __name__, device, str(size_bytes)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return float(done.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise RunError(
            f"the process that measures how fast memory is pinned for {device} failed: "
            f"{lines[-1] if lines else error}",
            hint=f"the device and {size_bytes} bytes of memory must be free for it",
        ) from error


if __name__ == "__main__":
    print(pin_bytes_per_s(sys.argv[1], int(sys.argv[2])))
