"""What crosses a cut: which tensors, and how many bytes they take as a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from costmodel.codecs import CodecSpec, codec_spec, message_bytes, most_bytes, statistics_of_density
from costmodel.work import DTYPE_BYTES, Work
from zosim.plan import Plan

_INSIDE = ".mlp"


def most_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes that no message across cut number `cut` exceeds."""
    return _sum(plan, cut, num_sequences, most_bytes)


def expected_message_bytes(plan: Plan, cut: int, num_sequences: int) -> int:
    """Return the bytes of a message across cut number `cut`, as the plan's densities let expect."""
    density = plan.split.densities[cut] if plan.split.densities else 1.0

    def expected(codec: CodecSpec, shape: tuple[int, ...], element_bytes: int) -> int:
        if codec.bits is None:
            return message_bytes(codec, shape, element_bytes)
        stats = statistics_of_density(shape, bits=codec.bits, density=density)
        return message_bytes(codec, shape, element_bytes, stats)

    return _sum(plan, cut, num_sequences, expected)


def coding_work(plan: Plan, cut: int, num_sequences: int) -> Work:
    """Return the work of encoding, or of decoding, one message: the tensors once, the message once."""
    element_bytes = DTYPE_BYTES[plan.precision.compute]
    tensors = sum(
        element_bytes * shape[0] * shape[1] * shape[2] for _, shape in _crossing(plan, cut, num_sequences)
    )
    return Work(elementwise_bytes=tensors + expected_message_bytes(plan, cut, num_sequences), num_kernels=2)


def _crossing(plan: Plan, cut: int, num_sequences: int) -> Iterator[tuple[CodecSpec, tuple[int, int, int]]]:
    """Yield the codec and the shape (sequences, tokens, width) of every tensor that crosses."""
    split, model = plan.split, plan.model
    if split.cuts[cut].endswith(_INSIDE):
        yield codec_spec(split.codec), (num_sequences, plan.seq, model.intermediate_size)
    yield codec_spec(split.residual_codec), (num_sequences, plan.seq, model.hidden_size)


def _sum(
    plan: Plan, cut: int, num_sequences: int, size: Callable[[CodecSpec, tuple[int, ...], int], int]
) -> int:
    element_bytes = DTYPE_BYTES[plan.precision.compute]
    return sum(size(codec, shape, element_bytes) for codec, shape in _crossing(plan, cut, num_sequences))
