"""The split axis: what crosses a boundary, as which message, and how it goes from stage to stage.

Two stages with a split point behind block 5: the first stage encodes what block 5 leaves and sends it on, once for each sign.
A message has a byte for each of 16 tokens x 768 numbers, and a header.

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Mesh, Placement, Split
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0", "cpu0"))
>>> stages = {"mesh": Mesh(stage=2), "split": Split(split_points=("block.5",), residual_codec="q8")}
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement, **stages)
>>> for rank in (0, 1):
...     items = [
...         item for item in lower(plan, rank).step if item.label in ("encode", "send", "recv", "decode")
...     ]
...     print(rank, *(item.id for item in items))
0 encode[q0+] send[q0+] encode[q0-] send[q0-]
1 recv[q0+] recv[q0-] decode[q0+] decode[q0-]
>>> most_message_bytes(plan, 0, num_sequences=1), expected_message_bytes(plan, 0, num_sequences=1)
(12356, 12356)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from costmodel.formats import FORMATS
from costmodel.formats.codec_time import decode_work, encode_work
from costmodel.formats.codecs import CodecSpec, codec_spec, message_bytes, most_bytes
from costmodel.formats.symbols import SymbolStatistics, boundary_statistics
from costmodel.models.forward import handed_elements
from costmodel.work import Work
from zosim.eval_points import EvalPoint
from zosim.lowering.rank import AxisWriter
from zosim.plans import INSIDE, Plan, last_before
from zosim.program.contents import Message
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Decode, Encode, Recv, Send

Side = Literal["in", "out", "here"]
"""Where a message comes from or goes to: the stage before, the next one, or this one."""


class Boundaries(AxisWriter):
    """Writes messages between stages, and their codecs."""

    def _wire(self, eval_point: EvalPoint, boundary: int, side: Side) -> Access:
        """Return the access to the message that crosses boundary number `boundary`, of the largest size it can have."""
        # Space for the longest message: how long one is, is known when it has been made.
        size = most_message_bytes(self._plan, boundary, self._rank.num_sequences)
        return Access(f"wire.{side}.{eval_point}", Message(boundary, eval_point), 0, size)

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of messages."""
        boundaries = list(self._own_boundaries())
        for eval_point in self._rank.own_eval_points:
            wires = [(boundary, self._wire(eval_point, boundary, side)) for boundary, side in boundaries]
            for name in dict.fromkeys(wire.buffer for _, wire in wires):
                size = max(wire.size_bytes for _, wire in wires if wire.buffer == name)
                # Codecs write to host memory; plain numbers go from device to device.
                encoded = any(
                    is_encoded(self._plan, boundary) for boundary, wire in wires if wire.buffer == name
                )
                space = Space.HOST if encoded else Space.DEVICE
                yield Buffer(name, space, size, "activations", "uint8", dynamic=True)

    def _own_boundaries(self) -> Iterator[tuple[int, Side]]:
        """Yield the split points on either side of this rank's stage, and those within it."""
        rank = self._rank
        for boundary in self._plan.encoded_in_place.values():
            yield boundary, "here"
        if not rank.is_first_stage:
            yield rank.stage - 1, "in"
        if not rank.is_last_stage:
            yield rank.stage, "out"

    def receive_all(self) -> None:
        """Write the receipt of every message of the stage before, in the order in which it sends them."""
        rank = self._rank
        if rank.is_first_stage:
            return
        boundary = rank.stage - 1
        work = Work(link_bytes=expected_message_bytes(self._plan, boundary, rank.num_sequences))
        for eval_point in rank.own_eval_points:
            # On a stream of its own: compute begins with the first message while others come.
            name, left = f"recv[{eval_point}]", (self._wire(eval_point, boundary, "in"),)
            op = Recv("pipeline", -1)
            self._emit(name, op, Stream.RECV, "recv", rank.segments[0], (), left, work)

    def before(self, segment: str, eval_point: EvalPoint) -> None:
        """Write how a message becomes what the segment before the first of this stage left."""
        rank = self._rank
        if segment == rank.segments[0] and not rank.is_first_stage:
            previous = rank.model.segments[rank.model.segments.index(segment) - 1]
            self._decode(segment, previous, eval_point, rank.stage - 1, "in")

    def after(self, segment: str, eval_point: EvalPoint) -> None:
        """Write how what `segment` leaves crosses the boundary behind it, to the next stage or within this one."""
        rank = self._rank
        if segment == rank.segments[-1] and not rank.is_last_stage:
            wire = self._encode(segment, eval_point, rank.stage, "out")
            link = Work(link_bytes=expected_message_bytes(self._plan, rank.stage, rank.num_sequences))
            op = Send("pipeline", 1)
            self._emit(f"send[{eval_point}]", op, Stream.LINK, "send", segment, (wire,), (), link)
        elif (boundary := self._plan.encoded_in_place.get(segment)) is not None:
            # Within a stage nothing is sent, but a codec rounds as it does between stages.
            self._encode(segment, eval_point, boundary, "here")
            self._decode(segment, segment, eval_point, boundary, "here")

    def _encode(self, segment: str, eval_point: EvalPoint, boundary: int, side: Side) -> Access:
        """Write how what `segment` leaves becomes a message, and return where that is."""
        wire, reads = self._wire(eval_point, boundary, side), (self._rank.hidden(eval_point, segment),)
        op = Encode(self._plan.split.codec, self._plan.split.residual_codec)
        work = codec_work(self._plan, boundary, self._rank.num_sequences, "encode")
        self._emit(f"encode[{eval_point}]", op, Stream.COMPUTE, "encode", segment, reads, (wire,), work)
        return wire

    def _decode(self, segment: str, left_by: str, eval_point: EvalPoint, boundary: int, side: Side) -> None:
        """Write how a message becomes what a segment left; the batch tells its shape."""
        reads = (self._wire(eval_point, boundary, side), self._rank.batch())
        left = (self._rank.hidden(eval_point, left_by),)
        work = codec_work(self._plan, boundary, self._rank.num_sequences, "decode")
        self._emit(f"decode[{eval_point}]", Decode(), Stream.COMPUTE, "decode", segment, reads, left, work)


def is_encoded(plan: Plan, boundary: int) -> bool:
    """Whether a codec writes down, on the host, what crosses boundary number `boundary`; plain numbers stay on the device."""
    return not all(codec.is_lossless for codec, _, _ in _boundary_tensors(plan, boundary, 1))


def most_message_bytes(plan: Plan, boundary: int, num_sequences: int) -> int:
    """Return the bytes that no message across boundary number `boundary` exceeds."""
    width = _element_bytes(plan)
    return sum(
        most_bytes(codec, shape, width)
        for codec, shape, _ in _boundary_tensors(plan, boundary, num_sequences)
    )


def expected_message_bytes(plan: Plan, boundary: int, num_sequences: int) -> int:
    """Return the bytes of a message across boundary number `boundary`, as the plan's densities let expect."""
    width = _element_bytes(plan)
    return sum(
        message_bytes(codec, shape, width, stats)
        for codec, shape, stats in _boundary_tensors(plan, boundary, num_sequences)
    )


def codec_work(plan: Plan, boundary: int, num_sequences: int, side: Literal["encode", "decode"]) -> Work:
    """Return the work of making the message that crosses boundary number `boundary`, or of taking it apart."""
    of, width = {"encode": encode_work, "decode": decode_work}[side], _element_bytes(plan)
    counts: Counter[str] = Counter()
    for codec, shape, stats in _boundary_tensors(plan, boundary, num_sequences):
        counts.update(of(codec, shape, width, stats))
    return Work(codec_work=tuple(sorted(counts.items())))


def _element_bytes(plan: Plan) -> int:
    """Return the bytes of one number; under autocast the residual stream keeps the format of the weights."""
    return max(FORMATS[plan.compute_dtype].element_bytes, FORMATS[plan.weights.dtype].element_bytes)


def _boundary_tensors(
    plan: Plan, boundary: int, num_sequences: int
) -> Iterator[tuple[CodecSpec, tuple[int, int, int], SymbolStatistics]]:
    """Yield the codec, the shape (sequences, tokens, width) and the expected symbols of every tensor that crosses."""
    split, model = plan.split, plan.model
    is_inside = split.split_points[boundary].endswith(INSIDE)
    # Inside a block the activation crosses, and beside it the residual stream.
    inner = [(split.codec, model.intermediate_size, False)] if is_inside else []
    for name, width, has_side_path in (*inner, (split.residual_codec, model.hidden_size, is_inside)):
        codec, shape = codec_spec(name), (num_sequences, plan.seq, width)
        if model.boundary_elements:  # several tensors, in one message
            segment = last_before(split.split_points[boundary], model.segments)
            shape = (1, 1, handed_elements(model, batch=num_sequences, seq=plan.seq, segment=segment))
        known = split.symbols(boundary)
        yield (
            codec,
            shape,
            boundary_statistics(known, shape, bits=codec.bits or 1, has_side_path=has_side_path),
        )
