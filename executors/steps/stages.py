"""What crosses a cut between two stages: encoded, sent, received and decoded, as a program says.

A message has the tensors of every micro-batch in turn, each as its codec's own message, which says of itself what it is
and how long. Inside a block the activation comes before the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Generator, Tensor

from costmodel.codecs import codec_spec
from costmodel.model_spec import FRONT
from executors.codecs import codec_of, decode
from executors.codecs.container import length_of
from executors.models.halves import Halfway, Handed
from executors.models.model import CutModel
from executors.randomness.rng import generator_on, mixed
from executors.ranks.messages import LENGTH_BYTES, Packed, pack, stays_on, unpack
from executors.steps.buffers import BufferStore
from executors.steps.frames import LoadedBatch, MicroBatch, StepFrame
from executors.steps.operands import Action, Unfit, one, place_of
from executors.steps.streams import Backend
from topology.errors import CodecError, ProgramError
from zosim.instructions import Access, Instruction, Space
from zosim.lowering.layout import BATCH
from zosim.operations import Decode, Encode, Recv, Send
from zosim.plans import INSIDE
from zosim.program import Program

_OUT = ":out"
_WIRE = "wire."


class Pipeline(Protocol):
    """What this needs of :class:`executors.ranks.communicator.Communicator`."""

    rank: int

    def send(self, group: str, offset: int, message: Tensor | Packed, what: str) -> int:
        """Send a message to a member of `group`, and return how many bytes went over the wire."""

    def recv(
        self, group: str, offset: int, most_bytes: int, what: str, device: torch.device | None
    ) -> Tensor | Packed:
        """Return the next message of a member of `group`, bytes of the host or numbers on a device."""


class Stages:
    """Makes actions out of what a program does at its cuts.

    Parameters
    ----------
    program : Program
    cut : CutModel
    store : BufferStore
    pipeline : Pipeline or None
        None for a rank alone, whose program has no cuts.
    backend : Backend
    loaded : callable
        Returns the batch that this rank forwards.
    num_micro_batches : int
        Parts that it is forwarded in.

    Attributes
    ----------
    num_made, made_bytes : int
        Messages that were made, sent or not, and what they have on a wire.
    num_sent, num_bytes : int
        Messages that went to the next stage, and what they had on the wire.
    sent_bytes : dict
        What each had, by step and instruction, of steps that are recorded.
    """

    def __init__(
        self,
        program: Program,
        cut: CutModel,
        store: BufferStore,
        pipeline: Pipeline | None,
        backend: Backend,
        loaded: Callable[[], LoadedBatch],
        num_micro_batches: int = 1,
    ) -> None:
        self._program = program
        self._cut = cut
        self._store = store
        self._pipeline = pipeline
        self._backend = backend
        self._loaded = loaded
        self._cut_names = dict(_names_of_cuts(program))
        self._num_micro_batches = num_micro_batches
        self.num_made = self.made_bytes = self.num_sent = self.num_bytes = 0
        self.sent_bytes: dict[tuple[int, str], int] = {}

    def encode(self, instruction: Instruction) -> Action:
        """Return what makes a message of what the stage hands on."""
        op = instruction.op
        assert isinstance(op, Encode)
        source = _handed(one(instruction.reads, "read of what a segment leaves"))
        wire = one(instruction.writes, "write of a message")
        codecs = [codec_of(codec_spec(name)) for name in (op.codec, op.residual_codec)]
        where, stays = self._where(wire), self._stays(wire)

        def encode(frame: StepFrame) -> None:
            if frame.replayed:
                return
            messages: list[Tensor] = []
            parts = self._store.values.pop(place_of(source))
            if stays:
                packed = pack([tensor for handed in parts for tensor in _each(handed)])
                self._made(wire, packed, packed.num_bytes)
                return
            for number, handed in enumerate(parts):
                generator = self._generator(frame, wire, number)
                tensors = _each(handed)
                with _told(where):
                    for tensor, used in zip(tensors, codecs[-len(tensors) :], strict=True):
                        messages.append(used.encode(tensor, generator))
            message = torch.cat(messages)
            self._made(wire, message, message.numel())

        return encode

    def _made(self, wire: Access, message: Tensor | Packed, num_bytes: int) -> None:
        self.num_made += 1
        self.made_bytes += LENGTH_BYTES + num_bytes
        self._store.values[place_of(wire)] = message

    def _stays(self, wire: Access) -> bool:
        """Whether a message is plain numbers that need not leave the device."""
        on_device = self._program.buffer(wire.buffer).space == Space.DEVICE
        return on_device and stays_on(self._backend.device)

    def decode(self, instruction: Instruction) -> Action:
        """Return what makes the tensors in a message that the first segment of the stage is given."""
        wire = one([read for read in instruction.reads if read.buffer != BATCH], "read of a message")
        target = _handed(one(instruction.writes, "write of what a segment leaves"))
        inside = target.what.endswith(FRONT + _OUT)
        where = self._where(wire)

        def decode_parts(frame: StepFrame) -> None:
            if frame.replayed:
                return
            with _told(where):
                tensors = self._tensors(self._store.values.pop(place_of(wire)), inside=inside)
            self._store.values[place_of(target)] = tensors

        return decode_parts

    def _tensors(self, message: Tensor | Packed, *, inside: bool) -> list[Handed]:
        """Return what is handed on for each micro-batch."""
        widths = (self._cut.inner_size, self._cut.hidden_size) if inside else (self._cut.hidden_size,)
        shapes = [(*_rows(part), width) for part in self._loaded().parts for width in widths]
        if isinstance(message, Packed):
            self._backend.borrow(message.data)
            found = iter(unpack(message, shapes))
        else:
            found = iter(self._decoded(message, shapes))
        return [Halfway(next(found), next(found)) if inside else next(found) for _ in self._loaded().parts]

    def _decoded(self, message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the tensors of a message of encoded ones, which stand one behind the other."""
        tensors, begin = [], 0
        for shape in shapes:
            size = length_of(message[begin:].numpy())
            part = message[begin : begin + size]
            tensors.append(decode(part, shape=shape, device=self._backend.device))
            begin += size
        if begin != message.numel():
            raise CodecError(f"{message.numel() - begin} bytes follow the end of a message of {begin}")
        return tensors

    def send(self, instruction: Instruction) -> Action:
        """Return what sends a message."""
        op, pipeline = instruction.op, self._others(instruction)
        assert isinstance(op, Send)
        wire = one(instruction.reads, "read of a message")
        what = self._what(wire)

        def send(frame: StepFrame) -> None:
            if frame.replayed:
                return
            message = self._store.values.pop(place_of(wire))
            if isinstance(message, Packed):
                self._backend.borrow(message.data)
            size = pipeline.send(op.group, op.offset, message, what)
            self.num_sent += 1
            self.num_bytes += size
            if self._backend.recording:
                self.sent_bytes[frame.step, instruction.id] = size

        return send

    def recv(self, instruction: Instruction) -> Action:
        """Return what receives a message, of no more bytes than the program says, or as many for each micro-batch."""
        op, pipeline = instruction.op, self._others(instruction)
        assert isinstance(op, Recv)
        wire = one(instruction.writes, "write of a message")
        what = self._what(wire)
        device = self._backend.device if self._stays(wire) else None

        def recv(frame: StepFrame) -> None:
            if frame.replayed:
                return
            # A part of the batch takes no more than all of it.
            most = wire.size_bytes * self._num_micro_batches
            self._store.values[place_of(wire)] = pipeline.recv(op.group, op.offset, most, what, device)

        return recv

    def _others(self, instruction: Instruction) -> Pipeline:
        if self._pipeline is None:
            raise ProgramError(
                f"program {self._program.name}: {instruction.id} takes other stages",
                hint="run it as the rank of a run that has as many",
            )
        return self._pipeline

    def _where(self, wire: Access) -> str:
        rank = 0 if self._pipeline is None else self._pipeline.rank
        return f"rank {rank}, {self._what(wire)}"

    def _what(self, wire: Access) -> str:
        """Return a message in words: its cut and evaluation point."""
        number = _cut_of(wire)
        return f"cut {self._cut_names.get(number, number)} at {wire.point or 'the base'}"

    def _generator(self, frame: StepFrame, wire: Access, part: int) -> Generator:
        """Return what codecs round with that do so at random: alike whenever the step is done, on every shard.

        Alike at all points, too: what the same random numbers do to both activations of a projected gradient is gone
        from their difference, but where a threshold lies between the two.
        """
        return generator_on(self._backend.device, mixed(frame.seeds[0], _cut_of(wire), part) >> 1)


def _each(handed: Handed) -> tuple[Tensor, ...]:
    return tuple(handed) if isinstance(handed, Halfway) else (handed,)


def _handed(access: Access) -> Access:
    if not access.what.endswith(_OUT):
        raise Unfit(f"crosses a cut with {access.what}, which no segment hands on")
    return access


def _rows(part: MicroBatch) -> tuple[int, int]:
    sequences, tokens = part.tensors["input_ids"].shape
    return sequences, tokens


def _cut_of(wire: Access) -> int:
    """Return the number of the cut that a message crosses."""
    return int(wire.what.partition(":")[0].rpartition(".")[2])


def _names_of_cuts(program: Program) -> Iterator[tuple[int, str]]:
    """Yield the number and the name, as a plan has it, of every cut that a rank is at."""
    for _, instruction in program.instructions():
        if isinstance(instruction.op, Encode | Decode):
            operands = (*instruction.reads, *instruction.writes)
            wires = [access for access in operands if access.buffer.startswith(_WIRE)]
            handed = [access for access in operands if access.what.endswith(_OUT)]
            if wires and handed:
                segment = handed[0].what.removesuffix(_OUT)
                inside = segment.endswith(FRONT)
                yield _cut_of(wires[0]), segment.removesuffix(FRONT) + INSIDE if inside else segment


class _told:  # noqa: N801 - reads as the context that it is
    """Adds to a codec's error where the message is."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CodecError):
            raise CodecError(f"{self._where}: {error.message}", hint=error.hint) from error
