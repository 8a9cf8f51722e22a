"""Which experts of a mixture the tokens of some data visit, watched while the model's own forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.experts import Experts
from costmodel.models.model_spec import ModelSpec
from executors.models.blocks import find_blocks
from executors.models.model import Batch
from executors.models.spec import experts_of, spec_of_model
from topology.errors import ModelError


@dataclass(frozen=True, slots=True)
class BlockRouting:
    """Visits of one block's experts."""

    block: int
    # largest_share, smallest_share: of the visits, those of the expert that gets the most and of the one that gets the fewest.
    largest_share: float
    smallest_share: float
    fullest: float  # tokens of a batch that visited the expert which most of them did; mean over batches
    visited: float  # experts that a batch visited; mean over batches
    # predicted, predicted_error: experts that as many independent tokens are expected to visit, and the standard error that comes of
    # the sample.
    predicted: float
    predicted_error: float
    # uploads, most_uploads: of the experts beside the quarter that is visited the most, those that a batch is expected to need, and the
    # most it can.
    uploads: float
    most_uploads: int


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Routing of a mixture of experts on some data."""

    # num_sequences, num_tokens: sequences that were watched, and tokens of a batch, padding included: it is routed, too.
    num_sequences: int
    num_tokens: int
    num_resident: int  # experts of a block that `uploads` takes to be on the device
    blocks: list[BlockRouting]


def measure_routing(model: nn.Module, batches: Sequence[Batch]) -> tuple[ModelSpec, RoutingReport]:
    """Return a mixture's specification with the measured shares of its experts, and a report of them.

    - `model`: a language model whose blocks have experts.
    - `batches`: batches of the data.

    Raises ModelError if the model has no experts, or its code does not tell their modules which tokens visit them.

    Tokens of one sequence choose alike, so the errors of shares are those of a mean over sequences, not over tokens.
    """
    spec = spec_of_model(model)
    if spec.experts is None:
        raise ModelError(f"the blocks of {spec.name} have no experts", hint="leave --experts out")
    with _watched(model, spec.experts.num_experts) as token_counts, torch.no_grad():
        for batch in batches:
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    if not any(token_counts):
        message = f"{type(model).__name__} does not tell its experts' modules which tokens visit them"
        raise ModelError(message, hint="plan without measured shares, which counts them as even")
    rows = [_shares(own) if own else ((), ()) for own in token_counts]
    experts = spec.experts.model_copy(
        update={"shares": tuple(row for row, _ in rows), "share_errors": tuple(row for _, row in rows)}
    )
    num_tokens = batches[0]["input_ids"].numel()
    resident = spec.experts.num_experts // 4
    blocks = [
        _report(experts, block, own, num_tokens, resident) for block, own in enumerate(token_counts) if own
    ]
    num_sequences = sum(len(batch["input_ids"]) for batch in batches)
    return spec.model_copy(update={"experts": experts}), RoutingReport(
        num_sequences, num_tokens, resident, blocks
    )


@contextmanager
def _watched(model: nn.Module, num_experts: int) -> Iterator[list[list[Tensor]]]:
    """Yield a list for each block that receives the visits (sequences, experts) of every batch while the model runs."""
    blocks = find_blocks(model)
    token_counts: list[list[Tensor]] = [[] for _ in blocks]
    num_sequences = 1

    def enter(_model: nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
        nonlocal num_sequences
        num_sequences = len(given["input_ids"])

    def watch(own: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = next(
                (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dtype == torch.int64),
                None,
            )
            if chosen is not None:
                rows = chosen.reshape(num_sequences, -1)
                # Some code numbers a place for no expert behind the last.
                counts = [row[row < num_experts].bincount(minlength=num_experts) for row in rows]
                own.append(torch.stack(counts).double().cpu())

        return note

    hooks = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [
        module.register_forward_pre_hook(watch(own), with_kwargs=True)
        for own, block in zip(token_counts, blocks, strict=True)
        for module in experts_of(block)
    ]
    try:
        yield token_counts
    finally:
        for hook in hooks:
            hook.remove()


def _shares(token_counts: Sequence[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the share of the visits that each expert gets, and its standard error over sequences."""
    by_sequence = torch.cat(list(token_counts))
    shares = by_sequence / by_sequence.sum(1, keepdim=True)
    mean = shares.mean(0)
    spread = shares.std(0) if len(shares) > 1 else (mean * (1 - mean)).sqrt()
    return tuple(mean.tolist()), tuple((spread / len(shares) ** 0.5).tolist())


def _report(
    experts: Experts, block: int, token_counts: Sequence[Tensor], num_tokens: int, num_resident: int
) -> BlockRouting:
    counts = torch.stack([own.sum(0) for own in token_counts])
    return BlockRouting(
        block,
        max(experts.shares[block]),
        min(experts.shares[block]),
        float(counts.max(1).values.mean()),
        float((counts > 0).sum(1).double().mean()),
        experts.num_active(num_tokens, block),
        experts.active_error(num_tokens, block),
        experts.num_active(num_tokens, block, num_resident=num_resident),
        experts.most_uploads(num_tokens, num_resident=num_resident),
    )
