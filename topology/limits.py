"""Counts that make sense: types for the fields of files and options, with a largest value that a message can name.

What is larger is a slip or an attack. Refused at its field, it cannot come back later as an overflow, or as hours of counting.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_ELEMENTS = 2**50
Elements = Annotated[int, Field(gt=0, le=MAX_ELEMENTS)]
"""Elements of a tensor or of a model: more than any machine stores."""
ElementsOrNone = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
"""The same, perhaps none."""
Extent = Annotated[int, Field(gt=0, le=2**31)]
"""Size of one dimension: a batch, a sequence, a vocabulary, a layer's width."""
Blocks = Annotated[int, Field(gt=0, le=1024)]
"""Blocks of a model; the deepest that were trained have about two hundred."""
Rank = Annotated[int, Field(gt=0, le=2**16)]
"""Columns of the factors of a matrix of low rank."""
NumPerturbations = Annotated[int, Field(gt=0, le=4096)]
"""Directions of one step."""
StagingBuffers = Annotated[int, Field(gt=0, le=1024)]
"""Device buffers that blocks pass through; no more than blocks are of use."""
Ranks = Annotated[int, Field(gt=0, le=2**16)]
"""Ranks along an axis of a mesh."""
MAX_RANKS = 2**16
MAX_THREADS = 1024
Threads = Annotated[int, Field(gt=0, le=MAX_THREADS)]
"""Threads of a process's kernels. OpenMP ends a process whose threads it cannot start, and says so on a line of its own."""
MAX_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""Of random numbers; generators take no more bits."""

_MAX_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number that a text writes in decimal digits; None if it writes none, or one of more digits than any count has.

    >>> whole_number("12"), whole_number("-3"), whole_number("9" * 5000)
    (12, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None
