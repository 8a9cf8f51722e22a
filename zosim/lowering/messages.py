"""What crosses a cut: which tensors, and how many bytes they take as a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from costmodel.codec_time import decode_work, encode_work
from costmodel.codecs import (
    CodecSpec,
    SymbolStatistics,
    activation_statistics,
    codec_spec,
    message_bytes,
    most_bytes,
    statistics_of_density,
)
from costmodel.work import DTYPE_BYTES, Work
from zosim.plan import Plan

Side = Literal["encode", "decode"]
_INSIDE = ".mlp"


def is_coded(plan: Plan, cut: int) -> bool:
    """Whether a codec writes down, on the host, what crosses cut number `cut`; plain numbers stay on the device."""
    return not all(codec.is_lossless for codec, _ in _crossing(plan, cut, 1))


def most_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes that no message across cut number `cut` exceeds."""
    return _sum(plan, cut, num_sequences, most_bytes)


def expected_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes of a message across cut number `cut`, as the plan's densities let expect."""

    def expected(codec: CodecSpec, shape: tuple[int, ...], element_bytes: int) -> int:
        return message_bytes(codec, shape, element_bytes, _statistics(plan, cut, codec, shape))

    return _sum(plan, cut, num_sequences, expected)


def coding_work(plan: Plan, cut: int, num_sequences: int, side: Side) -> Work:
    """Return the work of making the message that crosses cut number `cut`, or of taking it apart."""
    of, element_bytes = {"encode": encode_work, "decode": decode_work}[side], _element_bytes(plan)
    counts: Counter[str] = Counter()
    for codec, shape in _crossing(plan, cut, num_sequences):
        counts.update(of(codec, shape, element_bytes, _statistics(plan, cut, codec, shape)))
    return Work(coding=tuple(sorted(counts.items())))


def _statistics(plan: Plan, cut: int, codec: CodecSpec, shape: tuple[int, ...]) -> SymbolStatistics:
    """Return how the symbols of a tensor are distributed, as the plan's densities let expect; without any, evenly."""
    bits, split = codec.bits or 1, plan.split
    if not split.densities:
        return statistics_of_density(shape, bits=bits, density=1.0)
    is_beside = split.cuts[cut].endswith(_INSIDE) and shape[-1] == plan.model.hidden_size
    # The density is the activation's; beside one, the residual stream is dense.
    return activation_statistics(shape, bits=bits, density=None if is_beside else split.densities[cut])


def _element_bytes(plan: Plan) -> int:
    """Return the bytes of one number; under autocast the residual stream keeps the format of the weights."""
    return max(DTYPE_BYTES[plan.precision.compute], DTYPE_BYTES[plan.precision.storage])


def _crossing(plan: Plan, cut: int, num_sequences: int) -> Iterator[tuple[CodecSpec, tuple[int, int, int]]]:
    """Yield the codec and the shape (sequences, tokens, width) of every tensor that crosses."""
    split, model = plan.split, plan.model
    if split.cuts[cut].endswith(_INSIDE):
        yield codec_spec(split.codec), (num_sequences, plan.seq, model.intermediate_size)
    yield codec_spec(split.residual_codec), (num_sequences, plan.seq, model.hidden_size)


def _sum(
    plan: Plan, cut: int, num_sequences: int, size: Callable[[CodecSpec, tuple[int, ...], int], int]
) -> int:
    element_bytes = _element_bytes(plan)
    return sum(size(codec, shape, element_bytes) for codec, shape in _crossing(plan, cut, num_sequences))
