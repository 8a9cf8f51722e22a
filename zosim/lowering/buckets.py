"""Memory of parameters that lie together, as programs reserve it and executors fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodel.formats import FORMATS
from costmodel.formats.low_bits import QuantizedMatrix
from costmodel.formats.low_bits import num_elements as elements_of
from zosim.program import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from zosim.plans import Plan

GPU_ALIGNMENT_BYTES = 256
"""The coarsest alignment that cuBLASLt looks at when it chooses a kernel; that of what torch itself allocates there is no finer."""


def alignment_of(plan: Plan) -> int:
    """Return the bytes whose multiples all tensors of a plan's buckets start at: nothing else decides it."""
    return GPU_ALIGNMENT_BYTES if plan.placement.is_on_gpus else ALIGNMENT_BYTES


def aligned(size_bytes: int, alignment_bytes: int) -> int:
    """Return a size rounded up to a multiple of an alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def bucket_bytes(
    num_elements: int,
    num_tensors: int,
    dtype: str,
    alignment_bytes: int,
    matrices: Sequence[QuantizedMatrix] = (),
) -> int:
    """Return the most that `num_tensors` aligned tensors of `num_elements` together can take.

    Some matrices among them may be quantized values: quantized values and scales are tensors of their own.

    >>> from costmodel.formats.low_bits import QuantConfig
    >>> bucket_bytes(100, 1, "float32", 64), bucket_bytes(100, 2, "float32", 64)
    (512, 576)
    >>> bucket_bytes(64 * 64 + 64, 2, "float32", 64, [((64, 64), QuantConfig("int4"))])
    2752
    """
    if num_elements == 0:
        return 0
    # Quantized values, scales and zero points are tensors of their own, each of which is aligned.
    num_arrays = num_tensors + sum(how.num_arrays - 1 for _, how in matrices)
    size = FORMATS[dtype].bytes(num_elements - elements_of(matrices))
    size += sum(how.size_bytes([one]) for one, how in matrices)
    return aligned(size + num_arrays * (alignment_bytes - 1), alignment_bytes)
