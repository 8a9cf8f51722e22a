"""A CUDA device that is simulated on a torch without one, to run the shipped CUDA code, and to find what it leaves to chance.

Tensors are those of the CPU; which of them lie on the device is a property of their storage. Kernels run when they are
launched, in the order of the launches, so that results are right. Whether they *had* to be right is told by vector
clocks: of two accesses to one byte, at least one of them a write, a stream, an event or the host must have ordered one
before the other; and memory that is freed must not be in use on a stream that its allocator was not told of. See
``docs/explanation/simulated-device.md`` for what this can show and what it cannot.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from executors.calibration import pinning
from executors.randomness import samplers
from executors.ranks.host_memory import HostMemory
from executors.ranks.messages import Packed
from executors.steps import streams_accelerator
from executors.steps.streams import Task
from proofs_checks.setups import ranks
from tests.support.simulated_cuda.clocks import Clock, merge
from tests.support.simulated_cuda.device import (
    CONTEXT_BYTES,
    NUM_MULTIPROCESSORS,
    THREADS_PER_MULTIPROCESSOR,
    TOTAL_MEMORY_BYTES,
    Device,
    Event,
    Finding,
    Generator,
    Stream,
    StreamPool,
)
from tests.support.simulated_cuda.graphs import POOLS, Graph
from tests.support.simulated_cuda.modes import DRAWING, Devices, Kernels, drawn

__all__ = ["Device", "Finding", "seen_by", "simulated"]


@contextlib.contextmanager
def seen_by(device: Device) -> Iterator[None]:
    """Let the calling thread, which is a rank, find the device, and a default stream of its own as if it were another."""
    device.host.default, device.host.pool = Stream(device), StreamPool()
    with _seen_by(device):
        yield


@contextlib.contextmanager
def _seen_by(device: Device) -> Iterator[None]:
    """Let the calling thread find the device."""
    with Devices(device), Kernels(device):
        yield
    device.end_thread()


@contextlib.contextmanager
def simulated() -> Iterator[Device]:
    """Let ``torch.cuda`` be a simulated device for as long as the block lasts."""
    device = Device()
    samplers_known = [f for f in vars(samplers).values() if hasattr(f, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(device):
            stack.enter_context(_replaced(owner, name, value))
        for cached in samplers_known:  # tensors of the device, by formats
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        with _seen_by(device):
            yield device


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _replacements(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Yield what stands in for what: of torch, of the backend's threads, and of the places where ranks meet."""
    for name, value in _torch_cuda(device).items():
        yield torch.cuda, name, value
    for name, value in _torch_accelerator(device).items():
        yield torch.accelerator, name, value
    yield torch, "Stream", _stream_class(device)
    yield torch, "Event", _class_on(device, Event)
    yield dist, "get_default_backend_for_device", lambda _: "gloo"
    autocast = torch.autocast
    yield torch, "autocast", lambda _, *args, **kwargs: autocast("cpu", *args, **kwargs)
    yield torch.Tensor, "record_stream", _method(device.record_stream)
    for owner in (torch.Tensor, torch):
        for name in DRAWING:
            if hasattr(owner, name):
                yield owner, name, _draws(device, getattr(owner, name))

    real_generator = torch.Generator

    class Either(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return Generator() if torch.device(device).type == "cuda" else real_generator(device)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, Generator | real_generator)

    class EitherGenerator(metaclass=Either):
        """The host's or the device's."""

    for module in list(sys.modules.values()):
        if (
            getattr(module, "__name__", "").startswith("executors.")
            and vars(module).get("Generator") is real_generator
        ):
            yield module, "Generator", EitherGenerator
    yield pinning, "in_fresh_process", _in_fresh_process(device)
    yield from _threads(device)
    yield from _meetings(device)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is given the object it is called on, which a bound one is not."""
    return lambda *args: function(*args)  # noqa: PLW0108


def _torch_cuda(device: Device) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name="Simulated",
        total_memory=TOTAL_MEMORY_BYTES,
        multi_processor_count=NUM_MULTIPROCESSORS,
        max_threads_per_multi_processor=THREADS_PER_MULTIPROCESSOR,
        major=9,
        minor=0,
    )
    driver = types.SimpleNamespace(cudaHostRegister=device.register, cudaHostUnregister=device.unregister)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "get_device_name": lambda _=None: properties.name,
        "get_device_properties": lambda _=None: properties,
        "Stream": _stream_class(device),
        "Event": _class_on(device, Event),
        "CUDAGraph": _class_on(device, Graph),
        "graph_pool_handle": lambda: (0, next(POOLS)),
        "stream": device.on_stream,
        "default_stream": device.default_stream,
        "current_stream": device.current_stream,
        "synchronize": device.synchronize,
        "set_sync_debug_mode": device.set_sync_debug_mode,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _=None: (
            TOTAL_MEMORY_BYTES - CONTEXT_BYTES - device.allocated_bytes,
            TOTAL_MEMORY_BYTES,
        ),
        "memory_reserved": lambda _=None: device.allocated_bytes + device.pooled_bytes,
        "memory_allocated": lambda _=None: device.allocated_bytes,
        "max_memory_allocated": lambda _=None: device.peak_bytes,
        "max_memory_reserved": lambda _=None: device.peak_bytes + device.pooled_bytes,
        "reset_peak_memory_stats": device.reset_peak,
        "manual_seed_all": device.generator.manual_seed,
        "cudart": lambda: driver,
    }


def _class_on(device: Device, of: type) -> type:
    """Return a class as torch has one, which knows its device: others derive from it, and name it in annotations."""
    return type(of.__name__, (of,), {"__init__": functools.partialmethod(of.__init__, device)})


def _stream_class(device: Device) -> type:
    """Return a class as torch has one, of which each instance is the next of torch's streams."""

    class AnyStream(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, Stream)

    class Pooled(Stream, metaclass=AnyStream):
        def __new__(cls, *_: object, **__: object) -> Stream:  # type: ignore[misc]
            return device.new_stream()

    return Pooled


def _torch_accelerator(device: Device) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda **_: torch.device("cuda"),
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_stream": device.current_stream,
        "set_stream": device.set_stream,
        "synchronize": device.synchronize,
    }


def _draws(device: Device, real: Callable[..., Any]) -> Callable[..., Any]:
    """Teach what draws to take a generator of the device, which torch's parser refuses."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("generator"), Generator):
            return drawn(device, real, args, kwargs)
        return real(*args, **kwargs)

    draw.__name__ = real.__name__
    return draw


def _in_fresh_process(device: Device) -> Callable[..., float]:
    def measured(name: str, size_bytes: int) -> float:
        with device.fresh_process():
            return pinning.pin_bytes_per_s(name, size_bytes)

    return measured


class _Queue:
    """A queue between threads: who takes something knows what its putter knew.

    Numbers that go from device to device are sent and received by kernels, as NCCL does it: one reads them on the sender's stream,
    and another, which waits for it, writes them to memory of the receiver.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: SimpleQueue[tuple[Clock, Clock, Any]] = SimpleQueue()

    def put(self, item: Any) -> None:
        clock: Clock = {}
        if isinstance(item, Packed):
            stream = self._device.launch()
            self._device.touch(item.data, "a message that is sent", writes=False, stream=stream)
            clock, item = dict(stream.clock), Packed(_copied(item.data), item.formats)
        self._queue.put((dict(self._device.host.clock), clock, item))

    def get(self, timeout: float | None = None) -> Any:
        host, clock, item = self._queue.get(timeout=timeout)
        merge(self._device.host.clock, host)
        if isinstance(item, Packed):
            stream = self._device.launch()
            merge(stream.clock, clock)
            self._device.allocate(item.data, "device")
            self._device.touch(item.data, "a message that is received", writes=True, stream=stream)
        return item


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.clone()


def _threads(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Yield the backend's threads with what they tell each other: who waits for an event knows what its setter knew."""

    class ClockedEvent(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self._clock: Clock = {}

        def set(self) -> None:
            self._clock = dict(device.host.clock)
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            is_set = super().wait(timeout)
            merge(device.host.clock, self._clock)
            return is_set

    known = {name: getattr(threading, name) for name in ("Thread", "Lock")}
    yield streams_accelerator, "threading", types.SimpleNamespace(**known, Event=ClockedEvent)
    yield streams_accelerator, "SimpleQueue", lambda: _Queue(device)
    real_run, real_issue = streams_accelerator._Thread.run, streams_accelerator.AcceleratorBackend._issue

    def run(self: Any) -> None:
        with _seen_by(device):
            real_run(self)

    def issue(self: Any, task: Task, issued: Any) -> None:
        before, device.host.instruction = device.host.instruction, task.describe()
        try:
            real_issue(self, task, issued)
        finally:
            device.host.instruction = before

    yield streams_accelerator._Thread, "run", run
    yield streams_accelerator.AcceleratorBackend, "_issue", issue


def _meetings(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Yield where threads that are ranks meet: who waits for others knows what they knew when they said that they are there."""
    real_exchange, real_note, real_wait = (
        ranks._Rendezvous.exchange,
        HostMemory.note,
        HostMemory.wait,
    )
    noted: dict[tuple[str, int], Clock] = {}
    lock = threading.Lock()

    def exchange(self: Any, position: int, own: Any) -> list[Any]:
        # As a collective of NCCL does: the kernels of all members wait for each other, and hold what they send.
        stream = device.current_stream()
        everyone = real_exchange(self, position, (dict(device.host.clock), dict(stream.clock), stream, own))
        for host, theirs, _, sent in everyone:
            merge(device.host.clock, host)
            merge(stream.clock, theirs)
            memory = device.memory_of(sent) if isinstance(sent, torch.Tensor) else None
            if memory is not None:
                memory.recorded.update(member.name for _, _, member, _ in everyone)
        return [sent for *_, sent in everyone]

    def note(self: Any, instruction: str, turn: int) -> None:
        with lock:
            merge(noted.setdefault((instruction, turn), {}), device.host.clock)
        real_note(self, instruction, turn)

    def wait(self: Any, instruction: str, turn: int, *more: Any) -> None:
        real_wait(self, instruction, turn, *more)
        with lock:
            merge(device.host.clock, noted.get((instruction, turn), {}))

    yield ranks, "SimpleQueue", lambda: _Queue(device)
    yield ranks._Rendezvous, "exchange", exchange
    yield HostMemory, "note", note
    yield HostMemory, "wait", wait
