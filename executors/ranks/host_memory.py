"""Memory that the ranks of one host share: the host's one copy of the weights, and how far each rank has come.

It is a file in memory that every rank maps and that has no name once all have: when the last of them ends, however it
ends, nothing is left.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from executors.ranks.communicator import Communicator
from executors.ranks.launch import WAIT_HINT
from executors.ranks.notes import give_up, last_words
from executors.steps.streams import Ticket
from topology.errors import DoesNotFit, RunError
from topology.units import format_bytes
from zosim.instructions import Buffer
from zosim.program import Program

HOST = "host"
_PREFIX = "zosim-host-"
_PAGE_BYTES = 4096
_COUNTER_BYTES = 8
_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3


class HostMemory:
    """One mapping per rank of the same memory.

    Parameters
    ----------
    program : Program
        Its shared buffers get their memory here, and its instructions that others wait for a counter each.
    communicator : Communicator
    make : callable, optional
        Makes a file of a size, and returns its path.

    Attributes
    ----------
    size_bytes : int

    Raises
    ------
    DoesNotFit
        If the host has no room for it.
    """

    def __init__(
        self, program: Program, communicator: Communicator, make: Callable[[int], Path] | None = None
    ) -> None:
        self._communicator = communicator
        self._ranks = communicator.members(HOST)
        self._offsets: dict[str, int] = {}
        offset = 0
        for buffer in program.buffers:
            if buffer.shared:
                self._offsets[buffer.name] = offset
                offset += -(-buffer.size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._awaited = {name: index for index, name in enumerate(awaited(program))}
        self._counters_at = offset
        self.size_bytes = offset + max(1, len(self._ranks) * len(self._awaited)) * _COUNTER_BYTES
        self._map = self._mapped(make or made_in_memory)
        self._counters = memoryview(self._map)[self._counters_at :].cast("Q")
        self._pinned: list[int] = []

    def _mapped(self, make: Callable[[int], Path]) -> mmap.mmap:
        """Map the file that the first rank of the host makes, and take its name away when all have."""
        is_first = self._communicator.rank == self._ranks[0]
        told: dict[str, str] = {}
        if is_first:
            remove_leftovers()
            try:
                told = {"path": str(make(self.size_bytes))}
            except DoesNotFit as error:
                told = {"error": error.message, "hint": error.hint or ""}
        told = json.loads(
            self._communicator.gathered_bytes(json.dumps(told).encode(), "sharing memory")[self._ranks[0]]
        )
        if "error" in told:
            raise DoesNotFit(told["error"], hint=told["hint"])
        path = Path(told["path"])
        try:
            with path.open("r+b") as file:
                return mmap.mmap(file.fileno(), self.size_bytes)
        except OSError as error:
            raise RunError(
                f"rank {self._communicator.rank} cannot map {path}, which rank {self._ranks[0]} made: {error}",
                hint="ranks of one host must see one file system; or use --transfers private",
            ) from error
        finally:
            self._communicator.barrier("mapping shared memory")
            if is_first:
                path.unlink(missing_ok=True)

    def tensor(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of a shared buffer, zero at first."""
        begin = self._offsets[buffer.name]
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=begin)

    def pin(self) -> None:
        """Let a CUDA device copy from and to the memory without a detour.

        Raises
        ------
        RunError
            If the driver refuses.
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
        """Let go of what was pinned. The memory lives as long as tensors in it do."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())

    # -- how far others are ------------------------------------------------------------------------------------

    def is_awaited(self, instruction: str) -> bool:
        """Whether a rank of this host waits for `instruction` of another."""
        return instruction in self._awaited

    def note(self, instruction: str, turn: int) -> None:
        """Say that this rank has finished `instruction` in the part of the run numbered `turn`."""
        self._counters[self._place(self._communicator.rank, instruction)] = turn

    def wait(self, instruction: str, turn: int, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Wait until every other rank of this host has finished `instruction` of the part numbered `turn`.

        Parameters
        ----------
        instruction : str
        turn : int
        has_failed : callable
            Whether this rank cannot go on anyway.

        Raises
        ------
        RunError
            If one does not in time; the message names it and its last instruction.
        """
        for rank in self._ranks:
            if rank != self._communicator.rank:
                self._wait_for(rank, instruction, turn, has_failed)

    def _wait_for(self, rank: int, instruction: str, turn: int, has_failed: Callable[[], bool]) -> None:
        place, nap = self._place(rank, instruction), _FIRST_NAP_S
        end = time.monotonic() + self._communicator.timeout_s
        while self._counters[place] < turn:
            if has_failed():
                raise RunError(f"no longer waits for {instruction} of rank {rank}")
            if time.monotonic() > end:
                left = last_words(rank)
                said = f"waited {self._communicator.timeout_s:g} s for {instruction} of {left.of(rank)}"
                said += f", last at {left.line}" if left.line else ""
                give_up([rank], said)
                raise RunError(said, hint=WAIT_HINT)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _place(self, rank: int, instruction: str) -> int:
        return self._ranks.index(rank) * len(self._awaited) + self._awaited[instruction]


class PeersTicket(Ticket):
    """Says when the other ranks of the host have finished an instruction.

    Parameters
    ----------
    memory : HostMemory
    instruction : str
    turn : int
    has_failed : callable
        Whether this rank cannot go on anyway.
    """

    __slots__ = ("_has_failed", "_instruction", "_memory", "_turn")

    def __init__(
        self, memory: HostMemory, instruction: str, turn: int, has_failed: Callable[[], bool]
    ) -> None:
        self._memory, self._instruction, self._turn = memory, instruction, turn
        self._has_failed = has_failed

    def wait(self) -> None:
        """Wait for them."""
        self._memory.wait(self._instruction, self._turn, self._has_failed)


def awaited(program: Program) -> list[str]:
    """Return the instructions that a rank waits for on others, by name."""
    names = (edge.instruction for _, i in program.instructions() for edge in i.after if edge.group)
    return list(dict.fromkeys(names))


def made_in_memory(size_bytes: int, folders: Sequence[Path] | None = None) -> Path:
    """Make a file of `size_bytes` that lies in memory, or where that has no room, among temporary files.

    Raises
    ------
    DoesNotFit
        If there is no room in either.
    """
    folders = _folders() if folders is None else folders
    free: Mapping[Path, int] = {folder: _free_bytes(folder) for folder in folders}
    for folder, room in free.items():
        if room >= size_bytes:
            handle, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder)
            with os.fdopen(handle, "r+b") as file:
                # Taken now: a file that only promises its size kills whoever touches it once there is no room.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            return Path(name)
    rooms = ", ".join(f"{folder} has {format_bytes(room)}" for folder, room in free.items())
    raise DoesNotFit(
        f"the ranks of this host share {format_bytes(size_bytes)}, but {rooms}",
        hint="enlarge /dev/shm (docker run --shm-size), or use --transfers private",
    )


def _folders() -> list[Path]:
    return [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def remove_leftovers(folders: Iterable[Path] | None = None) -> None:
    """Remove what a rank made that was killed before the others had mapped it."""
    for folder in _folders() if folders is None else folders:
        for left in folder.glob(f"{_PREFIX}*"):
            owner = left.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                left.unlink(missing_ok=True)
