"""Blocks on a drive: one file of a rank, which has no name, so that nothing is left of it however the process ends.

The file is scratch, no checkpoint: checkpoints hold what the model's parameters hold, wherever those lie. Parameters are mapped from the
file; steps read and write it by its descriptor, which takes no page of it into the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from topology.errors import DoesNotFit, refusal_of_machine
from topology.units import format_bytes
from zosim.program.instructions import Buffer

_PAGE_BYTES = 4096
_PREFIX = "zosim-blocks-"


class DiskFile:
    """The buffers that lie on a drive.

    `directory`: on that drive; by default that of temporary files.

    Raises DoesNotFit if there is not enough free space.
    Raises MachineError if the directory is missing, or cannot be written to.
    """

    def __init__(self, buffers: Sequence[Buffer], directory: str | Path | None = None) -> None:
        self.directory = Path(directory or tempfile.gettempdir())
        self._offsets: dict[str, int] = {}
        self.size_bytes = 0
        for buffer in buffers:
            # Each buffer begins a page, so that two never share one.
            self._offsets[buffer.name] = self.size_bytes
            self.size_bytes += -(-buffer.size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            status = os.statvfs(self.directory)
            free_bytes = status.f_bavail * status.f_frsize
            if free_bytes < self.size_bytes:
                raise DoesNotFit(
                    f"blocks on the drive take {format_bytes(self.size_bytes)}, but {self.directory} has "
                    f"{format_bytes(free_bytes)} of free space",
                    hint="free some space there, or name a directory on another drive with --disk-dir",
                )
            with ExitStack() as stack:
                file = tempfile.TemporaryFile(prefix=_PREFIX, dir=self.directory)  # noqa: SIM115
                self._file = stack.enter_context(file)
                # Taken now: a mapped file that only promises its size kills whoever touches it once the drive is full.
                os.posix_fallocate(file.fileno(), 0, self.size_bytes)
                self._map = mmap.mmap(file.fileno(), self.size_bytes)
                stack.pop_all()
        except OSError as error:
            refusal = refusal_of_machine(OSError(error.errno, error.strerror, str(self.directory)))
            if refusal is None:
                raise
            raise type(refusal)(
                f"blocks cannot be kept on a drive: {refusal.message}",
                hint="name a directory on a drive that you may write to with --disk-dir",
            ) from error
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer as mapped memory, zero at first."""
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=self._offsets[buffer.name])

    def read(self, target: Tensor, source: Tensor) -> None:
        """Read bytes of the file, which `source` maps, into host memory."""
        self._move(os.preadv, source, target)

    def write(self, target: Tensor, source: Tensor) -> None:
        """Write bytes of host memory to the file, where `target` maps it."""
        self._move(os.pwritev, target, source)

    def _move(self, call: Callable[[int, list[memoryview], int], int], mapped: Tensor, held: Tensor) -> None:
        offset, memory = mapped.data_ptr() - self._address, memoryview(held.numpy().data)
        done = 0
        while done < len(memory):  # a call moves 2 GiB at most
            num_bytes = call(self._file.fileno(), [memory[done:]], offset + done)
            if not num_bytes:
                raise OSError(f"the blocks on {self.directory} end too soon")
            done += num_bytes

    def close(self) -> None:
        """Close the file, which stays on the drive for as long as tensors map it."""
        self._file.close()
