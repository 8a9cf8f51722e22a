"""Brings the whole model to one rank, or to all, for a while: parameter groups of other stages are fetched one by one.

Between steps only, after a flush. What is fetched lies in host memory, in the format of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from executors.low_bits.stored import Stored
from executors.models.model import SegmentedModel
from executors.models.parameters import NamedTensor, stand_in
from executors.ranks.communicator import PIPELINE, Communicator
from zosim.plans import Plan


class UnshardedModel:
    """Fetches parameters that other stages hold.

    - `storage`: format of the weights.
    - `device`: where stand-ins lie.
    """

    def __init__(
        self,
        plan: Plan,
        forward_runner: SegmentedModel,
        communicator: Communicator | None,
        storage: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward_runner = forward_runner
        self._communicator = communicator
        self._storage = storage
        self._device = device
        self._is_here = False
        self._owners = {} if communicator is None else _owners(plan, forward_runner, communicator)

    @contextmanager
    def here(self, segment: str | None = None, *, only_on_first: bool = False) -> Iterator[None]:
        """Hold all parameters on this rank for the length of the block, or those of one segment.

        `only_on_first`: whether rank 0 alone needs them.

        All ranks have to come, in the same order. Inside, nothing more is fetched.
        """
        fetched: list[NamedTensor] = []
        outer = self._is_here
        try:
            if not outer:
                self._is_here = True
                fetched += self._fetched(segment, only_on_first=only_on_first)
            yield
        finally:
            self._is_here = outer
            for tensor in fetched:
                tensor.hold(stand_in(tensor, self._device))

    def _fetched(self, segment: str | None, *, only_on_first: bool) -> list[NamedTensor]:
        """Fetch parameters into their places, and return them."""
        communicator = self._communicator
        if communicator is None or not self._owners:
            return []
        pipeline = communicator.members(PIPELINE)
        if only_on_first and 0 not in pipeline:
            return []
        fetched = []
        for group in self._forward_runner.param_groups:
            holders = self._owners[group.name]
            is_wanted = segment is None or segment in group.segments
            lacks = 0 not in holders if only_on_first else len(holders) < len(pipeline)
            if not (is_wanted and lacks):
                continue
            # All ranks of the pipeline take part in the broadcast, whether or not they keep what comes.
            is_kept = communicator.rank not in holders and (communicator.is_first or not only_on_first)
            tensors = self._forward_runner.tensors_of(group.name)
            for tensor, held in zip(tensors, self._spread(communicator, group.name, tensors), strict=True):
                if is_kept:
                    tensor.hold(held.to(self._device))
                    fetched.append(tensor)
        return fetched

    def _spread(self, communicator: Communicator, group: str, tensors: Sequence[NamedTensor]) -> list[Stored]:
        """Return a group's tensors as the first rank that holds the group has them.

        The group is one message: an evaluation fetches every group for every forward, and a message for each tensor would wait
        for all ranks a dozen times as often.
        """
        holder = self._owners[group][0]
        if communicator.rank == holder:
            held = [tensor.held.to(torch.device("cpu"), self._storage) for tensor in tensors]
        else:
            held = [
                tensor.stored_in(
                    torch.empty(shape, dtype=dtype) for shape, dtype in tensor.arrays(self._storage).values()
                )
                for tensor in tensors
            ]
        values = [part for one in held for part in one.dump().values()]
        message = torch.cat([_bytes_of(part) for part in values]) if values else torch.empty(0)
        if message.numel():
            communicator.broadcast_host(PIPELINE, holder, message, f"fetching {group}")
        if communicator.rank != holder:
            for part, received in zip(values, message.split([part.nbytes for part in values]), strict=True):
                _bytes_of(part).copy_(received)
        return held


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: a view, where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _owners(
    plan: Plan, forward_runner: SegmentedModel, communicator: Communicator
) -> dict[str, tuple[int, ...]]:
    """Return, by parameter group, the ranks of this pipeline that hold it; empty for a single stage."""
    if plan.num_stages == 1:
        return {}
    segments = {rank: set(plan.segments_of(rank)) for rank in communicator.members(PIPELINE)}
    return {
        group.name: tuple(rank for rank, own in segments.items() if own & set(group.segments))
        for group in forward_runner.param_groups
    }
