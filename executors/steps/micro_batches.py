"""A step's batch in micro-batches that are forwarded one after the other, and their losses as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executors.labels import IGNORED_LABEL
from executors.models.model import Batch
from executors.steps.frames import MicroBatch
from topology.errors import RunError


def micro_batches(
    batch: Batch, positions: Tensor | None, count: int, *, is_of_texts: bool = False
) -> list[MicroBatch]:
    """Return a batch as `count` micro-batches of as many sequences each.

    A loss is the mean over labels, or that of texts over sequences.

    Raises RunError if its sequences cannot be shared out evenly.
    """
    num_sequences = batch["input_ids"].shape[0]
    if num_sequences % count:
        raise RunError(
            f"a batch of {num_sequences} sequences cannot be divided into {count} equal micro-batches",
            hint="choose a number of micro-batches that divides the batch",
        )
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    position_chunks = [None] * count if positions is None else positions.chunk(count)
    parts = []
    for i in range(count):
        tensors = {name: tensor_chunks[i] for name, tensor_chunks in chunks.items()}
        # The first label is not asked for: nothing predicts it.
        num_labels = int((tensors["labels"][:, 1:] != IGNORED_LABEL).sum())
        num_averaged = num_sequences // count if is_of_texts else num_labels
        parts.append(MicroBatch(tensors, num_averaged, position_chunks[i]))
    return parts


def accumulated(losses: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the mean over all labels (or texts), given each micro-batch's mean over its own.

    One loss is returned as it is. Several are weighted in float64, ``Σ lᵢ·nᵢ / Σ nᵢ``: the projected gradient then
    loses nothing in the sum, but is not rounded as that of one large batch is.
    """
    if len(losses) == 1:
        return losses[0]
    pairs = [(loss.double(), n) for loss, n in zip(losses, counts, strict=True) if n]
    total = torch.zeros((), dtype=torch.float64, device=losses[0].device)
    for loss, n in pairs:
        total += loss * n
    return total / sum(counts)
