"""What the actions of one program have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from costmodel.roundings import RoundedDirection
from executors.models.engine import ForwardEngine
from executors.models.parameters import bind, stand_in
from executors.randomness.counter import CounterKey
from executors.randomness.rounded import MovedRows, RoundedDraws, rounding_key
from executors.ranks.messages import Packed
from executors.steps.buffers import BufferStore, PlacedPart
from executors.steps.frames import Hyperparameters, LoadedBatch, StepFrame
from executors.steps.graphs import Graphs
from executors.steps.streams import Backend
from executors.threads import DrawThreads
from zosim.contents import FrozenWeights, GroupWeights
from zosim.operations import Draw
from zosim.program import Program


def rounding_of(op: Draw) -> RoundedDirection:
    """Return how a draw's numbers are rounded to codes."""
    return RoundedDirection(op.distribution, op.bits, op.sparsity)


class Ranks(Protocol):
    """The other ranks: what actions need of :class:`executors.ranks.communicator.Communicator`."""

    rank: int

    def all_gather(self, group: str, gathered: Tensor, own: Tensor, what: str) -> None:
        """Fill `gathered` with every member's `own`, in rank order."""

    def send(self, group: str, offset: int, message: Tensor | Packed, what: str) -> int:
        """Send a message to a member of `group`, and return how many bytes went over the wire."""

    def recv(
        self, group: str, offset: int, most_bytes: int, what: str, device: torch.device | None
    ) -> Tensor | Packed:
        """Return the next message of a member of `group`, bytes of the host or numbers on a device."""


@dataclass
class Context:
    """What the actions of one program have in common.

    Attributes
    ----------
    program : Program
    engine : ForwardEngine
    store : BufferStore
    hyperparameters : Hyperparameters
    backend : Backend
    threads : DrawThreads
    num_micro_batches : int
        Parts that a batch is forwarded in.
    ranks : Ranks or None
        The other ranks, where the program takes any.
    remote_loss_dtype : torch.dtype or None
        Format of losses, where only other ranks compute them.
    graphs : Graphs or None
        Of draws and blocks, where they are launched as graphs.
    loaded : LoadedBatch
        The batch that this rank forwards.
    """

    program: Program
    engine: ForwardEngine
    store: BufferStore
    hyperparameters: Hyperparameters
    backend: Backend
    threads: DrawThreads = field(default_factory=DrawThreads)
    num_micro_batches: int = 1
    ranks: Ranks | None = None
    remote_loss_dtype: torch.dtype | None = None
    graphs: Graphs | None = None
    loaded: LoadedBatch = field(default_factory=LoadedBatch)
    _bound: dict[GroupWeights | FrozenWeights, PlacedPart] = field(default_factory=dict)
    _rounded: dict[RoundedDirection, RoundedDraws] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """Rows of token tables that the loaded batch names, for use by the running task."""
        assert self.loaded.rows is not None
        return self.backend.borrow(self.loaded.rows)

    @property
    def rows_on_host(self) -> Tensor:
        """The same on the host."""
        assert self.loaded.rows_on_host is not None
        return self.loaded.rows_on_host

    @cached_property
    def codes_drawn(self) -> dict[str, RoundedDirection]:
        """How directions are rounded, of the groups whose directions are codes."""
        draws = (i.op for _, i in self.program.instructions() if isinstance(i.op, Draw))
        return {op.group: rounding_of(op) for op in draws if op.bits}

    def moved_rows(self, group: str, parameter: int, frame: StepFrame, query: int) -> Tensor | None:
        """Return the rows of a parameter that a step's direction moves; None for all."""
        return self._moved(group).of(parameter, _rows_key(frame, query))

    def moved_rows_on_host(self, group: str, parameter: int, frame: StepFrame, query: int) -> Tensor | None:
        """Return the same on the host."""
        return self._moved(group).on_host(parameter, _rows_key(frame, query))

    def _moved(self, group: str) -> MovedRows:
        return self.draws_of(self.codes_drawn[group]).moved

    def draws_of(self, rounding: RoundedDirection) -> RoundedDraws:
        """Return what draws directions as codes."""
        if rounding not in self._rounded:
            trainable = [tensor for tensor in self.engine.tensors if tensor.trainable]
            shapes = [tensor.shape for tensor in trainable]
            coded = {tensor.index for tensor in trainable if tensor.layer is not None}
            device = self.backend.device
            moved = MovedRows(rounding.sparsity, shapes, coded, device)
            self._rounded[rounding] = RoundedDraws(rounding, shapes, moved, device, self.threads)
        return self._rounded[rounding]

    def bind(self, places: Sequence[PlacedPart]) -> None:
        """Let the engine compute with what lies at these places, where it does not already."""
        for placed in places:
            if self._bound.get(placed.part.what) is not placed:
                bind(placed.part.tensors, placed.held)
                self._bound[placed.part.what] = placed

    def unbind(self, places: Sequence[PlacedPart]) -> None:
        """Let go of what lies at these places, so that its memory can be freed."""
        for placed in places:
            if self._bound.get(placed.part.what) is placed:
                del self._bound[placed.part.what]
                for tensor in placed.part.tensors:
                    # The head's forward looks a token up in the table, too.
                    tensor.hold(stand_in(tensor, self.backend.device))


def _rows_key(frame: StepFrame, query: int) -> CounterKey:
    return rounding_key(frame.seeds[query], frame.step, query, "rows")
