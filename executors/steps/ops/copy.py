"""Bytes of parameters moved between memories, as they are or in another format; memory taken and given back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from executors.steps.frames import StepFrame
from executors.steps.ops.context import Context
from executors.steps.ops.operands import Action, Unfit
from zosim.program.contents import parameters_of
from zosim.program.instructions import DISK_STREAMS, Access, Instruction, Stream
from zosim.program.operations import Allocate, Free


class Copies:
    """Makes actions out of copies, casts, allocations and frees."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def copy(self, instruction: Instruction) -> Action:
        """Return what copies bytes."""
        pairs = self._pairs(instruction)
        for source, target in pairs:
            if source.size_bytes != target.size_bytes:
                raise Unfit(f"copies {source.size_bytes} bytes to {target.size_bytes}")
        store, move = self._context.store, self._mover(instruction.stream)

        def copy(_frame: StepFrame) -> None:
            # Looked up in every step: a buffer that is freed and allocated has other memory.
            for source, target in pairs:
                move(store.raw(target), store.raw(source))

        return copy

    def _mover(self, stream: Stream) -> Callable[[Tensor, Tensor], None]:
        """Return what copies bytes to a tensor from another, on a stream."""
        disk = self._context.disk
        if disk is None or stream not in DISK_STREAMS:
            return self._context.backend.copy
        return disk.read if stream == Stream.DISK_READ else disk.write

    def cast(self, instruction: Instruction) -> Action:
        """Return what rewrites parameters in the format of the buffer written."""
        pairs, store = self._pairs(instruction), self._context.store

        def cast(_frame: StepFrame) -> None:
            for source, target in pairs:
                for to, of in zip(store.placed(target).views, store.placed(source).views, strict=True):
                    to.copy_(of)

        return cast

    def _pairs(self, instruction: Instruction) -> list[tuple[Access, Access]]:
        reads, writes = instruction.reads, instruction.writes
        if len(reads) != len(writes) or not reads:
            raise Unfit(f"moves {len(reads)} contents into {len(writes)} places")
        pairs = list(zip(reads, writes, strict=True))
        for source, target in pairs:
            is_moved = self._context.store.is_weights(source)
            if not is_moved or parameters_of(source.what) != parameters_of(target.what):
                raise Unfit(
                    f"moves {source.what} into {target.what}; only parameters are moved, under their name"
                )
        return pairs

    def allocate(self, instruction: Instruction) -> Action:
        """Return what gives a buffer its memory."""
        op = instruction.op
        assert isinstance(op, Allocate)
        return lambda _frame: self._context.store.allocate(op.buffer)

    def free(self, instruction: Instruction) -> Action:
        """Return what takes a buffer's memory away."""
        op = instruction.op
        assert isinstance(op, Free)

        store, backend = self._context.store, self._context.backend
        # The backend says when: memory may go only once no stream uses it.
        return lambda _frame: backend.free(lambda: store.free(op.buffer))
