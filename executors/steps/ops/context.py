"""What the actions of one program have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from costmodel.formats.roundings import RoundedPerturbation
from executors.low_bits.stored import ChosenRows
from executors.models.model import SegmentedModel
from executors.models.parameters import bind, stand_in
from executors.randomness.rounded import NonzeroRows, RoundedSampler, rounding_key
from executors.ranks.messages import Packed
from executors.steps.buffers import BufferStore, PlacedSection
from executors.steps.disk import DiskFile
from executors.steps.frames import Hyperparameters, LoadedBatch, StepFrame
from executors.steps.graphs import Graphs
from executors.steps.streams import Backend
from executors.threads import SamplingThreads
from zosim.program import Program
from zosim.program.contents import FrozenWeights, ParamGroupWeights
from zosim.program.instructions import Access
from zosim.program.operations import Free, Sample


def rounding_of(op: Sample) -> RoundedPerturbation:
    """Return how a draw's numbers are rounded to quantized values."""
    return RoundedPerturbation(op.distribution, op.bits, op.sparsity)


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
    """What the actions of one program have in common."""

    program: Program
    forward_runner: SegmentedModel
    store: BufferStore
    hyperparameters: Hyperparameters
    backend: Backend
    threads: SamplingThreads = field(default_factory=SamplingThreads)
    num_micro_batches: int = 1  # micro-batches of a batch
    ranks: Ranks | None = None  # the other ranks, where the program takes any
    remote_loss_dtype: torch.dtype | None = None  # format of losses, where only other ranks compute them
    graphs: Graphs | None = None  # of draws and blocks, where they are launched as graphs
    disk: DiskFile | None = None  # where the buffers lie that the program has on a drive
    # Returns how much is read of adapters whose rank grows, which a graph has to be captured for.
    adapter_rank_in_use: Callable[[], int] = int
    loaded: LoadedBatch = field(default_factory=LoadedBatch)  # the batch that this rank forwards
    _bound: dict[ParamGroupWeights | FrozenWeights, PlacedSection] = field(default_factory=dict)

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
    def rounded_perturbations(self) -> dict[str, RoundedPerturbation]:
        """How perturbations are rounded, of the groups whose perturbations are rounded."""
        samples = (i.op for _, i in self.program.instructions() if isinstance(i.op, Sample))
        return {op.param_group: rounding_of(op) for op in samples if op.bits}

    def nonzero_rows(
        self, group: str, frame: StepFrame, perturbation: int
    ) -> Callable[[int], ChosenRows | None]:
        """Return what says which rows of a parameter a step's perturbation moves; None for all."""
        key = rounding_key(frame.seeds[perturbation], frame.step, perturbation, "rows")
        return partial(self.sampler_of(self.rounded_perturbations[group]).nonzero.of, key=key)

    def sampler_of(self, rounding: RoundedPerturbation) -> RoundedSampler:
        """Return what draws rounded perturbations; all streams are given the same."""
        return self._rounded[rounding]

    @cached_property
    def _rounded(self) -> dict[RoundedPerturbation, RoundedSampler]:
        trainable = [tensor for tensor in self.forward_runner.tensors if tensor.trainable]
        shapes = [tensor.shape for tensor in trainable]
        quantized = {tensor.index for tensor in trainable if not tensor.is_numbers}
        device = self.backend.device
        # A step's and those of the step before, which updates may be of.
        samples = [i.op for _, i in self.program.instructions() if isinstance(i.op, Sample)]
        num_kept = 2 * (1 + max((op.perturbation for op in samples), default=0))
        made = {}
        for rounding in set(self.rounded_perturbations.values()):
            nonzero = NonzeroRows(
                rounding.sparsity, shapes, quantized, device, num_kept=num_kept, borrow=self.backend.borrow
            )
            made[rounding] = RoundedSampler(rounding, shapes, nonzero, device, self.threads)
        return made

    # -- what the forward runner computes with -------------------------------------------------------------------------
    #
    # No program says which weights the forward runner holds, so nothing orders two streams that change it. It belongs to forwards,
    # which all run on compute, and to the host loop while nothing runs. A free, on whatever stream, finds its buffer let go of.

    def bind(self, accesses: Sequence[Access]) -> None:
        """Let the forward runner compute with weights where they lie."""
        for access in accesses:
            placed = self.store.placed(access)
            if self._bound.get(placed.section.what) is not placed:
                bind(placed.section.tensors, placed.held)
                # Compared by identity: a buffer that was freed and allocated anew is another place.
                self._bound[placed.section.what] = placed

    def let_go(self, accesses: Sequence[Access]) -> None:
        """Let the forward runner hold no weights that lie in buffers which the program frees."""
        for access in accesses:
            if access.buffer not in self._freed:
                continue
            section = self.store.section(access)
            if self._bound.pop(section.what, None) is not None:
                for tensor in section.tensors:
                    tensor.hold(stand_in(tensor, self.backend.device))

    @contextmanager
    def reading(self, accesses: Sequence[Access]) -> Iterator[None]:
        """Let the forward runner compute with weights for as long as a forward runs."""
        self.bind(accesses)
        yield
        self.let_go(accesses)

    @cached_property
    def _freed(self) -> set[str]:
        return {i.op.buffer for _, i in self.program.instructions() if isinstance(i.op, Free)}
