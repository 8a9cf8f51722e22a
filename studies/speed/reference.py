"""The reference MeZO loop as its authors write it, and the least that any loop has to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def literal_step(model: nn.Module, data: Mapping[str, Any], seed: int, rate: float, epsilon: float) -> float:
    """Take one step: four samplings of every perturbation, four passes with their temporaries, two forwards."""
    _perturb(model, seed, 1, epsilon)
    plus = model(**data).loss
    _perturb(model, seed, -2, epsilon)
    minus = model(**data).loss
    _perturb(model, seed, 1, epsilon)
    g: float = ((plus - minus) / (2 * epsilon)).item()
    torch.manual_seed(seed)
    for parameter in _tuned(model):
        parameter.data = parameter.data - rate * (g * _perturbation_like(parameter))
    return g


@torch.no_grad()
def two_forwards(model: nn.Module, data: dict[str, Tensor]) -> tuple[float, float]:
    """Return the loss twice: the floor of a step."""
    return model(**data).loss.item(), model(**data).loss.item()


def _perturb(model: nn.Module, seed: int, scale: int, epsilon: float) -> None:
    torch.manual_seed(seed)
    for parameter in _tuned(model):
        parameter.data = parameter.data + (scale * _perturbation_like(parameter)) * epsilon


def _tuned(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _perturbation_like(parameter: Tensor) -> Tensor:
    data = parameter.data
    return torch.normal(mean=0, std=1, size=data.size(), device=data.device, dtype=data.dtype)
