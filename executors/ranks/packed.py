"""Plain numbers that go from device to device: tensors side by side in one piece of the device's memory.

No header and no checksum, which would take the host: the receiver knows the shapes from its own batch, and the formats come
with the length, from host to host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executors.codecs.container import DTYPES, dtype_number
from topology.errors import CodecError

NUM_FORMATS = 2
"""Of a micro-batch's activation and residual stream; alike behind a block, where there is one tensor."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Packed:
    """Tensors of one message.

    Attributes
    ----------
    data : torch.Tensor
        Their bytes, each beginning at a multiple of 64.
    formats : tuple of int
        Numbers of the formats of odd and of even tensors, as in the header of an encoded message.
    """

    data: Tensor
    formats: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.data.numel()


def stays_on(device: torch.device) -> bool:
    """Whether a device's numbers reach another of its kind without the host."""
    return device.type == "cuda"


def pack(tensors: Sequence[Tensor]) -> Packed:
    """Return tensors side by side, on their device.

    Raises
    ------
    CodecError
        If a format is unknown.
    """
    sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    begin = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        end = begin + tensor.numel() * tensor.element_size()
        data[begin:end].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        begin += size
    return Packed(data, (dtype_number(tensors[0].dtype), dtype_number(tensors[-1].dtype)))


def unpack(packed: Packed, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a message, of these shapes, where they are.

    Raises
    ------
    CodecError
        If the message has another length.
    """
    found, begin = [], 0
    for shape, number in zip(shapes, itertools.cycle(packed.formats), strict=False):
        dtype = DTYPES[number]
        size = math.prod(shape) * dtype.itemsize
        if begin + size <= packed.num_bytes:
            found.append(packed.data[begin : begin + size].view(dtype).view(shape))
        begin += _aligned(size)
    if begin != packed.num_bytes:
        raise CodecError(
            f"a message of {packed.num_bytes} bytes for tensors of {begin}",
            hint="run both ranks on one release and one plan",
        )
    return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
