"""The model as it stands between two steps, wherever its blocks reside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from executors.models.halves import Handed
from executors.models.model import Batch, CutModel
from executors.models.recording_blocks import StepCache
from executors.ranks.whole_model import WholeModel


class PresentWeights:
    """Forwards at a session's weights, and copies of them; only after a flush.

    Parameters
    ----------
    cut : CutModel
        Its parameters lie in their final places.
    storage : torch.dtype
        Format that they are used in.
    device : torch.device
        Where they are used.
    whole : WholeModel
        Brings what other stages hold; all ranks then have to ask alike.
    """

    def __init__(self, cut: CutModel, storage: torch.dtype, device: torch.device, whole: WholeModel) -> None:
        self._cut = cut
        self._whole = whole
        self._storage = storage
        self._device = device

    def loss(self, batch: Batch) -> float:
        """Return the loss of a batch."""
        return self._forward(batch, self._cut.head).item()

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        return self._forward(batch, lambda hidden, _moved: self._cut.logits(hidden))

    def _forward(self, batch: Batch, head: Callable[[Tensor, Batch], Tensor]) -> Tensor:
        moved = {name: tensor.to(self._device) for name, tensor in batch.items()}
        cache = StepCache()
        first, *between, last = self._cut.segments
        with torch.no_grad():
            with self._there(first):
                handed: Handed = self._cut.embed(moved, cache)
            for segment in between:
                with self._there(segment):
                    handed = self._cut.between(segment, handed, cache)
            assert isinstance(handed, Tensor)
            with self._there(last):
                return head(handed, moved)

    @contextmanager
    def _there(self, segment: str) -> Iterator[None]:
        """Let a segment's weights be on the device in their storage format for a while."""
        moved: list[tuple[nn.Parameter, Tensor]] = []
        with self._whole.here(segment):
            for group in self._cut.groups:
                if segment in group.segments:
                    for tensor in self._cut.tensors_of(group.name):
                        home = tensor.parameter.data
                        if home.device != self._device or home.dtype != self._storage:
                            moved.append((tensor.parameter, home))
                            tensor.parameter.data = home.to(self._device, self._storage)
            try:
                yield
            finally:
                for parameter, home in moved:
                    parameter.data = home

    @contextmanager
    def whole_model(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield `model` with all its weights on the device in their storage format."""
        with self._whole.here():
            homes = [tensor.parameter.data for tensor in self._cut.tensors]
            try:
                for tensor in self._cut.tensors:
                    tensor.parameter.data = tensor.parameter.data.to(self._device, self._storage)
                yield model
            finally:
                for tensor, home in zip(self._cut.tensors, homes, strict=True):
                    tensor.parameter.data = home

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the parameters by name, a tied one once, on the CPU."""
        contiguous = torch.contiguous_format
        with self._whole.here():
            return {
                t.name: t.parameter.detach().to("cpu", self._storage, copy=True, memory_format=contiguous)
                for t in self._cut.tensors
            }
