"""Boundary activations between stages: encoded, sent, received and decoded, as a program says.

A message has the tensors of every micro-batch in turn, each as its codec's own message, which states its type and its
length. Inside a block the activation comes before the residual stream. Of a suspended forward the message has bytes that
:mod:`executors.models.boundaries` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from costmodel.formats.codecs import codec_spec
from costmodel.models.model_spec import FRONT, block_index
from executors.codecs import Quantized, codec_of, decode, messages_of
from executors.codecs.container import length_of
from executors.models.halves import Halfway, as_tensor
from executors.models.model import Batch, Handed, SuspendedModel
from executors.models.recording_blocks import StepCache
from executors.models.suspended import SuspendedForward
from executors.randomness.rng import generator_on, mixed
from executors.ranks.messages import LENGTH_BYTES, Packed, pack, stays_on, unpack
from executors.steps.frames import MicroBatch, StepFrame
from executors.steps.ops.context import Context, Ranks
from executors.steps.ops.operands import Action, Unfit, location_of, only
from topology.errors import CodecError, ProgramError
from zosim.plans import split_point_behind
from zosim.program import Program
from zosim.program.contents import BATCH, Hidden, Message
from zosim.program.instructions import Access, Instruction, Space
from zosim.program.operations import Decode, Encode, Recv, Send

_BYTES = (0, 0)
"""Formats of a message that says itself what it has; nobody reads them."""


class BoundaryActions:
    """Makes actions out of what a program does at its split points.

    - `num_made`, `made_bytes`: Messages that were made, sent or not, and what they have on a wire.
    - `num_sent`, `num_bytes`: Messages that went to the next stage, and what they had on the wire.
    - `sent_bytes`: What each had, by step and instruction, of steps that are recorded.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._program = context.program
        self._store = context.store
        self._backend = context.backend
        self._boundary_names = dict(_names_of_boundaries(context.program))
        self.num_made = self.made_bytes = self.num_sent = self.num_bytes = 0
        self.sent_bytes: dict[tuple[int, str], int] = {}

    def encode(self, instruction: Instruction) -> Action:
        """Return what makes a message of what the stage hands on."""
        op = instruction.op
        assert isinstance(op, Encode)
        source = _handed(only(instruction.reads, "read of what a segment leaves"))
        wire = only(instruction.writes, "write of a message")
        codecs = [codec_of(codec_spec(name)) for name in (op.codec, op.residual_codec)]
        where, stays, block = self._where(wire), self._stays(wire), _block_before(source)

        def encode(frame: StepFrame) -> None:
            if frame.replayed:
                return
            # Popped, so that an activation lives no longer than its message needs it.
            parts = self._store.values.pop(location_of(source))
            if isinstance(parts[0], SuspendedForward):
                data = torch.cat([forward.message(block) for forward in parts])
                self._made(wire, Packed(data, _BYTES) if stays else data.cpu(), data.numel())
                return
            if stays:
                packed = pack([tensor for handed in parts for tensor in _each(handed)])
                self._made(wire, packed, packed.num_bytes)
                return
            with _errors_have(where):
                contents: list[Quantized | Tensor] = []
                for number, handed in enumerate(parts):
                    generator = self._generator(frame, wire, number)
                    tensors = _each(handed)
                    # Between blocks only the residual stream is sent, whose codec is the last.
                    for tensor, used in zip(tensors, codecs[-len(tensors) :], strict=True):
                        contents.append(used.quantized(tensor, generator))
                message = torch.cat(messages_of(contents))
            self._made(wire, message, message.numel())

        return encode

    def _made(self, wire: Access, message: Tensor | Packed, num_bytes: int) -> None:
        self.num_made += 1
        self.made_bytes += LENGTH_BYTES + num_bytes
        self._store.values[location_of(wire)] = message

    def _stays(self, wire: Access) -> bool:
        """Whether a message is plain numbers that need not leave the device."""
        on_device = self._program.buffer(wire.buffer).space == Space.DEVICE
        return on_device and stays_on(self._backend.device)

    def decode(self, instruction: Instruction) -> Action:
        """Return what makes the tensors in a message that the first segment of the stage is given."""
        wire = only([read for read in instruction.reads if read.what != BATCH], "read of a message")
        target = _handed(only(instruction.writes, "write of what a segment leaves"))
        inside, block = _is_inside(target), _block_before(target)
        where, forward_runner = self._where(wire), self._context.forward_runner

        def decode_parts(frame: StepFrame) -> None:
            if frame.replayed:
                return
            message = self._store.values.pop(location_of(wire))
            with _errors_have(where):
                if isinstance(forward_runner, SuspendedModel):
                    handed = list(forward_runner.resumed(block, self._parts(), self._on_device(message)))
                else:
                    handed = self._tensors(message, inside=inside)
            self._store.values[location_of(target)] = handed

        return decode_parts

    def _parts(self) -> Iterator[tuple[Batch, StepCache]]:
        for part in self._context.loaded.micro_batches:
            yield {name: self._backend.borrow(tensor) for name, tensor in part.tensors.items()}, part.cache

    def _on_device(self, message: Tensor | Packed) -> Tensor:
        if isinstance(message, Packed):
            return self._backend.borrow(message.data)
        return message.to(self._backend.device)

    def _tensors(self, message: Tensor | Packed, *, inside: bool) -> list[Handed]:
        """Return what is handed on for each micro-batch."""
        widths = (
            (self._context.forward_runner.inner_size, self._context.forward_runner.hidden_size)
            if inside
            else (self._context.forward_runner.hidden_size,)
        )
        shapes = [(*_rows(part), width) for part in self._context.loaded.micro_batches for width in widths]
        if isinstance(message, Packed):
            self._backend.borrow(message.data)
            tensors = iter(unpack(message, shapes))
        else:
            tensors = iter(self._decoded(message, shapes))
        return [
            Halfway(next(tensors), next(tensors)) if inside else next(tensors)
            for _ in self._context.loaded.micro_batches
        ]

    def _decoded(self, message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the tensors of a message of encoded ones, which stand one behind the other."""
        tensors, begin = [], 0
        for shape in shapes:
            size = length_of(message[begin:].numpy())
            part = message[begin : begin + size]
            tensors.append(decode(part, shape=shape, device=self._backend.device))
            begin += size
        # A message of another plan may decode without an error; its length gives it away.
        if begin != message.numel():
            raise CodecError(f"a message of {begin} bytes is followed by {message.numel() - begin} more")
        return tensors

    def send(self, instruction: Instruction) -> Action:
        """Return what sends a message."""
        op, ranks = instruction.op, self._ranks(instruction)
        assert isinstance(op, Send)
        wire = only(instruction.reads, "read of a message")
        what = self._what(wire)

        def send(frame: StepFrame) -> None:
            if frame.replayed:
                return
            message = self._store.values.pop(location_of(wire))
            if isinstance(message, Packed):
                self._backend.borrow(message.data)
            size = ranks.send(op.process_group, op.offset, message, what)
            self.num_sent += 1
            self.num_bytes += size
            if self._backend.recording:
                self.sent_bytes[frame.step, instruction.id] = size

        return send

    def recv(self, instruction: Instruction) -> Action:
        """Return what receives a message, of no more bytes than the program says, or as many for each micro-batch."""
        op, ranks = instruction.op, self._ranks(instruction)
        assert isinstance(op, Recv)
        wire = only(instruction.writes, "write of a message")
        what = self._what(wire)
        device = self._backend.device if self._stays(wire) else None

        def recv(frame: StepFrame) -> None:
            if frame.replayed:
                return
            # A part of the batch takes no more than all of it.
            most = wire.size_bytes * self._context.num_micro_batches
            # Messages have any length up to this: sparse codecs depend on the activations.
            self._store.values[location_of(wire)] = ranks.recv(
                op.process_group, op.offset, most, what, device
            )

        return recv

    def _ranks(self, instruction: Instruction) -> Ranks:
        if self._context.ranks is None:
            raise ProgramError(
                f"program {self._program.name}: {instruction.id} needs the other stages",
                hint="run it as a rank of a run with all stages",
            )
        return self._context.ranks

    def _where(self, wire: Access) -> str:
        rank = 0 if self._context.ranks is None else self._context.ranks.rank
        return f"rank {rank}, {self._what(wire)}"

    def _what(self, wire: Access) -> str:
        """Return a message in words: its split point and evaluation point."""
        message = _message(wire)
        at = message.eval_point if message.eval_point.is_perturbed else "the base"
        return f"split point {self._boundary_names.get(message.boundary, message.boundary)} at {at}"

    def _generator(self, frame: StepFrame, wire: Access, part: int) -> Generator:
        """Return what codecs round with that do so at random: alike whenever the step is done, on every shard.

        Alike at all points, too: what the same random numbers do to both activations of a projected gradient is gone
        from their difference, but where a threshold lies between the two.
        """
        return generator_on(self._backend.device, mixed(frame.seeds[0], _message(wire).boundary, part) >> 1)


def _each(handed: Handed) -> tuple[Tensor, ...]:
    return tuple(handed) if isinstance(handed, Halfway) else (as_tensor(handed),)


def _handed(access: Access) -> Access:
    if not isinstance(access.what, Hidden):
        raise Unfit(f"crosses a boundary with {access.what}, which no segment hands on")
    return access


def _block_before(handed: Access) -> int:
    """Return the block that leaves what crosses a boundary."""
    assert isinstance(handed.what, Hidden)
    return block_index(handed.what.segment)


def _is_inside(handed: Access) -> bool:
    """Whether what a segment leaves crosses a boundary inside a block."""
    return isinstance(handed.what, Hidden) and handed.what.segment.endswith(FRONT)


def _rows(part: MicroBatch) -> tuple[int, int]:
    sequences, tokens = part.tensors["input_ids"].shape
    return sequences, tokens


def _message(wire: Access) -> Message:
    if not isinstance(wire.what, Message):
        raise Unfit(f"sends or takes {wire.what}, which is no message")
    return wire.what


def _names_of_boundaries(program: Program) -> Iterator[tuple[int, str]]:
    """Yield the number and the name, as a plan has it, of every split point that a rank is at."""
    for _, instruction in program.instructions():
        if isinstance(instruction.op, Encode | Decode):
            operands = [access.what for access in (*instruction.reads, *instruction.writes)]
            messages = [what for what in operands if isinstance(what, Message)]
            segments = [what.segment for what in operands if isinstance(what, Hidden)]
            if messages and segments:
                yield messages[0].boundary, split_point_behind(segments[0])


@contextmanager
def _errors_have(where: str) -> Iterator[None]:
    """Add to a codec's error where the message is."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"{where}: {error.message}", hint=error.hint) from error
