"""CUDA graphs: kernels that a step launches in the same shapes and places again and again, launched at once.

A graph replays kernels with the addresses that they were captured with. So whatever goes in or comes out has a place that stays,
and weights that have moved since are captured anew.

CUDA alone: ``torch.accelerator.Graph`` is newer than the oldest torch that runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from executors.devices import on_stream
from topology.errors import PlanError

_NUM_EAGER = 1
"""Calls before the one that is captured: libraries make what they keep in the first."""


def refuse_graphs(device: torch.device, *, keeps_slots: bool) -> None:
    """Refuse graphs where none can be captured or replayed.

    Raises
    ------
    PlanError
    """
    if device.type != "cuda":
        raise PlanError(f"--graphs needs a CUDA device, not {device.type}", hint="leave --graphs out")
    if not keeps_slots:
        raise PlanError(
            "--graphs needs blocks that stay where they are, but every step takes new memory for its slots",
            hint="leave --graphs or --no-reuse-slots out",
        )


@dataclass
class _Captured:
    """One graph.

    Attributes
    ----------
    signature : hashable
        What has to be as it was: addresses, and arguments that are no tensors.
    num_calls : int
        Calls with this signature before it was captured.
    graph : torch.cuda.CUDAGraph or None
    """

    signature: Hashable
    num_calls: int = 0
    graph: Any = None


class Graphs:
    """The graphs of a session.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, _Captured] = {}
        self._places: dict[Hashable, Tensor] = {}
        # Temporaries of one stream's graphs share memory, as they run one after the other; another's need their own.
        self._pools: dict[int, Any] = {}

    def place(self, key: Hashable, like: Tensor) -> Tensor:
        """Return a tensor of the shape, strides and format of `like` that stays at its address, by name."""
        key = key, tuple(like.shape), like.stride(), like.dtype
        if key not in self._places:
            self._places[key] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        return self._places[key]

    def placed(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a tensor's numbers at a place that stays."""
        place = self.place(key, tensor)
        if place is not tensor:
            _whole(place).copy_(_whole(tensor))
        return place

    def run(
        self,
        key: Hashable,
        signature: Hashable,
        launch: Callable[[], None],
        generators: Sequence[Generator] = (),
    ) -> None:
        """Do what `launch` does to tensors that stay: by itself at first, then by a graph of its kernels.

        Parameters
        ----------
        key : hashable
            By which the graph is kept.
        signature : hashable
            What `launch` depends on beside numbers in tensors. A graph of another is thrown away.
        launch : callable
        generators : sequence of torch.Generator
            Of which `launch` draws.
        """
        captured = self._captured.get(key)
        if captured is None or captured.signature != signature:
            captured = self._captured[key] = _Captured(signature)
        if captured.graph is None and captured.num_calls < _NUM_EAGER:
            captured.num_calls += 1
            launch()
            return
        if captured.graph is None:
            captured.graph = self._capture(launch, generators)
        captured.graph.replay()

    def _capture(self, launch: Callable[[], None], generators: Sequence[Generator]) -> Any:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        current = torch.accelerator.current_stream(self._device)
        pool = self._pools.setdefault(current.stream_id, torch.cuda.graph_pool_handle())
        # The default stream cannot be captured. Nothing runs on this one: kernels are noted down.
        stream = torch.cuda.Stream(self._device)
        with on_stream(stream):
            # Other threads go on to allocate and to ask for events meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor without what it only repeats, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


@dataclass(frozen=True)
class Arguments:
    """What a block is called with beside its hidden state, its tensors in places that stay.

    Attributes
    ----------
    leaves : tuple
    spec : TreeSpec
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, graphs: Graphs, key: Hashable, call: Any, known: dict[int, Tensor]) -> Arguments:
        """Return the arguments of a call.

        Parameters
        ----------
        graphs : Graphs
        key : hashable
        call : tree of tensors and other objects
        known : dict
            Of tensors of this step, by identity: where their numbers have been put. Added to.
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
    def signature(self) -> Hashable:
        """What a graph that was captured with the arguments depends on."""
        return self.spec, tuple(
            leaf.data_ptr() if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves
        )

    def tree(self) -> Any:
        """Return them as the call has them."""
        return tree_unflatten(list(self.leaves), self.spec)
