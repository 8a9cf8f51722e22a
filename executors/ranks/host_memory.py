"""Memory shared by the ranks of one host: one copy of the weights, and counters of each rank's progress.

It is a file in memory that every rank maps and that has no name once all have: when the last of them ends, however it
ends, nothing is left.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from executors.ranks.communicator import Communicator
from executors.ranks.stale_files import held_file, remove_stale_files
from topology.errors import DoesNotFit, RunError, refusal_of_machine
from topology.units import format_bytes
from zosim.program import Program
from zosim.program.instructions import Buffer

HOST = "host"
_PREFIX = "zosim-host-"
_PAGE_BYTES = 4096
_COUNTER_BYTES = 8
_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3


class HostMemory:
    """The mapping of the shared memory on this rank.

    `program`: its shared buffers get their memory here, and its instructions that others wait for a counter each.

    Raises DoesNotFit if the host has too little memory.
    """

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self._communicator = communicator
        self._ranks = communicator.members(HOST)
        self._offsets: dict[str, int] = {}
        offset = 0
        for buffer in program.buffers:
            if buffer.shared:
                self._offsets[buffer.name] = offset
                # Whole pages, so that no two buffers share one.
                offset += -(-buffer.size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._awaited = {name: index for index, name in enumerate(awaited(program))}
        self._counters_at = offset
        self.size_bytes = offset + max(1, len(self._ranks) * len(self._awaited)) * _COUNTER_BYTES
        self._map = self._mapped()
        self._counters = memoryview(self._map)[self._counters_at :].cast("Q")
        self._pinned: list[int] = []

    def _mapped(self) -> mmap.mmap:
        """Map the file that the first rank of the host makes, and unlink it when all have mapped it."""
        rank, first = self._communicator.rank, self._ranks[0]
        with ExitStack() as stack:
            reported: dict[str, str] = {}
            if rank == first:
                try:
                    reported = {"path": str(stack.enter_context(memory_file(self.size_bytes)))}
                except (DoesNotFit, OSError) as error:
                    refusal = error if isinstance(error, DoesNotFit) else refusal_of_machine(error)
                    if refusal is None:
                        raise
                    reported = {"error": refusal.message, "hint": refusal.hint or ""}
            reported = self._communicator.all_gather_json(reported, "sharing memory", dict[str, str])[first]
            if "error" in reported:
                raise DoesNotFit(reported["error"], hint=reported["hint"])
            path = Path(reported["path"])
            try:
                with path.open("r+b") as file:
                    _refuse_foreign(path, os.fstat(file.fileno()), self.size_bytes)
                    return mmap.mmap(file.fileno(), self.size_bytes)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # this process's limit, not the file's fault
                raise RunError(
                    f"rank {rank} cannot map {path}, which rank {first} made: {error}",
                    hint="ranks of one host must see one file system; or use --transfers private",
                ) from error
            finally:
                # The file loses its name with the block: not before every rank has mapped it, or failed to.
                self._communicator.barrier("mapping shared memory")

    def tensor(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of a shared buffer, zero at first."""
        begin = self._offsets[buffer.name]
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=begin)

    def pin(self) -> None:
        """Pin the memory, so that a CUDA device copies from and to it directly.

        Raises RunError if the driver refuses.
        """
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, self.size_bytes, 0)
        if int(error):
            raise RunError(
                f"cannot pin {format_bytes(self.size_bytes)} of shared memory: CUDA error {int(error)}",
                hint="raise the limit of locked memory (ulimit -l)",
            )
        self._pinned.append(address)

    def close(self) -> None:
        """Unpin the memory, which lives as long as tensors in it do."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())

    # -- how far others are ------------------------------------------------------------------------------------

    def is_awaited(self, instruction: str) -> bool:
        """Whether a rank of this host waits for `instruction` of another."""
        return instruction in self._awaited

    def note(self, instruction: str, turn: int) -> None:
        """Record that this rank has finished `instruction` of turn `turn`."""
        self._counters[self._index(self._communicator.rank, instruction)] = turn

    def wait(self, instruction: str, turn: int, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Wait until every other rank of this host has finished `instruction` of turn `turn`.

        `has_failed`: whether this rank cannot go on anyway.

        Raises RunError if one does not in time; the message names it and its last instruction.
        """
        for rank in self._ranks:
            if rank == self._communicator.rank:
                continue
            index, nap = self._index(rank, instruction), _FIRST_NAP_S
            end = time.monotonic() + self._communicator.timeout_s
            with self._communicator.missing.named((rank,), f"{instruction} of rank {rank}"):
                while self._counters[index] < turn:
                    if has_failed():
                        raise RunError(f"no longer waits for {instruction} of rank {rank}")
                    if time.monotonic() > end:
                        raise TimeoutError
                    # Longer and longer naps: most waits are short, and a core that spins is missing to the other ranks.
                    time.sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP_S)

    def _index(self, rank: int, instruction: str) -> int:
        return self._ranks.index(rank) * len(self._awaited) + self._awaited[instruction]


def awaited(program: Program) -> list[str]:
    """Return the names of the instructions of other ranks that a rank waits for."""
    names = (edge.instruction for _, i in program.instructions() for edge in i.after if edge.process_group)
    return list(dict.fromkeys(names))


@contextmanager
def memory_file(size_bytes: int, folders: Sequence[Path] | None = None) -> Iterator[Path]:
    """Make a file of `size_bytes` in shared memory, or among temporary files where that has too little space.

    Its name is gone after the block. What another launch was killed over is removed first.

    Raises DoesNotFit if neither has enough space.
    """
    free: dict[Path, int] = {}
    if folders is None:
        folders = [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]
    for folder in folders:
        remove_stale_files(folder, _PREFIX)
        status = os.statvfs(folder)
        free[folder] = status.f_bavail * status.f_frsize
    chosen = next((folder for folder, num_bytes in free.items() if num_bytes >= size_bytes), None)
    if chosen is None:
        free_space = ", ".join(
            f"{folder} has {format_bytes(num_bytes)}" for folder, num_bytes in free.items()
        )
        raise DoesNotFit(
            f"the ranks of this host share {format_bytes(size_bytes)}, but {free_space}",
            hint="enlarge /dev/shm (docker run --shm-size), or use --transfers private",
        )
    with held_file(chosen, _PREFIX) as (path, descriptor):
        # Taken now: a file that only promises its size kills whoever touches it once the space is used up.
        os.posix_fallocate(descriptor, 0, size_bytes)
        yield path


def _refuse_foreign(path: Path, status: os.stat_result, size_bytes: int) -> None:
    """Raise unless a file is what :func:`memory_file` makes: ranks write to it."""
    is_ours = path.name.startswith(_PREFIX) and stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_size != size_bytes:
        raise RunError(
            f"{path} is not a file of {format_bytes(size_bytes)} that a rank of this user has made to share memory",
            hint="run all ranks of a host on one release and one plan, and as one user",
        )
