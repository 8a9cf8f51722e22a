"""Perturbation and update of flat parameters, rounded as the reference loop rounds them.

The reference loop writes ``θ + (s·z)·ε`` and ``θ - η·(g·z + wd·θ)``, every operation rounded to the format of the
parameter. Here the same operations run in pieces that stay in cache, in place, and with one multiplication fewer:
since ``s`` is a power of two with a sign, ``s·z`` is exact, so ``z·(s·ε)`` rounds the same real number to the same
value. (Doubling ``z`` overflows only above half the largest number, which no direction reaches.)
``add_(alpha=)`` would be faster still, and fuses two roundings into one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import frexp

import torch
from torch import Tensor

PIECE_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements swept at a time: on a CPU a piece and its temporaries stay in the second-level cache; on a GPU the
piece bounds the temporaries."""


class Sweeper:
    """Runs the passes over parameters, keeping scratch memory from one to the next.

    Parameters
    ----------
    piece_elements : int, optional
        Elements at a time; by default what suits the device.
    """

    def __init__(self, piece_elements: int | None = None) -> None:
        self._piece_elements = piece_elements
        self._scratch = threading.local()

    def perturb(self, theta: Tensor, z: Tensor, scale: int, epsilon: float) -> None:
        """Change `theta` to ``θ + (s·z)·ε``.

        Parameters
        ----------
        theta, z : torch.Tensor
            One-dimensional, of one length and format.
        scale : int
            ``s``, a power of two with either sign.
        epsilon : float
        """
        assert abs(frexp(scale)[0]) == 0.5, "the product with z must be exact"
        for begin, end, product, _ in self._pieces(theta):
            torch.mul(z[begin:end], scale * epsilon, out=product)
            theta[begin:end].add_(product)

    def update(
        self, theta: Tensor, z: Tensor, *, gradient: float, learning_rate: float, weight_decay: float | None
    ) -> None:
        """Change `theta` to ``θ - η·(g·z + wd·θ)``, or to ``θ - η·(g·z)`` where `weight_decay` is None.

        A decay of 0 is not the same as None: it may turn a zero's sign, and an infinity into a NaN.
        """
        for begin, end, product, decay in self._pieces(theta):
            piece = theta[begin:end]
            torch.mul(z[begin:end], gradient, out=product)
            if weight_decay is not None:
                torch.mul(piece, weight_decay, out=decay)
                product.add_(decay)
            product.mul_(learning_rate)
            piece.sub_(product)

    def _pieces(self, theta: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield the bounds of each piece with two scratch tensors of its length."""
        size = self._piece_elements or PIECE_ELEMENTS.get(theta.device.type, 1 << 20)
        total = theta.numel()
        first, second = self._temporaries(min(size, total), theta)
        for begin in range(0, total, size):
            end = min(begin + size, total)
            yield begin, end, first[: end - begin], second[: end - begin]

    def _temporaries(self, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Per thread: instructions of two streams may sweep at once. Not kept on a GPU, where memory is scarcer
        # than time and the caching allocator orders reuse by stream.
        if like.device.type != "cpu":
            return torch.empty(size, dtype=like.dtype, device=like.device), torch.empty(
                size, dtype=like.dtype, device=like.device
            )
        kept: dict[torch.dtype, tuple[Tensor, Tensor]] = self._scratch.__dict__
        held = kept.get(like.dtype)
        if held is None or held[0].numel() < size:
            held = kept[like.dtype] = (
                torch.empty(size, dtype=like.dtype),
                torch.empty(size, dtype=like.dtype),
            )
        return held


def gathered(theta: Tensor, z: Tensor, scales: tuple[int, ...], epsilon: float) -> Tensor:
    """Return a copy of `theta` after the perturbations by each of `scales` in turn."""
    rows = theta.clone()
    for scale in scales:
        rows.add_(torch.mul(z, scale * epsilon))
    return rows


def projected_gradient(loss_plus: Tensor, loss_other: Tensor, epsilon: float, *, central: bool) -> float:
    """Return ``g`` in the precision of the losses.

    Parameters
    ----------
    loss_plus, loss_other : torch.Tensor
        Scalars: the loss at ``+ε``, and at ``-ε`` (central) or unperturbed (forward).
    """
    return ((loss_plus - loss_other) / (2 * epsilon if central else epsilon)).item()
