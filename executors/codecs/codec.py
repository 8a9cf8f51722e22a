"""Tensors to messages and back: one interface for plain numbers and for every quantised encoding.

Messages describe themselves, so there is one :func:`decode` for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from costmodel.codecs import ENCODINGS, CodecSpec, most_bytes, num_groups
from executors.codecs.container import GRIDS, SCOPES, Header, assemble, disassemble, dtype_number
from executors.codecs.encodings import BY_NAME, MessageLayout, Payload, Symbols, encode_smallest
from executors.codecs.grids import fitted
from executors.codecs.packing import Bytes
from executors.codecs.quantising import Quantised, dequantise, grid_format, quantise
from topology.errors import CodecError

Message = Tensor | bytes | bytearray | memoryview


class Codec(ABC):
    """Makes messages of tensors.

    Attributes
    ----------
    spec : CodecSpec
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    @abstractmethod
    def encode(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the message of `tensor`: uint8, one-dimensional, on the CPU; its length is what it takes on a wire.

        Parameters
        ----------
        tensor : torch.Tensor
            Floating-point, of up to 16 dimensions.
        generator : torch.Generator, optional
            For stochastic rounding. The same generator state makes the same message.

        Raises
        ------
        CodecError
            If the codec cannot represent the values, or the format is unknown.
        """

    def bytes_max(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that no message of such a tensor exceeds."""
        dtype_number(dtype)
        return most_bytes(self.spec, shape, dtype.itemsize)


class Plain(Codec):
    """The numbers as they are, infinities and NaNs included."""

    def __init__(self) -> None:
        super().__init__(CodecSpec())

    def encode(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:  # noqa: ARG002 - nothing is rounded
        """Return the message of `tensor`."""
        dtype_number(tensor.dtype)
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        return torch.from_numpy(assemble(Header(tensor.dtype, tuple(tensor.shape)), [raw]))


class QuantisedCodec(Codec):
    """Symbols of few bits, in an encoding that is given, or the smallest for each tensor."""

    def encode(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the message of `tensor`."""
        dtype_number(tensor.dtype)
        return encode_quantised(quantise(tensor, self.spec, generator))


def codec_of(spec: CodecSpec) -> Codec:
    """Return the codec that `spec` describes."""
    return Plain() if spec.bits is None else QuantisedCodec(spec)


def encode_quantised(quantised: Quantised) -> Tensor:
    """Return the message of a tensor that has been quantised."""
    spec = quantised.spec
    assert spec.bits is not None
    symbols = Symbols(quantised.symbols.cpu().numpy().reshape(-1), _num_columns(quantised.shape), spec.bits)
    payload = (
        encode_smallest(symbols) if spec.encoding == "smallest" else BY_NAME[spec.encoding].encode(symbols)
    )
    header = Header(
        quantised.dtype,
        quantised.shape,
        spec.bits,
        GRIDS.index(spec.grid),
        SCOPES.index(spec.scope),
        1 + ENCODINGS.index(payload.encoding),
        payload.background,
        payload.gap_bits,
        payload.num_items,
    )
    parameters = [
        parameter.cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        for parameter in quantised.parameters
    ]
    return torch.from_numpy(assemble(header, [*parameters, payload.body]))


def decode(
    message: Message, *, shape: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the tensor in `message`, on `device`.

    Parameters
    ----------
    message : torch.Tensor or bytes
        uint8, one-dimensional. What follows its end, as in a buffer that is larger, is not looked at.
    shape : sequence of int, optional
        What the tensor must have; a receiver that knows it should say so.
    device : torch.device

    Raises
    ------
    CodecError
        If the message is cut off, damaged, of another version or shape, or contradicts itself.
    """
    header, body = disassemble(_bytes_of(message), shape)
    if header.bits:
        return dequantise(_quantised(header, body, torch.device(device)))
    expected = header.num_elements * header.dtype.itemsize
    if len(body) != expected:
        raise CodecError(f"plain numbers take {len(body)} bytes where {expected} are due")
    return torch.from_numpy(body.copy()).view(header.dtype).reshape(header.shape).to(device)


def encoding_of(message: Message) -> str:
    """Return the encoding that a message is in, or ``"none"``."""
    header, _ = disassemble(_bytes_of(message), None)
    return ENCODINGS[header.encoding - 1] if header.bits else "none"


def decode_quantised(message: Message) -> Quantised:
    """Return the symbols and grids in a message that is not plain."""
    header, body = disassemble(_bytes_of(message), None)
    if not header.bits:
        raise CodecError("a message of plain numbers has no symbols")
    return _quantised(header, body, torch.device("cpu"))


def _bytes_of(message: Message) -> Bytes:
    if not isinstance(message, Tensor):
        return np.frombuffer(message, dtype=np.uint8)
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise CodecError(
            f"a message is one-dimensional uint8, not {message.dim()}-dimensional {message.dtype}"
        )
    return message.cpu().contiguous().numpy()


def _quantised(header: Header, body: Bytes, device: torch.device) -> Quantised:
    grid, scope = GRIDS[header.grid], SCOPES[header.scope]
    spec = CodecSpec(header.bits, grid, scope=scope, encoding=ENCODINGS[header.encoding - 1])  # type: ignore[arg-type]
    parameters, body = _parameters(header, spec, body)
    payload = Payload(spec.encoding, body, header.background, header.gap_bits, header.num_items)  # type: ignore[arg-type]
    columns = _num_columns(header.shape)
    if header.background >= 2**header.bits:
        raise CodecError(f"background {header.background} is no symbol of {header.bits} bits")
    symbols = BY_NAME[payload.encoding].decode(
        payload, MessageLayout(header.num_elements, columns, header.bits)
    )
    rows = torch.from_numpy(symbols).reshape(-1, columns or 1).to(device)
    return Quantised(spec, header.shape, header.dtype, rows, tuple(p.to(device) for p in parameters))


def _parameters(header: Header, spec: CodecSpec, body: Bytes) -> tuple[tuple[Tensor, ...], Bytes]:
    """Return the grids' parameters, in the layout of the groups, and what follows them."""
    groups = num_groups(header.shape, spec.scope)
    if not groups:
        return (), body
    real = grid_format(header.dtype)
    formats = {"symmetric": (real,), "affine-zero": (real, torch.uint8), "affine": (real, real)}[spec.grid]
    layout = (1, groups) if spec.scope == "channel" else (groups, 1)
    parameters = []
    for dtype in formats:
        size = groups * dtype.itemsize
        if size > len(body):
            raise CodecError(f"a message ends within the parameters of its {groups} grids")
        parameters.append(torch.from_numpy(body[:size].copy()).view(dtype).reshape(layout))
        body = body[size:]
    grids = fitted(tuple(parameters), spec)
    if not bool(torch.isfinite(grids.offset).all() & torch.isfinite(grids.step).all()):
        raise CodecError("a message's grids have steps that are not finite")
    return tuple(parameters), body


def _num_columns(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1
