"""Streams that run a program's instructions: the interface, and the one for a rank without an accelerator."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.ranks.host_memory import HostMemory
from executors.steps.heap import keep_freed_memory
from topology.errors import RunError, ZosimError
from zosim.program.instructions import Buffer, Instruction, Phase, Stream
from zosim.timeline import Span


class Ticket(ABC):
    """Says when one instruction of one step has finished."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Hold the calling thread until then, and raise if it failed."""


class PeersTicket(Ticket):
    """Says when the other ranks of the host have finished an instruction (`has_failed`: whether this rank cannot go on anyway)."""

    __slots__ = ("_has_failed", "_instruction", "_memory", "_turn")

    def __init__(
        self, memory: HostMemory, instruction: str, turn: int, has_failed: Callable[[], bool]
    ) -> None:
        self._memory, self._instruction, self._turn = memory, instruction, turn
        self._has_failed = has_failed

    def wait(self) -> None:
        """Wait for them."""
        self._memory.wait(self._instruction, self._turn, self._has_failed)


@dataclass(slots=True)
class Task:
    """One instruction to be run in one step."""

    instruction: Instruction
    phase: Phase
    step: int
    action: Callable[[], None]  # does it
    after: Sequence[Ticket]  # what it waits for on other streams and ranks
    done: Callable[[], None] | None = None  # called once it has finished

    def describe(self) -> str:
        """Return its position in the run."""
        return f"{self.phase}[{self.step}]/{self.instruction.id} on stream {self.instruction.stream}"


@dataclass(frozen=True, slots=True)
class Measured:
    """When one task ran, in seconds since the backend was made.

    It does not hold the task, whose action would keep the step's tensors alive.
    """

    instruction: Instruction
    phase: Phase
    step: int
    start_s: float
    end_s: float

    def span(self, rank: int) -> Span:
        """Return it as a span of a timeline."""
        instruction = self.instruction
        return Span(
            rank,
            self.phase,
            self.step,
            instruction.id,
            instruction.stream,
            instruction.label,
            instruction.segment,
            self.start_s,
            self.end_s,
        )


class Backend(ABC):
    """Where a rank's instructions run."""

    device: torch.device
    recording: bool = True  # whether tasks issued from now on are measured
    note: Callable[[str], None] | None = None  # called with the name of the compute task that begins
    _failure: ZosimError | None = None

    def has_failed(self) -> bool:
        """Whether a task could not be done, so that nobody need wait for what follows."""
        return self._failure is not None

    def reserve(self, sizes: Sequence[int]) -> None:  # noqa: B027 - most have nothing to do
        """Be ready to allocate host buffers of these sizes in bytes, whose users do not come and go."""

    @abstractmethod
    def allocate(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory in the buffer's space."""

    @abstractmethod
    def free(self, let_go: Callable[[], None]) -> None:
        """Call `let_go`, which drops the last references to memory, once nothing uses that, and give it back to the device."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes on the stream of the running task; both tensors are of format uint8."""

    @abstractmethod
    def borrow(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, made on another stream, for use by the running task."""

    @abstractmethod
    def read(self, numbers: Tensor) -> Sequence[float | DeviceScalar]:
        """Return the elements of a one-dimensional tensor that the running task made, without waiting for a device."""

    @abstractmethod
    def run(self, tasks: Sequence[Callable[[dict[str, Ticket]], Task]]) -> dict[str, Ticket]:
        """Issue tasks in order and return their tickets by instruction; compute has been issued on return.

        `tasks`: each is given the tickets of the tasks before it, and returns its task.
        """

    def capture_stream(self) -> torch.Stream:
        """Return the stream on which CUDA graphs of the running task's stream are captured; nothing else runs there."""
        raise NotImplementedError

    @abstractmethod
    def drain(self) -> None:
        """Wait for everything that was issued."""

    @abstractmethod
    def measured(self) -> list[Measured]:
        """Return what was recorded, after a :meth:`drain`."""

    @abstractmethod
    def close(self) -> None:
        """End the streams."""


def failure_of(task: Task, error: BaseException) -> ZosimError:
    """Return `error` as one that names the instruction."""
    if isinstance(error, ZosimError):
        # An exchange that fails begins with its own name.
        message = error.message.removeprefix(f"{task.instruction.id}: ")
        return type(error)(f"{task.describe()}: {message}", hint=error.hint)
    failed = RunError(f"{task.describe()} failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class _Event(Ticket):
    """A finished task of the CPU backend, or the error that kept it from finishing."""

    __slots__ = ("_event", "error")

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: ZosimError | None = None

    def finish(self, error: ZosimError | None = None) -> None:
        self.error = error
        self._event.set()

    def wait(self) -> None:
        """Wait, and raise if the task failed."""
        self._event.wait()
        if self.error is not None:
            raise self.error


class _Worker(threading.Thread):
    """One stream beside compute: a thread that runs its queue in order."""

    def __init__(self, stream: Stream, backend: CpuBackend) -> None:
        # A run that is given up must not hang on a stream that still waits.
        super().__init__(name=f"zosim-{stream}", daemon=True)
        self.queue: SimpleQueue[tuple[Task, _Event] | None] = SimpleQueue()
        self._backend = backend

    def run(self) -> None:
        with torch.no_grad():
            while (item := self.queue.get()) is not None:
                self._backend.perform(*item)


class CpuBackend(Backend):
    """A rank on a CPU: device memory is an arena of its own, copies are copies.

    Compute runs on the calling thread, every other stream on a thread of its own. torch releases the
    interpreter's lock while it computes, copies or draws, so the streams really overlap.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        keep_freed_memory()
        self._begin = time.perf_counter()
        self._workers: dict[Stream, _Worker] = {}
        self._pending: list[_Event] = []
        self._measured: list[Measured] = []

    def allocate(self, buffer: Buffer, num_elements: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return zeroed memory."""
        return torch.zeros(num_elements, dtype=dtype)

    def free(self, let_go: Callable[[], None]) -> None:
        """Let go of the memory, which goes back with its last reference."""
        let_go()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes on the calling thread alone; torch's own copy would use the compute stream's cores."""
        # A foreign call, during which other threads run: the interpreter's lock is released.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return `tensor`: there is one memory."""
        return tensor

    def read(self, numbers: Tensor) -> Sequence[float | DeviceScalar]:
        """Return the numbers."""
        # On a CPU the task that made them has finished.
        return list(numbers.tolist())

    def run(self, tasks: Sequence[Callable[[dict[str, Ticket]], Task]]) -> dict[str, Ticket]:
        """Queue what runs beside compute, then compute."""
        tickets: dict[str, Ticket] = {}
        compute: list[tuple[Task, _Event]] = []
        # The calling thread is the compute stream, so the other streams get all of their tasks before it starts.
        for make in tasks:
            task, event = make(tickets), _Event()
            tickets[task.instruction.id] = event
            if task.instruction.stream == Stream.COMPUTE:
                compute.append((task, event))
            else:
                self._pending.append(event)
                # Only the calling thread comes here: no lock.
                worker = self._workers.get(task.instruction.stream)
                if worker is None:
                    worker = self._workers[task.instruction.stream] = _Worker(task.instruction.stream, self)
                    worker.start()
                worker.queue.put((task, event))
        # Finished ones need no waiting for, and a long run must not gather them.
        self._pending = [event for event in self._pending if not event._event.is_set()]
        try:
            for task, event in compute:
                self.perform(task, event)
                self._go_on()
        except BaseException as error:
            # Other streams may wait for computations that will not come.
            _fail(compute, error if isinstance(error, ZosimError) else RunError("the run was interrupted"))
            raise
        return tickets

    def perform(self, task: Task, event: _Event) -> None:
        """Run one task on the calling thread, once what it waits for has finished."""
        try:
            for ticket in task.after:
                self._go_on()
                ticket.wait()
            self._go_on()
            if self.note is not None and task.instruction.stream == Stream.COMPUTE:
                self.note(task.describe())
            start = time.perf_counter()
            task.action()
            end = time.perf_counter()
            if task.done is not None:
                task.done()
        except Exception as error:  # noqa: BLE001 - whatever went wrong is reported with the instruction's name
            # A task that waited for a failed one reports that failure, not one of its own.
            waited_for_it = self._failure is not None and error is self._failure
            # The first failure is the cause; what fails after it is a consequence.
            self._failure = self._failure if waited_for_it else (self._failure or failure_of(task, error))
            event.finish(self._failure)
            return
        except BaseException:
            event.finish(RunError(f"{task.describe()} was interrupted"))
            raise
        if self.recording:
            # Several streams append to one list, which is atomic.
            # Noted before anybody goes on, so that whoever has waited finds it.
            begin_s, end_s = start - self._begin, end - self._begin
            self._measured.append(Measured(task.instruction, task.phase, task.step, begin_s, end_s))
        event.finish()

    def _go_on(self) -> None:
        """Raise what another task could not do: nothing waits for its peers in vain one task after the other."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait for the threads, and raise what one of them could not do."""
        for event in self._pending:
            event.wait()
        self._pending.clear()
        self._go_on()

    def measured(self) -> list[Measured]:
        """Return what was recorded."""
        return list(self._measured)

    def close(self) -> None:
        """End the threads once their queues are empty."""
        for worker in self._workers.values():
            # Behind what is queued already, so that nothing is lost.
            worker.queue.put(None)
        for worker in self._workers.values():
            worker.join()
        self._workers.clear()


def _fail(tasks: Sequence[tuple[Task, _Event]], error: ZosimError) -> None:
    """Release whoever waits for tasks that will not run."""
    for _, event in tasks:
        if not event._event.is_set():
            event.finish(error)


def backend_for(device: str) -> Backend:
    """Return the backend of ``"cpu"``, or of an accelerator such as ``"cuda:0"``.

    Raises RunError if torch does not find the device.
    """
    if device == "cpu":
        return CpuBackend()
    from executors.steps.streams_accelerator import AcceleratorBackend

    return AcceleratorBackend(device)
