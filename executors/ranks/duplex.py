"""Exchanges between two ranks that fill both directions of the link between them.

gloo has one connection for each pair of ranks of a process group, and before it sends a message it asks, over the same
connection, whether the other is ready. Where both ranks send at once, each one's answer waits behind the bytes that it is
sending itself, and the two take turns. With a connection for either direction answers find theirs empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

Parts = Sequence[Sequence[int]]
_NUM_RANKS = 2


class Duplex:
    """The two connections of a pair of ranks.

    Parameters
    ----------
    ranks : sequence of int
        The two, this one among them.
    place : int
        Of this rank among the two.
    groups : sequence of torch.distributed.ProcessGroup
        Of both ranks: over the first the first rank sends, over the second the second.
    """

    def __init__(self, ranks: Sequence[int], place: int, groups: Sequence[dist.ProcessGroup]) -> None:
        self._peer = ranks[1 - place]
        self._place = place
        self._sending, self._receiving = groups[place], groups[1 - place]

    @classmethod
    def among(cls, parts: Parts, rank: int, *, backend: str, timeout: timedelta) -> Duplex | None:
        """Return that of `rank`, None if its part is not a pair; all ranks of a partition call this together."""
        pairs = [list(part) for part in parts if len(part) == _NUM_RANKS]
        if not pairs:
            return None
        groups = [
            dist.new_subgroups_by_enumeration(pairs, timeout=timeout, backend=backend)[0]
            for _ in range(_NUM_RANKS)
        ]
        own = next((pair for pair in pairs if rank in pair), None)
        return None if own is None else cls(own, own.index(rank), groups)

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Fill `gathered`, of the host, with both ranks' `own`, which may be this rank's half of it."""
        rows = gathered.view(_NUM_RANKS, -1)
        coming = dist.irecv(rows[1 - self._place], self._peer, group=self._receiving)
        going = dist.isend(own.view(-1), self._peer, group=self._sending)
        mine = rows[self._place]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own.view(-1))
        for work in (coming, going):
            assert work is not None  # this rank is a member of both groups
            work.wait()
