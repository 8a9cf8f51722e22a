"""Small exchanges among many ranks in few rounds: what each holds doubles with every one.

gloo's all_gather passes every rank's part once around a ring, a round for each rank. For losses, a few bytes each, what
counts is the number of rounds.

References
----------
.. [1] J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE
   Transactions on Parallel and Distributed Systems 8(11), 1997, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 1 << 16
"""Of the whole; beyond, a ring moves the same bytes in pieces that links carry at once."""


def doubling_all_gather(
    gathered: Tensor, own: Tensor, members: Sequence[int], place: int, group: dist.ProcessGroup | None
) -> None:
    """Fill `gathered`, of the host, with the `own` of every member, in order.

    Parameters
    ----------
    gathered, own : torch.Tensor
    members : sequence of int
        Ranks of the group.
    place : int
        Of this rank among them.
    group : ProcessGroup, optional
    """
    size = len(members)
    # Row i is of the member i places on.
    rows = torch.empty((size, own.numel()), dtype=own.dtype)
    rows[0] = own.reshape(-1)
    held = 1
    while held < size:
        count = min(held, size - held)
        coming = dist.irecv(rows[held : held + count], members[(place + held) % size], group=group)
        going = dist.isend(rows[:count], members[(place - held) % size], group=group)
        for work in (coming, going):
            assert work is not None  # this rank is a member
            work.wait()
        held += count
    gathered.view(size, -1).copy_(rows.roll(place, 0))
