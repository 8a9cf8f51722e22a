"""CUDA graphs of the simulated device: kernels noted down with the addresses that they are given, and launched together."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.simulated_cuda.device import Device, Generator, GraphPool, Stream

POOLS = itertools.count(1)


@dataclass(frozen=True)
class _Placed:
    """A tensor that was there before the capture: a graph knows of it where it is, and nothing else."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    allocation: int


@dataclass(frozen=True)
class _Draw:
    """A draw of a generator of the device."""

    generator: Generator
    num_elements: int
    numbers_at_once: int


@dataclass(frozen=True)
class _Kernel:
    """A kernel with its operands, what it made, and which of its operands it writes."""

    name: str
    compute: Any
    args: Any
    kwargs: Any
    made: tuple[Tensor, ...]
    touched: tuple[tuple[Tensor | _Placed, bool], ...]


class Graph:
    """A ``torch.cuda.CUDAGraph``.

    While it is captured kernels have no effect: what they write to memory that was there before is put back, and what they make
    holds nothing. A replay is one launch, and two more for each generator, whose seed and offset are written to the device.
    """

    def __init__(self, device: Device, *_: object, **__: object) -> None:
        self._simulated = device
        self._generators: list[tuple[Generator, Tensor]] = []
        self._draw: _Draw | None = None
        self._kernels: list[_Kernel] = []
        self._own: set[int] = set()
        self._before: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._kept: list[Tensor] = []
        self._pool: GraphPool
        self._stream: Stream
        self.made_bytes = 0
        self.is_capturing = self._is_invalid = self._is_ready = False

    def register_generator_state(self, generator: Generator) -> None:
        self._generators.append((generator, generator.get_state()))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        del capture_error_mode
        device, stream = self._simulated, self._simulated.current_stream()
        if stream is device.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if stream.graph is not None or device.host.graph is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._pool = device.pool_of(pool if pool is not None else (0, next(POOLS)))
        if self._pool.was_used and self._pool.num_graphs == 0:
            device.report("pool", "a graph is captured into a pool whose graphs are all gone")
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool.was_used, self._pool.num_graphs = True, self._pool.num_graphs + 1
        weakref.finalize(self, _leave, self._pool)
        self._pool.captured_on.add(stream.name)
        if len(self._pool.captured_on) > 1:
            streams = ", ".join(sorted(self._pool.captured_on))
            device.report("pool", f"graphs that are captured on {streams} share a pool, but no memory of it")
        self._generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        for generator, _ in self._generators:
            generator.is_capturing = True
            if generator.on_device is None:
                generator.on_device = device.taken()
        stream.graph = device.host.graph = self
        self._stream, self.is_capturing = stream, True

    def refuse(self, why: str) -> NoReturn:
        """Let the capture have failed."""
        self._is_invalid = True
        raise RuntimeError(f"CUDA error: {why}")

    def capture_end(self) -> None:
        device = self._simulated
        if not self.is_capturing or device.current_stream() is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        device.host.graph = self._stream.graph = None
        self.is_capturing = False
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for tensor, numbers in self._before.values():
                tensor.copy_(numbers)
            for made in (tensor for kernel in self._kernels for tensor in kernel.made):
                if made.is_floating_point():
                    made.fill_(torch.nan)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        for generator, _ in self._generators:
            generator.is_capturing = False
        self._pool.reserved_bytes = max(self._pool.reserved_bytes, self.made_bytes)
        self._is_ready = True

    # -- capture -----------------------------------------------------------------------------------------------

    def draws(self, generator: Generator, num_elements: int, numbers_at_once: int) -> None:
        """Note of which generator the next kernel draws."""
        if not any(generator is known for known, _ in self._generators):
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        self._draw = _Draw(generator, num_elements, numbers_at_once)

    def keep(self, operands: list[tuple[Tensor, bool]]) -> None:
        """Keep what a kernel is about to write, if it was there before."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for tensor, writes in operands:
                if writes and tensor.untyped_storage()._cdata not in self._own:
                    self._before.setdefault((tensor.data_ptr(), tensor.numel()), (tensor, tensor.clone()))

    def made(self, tensors: list[Tensor]) -> None:
        """Note memory that is taken and not written: of the graph's own."""
        with torch._C.DisableTorchFunction():
            self._own.update(tensor.untyped_storage()._cdata for tensor in tensors)
        self._kept += tensors

    def note(self, name: str, compute: Any, args: Any, kwargs: Any, made: list[Tensor], operands: list[tuple[Tensor, bool]]) -> None:  # fmt: skip
        """Note a kernel down."""
        with torch._C.DisableTorchFunction():
            self._own.update(tensor.untyped_storage()._cdata for tensor in made)
            touched = tuple((self._known(tensor), writes) for tensor, writes in operands)
        args, kwargs = tree_map(self._known, (args, kwargs))
        if kwargs.get("generator") is not None:
            kwargs["generator"] = self._draw
        self._kernels.append(_Kernel(name, compute, args, kwargs, tuple(made), touched))

    def _known(self, value: Any) -> Any:
        """Return what a graph knows of an argument."""
        if not isinstance(value, Tensor):
            return value
        memory = self._simulated.memory_of(value)
        if memory is None or memory.kind != "device":
            return value
        with torch._C.DisableTorchFunction():
            if value.untyped_storage()._cdata in self._own:
                return value
            return _Placed(value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, memory.number)

    # -- replay ------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        device = self._simulated
        if not self._is_ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for generator, _ in self._generators:
            if generator.is_capturing:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
            for _ in range(2):
                stream = device.launch()
                device.touch(generator.on_device, "a graph's seed", writes=True, stream=stream)
        stream = device.launch()
        if self._stream.graph is not None and stream is self._stream:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for generator, _ in self._generators:
            device.touch(generator.on_device, "a graph's draws", writes=False, stream=stream)
        self._pool.replayed_on.add(stream.name)
        if len(self._pool.replayed_on) > 1:
            streams = ", ".join(sorted(self._pool.replayed_on))
            device.report("pool", f"graphs that share temporaries are replayed on {streams}")
        device.touch(self._pool.temporaries, "a graph's temporaries", writes=True, stream=stream)
        for kernel in self._kernels:
            for operand, writes in kernel.touched:
                if isinstance(operand, _Placed):
                    device.touch(
                        self._there(operand), f"{kernel.name} of a graph", writes=writes, stream=stream
                    )
            args, kwargs = self._arguments(kernel)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                computed = kernel.compute(*args, **kwargs)
                for made, result in zip(kernel.made, _fresh(computed, kernel.made), strict=True):
                    made.copy_(result)

    def _arguments(self, kernel: _Kernel) -> Any:
        def present(value: Any) -> Any:
            if isinstance(value, _Placed):
                return self._there(value)
            if isinstance(value, _Draw):
                return value.generator.numbers(value.num_elements, value.numbers_at_once)
            return value

        return tree_map(present, (kernel.args, kernel.kwargs))

    def _there(self, placed: _Placed) -> Tensor:
        """Return what lies at an address now."""
        is_empty = 0 in placed.shape
        storage, begin = (
            (None, 0) if is_empty else self._simulated.storage_at(placed.address, placed.allocation)
        )
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            made = torch.empty(0, dtype=placed.dtype)
            if storage is None:  # somebody else's, or nobody's
                return made.new_empty(placed.shape)
            offset = (placed.address - begin) // placed.dtype.itemsize
            return made.set_(storage, offset, placed.shape, placed.stride)


def _leave(pool: GraphPool) -> None:
    pool.num_graphs -= 1


def _fresh(computed: Any, made: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield the results that were made, as far as there are any."""
    tensors = [leaf for leaf in tree_leaves(computed) if isinstance(leaf, Tensor)]
    yield from tensors[len(tensors) - len(made) :] if made else ()
