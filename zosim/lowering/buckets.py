"""Memory of parameters that lie together, as programs reserve it and executors fill it."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.formats import FORMATS
from costmodel.low_bits import Coding, Linear

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


def coded_bucket_bytes(num_elements: int, num_tensors: int, linears: Sequence[Linear], coding: Coding) -> int:
    """Return the same where the weights of `linears` among them are codes: codes and scales are tensors of their own.

    Examples
    --------
    >>> coded_bucket_bytes(64 * 64 + 64, 2, [(64, 64)], Coding("int4"))
    2752
    """
    num_coded = sum(outputs * inputs for outputs, inputs in linears)
    num_plain, num_pieces = num_tensors - len(linears), coding.num_pieces * len(linears)
    size = FORMATS[coding.dtype].bytes(num_elements - num_coded) + coding.size_bytes(linears)
    size += (num_plain + num_pieces) * (ALIGNMENT_BYTES - 1)
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
