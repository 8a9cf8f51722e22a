"""Ways of writing symbols down, under one interface, and the choice among them by size.

Sizes are those of :mod:`costmodel.formats.codecs`, and here they are counted, not expected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from costmodel.formats.codecs import (
    FREQUENCY_BITS,
    MAX_GAP_BITS,
    Encoding,
    bitmap_bytes,
    dense_bytes,
    expected_entropy_bytes,
    frequencies,
    index_bits,
    index_bytes,
    packed_bytes,
    run_length_bytes,
)
from costmodel.formats.symbols import SymbolStatistics
from executors.codecs.entropy import decode_entropy, encode_entropy, is_available
from executors.codecs.packing import Bytes, pack, pack_wide, unpack, unpack_wide
from topology.errors import CodecError

Indices = npt.NDArray[np.int64]
_CHUNK = 1 << 20


class Symbols:
    """Symbols of a tensor, and what several encodings ask of them (`values`: uint8, one-dimensional)."""

    def __init__(self, values: Bytes, num_columns: int, bits: int) -> None:
        self.values = values
        self.num_columns = num_columns
        self.bits = bits

    @cached_property
    def histogram(self) -> npt.NDArray[np.int64]:
        """How often each of ``2^bits`` symbols occurs."""
        counts = np.zeros(2**self.bits, dtype=np.int64)
        for begin in range(0, len(self.values), _CHUNK):
            counts += np.bincount(self.values[begin : begin + _CHUNK], minlength=len(counts))
        return counts

    @cached_property
    def background(self) -> int:
        """The most frequent symbol, the smallest of several."""
        return int(self.histogram.argmax())

    @cached_property
    def statistics(self) -> SymbolStatistics:
        """Counts that sizes follow from."""
        counts = self.histogram.tolist()
        kept = len(self.values) - counts[self.background]
        return SymbolStatistics(len(self.values), self.num_columns, self.bits, kept, tuple(counts))

    @cached_property
    def indices(self) -> Indices:
        """Where symbols other than the background are, in ascending order."""
        return np.flatnonzero(self.values != self.background)

    @cached_property
    def kept(self) -> Bytes:
        """Symbols other than the background."""
        return self.values[self.indices]

    @cached_property
    def gaps(self) -> Indices:
        """Length of the run of background before each kept symbol."""
        return np.diff(self.indices, prepend=-1) - 1

    @cached_property
    def tokens_by_gap_bits(self) -> tuple[int, ...]:
        """Run-length tokens with 1, 2, ... bits for a run."""
        gaps, totals = self.gaps, []
        for _ in range(MAX_GAP_BITS):
            gaps = gaps >> 1
            gaps = gaps[gaps > 0]
            totals.append(len(self.indices) + int(gaps.sum()))
        return tuple(totals)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """What a receiver knows of the symbols before it reads them."""

    num_elements: int
    num_columns: int
    bits: int

    @property
    def num_rows(self) -> int:
        """Number of rows of `num_columns` elements."""
        return self.num_elements // self.num_columns if self.num_columns else 0


@dataclass(frozen=True, slots=True)
class Payload:
    """Symbols written down."""

    encoding: Encoding
    body: Bytes  # uint8
    background: int = 0  # the symbol that is left out
    gap_bits: int = 0  # of a run length; 0 elsewhere
    num_items: int = 0  # symbols, tokens or words that the body holds, by encoding


class SymbolEncoding(ABC):
    """A way of writing symbols down."""

    name: Encoding

    @abstractmethod
    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes of the body; never more than they will be."""

    @abstractmethod
    def encode(self, symbols: Symbols) -> Payload:
        """Return the symbols, written down."""

    @abstractmethod
    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols. Raises CodecError if the body is not as long as it says, or contradicts itself."""


class Dense(SymbolEncoding):
    """Every symbol."""

    name: Encoding = "dense"

    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes of all symbols."""
        return dense_bytes(symbols.statistics)

    def encode(self, symbols: Symbols) -> Payload:
        """Return the symbols, packed."""
        return Payload(self.name, pack(symbols.values, symbols.bits), num_items=len(symbols.values))

    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols."""
        (body,) = _sections(payload, packed_bytes(layout.num_elements, layout.bits))
        return unpack(body, layout.num_elements, layout.bits)


class Index(SymbolEncoding):
    """How many symbols each row keeps; their places within the row; the symbols."""

    name: Encoding = "index"

    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes of the three."""
        return index_bytes(symbols.statistics)

    def encode(self, symbols: Symbols) -> Payload:
        """Return counts, places and symbols, each packed."""
        num_index_bits, count_bits = index_bits(symbols.num_columns)
        num_rows = symbols.statistics.num_rows
        row, column = np.divmod(symbols.indices, symbols.num_columns)
        counts = np.bincount(row, minlength=num_rows).astype(np.int64)
        body = (
            pack_wide(counts, count_bits),
            pack_wide(column, num_index_bits),
            pack(symbols.kept, symbols.bits),
        )
        return Payload(self.name, np.concatenate(body), symbols.background, num_items=len(symbols.indices))

    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols, kept ones among the background."""
        num_index_bits, count_bits = index_bits(layout.num_columns)
        num, num_rows = payload.num_items, layout.num_rows
        packed_counts, packed_indices, packed_kept = _sections(
            payload,
            packed_bytes(num_rows, count_bits),
            packed_bytes(num, num_index_bits),
            packed_bytes(num, layout.bits),
        )
        counts = unpack_wide(packed_counts, num_rows, count_bits)
        column = unpack_wide(packed_indices, num, num_index_bits)
        if int(counts.sum()) != num or bool((column >= layout.num_columns).any()):
            raise CodecError(
                f"an index lists {int(counts.sum())} positions within {layout.num_columns} columns, but "
                f"{num} were expected"
            )
        row = np.repeat(np.arange(num_rows, dtype=np.int64), counts)
        return _filled(
            layout.num_elements,
            payload.background,
            row * layout.num_columns + column,
            unpack(packed_kept, num, layout.bits),
        )


class Bitmap(SymbolEncoding):
    """One bit for every element, whether it is kept; then the kept symbols."""

    name: Encoding = "bitmap"

    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes of both."""
        return bitmap_bytes(symbols.statistics)

    def encode(self, symbols: Symbols) -> Payload:
        """Return bits and symbols."""
        present = symbols.values != symbols.background
        body = (np.packbits(present, bitorder="little"), pack(symbols.values[present], symbols.bits))
        return Payload(
            self.name, np.concatenate(body), symbols.background, num_items=symbols.statistics.num_kept
        )

    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols, kept ones where bits are set."""
        num = payload.num_items
        packed, kept = _sections(
            payload, packed_bytes(layout.num_elements, 1), packed_bytes(num, layout.bits)
        )
        present = np.unpackbits(packed, count=layout.num_elements, bitorder="little").view(np.bool_)
        if int(np.count_nonzero(present)) != num:
            raise CodecError(
                f"a bitmap has {int(np.count_nonzero(present))} bits set, but {num} symbols were expected"
            )
        out = np.full(layout.num_elements, payload.background, dtype=np.uint8)
        out[present] = unpack(kept, num, layout.bits)
        return out


class RunLength(SymbolEncoding):
    """For every kept symbol the length of the run of background before it, in ``g`` bits; then the symbols.

    A run that is too long is cut: ``2^g - 1`` of the background and then the background itself as the symbol. What
    follows the last kept symbol is left out. ``g`` is what makes the tensor at hand smallest.
    """

    name: Encoding = "run-length"

    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes with the best ``g``."""
        return self._best(symbols)[1]

    def encode(self, symbols: Symbols) -> Payload:
        """Return runs and symbols."""
        gap_bits, _ = self._best(symbols)
        fillers = symbols.gaps >> gap_bits  # tokens that stand for 2^g of the background each
        ends = np.cumsum(fillers + 1)
        num = int(ends[-1]) if len(ends) else 0
        runs = np.full(num, 2**gap_bits - 1, dtype=np.int64)
        values = np.full(num, symbols.background, dtype=np.uint8)
        runs[ends - 1] = symbols.gaps & (2**gap_bits - 1)
        values[ends - 1] = symbols.kept
        body = np.concatenate([pack_wide(runs, gap_bits), pack(values, symbols.bits)])
        return Payload(self.name, body, symbols.background, gap_bits, num)

    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols, each after its run."""
        num, gap_bits = payload.num_items, payload.gap_bits
        if gap_bits not in range(1, MAX_GAP_BITS + 1):
            raise CodecError(f"run lengths of {gap_bits} bits are none of 1 to {MAX_GAP_BITS}")
        packed_runs, packed_values = _sections(
            payload, packed_bytes(num, gap_bits), packed_bytes(num, layout.bits)
        )
        indices = np.cumsum(unpack_wide(packed_runs, num, gap_bits) + 1) - 1
        if num and int(indices[-1]) >= layout.num_elements:
            raise CodecError(
                f"run lengths reach element {int(indices[-1])}, but there are {layout.num_elements}"
            )
        return _filled(
            layout.num_elements, payload.background, indices, unpack(packed_values, num, layout.bits)
        )

    def _best(self, symbols: Symbols) -> tuple[int, int]:
        """Return the bits for a run, and the bytes with them."""
        sizes = [
            (run_length_bytes(tokens, symbols.bits, gap_bits), gap_bits)
            for gap_bits, tokens in enumerate(symbols.tokens_by_gap_bits, start=1)
        ]
        size, gap_bits = min(sizes)
        return gap_bits, size


class Entropy(SymbolEncoding):
    """Which symbols occur and how often, in units of ``2^-16``; then all symbols, entropy-coded."""

    name: Encoding = "entropy"

    def size_bytes(self, symbols: Symbols) -> int:
        """Return the bytes less what the coder's last state takes, 8 at most."""
        return expected_entropy_bytes(symbols.statistics)

    def encode(self, symbols: Symbols) -> Payload:
        """Return table and words."""
        counts = symbols.histogram.tolist()
        frequency = frequencies(counts)
        present = np.asarray([count > 0 for count in counts])
        # Less one: the only symbol of a tensor has 2^16 units, one more than 16 bits hold.
        units = np.asarray([f - 1 for f in frequency if f], dtype="<u2")
        several = len(units) > 1
        words = encode_entropy(symbols.values, frequency) if several else np.empty(0, dtype=np.uint32)
        table = np.packbits(present, bitorder="little"), units.view(np.uint8)
        body = np.concatenate([*table, words.astype("<u4").view(np.uint8)])
        return Payload(self.name, body, num_items=len(words))

    def decode(self, payload: Payload, layout: MessageLayout) -> Bytes:
        """Return the symbols."""
        mask_bytes = packed_bytes(2**layout.bits, 1)
        mask = np.unpackbits(payload.body[:mask_bytes], count=2**layout.bits, bitorder="little")
        num_present = int(mask.sum())
        _, units, encoded = _sections(payload, mask_bytes, 2 * num_present, 4 * payload.num_items)
        frequency = np.zeros(2**layout.bits, dtype=np.int64)
        frequency[mask.view(np.bool_)] = units.view("<u2").astype(np.int64) + 1
        expected = 2**FREQUENCY_BITS if layout.num_elements else 0
        if int(frequency.sum()) != expected:
            raise CodecError(f"symbol frequencies sum to {int(frequency.sum())} instead of {expected}")
        if num_present < 2:  # there is nothing to tell apart, and no word was written
            return np.full(layout.num_elements, mask.argmax(), dtype=np.uint8)
        return decode_entropy(encoded.view("<u4").astype(np.uint32), layout.num_elements, frequency.tolist())


BY_NAME: dict[Encoding, SymbolEncoding] = {
    encoding.name: encoding for encoding in (Dense(), Index(), Bitmap(), RunLength(), Entropy())
}


def encode_smallest(symbols: Symbols) -> Payload:
    """Return the symbols in the encoding with the shortest body; of several the simplest.

    Sizes that follow from the histogram come first. Runs are looked for only where the kept symbols alone leave
    room for them; the entropy coder's size is known to a few bytes, so it codes only if it may win.
    """
    stats = symbols.statistics
    candidates: list[SymbolEncoding] = [BY_NAME["dense"], BY_NAME["bitmap"], BY_NAME["index"]]
    sizes = {encoding.name: encoding.size_bytes(symbols) for encoding in candidates}
    encoded: Payload | None = None
    if is_available() and BY_NAME["entropy"].size_bytes(symbols) < min(sizes.values()):
        # Its size is known once it is encoded, which is not done twice.
        encoded = BY_NAME["entropy"].encode(symbols)
        sizes["entropy"] = len(encoded.body)
    if run_length_bytes(stats.num_kept, stats.bits, 1) < min(sizes.values()):
        sizes["run-length"] = BY_NAME["run-length"].size_bytes(symbols)
    best = min(sizes, key=lambda name: sizes[name])
    return encoded if encoded is not None and best == "entropy" else BY_NAME[best].encode(symbols)


def _sections(payload: Payload, *lengths: int) -> list[Bytes]:
    """Return the parts of a body, which are as long as `lengths` say."""
    body = payload.body
    if sum(lengths) != len(body):
        raise CodecError(f"a {payload.encoding} payload has {len(body)} bytes instead of {sum(lengths)}")
    ends = np.cumsum(lengths)
    return [np.ascontiguousarray(body[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _filled(num_elements: int, background: int, indices: Indices, kept: Bytes) -> Bytes:
    out = np.full(num_elements, background, dtype=np.uint8)
    out[indices] = kept
    return out
