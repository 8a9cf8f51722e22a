"""Tensors to messages and back: one interface for plain numbers and for every quantized encoding.

Messages describe themselves, so there is one :func:`decode` for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Generator, Tensor

from costmodel.formats.codecs import ENCODINGS, GRID_PARAMETERS, CodecSpec, most_bytes, num_groups
from executors.codecs.container import GRIDS, SCOPES, Header, assemble, disassemble, dtype_number
from executors.codecs.encodings import BY_NAME, MessageLayout, Payload, Symbols, encode_smallest
from executors.codecs.grids import fitted
from executors.codecs.packing import Bytes
from executors.codecs.quantizing import Quantized, dequantize, grid_format, quantize
from executors.devices import staged_on
from topology.errors import CodecError

Message = Tensor | bytes | bytearray | memoryview


class Codec(ABC):
    """Makes messages of tensors."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def encode(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the message of `tensor`: uint8, one-dimensional, on the CPU; its length is what it takes on a wire.

        - `tensor`: floating-point, of up to 16 dimensions.
        - `generator`: for stochastic rounding. The same generator state makes the same message.

        Raises CodecError if the codec cannot represent the values, or the format is unknown.
        """
        (message,) = messages_of([self.quantized(tensor, generator)])
        return message

    @abstractmethod
    def quantized(self, tensor: Tensor, generator: Generator | None = None) -> Quantized | Tensor:
        """Return what a message of `tensor` holds, where that is: symbols, or the numbers themselves.

        Raises CodecError if the format is unknown, or of values of the host if the codec cannot represent them.
        """

    def bytes_max(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that no message of such a tensor exceeds."""
        dtype_number(dtype)
        return most_bytes(self.spec, shape, dtype.itemsize)


class Plain(Codec):
    """The numbers as they are, infinities and NaNs included."""

    def __init__(self) -> None:
        super().__init__(CodecSpec())

    def quantized(self, tensor: Tensor, generator: Generator | None = None) -> Quantized | Tensor:  # noqa: ARG002 - nothing is rounded
        """Return `tensor`."""
        dtype_number(tensor.dtype)
        return tensor.detach()


class QuantizedCodec(Codec):
    """Symbols of few bits, in an encoding that is given, or the smallest for each tensor."""

    def quantized(self, tensor: Tensor, generator: Generator | None = None) -> Quantized | Tensor:
        """Return the symbols of `tensor`."""
        dtype_number(tensor.dtype)
        return quantize(tensor, self.spec, generator)


def codec_of(spec: CodecSpec) -> Codec:
    """Return the codec that `spec` describes."""
    return Plain() if spec.bits is None else QuantizedCodec(spec)


def messages_of(contents: Sequence[Quantized | Tensor]) -> list[Tensor]:
    """Return the messages of tensors, quantized or plain, as :meth:`Codec.encode` does; a device is waited for once.

    Raises CodecError if a codec cannot represent the values.
    """
    parts = [
        [each.symbols, *each.parameters, *(doubt.is_there for doubt in each.doubts)]
        if isinstance(each, Quantized)
        else [each]
        for each in contents
    ]
    raw = iter(_on_host([part for own in parts for part in own]))
    return [_assembled(each, [next(raw) for _ in own]) for each, own in zip(contents, parts, strict=True)]


def encode_quantized(quantized: Quantized) -> Tensor:
    """Return the message of a tensor that has been quantized."""
    (message,) = messages_of([quantized])
    return message


def _on_host(tensors: Sequence[Tensor]) -> list[Bytes]:
    """Return the bytes of tensors, which a device sends in one copy."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if not flat or flat[0].device.type == "cpu":
        return [chunk.numpy() for chunk in flat]
    ends = list(accumulate(chunk.numel() for chunk in flat))
    whole = torch.cat(flat).cpu().numpy()
    return [whole[end - chunk.numel() : end] for end, chunk in zip(ends, flat, strict=True)]


def _assembled(content: Quantized | Tensor, raw: Sequence[Bytes]) -> Tensor:
    """Return the message of a tensor whose parts are these bytes of the host."""
    if isinstance(content, Tensor):
        return torch.from_numpy(assemble(Header(content.dtype, tuple(content.shape)), raw))
    own, *more = raw
    num_parameters = len(content.parameters)
    for doubt, answer in zip(content.doubts, more[num_parameters:], strict=True):
        if answer.any():
            raise doubt.error()
    spec = content.spec
    assert spec.bits is not None
    symbols = Symbols(own, _num_columns(content.shape), spec.bits)
    payload = (
        encode_smallest(symbols) if spec.encoding == "smallest" else BY_NAME[spec.encoding].encode(symbols)
    )
    header = Header(
        content.dtype,
        content.shape,
        spec.bits,
        GRIDS.index(spec.grid),
        SCOPES.index(spec.scope),
        1 + ENCODINGS.index(payload.encoding),
        payload.background,
        payload.gap_bits,
        payload.num_items,
    )
    return torch.from_numpy(assemble(header, [*more[:num_parameters], payload.body]))


def decode(
    message: Message, *, shape: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the tensor in `message`, on `device`.

    - `message`: uint8, one-dimensional. What follows its end, as in a buffer that is larger, is not looked at.
    - `shape`: what the tensor must have; a receiver that knows it should say so.

    Raises CodecError if the message is cut off, damaged, of another version or shape, or contradicts itself.
    """
    header, body = disassemble(_bytes_of(message), shape)
    if header.bits:
        return dequantize(_quantized(header, body, torch.device(device)))
    expected = header.num_elements * header.dtype.itemsize
    if len(body) != expected:
        raise CodecError(f"the numbers take {len(body)} bytes, but {expected} were expected")
    if not expected:  # no bytes have no stride that another format could be read with
        return torch.empty(header.shape, dtype=header.dtype, device=device)
    (numbers,) = _on_device([body.copy()], torch.device(device))
    return numbers.view(header.dtype).reshape(header.shape)


def encoding_of(message: Message) -> str:
    """Return the encoding that a message is in, or ``"none"``."""
    header, _ = disassemble(_bytes_of(message), None)
    return ENCODINGS[header.encoding - 1] if header.bits else "none"


def decode_quantized(message: Message) -> Quantized:
    """Return the symbols and grids in a message that is not plain."""
    header, body = disassemble(_bytes_of(message), None)
    if not header.bits:
        raise CodecError("a message of unencoded numbers has no symbols")
    return _quantized(header, body, torch.device("cpu"))


def _bytes_of(message: Message) -> Bytes:
    if not isinstance(message, Tensor):
        return np.frombuffer(message, dtype=np.uint8)
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise CodecError(
            f"a message must be a one-dimensional uint8 tensor, but is {message.dim()}-dimensional "
            f"{message.dtype}"
        )
    return message.cpu().contiguous().numpy()


def _quantized(header: Header, body: Bytes, device: torch.device) -> Quantized:
    grid, scope = GRIDS[header.grid], SCOPES[header.scope]
    spec = CodecSpec(header.bits, grid, scope=scope, encoding=ENCODINGS[header.encoding - 1])
    parameters, body = _parameters(header, spec, body)
    payload = Payload(spec.encoding, body, header.background, header.gap_bits, header.num_items)  # type: ignore[arg-type]
    columns = _num_columns(header.shape)
    if header.background >= 2**header.bits:
        raise CodecError(f"background {header.background} must be a symbol of {header.bits} bits")
    symbols = BY_NAME[payload.encoding].decode(
        payload, MessageLayout(header.num_elements, columns, header.bits)
    )
    raw = [parameter.view(-1).view(torch.uint8).numpy() for parameter in parameters]
    rows, *there = _on_device([symbols, *raw], device)
    kept = (own.view(here.dtype).view(here.shape) for own, here in zip(there, parameters, strict=True))
    return Quantized(spec, header.shape, header.dtype, rows.reshape(-1, columns or 1), tuple(kept))


def _on_device(chunks: Sequence[Bytes], device: torch.device) -> list[Tensor]:
    """Return bytes of the host on a device, which gets them in one chunk and is not waited for."""
    return staged_on(device, [torch.from_numpy(chunk) for chunk in chunks])


def _parameters(header: Header, spec: CodecSpec, body: Bytes) -> tuple[tuple[Tensor, ...], Bytes]:
    """Return the grids' parameters, in the layout of the groups, and what follows them."""
    groups = num_groups(header.shape, spec.scope)
    if not groups:
        return (), body
    real = grid_format(header.dtype)
    formats = [real if kind == "number" else torch.uint8 for kind in GRID_PARAMETERS[spec.grid]]
    layout = (1, groups) if spec.scope == "channel" else (groups, 1)
    parameters = []
    for dtype in formats:
        size = groups * dtype.itemsize
        if size > len(body):
            raise CodecError(f"the message ends within the parameters of its {groups} grids")
        parameters.append(torch.from_numpy(body[:size].copy()).view(dtype).reshape(layout))
        body = body[size:]
    grids = fitted(tuple(parameters), spec)
    if not bool(torch.isfinite(grids.offset).all() & torch.isfinite(grids.step).all()):
        raise CodecError("the message has a grid whose step is not finite")
    return tuple(parameters), body


def _num_columns(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1
