"""gloo process groups that share one socket thread and authenticate their peers, and two faster collectives.

A process group of gloo has a device of its own, and every device a thread that wakes a hundred times a second, whether or
not anything comes, so that as often a kernel finds its caches changed. A rank has ten
groups and more, one for whatever must not wait for something else. Here all of them share one device.

gloo takes whoever connects first for the peer that it expects. So ranks show each other, over every new connection, that
they know what the group's store holds; where the store is private, an unauthenticated peer cannot replace a rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from topology.errors import RunError

BACKEND = "zosim_gloo"
"""Name by which torch makes such groups, once :func:`shared_gloo` was called."""

_SECRET_KEY, _SECRET_BYTES = "zosim/secret", 32

_UNAUTHENTICATED_HINT = "look at that rank's process; if it has not ended, another process has connected to a port of this run (SECURITY.md)"

DOUBLING_BYTES = 1 << 16
"""Of a whole up to which :func:`doubling_all_gather` is faster; beyond, a ring moves the same bytes in chunks that links
carry at once."""

_NUM_THREADS = 2
"""Of each group, as torch has it by default: they run collectives, and sleep until there is one."""


@cache
def shared_gloo() -> str:
    """Register this backend with torch once, and return its name."""
    dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu"])
    return BACKEND


def _made(positions: Any, _options: object) -> dist.ProcessGroupGloo:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    group = gloo_group(
        positions.store,
        positions.group_rank,
        positions.group_size,
        positions.timeout,
        lambda: [_device(interface.strip()) for interface in interfaces],
    )
    refuse_unauthenticated_peers(group, positions.store, positions.group_rank, positions.group_size)
    return group


def refuse_unauthenticated_peers(group: dist.ProcessGroupGloo, store: Store, rank: int, size: int) -> None:
    """Raise RunError unless a process that can read the group's store is behind every connection of a new group."""
    if rank == 0:
        store.set(_SECRET_KEY, os.urandom(_SECRET_BYTES).hex())
    secret = store.get(_SECRET_KEY)

    def proof(sender: int, receiver: int) -> Tensor:
        digest = hashlib.sha256(secret + f" {sender} to {receiver}".encode()).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    peers = [peer for peer in range(size) if peer != rank]
    shown = {peer: torch.zeros_like(proof(peer, rank)) for peer in peers}
    talk: Any = group  # torch's stubs lack its messages
    # To all at once: who waited for one peer before it showed itself to the next could wait in a circle.
    works = [(talk.recv([shown[peer]], peer, 0), talk.send([proof(rank, peer)], peer, 0)) for peer in peers]
    for peer, (coming, going) in zip(peers, works, strict=True):
        try:
            coming.wait()
            going.wait()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(
                f"rank {peer} did not join rank {rank}: {reason}", hint=_UNAUTHENTICATED_HINT
            ) from error
        if not torch.equal(shown[peer], proof(peer, rank)):
            raise RunError(
                f"what has joined rank {rank} in place of rank {peer} is not a rank of this run",
                hint=_UNAUTHENTICATED_HINT,
            )


def gloo_group(
    store: Store, rank: int, size: int, timeout: timedelta, devices: Callable[[], list[Any]]
) -> dist.ProcessGroupGloo:
    """Return a gloo process group over given devices, or over its own where torch has no option for them.

    - `rank`, `size`: of this process in the group, and how many are in it.
    - `devices`: returns what gloo has its sockets served by.

    The options are private to torch (there from 2.11 to 2.13, as tried); the constructor without them is not.
    """
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout, options._threads = devices(), timeout, _NUM_THREADS
    except AttributeError:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)


@cache
def _device(interface: str) -> Any:
    """Return the device that all groups over a network interface share; without a name, that of the host's address."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


_PAIR = 2


class DuplexPair:
    """Two connections between two ranks, so that exchanges fill both directions of the link between them.

    gloo has one connection for each pair of ranks of a process group, and before it sends a message it asks, over the same
    connection, whether the other is ready. Where both ranks send at once, each one's answer waits behind the bytes that it
    is sending itself, and the two take turns. With a connection for either direction answers find theirs empty.

    - `position`: of this rank among the two.
    - `groups`: of both ranks: over the first the first rank sends, over the second the second.
    """

    def __init__(self, position: int, groups: Sequence[Any]) -> None:
        self._position = position
        # Their own messages, not those of `torch.distributed`: calibration has no other groups.
        self._sending, self._receiving = groups[position], groups[1 - position]
        self._peer = 1 - self._sending.rank()

    @classmethod
    def among(
        cls, parts: Sequence[Sequence[int]], rank: int, *, backend: str, timeout: timedelta
    ) -> DuplexPair | None:
        """Return the pair of `rank`; None if its part is not of two. All ranks of a partition call this together."""
        pairs = [list(part) for part in parts if len(part) == _PAIR]
        if not pairs:
            return None
        groups = [
            dist.new_subgroups_by_enumeration(pairs, timeout=timeout, backend=backend)[0]
            for _ in range(_PAIR)
        ]
        own = next((pair for pair in pairs if rank in pair), None)
        return None if own is None else cls(own.index(rank), groups)

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Fill `gathered`, of the host, with both ranks' `own`, which may be this rank's half of it."""
        rows = gathered.view(_PAIR, -1)
        coming = self._receiving.recv([rows[1 - self._position]], self._peer, 0)
        going = self._sending.send([own.view(-1)], self._peer, 0)
        mine = rows[self._position]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own.view(-1))
        coming.wait()
        going.wait()


def doubling_all_gather(
    gathered: Tensor, own: Tensor, members: Sequence[int], position: int, group: dist.ProcessGroup | None
) -> None:
    """Fill host tensor `gathered` with every member's `own`, in order, in a logarithmic number of rounds.

    gloo's all_gather passes every rank's part once around a ring, a round for each rank. For losses, a few bytes each, what
    counts is the number of rounds.

    `position`: of this rank among them.

    .. [1] J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE
       Transactions on Parallel and Distributed Systems 8(11), 1997, section 4.
    """
    size = len(members)
    # Row i is of the member i places on.
    rows = torch.empty((size, own.numel()), dtype=own.dtype)
    rows[0] = own.reshape(-1)
    held = 1
    while held < size:
        count = min(held, size - held)
        coming = dist.irecv(rows[held : held + count], members[(position + held) % size], group=group)
        going = dist.isend(rows[:count], members[(position - held) % size], group=group)
        for work in (coming, going):
            assert work is not None  # this rank is a member
            work.wait()
        held += count
    # Rows are counted from this rank on; members from the first.
    gathered.view(size, -1).copy_(rows.roll(position, 0))
