"""What ranks exchange in a program: shares of parameters, and losses that become those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executors.steps.buffers import BufferStore
from executors.steps.frames import LoadedBatch, StepFrame
from executors.steps.micro_batches import accumulated
from executors.steps.operands import Action
from topology.errors import ProgramError, RunError
from zosim.instructions import Access, Instruction
from zosim.operations import Collective, Scalar
from zosim.program import Program

_ELSEWHERE = -1.0
"""Stands for the number of labels of a loss that another rank forwards."""


class Exchange(Protocol):
    """What this needs of :class:`executors.ranks.communicator.Communicator`."""

    def all_gather(self, group: str, gathered: Tensor, own: Tensor, what: str) -> None:
        """Fill `gathered` with every member's `own`, in rank order."""


class Exchanges:
    """Makes actions out of a program's collectives, and of the scalars around them.

    Parameters
    ----------
    program : Program
    store : BufferStore
    exchange : Exchange or None
        None for a rank alone, whose program has none of these.
    device : torch.device
    loaded : callable
        Returns the batch that this rank forwards.
    elsewhere : torch.dtype or None
        Format of losses, where this rank computes none.
    """

    def __init__(
        self,
        program: Program,
        store: BufferStore,
        exchange: Exchange | None,
        device: torch.device,
        loaded: Callable[[], LoadedBatch],
        elsewhere: torch.dtype | None = None,
    ) -> None:
        self._program = program
        self._store = store
        self._exchange = exchange
        self._device = device
        self._loaded = loaded
        self._elsewhere = elsewhere

    def collective(self, instruction: Instruction) -> Action:
        """Return what exchanges the operands of `instruction`.

        Raises
        ------
        ProgramError
            If there is nobody to exchange with, or the operands do not fit.
        """
        op = instruction.op
        assert isinstance(op, Collective)
        exchange = self._exchange
        if exchange is None:
            raise ProgramError(
                f"program {self._program.name}: {instruction.id} takes {self._program.groups[op.group]} ranks",
                hint="run it as the rank of a run that has as many",
            )
        pairs = list(zip(instruction.reads, instruction.writes, strict=True))
        if all(self._store.is_weights(access) for pair in pairs for access in pair):
            return self._gather_shares(exchange, instruction, op.group, pairs)
        if len(pairs) != 1:
            raise ProgramError(f"program {self._program.name}: {instruction.id} gathers more than losses")
        return self._gather_losses(exchange, instruction, op.group)

    def _gather_shares(
        self, exchange: Exchange, instruction: Instruction, group: str, pairs: Sequence[tuple[Access, Access]]
    ) -> Action:
        for own, whole in pairs:
            if own.share != group or (own.buffer, own.offset_bytes) != (whole.buffer, whole.offset_bytes):
                raise ProgramError(
                    f"program {self._program.name}: {instruction.id} gathers {own.describe()} into "
                    f"{whole.describe()} of {whole.buffer}",
                    hint="shares are gathered in place, among the ranks that they are shares of",
                )

        def gather(_frame: StepFrame) -> None:
            for own, whole in pairs:
                exchange.all_gather(group, self._store.raw(whole), self._store.raw(own), instruction.id)

        return gather

    def _gather_losses(self, exchange: Exchange, instruction: Instruction, group: str) -> Action:
        num_ranks = self._program.groups[group]

        def gather(frame: StepFrame) -> None:
            if frame.replayed:
                return
            assert frame.packed is not None
            frame.gathered = frame.packed.new_zeros((num_ranks, *frame.packed.shape))
            exchange.all_gather(group, frame.gathered.view(-1), frame.packed.view(-1), instruction.id)

        return gather

    def scalar(self, instruction: Instruction) -> Action:
        """Return what packs this rank's losses, or makes one loss of all ranks' at each point."""
        op = instruction.op
        assert isinstance(op, Scalar)
        return self._pack(instruction) if op.function == "pack_losses" else self._mean(instruction)

    def _points(self) -> list[str]:
        """Return the evaluation points of all ranks, in the order in which their losses lie side by side."""
        for instruction in self._program.step:
            if isinstance(instruction.op, Scalar) and instruction.op.function == "mean_loss":
                return [access.point for access in instruction.writes]
        raise ProgramError(f"program {self._program.name} packs losses that it makes no mean of")

    def _pack(self, instruction: Instruction) -> Action:
        places = {point: place for place, point in enumerate(self._points())}
        own = [access.point for access in instruction.reads]

        def pack(frame: StepFrame) -> None:
            if frame.replayed:
                return
            num_labels = sum(part.num_labels for part in self._loaded().parts)
            # Numbers of the host: the projected gradient is read there anyway.
            packed = torch.tensor([[0.0, _ELSEWHERE]], dtype=torch.float64).repeat(len(places), 1)
            losses = torch.stack([frame.losses[point].double() for point in own]).cpu() if own else ()
            for point, loss in zip(own, losses, strict=True):
                packed[places[point], 0], packed[places[point], 1] = loss, num_labels
            frame.packed = packed

        return pack

    def _mean(self, instruction: Instruction) -> Action:
        points = [access.point for access in instruction.writes]

        def mean(frame: StepFrame) -> None:
            if frame.replayed:
                return
            assert frame.gathered is not None
            dtype = self._elsewhere or next(iter(frame.losses.values())).dtype
            for place, point in enumerate(points):
                found = _mean_of(frame.gathered[:, place], dtype, self._device)
                if found is None:
                    message = f"no rank forwarded {point or 'the base'} in step {frame.step}"
                    raise RunError(message, hint="run every rank on the program of its own role")
                frame.losses[point] = found

        return mean


def _mean_of(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the mean over all labels of the ranks' losses of one point; None if there are none.

    Parameters
    ----------
    rows : torch.Tensor
        By rank, a loss and the labels that it is the mean over, negative where another rank forwards the point.
    dtype : torch.dtype
        Format that ranks compute losses in. The only loss of a point keeps it, so that the projected gradient
        is that of a rank alone to the last bit.
    """
    labels = [int(number) for number in rows[:, 1].tolist()]
    holders = [rank for rank, number in enumerate(labels) if number >= 0]
    if not holders:
        return None
    if len(holders) == 1:
        return rows[holders[0], 0].to(device, dtype)
    return accumulated([rows[rank, 0].to(device) for rank in holders], [labels[rank] for rank in holders])
