"""The loops of LoZO and MeZO as their authors write them: whole models perturbed in place, padded batches, all logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class PlainLoop:
    """Steps along ``U·Vᵀ`` of every tuned matrix, with the paper's ``1/r`` in the update, or along all of its elements."""

    model: nn.Module
    rank: int | None  # None for MeZO's perturbations, which have no factors
    lazy_steps: int
    rate: float
    epsilon: float
    losses: tuple[float, float] = (0.0, 0.0)  # of the latest step, at ``+ε`` and ``-ε``
    _rights: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, number: int, data: dict[str, Tensor], seed: int) -> float:
        """Take a step, and return its projected gradient."""
        self._perturb(number, seed, 1)
        plus = self.model(**data).loss
        self._perturb(number, seed, -2)
        minus = self.model(**data).loss
        self._perturb(number, seed, 1)
        g: float = ((plus - minus) / (2 * self.epsilon)).item()
        self.losses = plus.item(), minus.item()
        for parameter, z in self._perturbations(number, seed):
            parameter.data = parameter.data - self.rate * (g / (self.rank or 1) * z)
        return g

    def _perturb(self, number: int, seed: int, scale: int) -> None:
        for parameter, z in self._perturbations(number, seed):
            parameter.data = parameter.data + (scale * z) * self.epsilon

    def _perturbations(self, number: int, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        torch.manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield parameter, self._perturbation(name, parameter, opens=number % self.lazy_steps == 0)

    def _perturbation(self, name: str, parameter: nn.Parameter, *, opens: bool) -> Tensor:
        rows, columns = parameter.shape
        like = {"dtype": parameter.dtype, "device": parameter.device}
        if self.rank is None:
            dense: Tensor = torch.randn(rows, columns, **like)  # type: ignore[call-overload]
            return dense
        if opens:
            self._rights[name] = torch.randn(columns, self.rank, **like)  # type: ignore[call-overload]
        left: Tensor = torch.randn(rows, self.rank, **like)  # type: ignore[call-overload]
        return left @ self._rights[name].T
