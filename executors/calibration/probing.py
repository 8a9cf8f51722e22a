"""What a probe is, and what all of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.estimate import CopyDirection
from costmodel.formats import DType
from costmodel.work import Work
from executors.formats import TORCH_DTYPES
from executors.models.model import Batch
from executors.randomness.rng import generator_on

Action = Callable[[], object]

MEMORY_BYTES = {"cpu": 1 << 26, "accelerator": 1 << 30}
"""Far above any cache that a core can call its own."""

CACHE_BYTES = {"cpu": 1 << 18, "accelerator": 1 << 22}


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to time."""

    name: str
    work: Work  # what it counts as
    run: Action  # does it `num_done` times; on a GPU, issues it
    direction: CopyDirection = "h2d"  # which way bytes are copied, where they are
    # Runs over and over on another thread meanwhile, to see what the two take from each other.
    concurrent: Action | None = None
    # Runs before each sample and is not timed; such a sample runs the probe once.
    before: Action | None = None
    num_done: int = 1


def device_type_of(device: torch.device) -> str:
    """Return which of the tables' rows is a device's."""
    return "cpu" if device.type == "cpu" else "accelerator"


def random_tensor(device: torch.device, dtype: str, *shape: int) -> Tensor:
    """Return normals of a format, always the same."""
    return torch.randn(shape, device=device, generator=generator_on(device, 0)).to(TORCH_DTYPES[dtype])


def cold_copies(make: Callable[[], Tensor], device: torch.device) -> list[Tensor]:
    """Return as many tensors as overflow the caches, so that taking turns finds each of them cold."""
    first = make()
    size = first.numel() * first.element_size()
    return [first, *(make() for _ in range(min(64, MEMORY_BYTES[device_type_of(device)] // size)))]


def format_named(dtype: str) -> DType:
    """Return a name as the type that work is stated in; both use torch's names."""
    assert dtype in TORCH_DTYPES, dtype
    return dtype  # type: ignore[return-value]


def token_batch(batch: int, seq: int, vocab: int) -> Batch:
    """Return a batch of random tokens on the host, always the same."""
    tokens = torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
