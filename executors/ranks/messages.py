"""Messages between two ranks: their length, then their bytes, over a process group that carries nothing else.

Collectives of a program run meanwhile, on another thread. Messages of one pair arrive in the order in which they were
sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from executors.codecs.container import DTYPES, dtype_number
from topology.errors import CodecError, RunError
from zosim.lowering.buckets import GPU_ALIGNMENT_BYTES, aligned

LENGTH_BYTES = 8
NUM_FORMATS = 2
"""Of a micro-batch's activation and residual stream; alike behind a block, where there is one tensor."""

Naming = Callable[[Sequence[int], str], AbstractContextManager[None]]
"""Takes who takes part and what is being done, and makes an error that names the ranks that are missing of torch's."""


@dataclass(frozen=True)
class Packed:
    """Tensors that go from device to device unencoded, packed into one buffer.

    No header and no checksum, which would take the host: the receiver knows the shapes from its own batch, and the formats
    come with the length, from host to host.
    """

    # Their bytes, each beginning at a multiple of 256: the next stage multiplies by what it gets, where it lies.
    data: Tensor
    # Numbers of the formats of odd and of even tensors, as in the header of an encoded message.
    formats: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.data.numel()


class Messages:
    """Sends and receives messages between this rank and the others of its pipeline.

    - `parts`: a partition of the ranks; all ranks make their messages at the same time.
    - `backend`: of bytes of the host.
    - `device_backend`: of numbers that stay on devices.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        rank: int,
        *,
        backend: str,
        device_backend: str,
        timeout: timedelta,
        naming: Naming,
    ) -> None:
        lists = [list(part) for part in parts]
        self._rank = rank
        self._group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend=backend)
        self._direct = self._group
        if device_backend != backend:
            self._direct, _ = dist.new_subgroups_by_enumeration(
                lists, timeout=timeout, backend=device_backend
            )
        self._naming = naming

    def connect(self, device: torch.device) -> None:
        """Let every two neighbours of the pipeline exchange one number between their devices, before anything depends on it.

        A library that joins devices makes the connection of two ranks when they first need it, which takes both of them and
        may wait for kernels that run. Here all ranks of the part come by in one order. Messages are then sent one by one, not
        grouped with those of the other direction: between two ranks they go one way, and in a group a message to the next
        stage would wait for the one from the stage before.
        """
        token = torch.zeros(1, device=device)
        for one, other in pairwise(sorted(dist.get_process_group_ranks(self._direct))):
            with self._naming((one, other), f"connecting the devices of ranks {one} and {other}"):
                if self._rank == one:
                    dist.send(token, other, group=self._direct)
                elif self._rank == other:
                    dist.recv(token, one, group=self._direct)
        torch.accelerator.synchronize(device)

    def send(self, peer: int, message: Tensor | Packed, what: str) -> int:
        """Send a message to rank `peer`, and return how many bytes went over the wire."""
        with self._naming((peer,), f"sending {what} to rank {peer}"):
            if isinstance(message, Packed):
                # What it is goes from host to host, so that a peer that is gone is noticed before devices wait for it.
                head = torch.tensor([message.num_bytes, *message.formats])
                dist.send(head, peer, group=self._group)
                dist.send(message.data, peer, group=self._direct)
                return head.nbytes + message.num_bytes
            dist.send(torch.tensor([message.numel()]), peer, group=self._group)
            dist.send(message, peer, group=self._group)
        return LENGTH_BYTES + message.numel()

    def recv(
        self, peer: int, most_bytes: int, what: str, device: torch.device | None = None
    ) -> Tensor | Packed:
        """Return the next message of rank `peer`: bytes of the host, or numbers on a device.

        Raises RunError if it has more than `most_bytes`, or does not come.
        """
        # Behind the length of numbers on a device come their formats: see `Packed`.
        head = torch.zeros(1 if device is None else 1 + NUM_FORMATS, dtype=torch.int64)
        with self._naming((peer,), f"receiving {what} from rank {peer}"):
            dist.recv(head, peer, group=self._group)
            length, *formats = head.tolist()
            check_length(length, most_bytes, f"{what}, from rank {peer} to rank {self._rank}")
            data = torch.empty(length, dtype=torch.uint8, device=device)
            dist.recv(data, peer, group=self._group if device is None else self._direct)
        return data if device is None else Packed(data, tuple(formats))

    def broadcast(self, owner: int, tensor: Tensor, what: str) -> None:
        """Fill `tensor`, bytes of the host, with that of rank `owner`, on all ranks of the part."""
        # Not for the owner alone: what it sends comes by way of the others.
        with self._naming(dist.get_process_group_ranks(self._group), f"{what} of rank {owner}"):
            dist.broadcast(tensor, owner, group=self._group)


def check_length(length: int, most_bytes: int, what: str) -> None:
    """Raise RunError unless a message may have so many bytes."""
    if not 0 < length <= most_bytes:
        raise RunError(
            f"{what}: a message of {length} bytes is outside 1 to {most_bytes}",
            hint="run both ranks on one release and one plan",
        )


def stays_on(device: torch.device) -> bool:
    """Whether a device's numbers reach another of its kind without the host."""
    return device.type != "cpu"


def pack(tensors: Sequence[Tensor]) -> Packed:
    """Pack tensors into one buffer on their device. Raises CodecError if a format is unknown."""
    sizes = [aligned(tensor.numel() * tensor.element_size(), GPU_ALIGNMENT_BYTES) for tensor in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    begin = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        end = begin + tensor.numel() * tensor.element_size()
        data[begin:end].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        begin += size
    return Packed(data, (dtype_number(tensors[0].dtype), dtype_number(tensors[-1].dtype)))


def unpack(packed: Packed, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a message, of these shapes, as views of it.

    Raises CodecError if the message has another length.
    """
    tensors, begin = [], 0
    for shape, number in zip(shapes, itertools.cycle(packed.formats), strict=False):
        dtype = DTYPES[number]
        size = math.prod(shape) * dtype.itemsize
        # One that does not fit is refused below, with the length of all.
        if begin + size <= packed.num_bytes:
            tensors.append(packed.data[begin : begin + size].view(dtype).view(shape))
        begin += aligned(size, GPU_ALIGNMENT_BYTES)
    if begin != packed.num_bytes:
        raise CodecError(
            f"a message of {packed.num_bytes} bytes arrived for tensors of {begin}",
            hint="run both ranks on one release and one plan",
        )
    return tensors
