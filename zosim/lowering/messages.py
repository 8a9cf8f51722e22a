"""What crosses a cut: which tensors, and how many bytes they take as a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from costmodel.codec_time import decode_work, encode_work
from costmodel.codecs import (
    CodecSpec,
    codec_spec,
    message_bytes,
    most_bytes,
)
from costmodel.symbols import SymbolStatistics, crossing_statistics
from costmodel.work import DTYPE_BYTES, Work
from zosim.plans import INSIDE, Plan

Side = Literal["encode", "decode"]


def is_coded(plan: Plan, cut: int) -> bool:
    """Whether a codec writes down, on the host, what crosses cut number `cut`; plain numbers stay on the device."""
    return not all(codec.is_lossless for codec, _, _ in _crossing(plan, cut, 1))


def most_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes that no message across cut number `cut` exceeds."""
    width = _element_bytes(plan)
    return sum(most_bytes(codec, shape, width) for codec, shape, _ in _crossing(plan, cut, num_sequences))


def expected_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes of a message across cut number `cut`, as the plan's densities let expect."""
    width = _element_bytes(plan)
    return sum(
        message_bytes(codec, shape, width, stats)
        for codec, shape, stats in _crossing(plan, cut, num_sequences)
    )


def coding_work(plan: Plan, cut: int, num_sequences: int, side: Side) -> Work:
    """Return the work of making the message that crosses cut number `cut`, or of taking it apart."""
    of, width = {"encode": encode_work, "decode": decode_work}[side], _element_bytes(plan)
    counts: Counter[str] = Counter()
    for codec, shape, stats in _crossing(plan, cut, num_sequences):
        counts.update(of(codec, shape, width, stats))
    return Work(coding=tuple(sorted(counts.items())))


def _element_bytes(plan: Plan) -> int:
    """Return the bytes of one number; under autocast the residual stream keeps the format of the weights."""
    return max(DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.weights.dtype])


def _crossing(
    plan: Plan, cut: int, num_sequences: int
) -> Iterator[tuple[CodecSpec, tuple[int, int, int], SymbolStatistics]]:
    """Yield the codec, the shape (sequences, tokens, width) and the expected symbols of every tensor that crosses."""
    split, model = plan.split, plan.model
    is_inside = split.cuts[cut].endswith(INSIDE)
    crossing = [(split.codec, model.intermediate_size, False)] if is_inside else []
    for name, width, is_beside in (*crossing, (split.residual_codec, model.hidden_size, is_inside)):
        codec, shape = codec_spec(name), (num_sequences, plan.seq, width)
        known = split.symbols(cut)
        yield codec, shape, crossing_statistics(known, shape, bits=codec.bits or 1, is_beside=is_beside)
