"""Memory of parameters that lie together, as programs reserve it and executors fill it."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.formats import FORMATS
from costmodel.low_bits import CodedMatrix, num_elements

ALIGNMENT_BYTES = 64
"""Every tensor of a bucket starts at a multiple of this: misaligned weights change the bits of a product."""


def bucket_bytes(num_elements: int, num_tensors: int, dtype: str) -> int:
    """Return the most that `num_tensors` aligned tensors of `num_elements` together can take.

    Examples
    --------
    >>> bucket_bytes(100, 1, "float32"), bucket_bytes(100, 2, "float32")
    (512, 576)
    """
    if num_elements == 0:
        return 0
    size = FORMATS[dtype].bytes(num_elements) + num_tensors * (ALIGNMENT_BYTES - 1)
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def coded_bucket_bytes(total: int, num_tensors: int, matrices: Sequence[CodedMatrix], dtype: str) -> int:
    """Return the same where some matrices among them are codes: codes and scales are tensors of their own.

    Examples
    --------
    >>> from costmodel.low_bits import Coding
    >>> coded_bucket_bytes(64 * 64 + 64, 2, [((64, 64), Coding("int4"))], "float32")
    2752
    """
    num_pieces = num_tensors - len(matrices) + sum(how.num_pieces for _, how in matrices)
    size = FORMATS[dtype].bytes(total - num_elements(matrices))
    size += sum(how.size_bytes([one]) for one, how in matrices) + num_pieces * (ALIGNMENT_BYTES - 1)
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
