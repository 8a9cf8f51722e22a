"""The message around encoded symbols: what it is, how long, and whether it arrived whole.

``docs/reference/codecs.md`` has the layout byte by byte. All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from costmodel.formats.codecs import DIM_BYTES, ENCODINGS, PREAMBLE_BYTES, Grid, Scope
from executors.codecs.packing import Bytes
from topology.errors import CodecError

MAGIC = b"ZOCD"
VERSION = 1
MOST_DIMS = 16
MOST_ELEMENTS = 1 << 36
"""No more are decoded unless the receiver names the shape: a header of 64 bytes could claim any number."""

_PREAMBLE = struct.Struct("<4sBBBBBBBBB3xQQI4x")
assert _PREAMBLE.size == PREAMBLE_BYTES
_CHECKSUM_AT = 32

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""By their number in a header."""

GRIDS: tuple[Grid, ...] = get_args(Grid)
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""By their numbers in a header: another one is appended to the list in :mod:`costmodel.formats.codecs`."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int = 0  # 0 for plain numbers, and then `grid`, `scope` and `encoding` are 0
    # grid, scope: numbers in :data:`GRIDS` and :data:`SCOPES`.
    grid: int = 0
    scope: int = 0
    encoding: int = 0  # 1 + the number in :data:`~costmodel.formats.codecs.ENCODINGS`; 0 for plain numbers
    # background, gap_bits, num_items: of the payload.
    background: int = 0
    gap_bits: int = 0
    num_items: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the header."""
        return PREAMBLE_BYTES + DIM_BYTES * len(self.shape)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def assemble(header: Header, sections: Sequence[Bytes]) -> Bytes:
    """Return the message: header, then `sections`, with its length and checksum filled in.

    Raises CodecError if the tensor has more dimensions than a header holds, or a format that it has no number for.
    """
    length = header.size_bytes + sum(len(section) for section in sections)
    message = np.empty(length, dtype=np.uint8)
    message[: header.size_bytes] = np.frombuffer(_header_bytes(header, length), dtype=np.uint8)
    begin = header.size_bytes
    for section in sections:
        message[begin : begin + len(section)] = section
        begin += len(section)
    message[_CHECKSUM_AT : _CHECKSUM_AT + 4] = np.frombuffer(struct.pack("<I", _checksum(message)), np.uint8)
    return message


def disassemble(message: Bytes, shape: Sequence[int] | None) -> tuple[Header, Bytes]:
    """Return the header and what follows it, after every check that needs no payload.

    - `message`: uint8. It may be longer than it says, as a buffer to receive in is.
    - `shape`: what the tensor must have.

    Raises CodecError if it is not a message, of another version, cut off, damaged, or of another shape.
    """
    length_of(message)
    fields = _PREAMBLE.unpack(message[:PREAMBLE_BYTES].tobytes())
    magic, version, dtype, bits, grid, scope, encoding, background, gap_bits, num_dims = fields[:10]
    length, num_items, checksum = fields[10:]
    if magic != MAGIC:
        raise CodecError(
            f"the message begins with {magic!r} instead of {MAGIC!r}", hint="it was not written by a codec"
        )
    if version != VERSION:
        raise CodecError(
            f"the message has version {version}, but this zosim reads version {VERSION}",
            hint="run the same release on both sides",
        )
    if length > len(message):
        raise CodecError(f"the message of {length} bytes is truncated after {len(message)}")
    message = message[:length]
    if checksum != _checksum(message):
        raise CodecError(f"the message of {length} bytes is damaged: its checksum does not match")
    begin = PREAMBLE_BYTES + DIM_BYTES * num_dims
    known = dtype < len(DTYPES) and grid < len(GRIDS) and scope < len(SCOPES) and encoding <= len(ENCODINGS)
    if not (
        known and bits <= 8 and num_dims <= MOST_DIMS and begin <= length and (bits > 0) == (encoding > 0)
    ):
        raise CodecError(f"the fields of the message's header contradict each other: {fields[2:10]}")
    dims = tuple(int(d) for d in message[PREAMBLE_BYTES:begin].view("<u8"))
    header = Header(DTYPES[dtype], dims, bits, grid, scope, encoding, background, gap_bits, num_items)
    _check_shape(header, shape)
    return header, message[begin:]


def length_of(message: Bytes) -> int:
    """Return the bytes that the message at the beginning of `message` says it has.

    Raises CodecError if not even its header is there.
    """
    if len(message) < PREAMBLE_BYTES:
        raise CodecError(
            f"the message of {len(message)} bytes is truncated: its header takes {PREAMBLE_BYTES} or more"
        )
    return int(_PREAMBLE.unpack(message[:PREAMBLE_BYTES].tobytes())[10])


def _check_shape(header: Header, shape: Sequence[int] | None) -> None:
    if shape is not None and tuple(shape) != header.shape:
        raise CodecError(
            f"the message holds a tensor of shape {header.shape}, but {tuple(shape)} was expected",
            hint="sender and receiver disagree on the split point or the batch",
        )
    if math.prod(max(1, dim) for dim in header.shape) >= 2**63:  # of no elements, too
        raise CodecError(f"the message has an impossible tensor shape, {header.shape}")
    if shape is None and header.num_elements > MOST_ELEMENTS:
        raise CodecError(
            f"the message announces {header.num_elements} elements, more than allowed",
            hint="pass the expected shape to allow it",
        )


def _header_bytes(header: Header, length: int) -> bytes:
    if len(header.shape) > MOST_DIMS:
        raise CodecError(f"a tensor of {len(header.shape)} dimensions exceeds the maximum of {MOST_DIMS}")
    preamble = _PREAMBLE.pack(
        MAGIC,
        VERSION,
        dtype_number(header.dtype),
        header.bits,
        header.grid,
        header.scope,
        header.encoding,
        header.background,
        header.gap_bits,
        len(header.shape),
        length,
        header.num_items,
        0,
    )
    return preamble + struct.pack(f"<{len(header.shape)}Q", *header.shape)


def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a format. Raises CodecError if it has none."""
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise CodecError(
            f"codecs do not support {str(dtype).removeprefix('torch.')} tensors",
            hint=f"supported formats: {known}",
        )
    return DTYPES.index(dtype)


def _checksum(message: Bytes) -> int:
    """Return the CRC-32 of all bytes but the checksum's own."""
    before = zlib.crc32(message[:_CHECKSUM_AT].data)
    return zlib.crc32(message[_CHECKSUM_AT + 4 :].data, before)
