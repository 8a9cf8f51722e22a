"""What a step really takes: the arena that a program declares, and the tensors that come and go beside it."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executors.devices import device_module
from zosim.program.instructions import Space
from zosim.timeline import MemorySample


@dataclass(frozen=True)
class MemoryReport:
    """Measured memory of one rank."""

    # Memory of the program's flat buffers at its largest, by space and role.
    arena_bytes: Mapping[tuple[Space, str], int] = field(default_factory=dict)
    # Largest total of device tensors that existed beside the arena at one time, in the steps observed.
    live_bytes: int = 0
    # What an accelerator's allocator held beyond both, for slack and alignment; 0 on a CPU.
    allocator_bytes: int = 0
    # rss_bytes, peak_rss_bytes: resident set of the process now and at its largest: interpreter, libraries and all.
    rss_bytes: int = 0
    peak_rss_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Arena on the device plus live tensors."""
        return self._arena(Space.DEVICE) + self.live_bytes

    @property
    def host_bytes(self) -> int:
        """Arena on the host."""
        return self._arena(Space.HOST)

    def samples(self, rank: int, time_s: float) -> list[MemorySample]:
        """Return the report as samples of a timeline, all at one time."""
        parts = [(space, role, size) for (space, role), size in self.arena_bytes.items()]
        parts.append((Space.DEVICE, "live tensors", self.live_bytes))
        return [MemorySample(rank, space, role, time_s, size) for space, role, size in parts]

    def _arena(self, space: Space) -> int:
        return sum(size for (where, _), size in self.arena_bytes.items() if where == space)


class LiveTensors(TorchDispatchMode):
    """Counts storages that operations of this thread create while the mode is on, until they are freed.

    Attributes
    ----------
    live_bytes, peak_bytes : int

    Notes
    -----
    What a kernel allocates and frees inside itself does not pass here, nor do tensors that other threads make.
    An operation's result counts while its inputs still do, as in reality.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping what follows for its compiler, which sees no step: that took longer than what follows."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note the storages that are new."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        if _makes_nothing(func):
            return result
        made = {storage._cdata: storage for storage in _storages_of(result)}
        if made.keys() <= self._known.keys():
            return result
        # What an operation was given, and hands back as a view, is no new memory.
        borrowed = {storage._cdata for storage in _storages_of((args, kwargs))}
        for key in made.keys() - self._known.keys() - borrowed:
            self._note(made[key])
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        # A weak reference tells when it is freed; a strong one would keep it.
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live_bytes -= size


class ObservedSteps:
    """The peak of live tensors on a device in some steps; what one leaves alive counts in those behind it.

    - `peak_bytes`: On an accelerator what the allocator handed out beyond what it had handed out before the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors = LiveTensors()
        self._before: int | None = None
        self.peak_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Observe what runs meanwhile."""
        if self._device.type == "cpu":
            with self._tensors:
                yield
            self.peak_bytes = self._tensors.peak_bytes
            return
        counters = device_module(self._device)
        # The allocator's own peak: tensors of all streams and threads, which no dispatch mode sees.
        counters.reset_peak_memory_stats(self._device)
        # Measured once: what a step leaves alive counts in those behind it.
        if self._before is None:
            self._before = counters.memory_allocated(self._device)
        yield
        peak = counters.max_memory_allocated(self._device) - self._before
        self.peak_bytes = max(self.peak_bytes, peak)


def report(
    device: torch.device, arena_bytes: Mapping[tuple[Space, str], int], live_bytes: int
) -> MemoryReport:
    """Return what is known now."""
    slack = 0
    if device.type != "cpu":
        arena = sum(size for (space, _), size in arena_bytes.items() if space == Space.DEVICE)
        slack = max(0, device_module(device).max_memory_reserved(device) - arena - live_bytes)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes here, macOS bytes.
    peak = largest if sys.platform == "darwin" else 1024 * largest
    rss = psutil.Process().memory_info().rss
    return MemoryReport(dict(arena_bytes), live_bytes, slack, rss, max(peak, rss))


@cache
def _makes_nothing(func: Any) -> bool:
    """Whether all that an operation returns is said to be its arguments, or views of them, as of most operations of a step."""
    return all(returned.alias_info is not None for returned in func._schema.returns)


def _storages_of(tree: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in an operation's arguments or results: lists, tuples and keywords of them, no more."""
    if isinstance(tree, Tensor):
        # Sparse tensors have no one storage, tensors on meta none at all.
        if tree.layout == torch.strided and tree.device.type != "meta":
            yield tree.untyped_storage()
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _storages_of(part)
    elif isinstance(tree, dict):
        yield from _storages_of(list(tree.values()))
