"""Hypothesis strategies as wide as the theorems' premises, for tests of one's own: losses, points, numbers to be rounded.

Needs ``hypothesis``, which zosim itself does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class SmoothLoss:
    """``f(θ) = Σᵢ cᵢ sin(aᵢ·θ + bᵢ) + θᵀDθ/2``, with ``D`` diagonal, whose constants are known."""

    # weights, slopes, phases: ``c`` of shape (k,), ``a`` of shape (k, d), ``b`` of shape (k,).
    weights: Tensor
    slopes: Tensor
    phases: Tensor
    curvatures: Tensor  # diagonal of ``D``, shape (d,)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return (
            self.weights @ torch.sin(self.slopes @ theta + self.phases) + self.curvatures @ theta.square() / 2
        )

    def gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient, shape (d,)."""
        return (
            self.weights * torch.cos(self.slopes @ theta + self.phases)
        ) @ self.slopes + self.curvatures * theta

    def smoothed_gradient(self, theta: Tensor, epsilon: float) -> Tensor:
        """Return the gradient of ``E f(θ + εz)`` along normals: each sine is damped by ``exp(-ε²|aᵢ|²/2)``."""
        damped = self.weights * torch.exp(-(epsilon**2) * self.slopes.square().sum(1) / 2)
        return (damped * torch.cos(self.slopes @ theta + self.phases)) @ self.slopes + self.curvatures * theta

    @property
    def gradient_lipschitz(self) -> float:
        """``L``: no smaller than the Lipschitz constant of the gradient, ``Σ|cᵢ||aᵢ|² + max|D|``."""
        return float(self.weights.abs() @ self.slopes.square().sum(1) + self.curvatures.abs().max())

    @property
    def hessian_lipschitz(self) -> float:
        """No smaller than the Lipschitz constant of the Hessian, ``Σ|cᵢ||aᵢ|³``."""
        return float(self.weights.abs() @ self.slopes.norm(dim=1) ** 3)


def _vectors(count: int, largest: float) -> st.SearchStrategy[Tensor]:
    number = st.floats(-largest, largest, allow_subnormal=False)
    return st.lists(number, min_size=count, max_size=count).map(partial(torch.tensor, dtype=torch.float64))


def points(dimension: int, largest: float = 10.0) -> st.SearchStrategy[Tensor]:
    """Parameters of shape (dimension,), in float64, no component above `largest`."""
    return _vectors(dimension, largest)


def radii(least: float = 1e-6, most: float = 1.0) -> st.SearchStrategy[float]:
    """Smoothing radii, as likely in each power of ten."""
    return st.floats(math.log10(least), math.log10(most)).map(lambda power: 10.0**power)


@st.composite
def smooth_losses(draw: st.DrawFn, dimension: int, max_waves: int = 4) -> SmoothLoss:
    """Losses with a Lipschitz gradient and Hessian, which need be neither convex nor bounded below."""
    count = draw(st.integers(1, max_waves))
    slopes = torch.stack([draw(_vectors(dimension, 3.0)) for _ in range(count)])
    return SmoothLoss(
        draw(_vectors(count, 2.0)), slopes, draw(_vectors(count, math.pi)), draw(_vectors(dimension, 2.0))
    )


@st.composite
def numbers_to_round(draw: st.DrawFn, max_size: int = 256) -> Tensor:
    """Finite numbers in float32 of any scale between 1e-20 and 1e20: with ties, zeros, one sign or one value as it comes."""
    count = draw(st.integers(1, max_size))
    scale: float = 10.0 ** draw(st.floats(-20, 20))
    part = st.one_of(st.floats(-1, 1, allow_subnormal=False), st.sampled_from([0.0, 1.0, -1.0, 0.5]))
    numbers: list[float] = draw(st.lists(part, min_size=count, max_size=count))
    return torch.tensor(numbers, dtype=torch.float32) * scale
