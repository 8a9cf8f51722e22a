"""A compressed boundary in a quadratic: what compressing its activation does to the gradient, and what SparQ's lemma 1 allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofs_checks.oracles.bounds import compressed_gradient_bound

Array = NDArray[np.float64]


def compressed(activation: Array, bits: int) -> Array:
    """Return an activation rounded to the nearest grid values of a symmetric grid that ends at its largest magnitude."""
    step = np.abs(activation).max() / (2 ** (bits - 1) - 1)
    return np.asarray(np.round(activation / step) * step if step else activation)


@dataclass(frozen=True)
class EncodedBoundary:
    """``S₁(x) = x`` before a boundary, ``F∘S₂(a; y) = ½(a; y)ᵀH(a; y)`` behind it."""

    hessian: Array  # ``H``, shape (2n, 2n)
    # activation, parameters: ``a`` and ``y``, shape (n,).
    activation: Array
    parameters: Array
    bits: int  # of the codec

    @classmethod
    def of(
        cls, hessian: Sequence[Sequence[float]], activation: Sequence[float], bits: int
    ) -> EncodedBoundary:
        """Return a boundary at parameters 0."""
        a = np.array(activation, dtype=float)
        return cls(np.array(hessian, dtype=float), a, np.zeros_like(a), bits)

    @property
    def kappa(self) -> float:
        """``‖a - C(a)‖/‖a‖``: assumption 5 wants it below 1."""
        error = np.linalg.norm(self.activation - compressed(self.activation, self.bits))
        return float(error / np.linalg.norm(self.activation))

    @property
    def rest_smoothness(self) -> float:
        """``L₂`` as assumption 3 states it: how fast the gradient in ``y`` moves with ``y``."""
        n = len(self.activation)
        return float(np.linalg.norm(self.hessian[n:, n:], 2))

    @property
    def joint_smoothness(self) -> float:
        """The same in activation and parameters together."""
        return float(np.linalg.norm(self.hessian, 2))

    @property
    def gradient_error(self) -> float:
        """``‖∇f - ∇f̂‖²``, the gradient in ``x`` (through ``S₁``) and in ``y``."""
        n = len(self.activation)
        moved = compressed(self.activation, self.bits) - self.activation
        return float(np.sum((self.hessian[:, :n] @ moved) ** 2))

    def allowed(self, smoothness: float) -> float:
        """Return lemma 1's bound, ``(1 + C²)·L₂²·κ²·L_S²`` with ``C = 1``, for a given ``L₂``."""
        return float(
            compressed_gradient_bound(1.0, smoothness, self.kappa, float(np.linalg.norm(self.activation)))
        )
