"""Memory of parameters that lie together, as programs reserve it and executors fill it."""

from __future__ import annotations

from costmodel.formats import FORMATS

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
