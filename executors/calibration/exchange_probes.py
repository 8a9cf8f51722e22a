"""Probes of what ranks of one host tell each other: a second process, and gloo over the loopback as runs use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from costmodel.work import Work
from executors.calibration.probing import Probe
from executors.ranks.gloo import DuplexPair, gloo_group
from executors.ranks.launch import module_command
from executors.ranks.stale_files import held_directory
from topology.errors import RunError

SIZES = {8: 40, 1 << 16: 10, 1 << 22: 2}
"""Bytes that each of the two sends, with how often they are sent in a row."""

_TIMEOUT = timedelta(seconds=120)
_END = -1


class _ProbeRank:
    """One of two processes that gather each other's bytes (`store`: file by which the two find each other)."""

    def __init__(self, store: Path, rank: int) -> None:
        self._pair = loopback_pair(store, rank)
        self._command = torch.zeros(1, dtype=torch.int64)
        self._commands = torch.zeros(2, dtype=torch.int64)
        self._own = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES}
        self._gathered = {size: torch.zeros(2 * size, dtype=torch.uint8) for size in SIZES}

    def agree(self, command: int) -> int:
        """Tell the other what comes next, and return what rank 0 said."""
        self._command.fill_(command)
        self._pair.all_gather(self._commands, self._command)
        return int(self._commands[0])

    def exchange(self, size: int) -> None:
        """Gather both ranks' `size` bytes as often as a sample takes."""
        for _ in range(SIZES[size]):
            self._pair.all_gather(self._gathered[size], self._own[size])


def loopback_pair(store: Path, rank: int) -> DuplexPair:
    """Return what two processes of this host exchange over, as two ranks of a run do."""
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    stores = (FileStore(f"{store}-{direction}", 2) for direction in range(2))
    groups = [gloo_group(each, rank, 2, _TIMEOUT, lambda: [device]) for each in stores]
    return DuplexPair(rank, groups)


def _met(store: Path) -> _ProbeRank:
    try:
        return _ProbeRank(store, 0)
    except RuntimeError as error:  # torch's word for a peer that has not come
        raise RunError(
            f"a second process did not join within {_TIMEOUT.total_seconds():.0f} s, so exchanges were "
            "not measured",
            hint="calibrate again when memory and cores are free",
        ) from error


@contextmanager
def exchange_probes() -> Iterator[list[Probe]]:
    """Start a second process, and yield probes of exchanges with it, as long as the block lasts.

    Raises RunError if the two do not meet in time.
    """
    with held_directory("zosim-exchange-") as directory:
        store = directory / "store"
        command, environment = module_command(__name__)
        peer = subprocess.Popen(
            [*command, str(store)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            rank = _met(store)
            yield [_probe(rank, size) for size in SIZES]
            rank.agree(_END)
            with suppress(subprocess.TimeoutExpired):
                peer.wait(_TIMEOUT.total_seconds())
        finally:
            if peer.poll() is None:
                peer.kill()
                peer.wait()


def _probe(rank: _ProbeRank, size: int) -> Probe:
    def prepare() -> None:
        rank.agree(size)

    return Probe(
        f"exchange of {size} bytes by 2 ranks",
        Work(link_bytes=size),
        lambda: rank.exchange(size),
        before=prepare,
        num_done=SIZES[size],
    )


def _answer(store: str) -> None:
    """Do what rank 0 says until it says that it is enough."""
    torch.set_num_threads(1)
    rank = _ProbeRank(Path(store), 1)
    while (size := rank.agree(0)) != _END:
        rank.exchange(size)


if __name__ == "__main__":
    _answer(sys.argv[1])
