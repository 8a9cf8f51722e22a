"""Streams of a rank on a CUDA device: CUDA streams, events and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executors.streams import Backend, Measured, Task, Ticket, failure_of
from topology.errors import RunError
from zosim.program import Buffer, Instruction, Part, Space, Stream


class _CudaTicket(Ticket):
    """An event recorded behind a task on its stream."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event


class CudaBackend(Backend):
    """A rank on a CUDA device.

    The host issues tasks in the order listed; each stream runs its own in order, and an event carries every
    dependency between two streams. The host waits for the device where a number has to be read (the projected
    gradient), and in :meth:`drain`.

    Raises
    ------
    RunError
        If torch does not find the device.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device if ":" in device else f"{device}:0")
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device.type != "cuda" or self.device.index >= found:
            raise RunError(
                f"there is no device {device!r}: torch {torch.__version__} finds {found} CUDA devices",
                hint="run with --device cpu, or install a torch build that supports this machine's GPU",
            )
        torch.cuda.set_device(self.device)
        self._streams = {
            stream: torch.cuda.default_stream(self.device)
            if stream == Stream.COMPUTE
            else torch.cuda.Stream(self.device)
            for stream in Stream
        }
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(self._streams[Stream.COMPUTE])
        self._timed: list[tuple[tuple[Instruction, Part, int], torch.cuda.Event, torch.cuda.Event]] = []

    def allocate(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed device memory, or pinned host memory."""
        if buffer.space == Space.HOST:
            num_bytes = num_elements * dtype.itemsize
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).view(dtype)
        memory = torch.empty(num_elements, dtype=dtype, device=self.device)
        # Buffers are shared by all streams and live until `release`, which waits for them all. Zeroing runs on
        # the allocating stream, so it must be over before another stream writes.
        memory.view(torch.uint8).zero_()
        torch.cuda.current_stream(self.device).synchronize()
        return memory

    def release(self) -> None:
        """Wait for the device and give cached memory back to it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes on the running task's stream."""
        target.copy_(source, non_blocking=True)

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, and keep the allocator from reusing its memory before this stream is done."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def run(self, tasks: Sequence[Callable[[dict[str, Ticket]], Task]]) -> dict[str, Ticket]:
        """Issue tasks to their streams in the order listed."""
        tickets: dict[str, Ticket] = {}
        for make in tasks:
            task = make(tickets)
            tickets[task.instruction.id] = self._issue(task)
        return tickets

    def _issue(self, task: Task) -> _CudaTicket:
        stream = self._streams[task.instruction.stream]
        for ticket in task.after:
            assert isinstance(ticket, _CudaTicket)
            stream.wait_event(ticket.event)
        if self.note is not None and task.instruction.stream == Stream.COMPUTE:
            self.note(task.describe())
        with torch.cuda.stream(stream):
            start = torch.cuda.Event(enable_timing=True) if self.recording else None
            if start is not None:
                start.record(stream)
            try:
                task.action()
            except Exception as error:
                raise failure_of(task, error) from error
            end = torch.cuda.Event(enable_timing=self.recording)
            end.record(stream)
        if start is not None:
            self._timed.append(((task.instruction, task.part, task.step), start, end))
        return _CudaTicket(end)

    def drain(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def measured(self) -> list[Measured]:
        """Return what was recorded, in seconds since the backend was made."""
        found = []
        for (instruction, part, step), start, end in self._timed:
            start_s = self._origin.elapsed_time(start) / 1e3
            end_s = max(start_s, self._origin.elapsed_time(end) / 1e3)
            found.append(Measured(instruction, part, step, start_s, end_s))
        return found

    def close(self) -> None:
        """Wait for the device; its streams end with the process."""
        self.drain()
