"""The model as it stands between two steps, wherever its blocks reside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from costmodel.models.model_spec import HEAD
from executors.low_bits.stored import Stored
from executors.models.halves import as_tensor
from executors.models.model import Batch, Handed, SegmentedModel
from executors.models.parameters import NamedTensor
from executors.models.recording_blocks import StepCache
from executors.ranks.unsharded_model import UnshardedModel


class PresentWeights:
    """Forwards at a session's weights, and copies of them; only after a flush.

    - `forward_runner`: its parameters lie in their final places.
    - `storage`: format that they are used in.
    - `device`: where they are used.
    - `whole`: brings what other stages hold; all ranks then have to ask alike.
    """

    def __init__(
        self,
        forward_runner: SegmentedModel,
        storage: torch.dtype,
        device: torch.device,
        whole: UnshardedModel,
    ) -> None:
        self._forward_runner = forward_runner
        self._whole = whole
        self._storage = storage
        self._device = device

    def loss(self, batch: Batch) -> float:
        """Return the loss of a batch."""
        moved, cache, hidden = self._before_head(batch)
        with self._there(HEAD), torch.no_grad():
            return as_tensor(self._forward_runner.run(HEAD, moved, cache, hidden)).item()

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        _, _, hidden = self._before_head(batch)
        with self._there(HEAD), torch.no_grad():
            assert hidden is not None
            return self._forward_runner.logits(hidden)

    def _before_head(self, batch: Batch) -> tuple[Batch, StepCache, Handed | None]:
        """Return a batch on the device, and what all segments but the head make of it."""
        moved = {name: tensor.to(self._device) for name, tensor in batch.items()}
        cache = StepCache()
        handed: Handed | None = None
        with torch.no_grad():
            for segment in self._forward_runner.segments[:-1]:
                with self._there(segment):
                    handed = self._forward_runner.run(segment, moved, cache, handed)
        return moved, cache, handed

    @contextmanager
    def _there(self, segment: str) -> Iterator[None]:
        """Let a segment's weights be on the device in their storage format for a while."""
        moved: list[tuple[NamedTensor, Stored]] = []
        with self._whole.here(segment):
            for group in self._forward_runner.param_groups:
                if segment in group.segments:
                    for tensor in self._forward_runner.tensors_of(group.name):
                        home = tensor.held
                        here = home.to(self._device, self._storage)
                        if here is not home:
                            moved.append((tensor, home))
                            tensor.hold(here)
            try:
                yield
            finally:
                for tensor, home in moved:
                    tensor.hold(home)

    @contextmanager
    def unsharded_model(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield `model` with all its weights on the device in their storage format."""
        with self._whole.here():
            homes = [tensor.held for tensor in self._forward_runner.tensors]
            try:
                for tensor in self._forward_runner.tensors:
                    tensor.hold(tensor.held.to(self._device, self._storage))
                yield model
            finally:
                for tensor, home in zip(self._forward_runner.tensors, homes, strict=True):
                    tensor.hold(home)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the parameters by name, a tied one once, on the CPU, all as numbers."""
        with self._whole.here():
            return {tensor.name: tensor.numbers(self._storage) for tensor in self._forward_runner.tensors}
