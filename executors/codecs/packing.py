"""Integers of any number of bits side by side, without gaps, in little-endian order of bits and bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from costmodel.formats.codecs import packed_bytes

Bytes = npt.NDArray[np.uint8]
_LANES = 8
_CHUNK_OUTPUTS = 1 << 14
"""Words of eight symbols that are packed at a time, so that they stay in cache."""

_MERGES = (
    (0x00FF00FF00FF00FF, 8),
    (0x0000FFFF0000FFFF, 16),
    (0x00000000FFFFFFFF, 32),
)
"""A step of packing joins neighbouring lanes: the mask of the lower of each two, and the width of a lane."""


def pack(symbols: Bytes, width: int) -> Bytes:
    """Return `symbols`, each below ``2^width``, in `width` bits each.

    - `symbols`: uint8, one-dimensional.
    - `width`: 0 to 8.

    Symbol ``i`` takes bits ``i·width`` to ``(i + 1)·width - 1``, bit 0 being the lowest of the first byte. Eight
    symbols make one 64-bit word, whose lanes are joined in three steps.
    """
    if width in (0, 8):
        return symbols[: len(symbols) * width // 8]
    out = np.empty(packed_bytes(len(symbols), width), dtype=np.uint8)
    whole = len(symbols) // _LANES
    words = symbols[: whole * _LANES].view("<u8")
    target = out[: whole * width].reshape(whole, width)
    for begin in range(0, whole, _CHUNK_OUTPUTS):
        chunk = slice(begin, begin + _CHUNK_OUTPUTS)
        target[chunk] = _joined(words[chunk], width).view(np.uint8).reshape(-1, _LANES)[:, :width]
    rest = symbols[whole * _LANES :]
    if len(rest):
        last = np.zeros(_LANES, dtype=np.uint8)
        last[: len(rest)] = rest
        out[whole * width :] = _joined(last.view("<u8"), width).view(np.uint8)[: len(out) - whole * width]
    return out


def unpack(packed: Bytes, num: int, width: int) -> Bytes:
    """Return the `num` symbols of `width` bits in `packed`."""
    if width == 8:
        return packed[:num]
    out = np.zeros(num, dtype=np.uint8)
    if width == 0:
        return out
    whole = num // _LANES
    source = packed[: whole * width].reshape(whole, width)
    words = out[: whole * _LANES].view("<u8")
    for begin in range(0, whole, _CHUNK_OUTPUTS):
        chunk = slice(begin, begin + _CHUNK_OUTPUTS)
        lanes = np.zeros((len(source[chunk]), _LANES), dtype=np.uint8)
        lanes[:, :width] = source[chunk]
        words[chunk] = _parted(lanes.reshape(-1).view("<u8"), width)
    if num % _LANES:
        last = np.zeros(_LANES, dtype=np.uint8)
        tail = packed[whole * width :]
        last[: len(tail)] = tail
        out[whole * _LANES :] = _parted(last.view("<u8"), width).view(np.uint8)[: num % _LANES]
    return out


def pack_wide(numbers: npt.NDArray[np.int64], width: int) -> Bytes:
    """Return `numbers` below ``2^width``, of up to 63 bits: their lowest bytes one after the other, then the rest packed.

    Bits within a byte are those of :func:`pack`; a plane of 8 bits is the lowest byte of every number.
    """
    planes = []
    for shift in range(0, width, 8):
        plane = (numbers >> shift).astype(np.uint8)
        planes.append(pack(plane, min(8, width - shift)))
    return np.concatenate(planes) if planes else np.empty(0, dtype=np.uint8)


def unpack_wide(packed: Bytes, num: int, width: int) -> npt.NDArray[np.int64]:
    """Return the `num` numbers that :func:`pack_wide` wrote."""
    numbers = np.zeros(num, dtype=np.int64)
    begin = 0
    for shift in range(0, width, 8):
        bits = min(8, width - shift)
        end = begin + packed_bytes(num, bits)
        numbers |= unpack(packed[begin:end], num, bits).astype(np.int64) << shift
        begin = end
    return numbers


def _joined(words: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Return words whose lowest ``8·width`` bits are those of their eight bytes, `width` from each."""
    for number, (mask, lane) in enumerate(_MERGES):
        gap = np.uint64(lane - (width << number))
        lower = words & np.uint64(mask)
        upper = words & np.uint64(mask << lane)
        upper >>= gap
        lower |= upper
        words = lower
    return words


def _parted(words: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Undo :func:`_joined`."""
    for number, (_, lane) in reversed(list(enumerate(_MERGES))):
        used = width << number
        mask = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        lower = words & np.uint64(mask)
        upper = words & np.uint64(mask << used)
        upper <<= np.uint64(lane - used)
        lower |= upper
        words = lower
    return words
