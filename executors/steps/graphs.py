"""CUDA graphs: kernels that a step launches in the same shapes and places again and again, launched at once.

A graph replays kernels with the addresses that they were captured with. So whatever goes in or comes out has a place that stays,
and what lies elsewhere has a graph of its own. Launches that are equal but for their caller, such as those of blocks that take
turns in one staging buffer, share a graph.

CUDA alone: ``torch.accelerator.Graph`` is newer than the oldest torch that runs here.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from executors.devices import on_stream
from topology.errors import PlanError

_NUM_EAGER = 1
"""Calls before the one that is captured: libraries make what they keep in the first."""

_MOST_SHAPES = 8
"""Shapes of batches whose blocks have graphs. Every shape has its own of every block, and places for what goes in and comes out."""

_MOST_GRAPHS = 4096
"""Graphs of a session, those that are out of use among them."""


def refuse_graphs(device: torch.device, *, keeps_buffers: bool) -> None:
    """Refuse graphs where none can be captured or replayed. Raises PlanError."""
    if device.type != "cuda":
        raise PlanError(f"--graphs needs a CUDA device, not {device.type}", hint="leave --graphs out")
    if not keeps_buffers:
        raise PlanError(
            "--graphs needs resident blocks, but this plan allocates staging buffers in every step",
            hint="leave --graphs out, or plan with residency.reuse_staging_buffers=true",
        )


@dataclass
class _Entry:
    """Launches with one signature, and their graph once it is captured."""

    memory: tuple[weakref.ref[Any], ...]  # storages that the graph reads or writes
    generators: Sequence[Generator]  # those that it draws from
    num_calls: int = 0  # calls before it was captured
    graph: Any = None  # torch.cuda.CUDAGraph or None
    # captured_for, verified_for, unlike: the caller that it was captured for, those for which it was seen to compute the
    # same bits, and those for which it does not.
    captured_for: Hashable = None
    verified_for: set[Hashable] = field(default_factory=set)
    unlike: set[Hashable] = field(default_factory=set)
    is_refused: bool = False  # whether it cannot be captured, or computes other bits

    def is_current(self, generators: Sequence[Generator]) -> bool:
        """Whether what it refers to is still there, and its generators are those that are drawn from now."""
        is_same = len(generators) == len(self.generators) and all(
            one is other for one, other in zip(generators, self.generators, strict=True)
        )
        return is_same and all(reference() is not None for reference in self.memory)


class Graphs:
    """The graphs of a session.

    `capture_stream`: returns the stream on which graphs of the current stream are captured, on which nothing else runs.

    torch hands out 32 native streams in turn, so a stream that is requested for a capture may be one that copies or samples. Kernels
    of other threads would then become part of the graph. A replay would also share cuBLAS's workspace of that stream with
    products that run at the same time.

    Graphs that are replayed on one stream share a pool, since their temporaries are never in use at once. All graphs live until
    :meth:`close`: a pool whose last graph is gone cannot be captured into again.
    """

    def __init__(self, device: torch.device, capture_stream: Callable[[], torch.Stream]) -> None:
        self._device = device
        self._capture_stream = capture_stream
        self._entries: dict[Hashable, _Entry] = {}
        self._out_of_use: list[Any] = []
        self._failed: list[Any] = []
        self._static_buffers: dict[Hashable, Tensor] = {}
        self._pools: dict[int, Any] = {}
        self._generators: dict[int, Generator] = {}
        self._shapes: set[Hashable] = set()
        self._with_workspace: set[tuple[int, int]] = set()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Drop the graphs, their memory and their places, once the device is through with them."""
        # A graph that is still being replayed must keep its memory.
        torch.accelerator.synchronize(self._device)
        self._entries.clear()
        self._out_of_use.clear()
        self._failed.clear()
        self._static_buffers.clear()

    def __len__(self) -> int:
        """Return how many graphs have been captured."""
        captured = sum(entry.graph is not None for entry in self._entries.values())
        return captured + len(self._out_of_use)

    def generator(self) -> Generator:
        """Return the generator that graphs of the current stream draw from: its seed and offset lie on the device, once."""
        stream = torch.accelerator.current_stream(self._device).stream_id
        if stream not in self._generators:
            self._generators[stream] = Generator(device=self._device)
        return self._generators[stream]

    def admits(self, like: Tensor) -> bool:
        """Whether batches whose hidden states are of the shape and format of `like` have graphs: the first few shapes do."""
        shape = tuple(like.shape), like.dtype
        if shape not in self._shapes and len(self._shapes) >= _MOST_SHAPES:
            self._warn_once(
                f"the batches have more than {_MOST_SHAPES} shapes: only the first {_MOST_SHAPES} have CUDA graphs, and blocks of "
                "the others are launched kernel by kernel"
            )
            return False
        self._shapes.add(shape)
        return True

    def static_buffer(self, key: Hashable, like: Tensor) -> Tensor:
        """Return a tensor of the shape, strides and format of `like` that stays at its address, by name."""
        key = key, tuple(like.shape), like.stride(), like.dtype
        if key not in self._static_buffers:
            self._static_buffers[key] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        return self._static_buffers[key]

    def placed(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a tensor's numbers at a place that stays."""
        static_buffer = self.static_buffer(key, tensor)
        if static_buffer is not tensor:
            _whole(static_buffer).copy_(_whole(tensor))
        return static_buffer

    def run(
        self,
        signature: Hashable,
        launch: Callable[..., None],
        *,
        memory: Sequence[Tensor] = (),
        generators: Sequence[Generator] = (),
        caller: Hashable = None,
        states: Sequence[Tensor] = (),
    ) -> None:
        """Do what `launch` does to tensors that stay: by itself at first, then by a graph of its kernels.

        - `signature`: what the kernels depend on beside the numbers in tensors: addresses, shapes, formats.
        - `launch`: is given `generators`.
        - `memory`: what the kernels read and write: a graph of memory that has been given back is not replayed.
        - `generators`: those that `launch` draws from.
        - `caller`: whose kernels they are. The graph of one caller is replayed for another once it has been seen to compute the
          same bits.
        - `states`: what the kernels begin with and leave, by which that is seen.
        """
        signature = torch.accelerator.current_stream(self._device).stream_id, signature
        entry = self._entry(signature, memory, generators)
        if entry is not None and caller in entry.unlike:
            entry = self._entry((signature, caller), memory, generators)
        if entry is None or entry.is_refused or entry.num_calls < _NUM_EAGER:
            if entry is not None:
                entry.num_calls += 1
            launch(*generators)
            return
        if entry.graph is None:
            # Capturing launches nothing: the graph is replayed below, or the kernels are launched one by one.
            entry.graph, entry.captured_for = self._capture(launch, generators), caller
            if entry.graph is None:
                entry.is_refused = True
                self._launch_apart(launch, generators)
                return
        if states and caller not in entry.verified_for:
            self._verify(entry, caller, partial(launch, *generators), states)
        else:
            entry.graph.replay()

    def _entry(
        self, signature: Hashable, memory: Sequence[Tensor], generators: Sequence[Generator]
    ) -> _Entry | None:
        """Return the entry of a signature; None where there are as many as there may be."""
        entry = self._entries.get(signature)
        if entry is not None and (entry.is_refused or entry.is_current(generators)):
            return entry
        if entry is not None and entry.graph is not None:
            # Kept until the end: a pool whose last graph is gone cannot be captured into again.
            self._out_of_use.append(entry.graph)
        if len(self._entries) + len(self._out_of_use) >= _MOST_GRAPHS:
            self._warn_once(
                f"there are {_MOST_GRAPHS} CUDA graphs: what else could be one is launched kernel by kernel"
            )
            return None
        # Freed memory may be given out again at the same address: a signature alone does not tell.
        references = tuple(weakref.ref(tensor.untyped_storage()) for tensor in memory)
        entry = self._entries[signature] = _Entry(references, generators)
        return entry

    def _verify(
        self, entry: _Entry, caller: Hashable, launch: Callable[[], None], states: Sequence[Tensor]
    ) -> None:
        """Do what `launch` does, and note whether the graph does the same. The host waits, once for each caller."""
        before = [state.clone() for state in states]
        launch()
        wanted = [state.clone() for state in states]
        # The graph must begin with what the kernels began with.
        for state, numbers in zip(states, before, strict=True):
            state.copy_(numbers)
        entry.graph.replay()
        if all(_have_equal_bits(*pair) for pair in zip(states, wanted, strict=True)):
            entry.verified_for.add(caller)
            return
        # The kernels' numbers stand, not those of the graph.
        for state, numbers in zip(states, wanted, strict=True):
            state.copy_(numbers)
        if caller == entry.captured_for:
            entry.is_refused = True
            self._warn_once(
                "a CUDA graph computes other numbers than its kernels one by one, which are launched instead"
            )
        else:
            entry.unlike.add(caller)

    def _capture(self, launch: Callable[..., None], generators: Sequence[Generator]) -> Any:
        """Return a graph of what `launch` launches; None, and a warning, where that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        current, stream = torch.accelerator.current_stream(self._device), self._capture_stream()
        with self._lock:
            pool = self._pools.setdefault(current.stream_id, torch.cuda.graph_pool_handle())
            # Graphs that are being replayed use the workspace of the capture's stream.
            stream.wait_stream(current)
            failure = None
            try:
                with on_stream(stream):
                    self._make_workspace(stream)
                    self._captured(graph, pool, partial(launch, *generators))
            except Exception as error:  # noqa: BLE001 - whatever it is, its kernels can be launched one by one
                failure = error
                # torch's allocator may still ask it which stream it is of.
                self._failed.append(graph)
            current.wait_stream(stream)
        if failure is None:
            return graph
        self._warn_once(
            f"a CUDA graph could not be captured ({type(failure).__name__}: {failure}): its kernels are launched one by one"
        )
        return None

    def _captured(self, graph: Any, pool: Any, launch: Callable[[], None]) -> None:
        try:
            # Other threads go on to allocate and to ask for events meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            launch()
        except BaseException:
            with suppress(RuntimeError):  # it would hide the cause
                self._end(graph, pool)
            raise
        self._end(graph, pool)

    def _end(self, graph: Any, pool: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # torch's allocator does not learn of it, and would keep all memory that several streams use until it does.
            for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
                if (end := getattr(torch._C, name, None)) is not None:
                    with suppress(RuntimeError):
                        end(self._device.index or 0, pool)
                    break
            raise

    def _make_workspace(self, stream: torch.Stream) -> None:
        """Let cuBLAS take the memory that it keeps for this thread on a stream, so that it is not of a graph's pool."""
        # cuBLAS keeps a handle per thread, and a workspace per handle and stream.
        key = threading.get_ident(), stream.stream_id
        if key not in self._with_workspace:
            ones = torch.ones((8, 8), device=self._device)
            torch.mm(ones, ones)
            self._with_workspace.add(key)

    def _launch_apart(self, launch: Callable[..., None], generators: Sequence[Generator]) -> None:
        """Launch what could not be captured. A generator of a capture that failed refuses to draw: others take its turn."""
        others = [Generator(device=self._device) for _ in generators]
        for other, generator in zip(others, generators, strict=True):
            other.set_state(generator.get_state())
        launch(*others)
        for other, generator in zip(others, generators, strict=True):
            generator.set_state(other.get_state())
        spoilt = set(map(id, generators))
        self._generators = {key: kept for key, kept in self._generators.items() if id(kept) not in spoilt}
        self._failed += generators

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def _have_equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor without what it only repeats, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


@dataclass(frozen=True)
class Arguments:
    """What a block is called with beside its hidden state, its tensors in places that stay."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, graphs: Graphs, key: Hashable, call: Any, known: dict[int, Tensor]) -> Arguments:
        """Return the arguments of a call.

        - `known`: Of tensors of this step, by identity: where their numbers have been put. Added to.
        """
        leaves, spec = tree_flatten(call)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in known:
                known[id(leaf)] = graphs.placed((key, len(known)), leaf)
            leaves[number] = known[id(leaf)]
        return cls(tuple(leaves), spec)

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in places that stay."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def signature(self) -> Hashable:
        """What a graph that was captured with the arguments depends on."""
        return self.spec, tuple(
            leaf.data_ptr() if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves
        )

    def tree(self) -> Any:
        """Return them as the call has them."""
        return tree_unflatten(list(self.leaves), self.spec)
