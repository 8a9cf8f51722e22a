"""Codecs for activations that cross a boundary: what each makes of a tensor, in bytes, before there is a tensor.

A message is a header, the parameters of the grids, and the symbols in one of the :data:`Encoding`. Symbols are
integers of ``b`` bits; the most frequent one is the background, and ``k`` others are kept
(:mod:`costmodel.formats.symbols`). All but ``run-length`` and ``entropy`` have sizes that follow from counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from costmodel.formats.symbols import SymbolStatistics
from topology.errors import PlanError
from topology.limits import whole_number
from topology.validation import did_you_mean

Grid = Literal["symmetric", "affine-zero", "affine"]
"""Where the values of a grid lie.

``symmetric``
    ``{-c, ..., c}·s`` with ``c = 2^(b-1) - 1``; with one bit, ``{-s, s}``.
``affine-zero``
    ``2^b`` equidistant values, one of them 0.
``affine``
    ``2^b`` equidistant values from the smallest number to the largest; 0 is among them only by luck.
"""

GRID_PARAMETERS: dict[Grid, tuple[Literal["number", "byte"], ...]] = {
    "symmetric": ("number",),
    "affine-zero": ("number", "byte"),
    "affine": ("number", "number"),
}
"""What a message carries of each grid, in the order of :data:`Grid`: numbers in float32, or float64 for tensors in float64, and bytes."""

Rounding = Literal["nearest", "stochastic"]

Scope = Literal["tensor", "token", "channel"]
"""What shares a grid: everything, each row along the last dimension, or each place in it."""

Encoding = Literal["dense", "index", "bitmap", "run-length", "entropy"]
"""How symbols are written down; see ``docs/reference/codecs.md``."""

EncodingChoice = Literal[Encoding, "smallest"]

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

PREAMBLE_BYTES = 40
DIM_BYTES = 8
"""A header is a preamble and one length for each dimension."""

FREQUENCY_BITS = 16
"""Frequencies of symbols are sent to the entropy coder's other end in units of ``2^-16``."""

MAX_GAP_BITS = 16
_WORD_BYTES = 4
_FLUSH_BYTES = 8
"""State that an entropy coder leaves at the end, at most."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec: how numbers become symbols, and symbols bytes.

    Raises PlanError if a field is out of range.

    >>> CodecSpec(bits=4).name
    'q4:symmetric:nearest:tensor:smallest'
    >>> codec_spec("q2:affine-zero:token") == CodecSpec(bits=2, grid="affine-zero", scope="token")
    True
    """

    # 1 to 8; None sends the numbers as they are, and then the other fields mean nothing.
    bits: int | None = None
    # grid, rounding, scope, encoding: `"smallest"` picks an encoding for every tensor anew.
    grid: Grid = "symmetric"
    rounding: Rounding = "nearest"
    scope: Scope = "tensor"
    encoding: EncodingChoice = "smallest"

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in range(1, 9):
            raise PlanError(
                f"codec bits={self.bits} must be from 1 to 8", hint='use "none" for plain numbers'
            )
        for field, known in _WORDS.items():
            value = getattr(self, field)
            if value not in known:
                hint = did_you_mean(value, known) or "known: " + ", ".join(known)
                raise PlanError(f"unknown codec {field} {value!r}", hint=hint)

    @property
    def name(self) -> str:
        """What :func:`codec_spec` reads."""
        if self.bits is None:
            return "none"
        return f"q{self.bits}:{self.grid}:{self.rounding}:{self.scope}:{self.encoding}"

    @property
    def is_lossless(self) -> bool:
        """Whether numbers arrive as they were."""
        return self.bits is None


_WORDS: dict[str, tuple[str, ...]] = {
    "grid": get_args(Grid),
    "rounding": get_args(Rounding),
    "scope": get_args(Scope),
    "encoding": get_args(EncodingChoice),
}


def codec_spec(name: str) -> CodecSpec:
    """Return the codec called `name`: ``none``, or ``q<bits>`` and any of the other words, by colons.

    Raises PlanError if a word is unknown, or two say the same field.
    """
    head, *words = name.split(":")
    if head == "none" and not words:
        return CodecSpec()
    if not head.startswith("q") or (bits := whole_number(head[1:])) is None:
        raise PlanError(
            f"{name!r} is not a codec", hint='write "none", or bits first, such as "q4:affine-zero:token"'
        )
    given: dict[str, str] = {}
    for word in words:
        fields = [field for field, known in _WORDS.items() if word in known]
        if not fields or fields[0] in given:
            every = [known for words_of in _WORDS.values() for known in words_of]
            problem = f"says its {fields[0]} twice" if fields else f"has an unknown part {word!r}"
            raise PlanError(f"codec {name!r} {problem}", hint=did_you_mean(word, every))
        given[fields[0]] = word
    return CodecSpec(bits=bits, **given)  # type: ignore[arg-type]


def packed_bytes(num: int, width: int) -> int:
    """Return the bytes of `num` integers of `width` bits each.

    >>> packed_bytes(3, 3), packed_bytes(1, 17)
    (2, 3)
    """
    return -(-num * width // 8)


def index_bits(num_columns: int) -> tuple[int, int]:
    """Return the bits of a place within a row, and of the number of kept elements of a row."""
    return (max(0, num_columns - 1)).bit_length(), num_columns.bit_length()


def num_groups(shape: Sequence[int], scope: Scope) -> int:
    """Return how many grids a tensor of `shape` has."""
    numel, columns = math.prod(shape), shape[-1] if shape else 1
    if numel == 0:
        return 0
    return {"tensor": 1, "token": numel // columns, "channel": columns}[scope]


def overhead_bytes(spec: CodecSpec, shape: Sequence[int], element_bytes: int) -> int:
    """Return the bytes of a message beside its symbols: header and grids."""
    header = PREAMBLE_BYTES + DIM_BYTES * len(shape)
    if spec.bits is None:
        return header
    real = max(4, element_bytes)  # of half precision, too, grids are in float32
    per_group = sum(real if kind == "number" else 1 for kind in GRID_PARAMETERS[spec.grid])
    return header + num_groups(shape, spec.scope) * per_group


def dense_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes of all symbols, packed."""
    return packed_bytes(stats.num_elements, stats.bits)


def index_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes of kept symbols, their places within their rows, and the number of them in each row."""
    index, count = index_bits(stats.num_columns)
    return (
        packed_bytes(stats.num_kept, stats.bits)
        + packed_bytes(stats.num_kept, index)
        + packed_bytes(stats.num_rows, count)
    )


def bitmap_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes of one bit for every element, and of kept symbols."""
    return packed_bytes(stats.num_elements, 1) + packed_bytes(stats.num_kept, stats.bits)


def run_length_bytes(num_tokens: int, bits: int, gap_bits: int) -> int:
    """Return the bytes of pairs of a run of background and the symbol that ends it."""
    return packed_bytes(num_tokens, gap_bits) + packed_bytes(num_tokens, bits)


def expected_run_length_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes of ``run-length`` if kept elements lie independently of each other.

    A run of ``r`` background elements takes ``⌊r/2^g⌋`` tokens more than the one that ends it. Runs are geometric,
    ``P(r >= n) = q^n`` with ``q = 1 - ρ``, so there are ``k·(1 + Q/(1 - Q))`` tokens, ``Q = q^(2^g)``; the best ``g``
    is taken. Runs that cluster, as zeros of padded positions do, take less; the codec itself counts them.
    """
    if stats.num_kept == 0:
        return 0
    absent = 1 - stats.density
    sizes = []
    for gap_bits in range(1, MAX_GAP_BITS + 1):
        full = absent ** (2**gap_bits)
        tokens = round(stats.num_kept / (1 - full))
        sizes.append(run_length_bytes(tokens, stats.bits, gap_bits))
    return min(sizes)


def entropy_table_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes that tell the other end how frequent each symbol is."""
    present = sum(1 for count in stats.counts if count)
    return packed_bytes(2**stats.bits, 1) + present * FREQUENCY_BITS // 8


def frequencies(counts: Sequence[float]) -> list[int]:
    """Return the frequency of each symbol in units of ``2^-16``: 0 only for those that never occur.

    ``1 + ⌊p·(2^16 - n)⌋`` of ``n`` symbols, the rest to the most frequent. So none falls below ``p·(1 - n/2^16)``,
    and coding with them costs at most ``-log2(1 - n/2^16) <= 0.0057`` bits a symbol more than the entropy.

    .. [1] J. Duda, "Asymmetric Numeral Systems", 2013, arXiv:1311.2540: the coder that takes them.
    """
    total, whole = sum(counts), 2**FREQUENCY_BITS
    present = sum(1 for count in counts if count)
    frequencies_by_symbol = [1 + int(count * (whole - present) // total) if count else 0 for count in counts]
    if present:
        frequencies_by_symbol[max(range(len(counts)), key=lambda symbol: counts[symbol])] += whole - sum(
            frequencies_by_symbol
        )
    return frequencies_by_symbol


def expected_entropy_bytes(stats: SymbolStatistics) -> int:
    """Return the bytes of ``entropy``: the table and the cross-entropy with it, in words; right to 8 bytes or so."""
    table = entropy_table_bytes(stats)
    if sum(1 for count in stats.counts if count) < 2:
        return table
    return table + _WORD_BYTES * math.ceil(_cross_entropy_bits(stats) / (8 * _WORD_BYTES))


def _cross_entropy_bits(stats: SymbolStatistics) -> float:
    if stats.measured_entropy_bits is not None:
        return stats.measured_entropy_bits * stats.num_elements
    pairs = zip(stats.counts, frequencies(stats.counts), strict=True)
    return sum(count * (FREQUENCY_BITS - math.log2(frequency)) for count, frequency in pairs if count)


def payload_bytes(encoding: Encoding, stats: SymbolStatistics) -> int:
    """Return the bytes of the symbols: exact for dense, index and bitmap, expected for the others."""
    sizes = {
        "dense": dense_bytes,
        "index": index_bytes,
        "bitmap": bitmap_bytes,
        "run-length": expected_run_length_bytes,
        "entropy": expected_entropy_bytes,
    }
    return sizes[encoding](stats)


def message_bytes(
    spec: CodecSpec, shape: Sequence[int], element_bytes: int, stats: SymbolStatistics | None = None
) -> int:
    """Return the predicted bytes of a whole message.

    - `element_bytes`: of the tensor's format.
    - `stats`: of its symbols; needed unless the codec is ``none``.
    """
    overhead = overhead_bytes(spec, shape, element_bytes)
    if spec.bits is None:
        return overhead + math.prod(shape) * element_bytes
    assert stats is not None, "a quantized tensor's size depends on its symbols"
    if spec.encoding == "smallest":
        return overhead + min(payload_bytes(encoding, stats) for encoding in ENCODINGS)
    return overhead + payload_bytes(spec.encoding, stats)


def most_bytes(spec: CodecSpec, shape: Sequence[int], element_bytes: int) -> int:
    """Return the bytes that no message of a tensor of `shape` exceeds, for a buffer to receive it in."""
    overhead, numel = overhead_bytes(spec, shape, element_bytes), math.prod(shape)
    if spec.bits is None:
        return overhead + numel * element_bytes
    full = SymbolStatistics(numel, shape[-1] if shape else 1, spec.bits, numel)
    if spec.encoding in ("dense", "smallest"):
        return overhead + dense_bytes(full)
    if spec.encoding == "run-length":
        # A token stands for at least one element, and one bit for a run is among the choices.
        return overhead + run_length_bytes(numel, spec.bits, 1)
    if spec.encoding == "entropy":
        most_symbols = 1 << spec.bits
        excess = -math.log2(1 - most_symbols / 2.0**FREQUENCY_BITS)
        encoded = math.ceil(numel * (spec.bits + excess) / 8) + _WORD_BYTES + _FLUSH_BYTES
        return overhead + packed_bytes(most_symbols, 1) + 2 * most_symbols + encoded
    return overhead + (index_bytes(full) if spec.encoding == "index" else bitmap_bytes(full))
