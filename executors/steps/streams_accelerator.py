"""Streams of a rank on an accelerator: torch's streams and events, whatever the device, and pinned host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

from costmodel.memory import pinned_slabs
from executors.device_scalars import DeviceScalar, ScalarReading
from executors.devices import device_module, device_named, on_stream, select_device
from executors.steps.streams import Backend, Measured, Task, Ticket, failure_of
from topology.errors import RunError, ZosimError
from zosim.program.instructions import DISK_STREAMS, Buffer, Instruction, Phase, Space, Stream
from zosim.program.operations import Recv, Send

_GRAPHED = (Stream.COMPUTE, Stream.SAMPLE)
"""Streams whose kernels may be launched as CUDA graphs."""

_NATIVE_STREAMS = 32
"""Streams of a device that torch has: whoever asks for one is given the next, and behind the last the first again."""


class _EventTicket(Ticket):
    """An event recorded behind a task on its stream, once the task has been issued."""

    __slots__ = ("_issued", "error", "event")

    def __init__(self) -> None:
        self._issued = threading.Event()
        self.event: torch.Event | None = None
        self.error: ZosimError | None = None

    def issue(self, event: torch.Event | None, error: ZosimError | None = None) -> None:
        """Say that the task is on its stream, or why it is not."""
        # Both are set before the flag: a thread that sees the flag reads them without a lock.
        self.event, self.error = event, error
        self._issued.set()

    def refuse(self, error: ZosimError) -> None:
        """Say that the task will not be issued, unless it was."""
        if not self._issued.is_set():
            self.issue(None, error)

    def recorded(self) -> torch.Event:
        """Return the event, waiting for a thread that has yet to issue the task."""
        self._issued.wait()
        if self.error is not None:
            raise self.error
        assert self.event is not None
        return self.event

    def wait(self) -> None:
        """Hold the host until the task has finished."""
        self.recorded().synchronize()


class _Thread(threading.Thread):
    """Does jobs in order."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name=f"zosim-{name}", daemon=True)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._device = device
        self.start()

    def put(self, job: Callable[[], None] | None) -> None:
        """Add a job; None ends the thread."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until all jobs so far are done."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def run(self) -> None:
        select_device(self._device)
        with torch.no_grad():
            # In order: the queue of a stream is its order on the device.
            while (job := self._jobs.get()) is not None:
                job()


class AcceleratorBackend(Backend):
    """A rank on an accelerator.

    The host issues tasks in the order listed; each stream runs its own in order, and an event carries every
    dependency between two streams. The host waits for the device where it needs a number of it (:meth:`read`), and in
    :meth:`drain`.

    A task that waits for another rank is issued when that rank is ready. So that only its stream waits, every stream but
    compute then has a thread that issues its tasks, and one that tells other ranks what has finished.

    Raises RunError if torch does not find the device.
    """

    def __init__(self, device: str) -> None:
        self.device = device_named(device)
        select_device(self.device)
        # What a model's own code launches without a word goes where compute does.
        current = torch.accelerator.current_stream(self.device)
        others = [stream for stream in Stream if stream != Stream.COMPUTE]
        own = _distinct_streams(self.device, len(others) + len(_GRAPHED), current)
        self._streams: dict[Stream, torch.Stream] = {Stream.COMPUTE: current}
        self._streams.update(zip(others, own, strict=False))
        self._capture_streams = {
            self._streams[stream].stream_id: capture
            for stream, capture in zip(_GRAPHED, own[len(others) :], strict=True)
        }
        self._origins: list[torch.Event] = []
        self._add_origin()
        self._was_recording = True
        self._timed: list[tuple[tuple[Instruction, Phase, int], int, torch.Event, torch.Event]] = []
        self._pinned: dict[int, list[Tensor]] = {}
        self._threads: dict[str, _Thread] = {}
        self._lock = threading.Lock()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Pin the memory of all buffers at once: alone, each would take the next power of two."""
        for size_bytes, members in pinned_slabs(sizes):
            slab, begin = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True), 0
            for member in members:
                self._pinned.setdefault(member, []).append(slab[begin : begin + member])
                begin += member

    def allocate(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed device memory, or pinned host memory."""
        if buffer.space == Space.HOST:
            num_bytes = num_elements * dtype.itemsize
            slices = self._pinned.get(num_bytes)
            memory = slices.pop() if slices else torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
            return memory.view(dtype)
        memory = torch.empty(num_elements, dtype=dtype, device=self.device)
        # Buffers are shared by all streams and live until `free`, which waits for them all. Zeroing runs on
        # the allocating stream, so it must be over before another stream writes.
        memory.view(torch.uint8).zero_()
        torch.accelerator.current_stream(self.device).synchronize()
        return memory

    def free(self, let_go: Callable[[], None]) -> None:
        """Wait for the device, let go of the memory, and give it back.

        The wait comes first: the allocator may hand memory out again as soon as it is let go of, also to another stream's thread.
        """
        torch.accelerator.synchronize(self.device)
        let_go()
        device_module(self.device).empty_cache()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes on the running task's stream."""
        # The host goes on: host memory is pinned, and the stream orders the copy against its users.
        target.copy_(source, non_blocking=True)

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, and keep the allocator from reusing its memory before this stream is done."""
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream(self.device))
        return tensor

    def read(self, numbers: Tensor) -> Sequence[float | DeviceScalar]:
        """Return numbers that are on their way to the host; those of the host at once."""
        if numbers.device.type == "cpu":
            return list(numbers.tolist())
        return ScalarReading(numbers).scalars()

    def capture_stream(self) -> torch.Stream:
        """Return the stream on which CUDA graphs of the running task's stream are captured."""
        return self._capture_streams[torch.accelerator.current_stream(self.device).stream_id]

    def run(self, tasks: Sequence[Callable[[dict[str, Ticket]], Task]]) -> dict[str, Ticket]:
        """Issue tasks to their streams in the order listed."""
        if self.recording and not self._was_recording:
            self._add_origin()
        self._was_recording = self.recording
        tickets: dict[str, Ticket] = {}
        made: list[tuple[Task, _EventTicket]] = []
        for make in tasks:
            task, ticket = make(tickets), _EventTicket()
            tickets[task.instruction.id] = ticket
            made.append((task, ticket))
        # Once a stream has a thread, its tasks stay there: two issuers would not keep their order.
        if not self._threads and not any(_takes_others(task) for task, _ in made):
            for task, ticket in made:
                self._issue(task, ticket)
            return tickets
        compute = []
        for task, ticket in made:
            if task.instruction.stream == Stream.COMPUTE:
                compute.append((task, ticket))
            else:
                self._thread(task.instruction.stream).put(partial(self._issue_quietly, task, ticket))
        try:
            for task, ticket in compute:
                self._issue(task, ticket)
        except BaseException as error:
            failure = error if isinstance(error, ZosimError) else RunError("the run was interrupted")
            self._failure = self._failure or failure
            for _, ticket in compute:
                ticket.refuse(failure)
            raise
        return tickets

    def _issue_quietly(self, task: Task, ticket: _EventTicket) -> None:
        """Issue a task on a thread of its stream; whoever depends on it gets its failure."""
        try:
            if self._failure is not None:
                raise self._failure
            self._issue(task, ticket)
        except Exception as error:  # noqa: BLE001 - a thread that ends leaves whoever waits for its tasks waiting
            failure = error if isinstance(error, ZosimError) else failure_of(task, error)
            self._failure = self._failure or failure
            ticket.issue(None, self._failure)

    def _issue(self, task: Task, issued: _EventTicket) -> None:
        stream = self._streams[task.instruction.stream]
        # Events order streams on the device; only tickets of other ranks hold up this thread.
        for ticket in task.after:
            # What the host itself does waits until the device has done what comes before.
            if isinstance(ticket, _EventTicket) and task.instruction.stream not in DISK_STREAMS:
                stream.wait_event(ticket.recorded())
            else:
                ticket.wait()
        if self.note is not None and task.instruction.stream == Stream.COMPUTE:
            self.note(task.describe())
        with on_stream(stream):
            start = torch.Event(self.device, enable_timing=True) if self.recording else None
            if start is not None:
                start.record(stream)
            try:
                task.action()
            except Exception as error:
                raise failure_of(task, error) from error
            # An event that keeps no time is cheaper, and orders streams as well.
            end = torch.Event(self.device, enable_timing=self.recording)
            end.record(stream)
        if start is not None:
            what = (task.instruction, task.phase, task.step)
            self._timed.append((what, len(self._origins) - 1, start, end))
        issued.issue(end)
        if task.done is not None:
            # Another thread waits for the device and tells the other ranks: this one has more to issue.
            self._thread(f"{task.instruction.stream}-done").put(partial(_notify, end, task.done))

    def _add_origin(self) -> None:
        """Let recorded times count from now.

        Between events the driver tells time in milliseconds of 24 bits: after ten minutes, in steps of 60 us. So each recording
        has an origin of its own, which comes before all that it records: hence the wait.
        """
        torch.accelerator.synchronize(self.device)
        origin = torch.Event(self.device, enable_timing=True)
        origin.record(self._streams[Stream.COMPUTE])
        self._origins.append(origin)

    def _thread(self, name: str) -> _Thread:
        with self._lock:
            # Threads that issue make threads that notify: two may come at once.
            thread = self._threads.get(name)
            if thread is None:
                thread = self._threads[name] = _Thread(name, self.device)
            return thread

    def drain(self) -> None:
        """Wait for the threads and the device, and raise what could not be issued."""
        for thread in list(self._threads.values()):
            thread.finish()
        torch.accelerator.synchronize(self.device)
        if self._failure is not None:
            raise self._failure

    def measured(self) -> list[Measured]:
        """Return what was recorded, in seconds since the backend was made."""
        began_s, measured = [0.0], []
        for one, other in pairwise(self._origins):
            began_s.append(began_s[-1] + one.elapsed_time(other) / 1e3)
        for (instruction, phase, step), number, start, end in self._timed:
            origin = self._origins[number]
            start_s = began_s[number] + origin.elapsed_time(start) / 1e3
            # The driver rounds each reading, which may put the end of a short task before its start.
            end_s = max(start_s, began_s[number] + origin.elapsed_time(end) / 1e3)
            measured.append(Measured(instruction, phase, step, start_s, end_s))
        return measured

    def close(self) -> None:
        """Wait for the device; its streams end with the process."""
        if self._failure is None:
            # Not after a failure: the device may wait for a rank that is gone.
            self.drain()
        for thread in self._threads.values():
            thread.put(None)
        self._threads.clear()


def _distinct_streams(device: torch.device, number: int, other: torch.Stream) -> list[torch.Stream]:
    """Return streams that are different queues of the device, and not `other`, however many were asked for before."""
    streams: dict[int, torch.Stream] = {}
    for _ in range(2 * _NATIVE_STREAMS):
        stream = torch.Stream(device)
        if stream.stream_id != other.stream_id:
            streams.setdefault(stream.stream_id, stream)
        if len(streams) == number:
            return list(streams.values())
    raise RunError(f"{device} has {len(streams)} streams of its own, but a rank needs {number}")


def _takes_others(task: Task) -> bool:
    """Whether the host may have to wait for another rank or a drive before it can issue a task, or what follows it."""
    is_host = isinstance(task.instruction.op, Send | Recv) or task.instruction.stream in DISK_STREAMS
    return is_host or any(not isinstance(ticket, _EventTicket) for ticket in task.after)


def _notify(event: torch.Event, done: Callable[[], None]) -> None:
    event.synchronize()
    done()
