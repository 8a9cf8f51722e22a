"""One command in every rank of a shaped network, with the variables that torchrun would set."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from studies.shaped.network import INTERFACE, ShapedNetwork

_PORT = 29500
"""Free for certain: the namespaces are new."""

_GRACE_S = 5.0
"""What other ranks have to end by themselves, with their own words, once one has failed."""


def environment(network: ShapedNetwork, rank: int, ranks_per_host: int) -> dict[str, str]:
    """Return what a rank is told beside this process' own environment: its place, and where rank 0 is."""
    host, local_rank = divmod(rank, ranks_per_host)
    return {
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_PORT),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": str(network.num_hosts * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run_ranks(
    network: ShapedNetwork, command: Sequence[str], *, ranks_per_host: int = 1, timeout_s: float | None = None
) -> int:
    """Run `command` in every rank and return the exit status of the first that failed, or 0.

    - `network`: that has been entered.
    - `timeout_s`: after which all ranks are ended, and 124 is returned, as ``timeout`` does.

    Each host has a directory of its own for temporary files, in which its ranks meet: without it the ranks of two hosts
    would meet in the machine's. What they print is not separated.
    """
    with tempfile.TemporaryDirectory(prefix="zosim-shaped-") as folder:
        processes = []
        try:
            for rank in range(network.num_hosts * ranks_per_host):
                host = rank // ranks_per_host
                home = Path(folder) / f"host{host}"
                home.mkdir(exist_ok=True)
                added = {**environment(network, rank, ranks_per_host), "TMPDIR": str(home)}
                full_command = [*network.within(host), *command]
                processes.append(subprocess.Popen(full_command, env={**os.environ, **added}))
            return _waited(processes, timeout_s)
        finally:
            _end(processes)


def _waited(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> int:
    """Return when all have ended well, when one has failed and the others had their grace, or after the timeout."""
    began, failed_at, status = time.monotonic(), None, 0
    while any(process.poll() is None for process in processes):
        if failed_at is None:
            status = next((code for process in processes if (code := process.poll())), 0)
            failed_at = time.monotonic() if status else None
        elif time.monotonic() - failed_at > _GRACE_S:
            return status
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            return 124
        time.sleep(0.05)
    return status or next((code for process in processes if (code := process.returncode)), 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + 2.0
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
