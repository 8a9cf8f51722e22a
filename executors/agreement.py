"""Whether the replicas of a run still hold the same parameters, by their digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from topology.errors import RunError


def gathered_digests(digest: str) -> list[str]:
    """Return every rank's digest, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [digest]
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    return found


def refuse_disagreement(digests: Sequence[str], num_steps: int) -> None:
    """Raise if replicas differ, naming those that are not with the majority.

    Raises
    ------
    RunError
        If any two differ.
    """
    ((common, count), *_) = Counter(digests).most_common()
    if count == len(digests):
        return
    others = [str(rank) for rank, digest in enumerate(digests) if digest != common]
    noun = "ranks" if len(others) > 1 else "rank"
    raise RunError(
        f"after {num_steps} steps replicas differ: {noun} {', '.join(others)} from the other {count}",
        hint="they drew other directions or rounded otherwise; run every rank on one torch build and thread count",
    )
