"""The device: its streams, events, generators and memory, and what was found of how they were used."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.simulated_cuda.clocks import Clock, Shadow, Use, merge

DEVICE = torch.device("cuda:0")
TOTAL_MEMORY_BYTES, CONTEXT_BYTES = 80 << 30, 600 << 20
NUM_MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR, _THREADS_PER_BLOCK = 132, 2048, 256
NATIVE_STREAMS = 32
"""What torch has of each device: whoever asks for a stream is given the next one, and behind the last the first again."""

_ALLOCATOR_BYTES = 512
"""The caching allocator hands out multiples of so many."""

Kind = Literal["device", "pinned", "host"]
FindingType = Literal["race", "freed", "captured", "pool"]


class Stream:
    """A queue of the device. Its kernels run when they are launched; its clock says what they may rely on."""

    def __init__(self, device: Device, *_: object, **__: object) -> None:
        self._simulated = device
        self.clock: Clock = {}
        self.cuda_stream = self.stream_id = number = device.added(self)
        self.name = f"stream {number}"
        self.device = DEVICE
        self.graph: Any = None
        """The graph that is being captured here."""

    def wait_event(self, event: Event) -> None:
        self._wait(event.clock, event.graph)

    def wait_stream(self, stream: Stream) -> None:
        self._wait(stream.clock, stream.graph)

    def _wait(self, clock: Clock, graph: Any) -> None:
        self._simulated.notice_foreign(self, "waits")
        if self.graph is not None and graph is not self.graph:
            self.graph.refuse("dependency created on uncaptured work in another stream")
        if self.graph is None and graph is not None and graph.is_capturing:
            graph.refuse("capturing stream has unjoined work")
        merge(self.clock, clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulated)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._simulated.hold_host(self.clock, "a stream")

    def query(self) -> bool:
        return self._simulated.is_known(self.clock)


class Event:
    """What a stream had come to when it was recorded."""

    def __init__(self, device: Device, *_: object, enable_timing: bool = False, **__: object) -> None:
        self._simulated = device
        self._is_timed = enable_timing
        self._at_s: float | None = None
        self.clock: Clock = {}
        self.graph: Any = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._simulated.current_stream()
        self._simulated.notice_foreign(stream, "records an event")
        self.graph = stream.graph
        merge(stream.clock, self._simulated.host.clock)
        self.clock = dict(stream.clock)
        self._at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._simulated.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._simulated.hold_host(self.clock, "an event")

    def query(self) -> bool:
        """Whether it is over as far as the host can know: any kernel may take as long as it likes."""
        return self._simulated.is_known(self.clock)

    def elapsed_time(self, end: Event) -> float:
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        # In single precision, as the driver tells it.
        return float(np.float32((end._at_s - self._at_s) * 1e3))


class Generator:
    """Behaves as CUDA's Philox does: its state is a seed and an offset, which every draw moves on by what its kernel takes."""

    device = DEVICE

    def __init__(self) -> None:
        self._seed, self._offset = 0, 0
        self.is_capturing = False
        """Whether it is part of a capture: of one that failed for good."""
        self.on_device: Tensor | None = None
        """Its seed and offset, where graphs read them."""

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed & (2**64 - 1), 0
        return self

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> Tensor:
        words = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        return torch.tensor(list(words), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        if state.device.type != "cpu" or state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        words = bytes(state.tolist())
        self._seed, self._offset = (int.from_bytes(words[i : i + 8], "little") for i in (0, 8))

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def for_a_draw(self, num_elements: int, numbers_at_once: int) -> torch.Generator:
        """Return a CPU generator that stands for this one's numbers from here on, and move on past one draw."""
        if self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return self.numbers(num_elements, numbers_at_once)

    def numbers(self, num_elements: int, numbers_at_once: int) -> torch.Generator:
        """Return the same for a kernel of a graph, which moves on, too."""
        generator = torch.Generator()
        generator.manual_seed(hash((self._seed, self._offset)) & (2**63 - 1))
        if num_elements:
            blocks_at_once = NUM_MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // _THREADS_PER_BLOCK)
            grid = min(blocks_at_once, -(-num_elements // _THREADS_PER_BLOCK))
            self._offset += 4 * ((num_elements - 1) // (_THREADS_PER_BLOCK * grid * numbers_at_once) + 1)
        return generator


@dataclass(slots=True)
class Memory:
    """One allocation.

    - `stream`: The one that it was allocated on, which may use it until the instant at which it is freed.
    - `where`: Line that allocated it.
    - `uses`: The last of each stream.
    - `recorded`: Streams that the allocator was told of by ``record_stream``.
    - `storage`: The tensors' storage.
    - `alias`: Bytes from here to another mapping of the same memory, by whose addresses uses of both are noted.
    """

    kind: Kind
    begin: int
    size_bytes: int
    stream: str
    where: str
    uses: dict[str, Use] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    alias: int = 0
    storage: Any = None
    number: int = 0
    """Which allocation it is, counted from the first."""
    is_of_graph: bool = False
    """Whether it is of a graph's pool: reserved with that of the pool's other graphs, and not counted as allocated."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a real device could do in another order.

    - `what`: In words.
    - `instruction`: The program's instruction that was being issued.
    """

    kind: FindingType
    what: str
    instruction: str | None


class HostThread(threading.local):
    """What each thread of the host knows, and what it is about."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.stream: Stream | None = None
        self.default: Stream | None = None
        self.instruction: str | None = None
        self.makes_on_device = False
        self.graph: Any = None
        self.pool: StreamPool | None = None


class StreamPool:
    """The streams that torch has for a process, which goes round them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.num_requested = 0


@dataclass
class GraphPool:
    """Memory that graphs share.

    - `temporaries`: Stands for what all of them use while they run.
    - `captured_on`, `replayed_on`: Streams.
    - `num_graphs`: Those that there are.
    - `was_used`: Whether there has been one.
    - `reserved_bytes`: What the largest graph makes. What is freed during a capture and taken again counts twice: at most
      this is reserved.
    """

    temporaries: Tensor
    captured_on: set[str] = field(default_factory=set)
    replayed_on: set[str] = field(default_factory=set)
    num_graphs: int = 0
    was_used: bool = False
    reserved_bytes: int = 0


class Device:
    """A device of one process.

    - `launches`: Kernels and copies by instruction, None for those of the host loop.
    - `synchronisations`: How often the host waited for the device, by instruction and by what it waited for.
    - `standstills`: Those of them after which the stream of the computation, the thread's default one, had nothing left to do.
    - `pageable`: Copies to the device of host memory that is not pinned, by instruction: each goes through a buffer of the
      driver.
    - `allocated_bytes`, `peak_bytes`: As the caching allocator counts them.
    - `pinned_bytes`, `pinned_taken_bytes`: Host memory that was asked to be pinned, and what torch takes for it: powers of
      two, which it keeps when they are given back, and hands out again.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.launches: Counter[str | None] = Counter()
        self.synchronisations: Counter[tuple[str | None, str]] = Counter()
        self.standstills: Counter[tuple[str | None, str]] = Counter()
        self.pageable: Counter[str | None] = Counter()
        self.allocated_bytes = self.peak_bytes = 0
        self.pinned_bytes = self.pinned_taken_bytes = 0
        self._pinned_kept: Counter[int] = Counter()
        self.generator = Generator()
        self.host = HostThread()
        self._lock = threading.RLock()
        self.streams: list[Stream] = []
        Stream(self)
        self._shadow = Shadow()
        # What threads knew that have ended: whoever collects their garbage comes after them.
        self._ended: Clock = {}
        self._numbers: Counter[str] = Counter()
        self._memory: dict[int, Memory] = {}
        self._registered: list[Memory] = []
        self._mappings: dict[str, int] = {}
        self._stream_pool = StreamPool()
        self._pools: dict[object, GraphPool] = {}
        self._workspaces: dict[tuple[int, str], Tensor] = {}
        self._num_allocated = 0
        self._warns_of_waits = False

    # -- streams -----------------------------------------------------------------------------------------------

    def default_stream(self, _: object = None) -> Stream:
        return self.host.default or self.streams[0]

    def current_stream(self, _: object = None) -> Stream:
        return self.host.stream or self.default_stream()

    def added(self, stream: Stream) -> int:
        """Take up a new stream, and return its number; the first is the default one."""
        with self._lock:
            self.streams.append(stream)
            return len(self.streams) - 1

    def new_stream(self) -> Stream:
        """Return the next of the streams that torch has: one that others were given before, once all have been."""
        with self._lock:
            pool = self.host.pool or self._stream_pool
            if len(pool.streams) < NATIVE_STREAMS:
                pool.streams.append(Stream(self))
            pool.num_requested += 1
            return pool.streams[(pool.num_requested - 1) % NATIVE_STREAMS]

    def notice_foreign(self, stream: Stream, what: str) -> None:
        """Report what a thread does on a stream that another one captures: it becomes part of the graph."""
        if stream.graph is not None and stream.graph is not self.host.graph:
            self.report(
                "captured", f"another thread {what} on {stream.name} at {_where()}, which is being captured"
            )

    def capturing(self) -> Any:
        """Return the graph that the calling thread's kernels become part of; None where they run."""
        graph = self.current_stream().graph
        return graph if graph is self.host.graph else None

    def set_stream(self, stream: Stream) -> None:
        self.host.stream = stream

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.host.stream = self.host.stream, stream
        try:
            yield
        finally:
            self.host.stream = before

    def synchronize(self, _: object = None) -> None:
        everything: Clock = {}
        for stream in self.streams:
            merge(everything, stream.clock)
        self.hold_host(everything, "the device")

    def set_sync_debug_mode(self, mode: str) -> None:
        """Warn, or no longer, of operations that let the host wait, as torch does: not of events and streams that are waited for."""
        self._warns_of_waits = mode == "warn"

    def hold_host(self, clock: Clock, why: str) -> None:
        """Let the calling thread wait for what `clock` knows."""
        if self._warns_of_waits and why in ("a number", "a copy"):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.host.graph is not None:
            self.host.graph.refuse("operation not permitted when stream is capturing")
        merge(self.host.clock, clock)
        with self._lock:
            self.synchronisations[self.host.instruction, why] += 1
            computing = self.default_stream().name
            if clock.get(computing, 0) >= self._numbers[computing]:
                self.standstills[self.host.instruction, why] += 1

    def is_known(self, clock: Clock) -> bool:
        """Whether the calling thread has waited for all kernels that `clock` knows."""
        names = {stream.name for stream in self.streams}
        return all(
            self.host.clock.get(agent, 0) >= number for agent, number in clock.items() if agent in names
        )

    def launch(self, num: int = 1) -> Stream:
        """Launch kernels on the calling thread's stream, which come after all that the thread knows."""
        stream = self.current_stream()
        self.notice_foreign(stream, "launches a kernel")
        with self._lock:
            merge(stream.clock, self.host.clock)
            self._numbers[stream.name] += 1
            stream.clock[stream.name] = self._numbers[stream.name]
            self.launches[self.host.instruction] += num
        return stream

    # -- memory ------------------------------------------------------------------------------------------------

    def kind_of(self, value: object) -> Kind:
        """Return where a tensor lies; on the host whatever is none."""
        memory = self.memory_of(value) if isinstance(value, Tensor) else None
        return memory.kind if memory is not None else "host"

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the allocation that a tensor lies in; None if it is plain host memory."""
        if tensor.layout != torch.strided:
            return None
        with torch._C.DisableTorchFunction():
            try:
                memory = self._memory.get(tensor.untyped_storage()._cdata)
                if memory is None and self._registered:
                    at = tensor.data_ptr()
                    inside = (m for m in self._registered if m.begin <= at < m.begin + m.size_bytes)
                    memory = next(inside, None)
            except (RuntimeError, NotImplementedError):  # a tensor without storage
                return None
        return memory

    def allocate(self, tensor: Tensor, kind: Kind) -> None:
        """Let a new tensor's storage be memory of a kind, until it is gone."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            key, begin, size_bytes = storage._cdata, storage.data_ptr(), storage.nbytes()
        with self._lock:
            if key in self._memory:
                return
            own = weakref.ref(storage)
            self._num_allocated += 1
            self._memory[key] = Memory(
                kind,
                begin,
                size_bytes,
                self.current_stream().name,
                _where(),
                storage=own,
                number=self._num_allocated,
            )
            self._shadow.forget(begin, begin + size_bytes)
            graph = self.capturing()
            if kind == "device" and graph is not None:
                self._memory[key].is_of_graph = True
                graph.made_bytes += _handed_out(size_bytes)
            elif kind == "device":
                self.allocated_bytes += _handed_out(size_bytes)
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            else:
                self.pinned_bytes += size_bytes
                taken = _pinned_for(size_bytes)
                if self._pinned_kept[taken]:
                    self._pinned_kept[taken] -= 1
                else:
                    self.pinned_taken_bytes += taken
        weakref.finalize(storage, self._free, key)

    @contextlib.contextmanager
    def fresh_process(self) -> Iterator[None]:
        """Let the block be another process, whose torch keeps no pinned memory."""
        kept, self._pinned_kept = self._pinned_kept, Counter()
        try:
            yield
        finally:
            self._pinned_kept = kept

    def end_thread(self) -> None:
        """Let the calling thread have ended, which others wait for before they go on."""
        with self._lock:
            merge(self._ended, self.host.clock)

    def _free(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key, None)
            if memory is None:
                return
            self._shadow.forget(memory.begin, memory.begin + memory.size_bytes)
            # Of pinned memory the allocator itself notes which copies use it.
            if memory.kind == "pinned":
                self._pinned_kept[_pinned_for(memory.size_bytes)] += 1
                return
            if not memory.is_of_graph:
                self.allocated_bytes -= _handed_out(memory.size_bytes)
            known = dict(next(s for s in self.streams if s.name == memory.stream).clock)
            merge(known, self.host.clock)
            merge(known, self._ended)
            for stream, use in memory.uses.items():
                if stream not in memory.recorded and not use.is_known_to(memory.stream, known):
                    self.report(
                        "freed",
                        f"{memory.size_bytes} bytes, allocated on {memory.stream} at {memory.where}, are freed while {stream} "
                        f"may still run {use.what}: record_stream was not called",
                    )

    def storage_at(self, address: int, number: int) -> tuple[Any, int]:
        """Return the storage of the device's memory at an address, and where it begins.

        It is reported where there is none, or another than the allocation of that number.
        """
        with self._lock:
            for memory in self._memory.values():
                if memory.kind == "device" and memory.begin <= address < memory.begin + memory.size_bytes:
                    if memory.number != number:
                        self.report(
                            "freed",
                            f"a graph is replayed whose memory has been given back, and taken again at {memory.where}",
                        )
                    return memory.storage(), memory.begin
            self.report("freed", "a graph is replayed that uses memory which has been given back")
        return None, 0

    def pool_of(self, pool: object) -> GraphPool:
        """Return the memory of all graphs that are captured into a pool."""
        with self._lock:
            if pool not in self._pools:
                self._pools[pool] = GraphPool(self.taken())
            return self._pools[pool]

    @property
    def pooled_bytes(self) -> int:
        """What the pools of graphs that there are have taken."""
        return sum(pool.reserved_bytes for pool in list(self._pools.values()) if pool.num_graphs)

    def workspace(self) -> Tensor:
        """Return what cuBLAS keeps for the calling thread on its stream; a product writes there."""
        key = threading.get_ident(), self.current_stream().name
        with self._lock:
            if key not in self._workspaces:
                if self.capturing() is not None:
                    self.report(
                        "pool", f"cuBLAS's workspace for {key[1]} is taken from a graph's pool at {_where()}"
                    )
                self._workspaces[key] = self.taken()
            return self._workspaces[key]

    def taken(self) -> Tensor:
        """Return new memory of the device that stays."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            taken = torch.zeros(1)
        self.allocate(taken, "device")
        return taken

    def register(self, address: int, size_bytes: int, _: int) -> int:
        """Pin memory that the host has already, as ``cudaHostRegister`` does."""
        first = self._mappings.setdefault(_file_mapped_at(address), address)
        self._registered.append(
            Memory("pinned", address, size_bytes, "stream 0", _where(), alias=first - address)
        )
        return 0

    def unregister(self, address: int) -> int:
        self._registered = [memory for memory in self._registered if memory.begin != address]
        return 0

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        memory = self.memory_of(tensor)
        if memory is None or memory.kind != "device":
            raise RuntimeError("record_stream is for tensors of the device")
        memory.recorded.add(stream.name)

    def reset_peak(self, _: object = None) -> None:
        self.peak_bytes = self.allocated_bytes

    def touch(self, tensor: Tensor, what: str, *, writes: bool, stream: Stream | None) -> None:
        """Note that `stream`, or for None the calling thread, reads or writes what a tensor spans."""
        memory = self.memory_of(tensor)
        if memory is None or tensor.numel() == 0:
            return
        with torch._C.DisableTorchFunction():
            begin = tensor.data_ptr() + memory.alias
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            num_elements = 1 + sum((size - 1) * stride for size, stride in sizes)
            end = begin + num_elements * tensor.element_size()
        with self._lock:
            if stream is None:
                agent, clock = f"host thread {threading.get_ident()}", self.host.clock
                self._numbers[agent] += 1
                clock[agent] = self._numbers[agent]
            else:
                agent, clock = stream.name, stream.clock
            use = Use(agent, self._numbers[agent], f"{what} at {_where()}")
            if stream is not None:
                memory.uses[agent] = use
            for kind, other in self._shadow.access(begin, end, use, clock, writes=writes):
                verb = "writes" if writes else "reads"
                self.report(
                    "race",
                    f"{agent} {verb} {end - begin} bytes in {use.what}; "
                    f"nothing orders that after the {kind} of {other.agent} in {other.what}",
                )

    def report(self, kind: FindingType, what: str) -> None:
        self.findings.append(Finding(kind, what, self.host.instruction))


def _handed_out(size_bytes: int) -> int:
    return -(-size_bytes // _ALLOCATOR_BYTES) * _ALLOCATOR_BYTES


def _pinned_for(size_bytes: int) -> int:
    return 1 << max(0, size_bytes - 1).bit_length()


def _file_mapped_at(address: int) -> str:
    """Return which file lies at an address, as the kernel names it; what is no file's is named by the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        reach, _, _, device, inode, *_ = line.split()
        begin, end = (int(bound, 16) for bound in reach.split("-"))
        if begin <= address < end and inode != "0":
            return f"{device} {inode}"
    return f"{address}"


def _where() -> str:
    """Return the innermost line of the executor, of a model or of a test that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (name := _reported_by(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


@cache
def _reported_by(file: str) -> str | None:
    """Return the name of a file whose lines tell something, None of other files."""
    is_reported = any(part in file for part in ("/executors/", "/transformers/", "/tests/"))
    return "/".join(file.split("/")[-3:]) if is_reported and "simulated_cuda" not in file else None
