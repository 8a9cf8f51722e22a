"""Entropy coding of symbols with constriction's asymmetric numeral systems.

The library is optional: without it a message in this encoding is refused, and no tensor is encoded so.

.. [1] Bamler (2022), Understanding entropy coding with asymmetric numeral systems; https://bamler-lab.github.io/constriction
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodel.formats.codecs import FREQUENCY_BITS
from executors.codecs.packing import Bytes
from topology.errors import CodecError

Words = npt.NDArray[np.uint32]
_CHUNK = 1 << 18
"""Symbols that are widened to the library's integers at a time."""


def is_available() -> bool:
    """Whether the library is installed."""
    return find_spec("constriction") is not None


def encode_entropy(symbols: Bytes, frequencies: Sequence[int]) -> Words:
    """Return `symbols` as words, given each symbol's frequency in units of ``2^-16``.

    One coder runs over all symbols, from the last to the first: what is put in last comes out first.
    """
    coder, model = _stream().stack.AnsCoder(), _model(frequencies)
    for begin in reversed(range(0, len(symbols), _CHUNK)):
        coder.encode_reverse(symbols[begin : begin + _CHUNK].astype(np.int32), model)
    words: Words = coder.get_compressed()
    return words


def decode_entropy(words: Words, num: int, frequencies: Sequence[int]) -> Bytes:
    """Return the `num` symbols that :func:`encode_entropy` wrote.

    Raises CodecError if the words are not used up, so that they are others' symbols.
    """
    model = _model(frequencies)
    try:
        coder = _stream().stack.AnsCoder(words)
    except ValueError as error:
        raise CodecError(f"{len(words)} words are no coder's state: {error}") from error
    out = np.empty(num, dtype=np.uint8)
    for begin in range(0, num, _CHUNK):
        end = min(begin + _CHUNK, num)
        out[begin:end] = coder.decode(model, end - begin)
    if not coder.is_empty():
        raise CodecError(f"{len(words)} words hold something else than {num} symbols")
    return out


def _model(frequencies: Sequence[int]) -> Any:
    probabilities = np.asarray(frequencies, dtype=np.float64) / 2**FREQUENCY_BITS
    return _stream().model.Categorical(probabilities, perfect=False)


def _stream() -> Any:
    try:
        from constriction import stream
    except ImportError as error:
        raise CodecError(
            "the entropy coder needs the package constriction, which is not installed",
            hint="pip install constriction, or take another encoding on both sides",
        ) from error
    return stream
