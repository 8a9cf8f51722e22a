"""Losses of parts of a batch are one loss of the whole, whatever each part asks for."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from executors.steps.micro_batches import accumulated, micro_batches
from executors.steps.ops.exchange import _mean_of

VOCABULARY = 7


def loss_of(logits, labels):
    """Mean over all labels that something predicts, by the definition of a causal model's loss."""
    return cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("requested", ["from the first token on", "late", "of one sequence alone"])
@pytest.mark.parametrize("count", [2, 4])
def test_unequal_parts_are_no_bias(requested, count):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, VOCABULARY, (4, 9), generator=generator)
    logits = torch.randn(4, 9, VOCABULARY, generator=generator, dtype=torch.float64)
    for row in range(4):  # as many more labels in each row
        labels[row, 2 + 2 * row :] = -100
    if requested == "late":
        labels[:, 0] = -100
    elif requested == "of one sequence alone":
        labels[:3] = -100
    parts = micro_batches({"input_ids": labels, "labels": labels}, None, count)
    rows = zip(parts, logits.chunk(count), strict=True)
    losses = [loss_of(own, part.tensors["labels"]) for part, own in rows]
    found = accumulated(losses, [part.num_averaged for part in parts])
    # The same terms in another order, in float64.
    torch.testing.assert_close(found, loss_of(logits, labels), rtol=1e-12, atol=0)


def test_a_shard_of_which_nothing_is_asked_counts_as_a_micro_batch_does():
    """Data shards are bit for bit the micro-batches of one device, also where one of them has no labels."""
    losses = [torch.tensor(2.7182817), torch.tensor(float("nan"))]
    gathered = torch.tensor([[losses[0].double(), 3], [losses[1].double(), 0]], dtype=torch.float64)
    shards = _mean_of(gathered, torch.float32, torch.device("cpu"))
    alone = accumulated(losses, [3, 0])
    assert shards.dtype == alone.dtype == torch.float64
    assert shards.item() == alone.item() == pytest.approx(losses[0].item(), rel=1e-15)


def test_a_loss_that_one_rank_alone_has_found_keeps_its_format():
    gathered = torch.tensor([[0.0, -1], [2.5, 4]], dtype=torch.float64)
    found = _mean_of(gathered, torch.float32, torch.device("cpu"))
    assert (found.dtype, found.item()) == (torch.float32, 2.5)
    assert _mean_of(gathered[:1], torch.float32, torch.device("cpu")) is None
