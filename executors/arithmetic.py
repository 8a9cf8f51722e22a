"""Perturbation and update of flat parameters, rounded as the reference loop rounds them.

The reference loop writes ``θ + (s·z)·ε`` and ``θ - η·(g·z + wd·θ)``, every operation rounded to the format of the
parameter. Here the same operations run in pieces that stay in cache, in place, and with one multiplication fewer:
since ``s`` is a power of two with a sign, ``s·z`` is exact, so ``z·(s·ε)`` rounds the same real number to the same
value. (Doubling ``z`` overflows only above half the largest number, which no direction reaches.)
``add_(alpha=)`` would be faster still, and fuses two roundings into one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import frexp
from typing import Any

import torch
from torch import Tensor

PIECE_ELEMENTS = {"cpu": (1 << 15) - 64, "cuda": 1 << 24}
"""Elements swept at a time. On a CPU a piece and its temporaries stay in cache, and torch runs an
operation of less than 32768 on the calling thread: a barrier between threads for each would cost more than the operation, and far more
where cores are shared. On a GPU the piece bounds the temporaries."""

_THREADED_ELEMENTS = 1 << 18
"""Sweeps of at least this length are shared among threads."""


class Sweeper:
    """Runs the passes over parameters, keeping scratch memory from one to the next.

    Parameters
    ----------
    piece_elements : int, optional
        Elements at a time; by default what suits the device.
    num_threads : int
        Threads that share a long sweep on a CPU. Bits do not depend on it.
    """

    def __init__(self, piece_elements: int | None = None, num_threads: int = 1) -> None:
        self._piece_elements = piece_elements
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "zosim-sweep") if num_threads > 1 else None
        self._scratch = threading.local()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

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

        def sweep(begin: int, end: int, product: Tensor, _spare: Tensor) -> None:
            torch.mul(z[begin:end], scale * epsilon, out=product)
            theta[begin:end].add_(product)

        self._sweep(theta, sweep)

    def update(
        self, theta: Tensor, z: Tensor, *, gradient: float, learning_rate: float, weight_decay: float | None
    ) -> None:
        """Change `theta` to ``θ - η·(g·z + wd·θ)``, or to ``θ - η·(g·z)`` where `weight_decay` is None.

        A decay of 0 is not the same as None: it may turn a zero's sign, and an infinity into a NaN.
        """

        def sweep(begin: int, end: int, product: Tensor, decay: Tensor) -> None:
            piece = theta[begin:end]
            torch.mul(z[begin:end], gradient, out=product)
            if weight_decay is not None:
                torch.mul(piece, weight_decay, out=decay)
                product.add_(decay)
            product.mul_(learning_rate)
            piece.sub_(product)

        self._sweep(theta, sweep)

    def _sweep(self, theta: Tensor, sweep: Callable[[int, int, Tensor, Tensor], None]) -> None:
        size = self._piece_elements or PIECE_ELEMENTS.get(theta.device.type, 1 << 20)
        total = theta.numel()
        if self._pool is None or theta.device.type != "cpu" or total < _THREADED_ELEMENTS:
            self._share(theta, sweep, range(0, total, size))
            return
        begins = range(0, total, size)
        length = -(-len(begins) // self._num_threads)
        own, *others = (begins[i : i + length] for i in range(0, len(begins), length))
        tasks = [self._pool.submit(self._share, theta, sweep, share) for share in others]
        self._share(theta, sweep, own)
        for task in tasks:
            task.result()

    def _share(self, theta: Tensor, sweep: Callable[[int, int, Tensor, Tensor], None], begins: range) -> None:
        """Sweep the pieces that begin at `begins`."""
        total = theta.numel()
        first, second = self._temporaries(min(begins.step, total), theta)
        with torch.no_grad():
            for begin in begins:
                end = min(begin + begins.step, total)
                sweep(begin, end, first[: end - begin], second[: end - begin])

    def _temporaries(self, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Not kept on a GPU, where the caching allocator orders reuse by stream.
        if like.device.type != "cpu":
            return torch.empty_like(like[:size]), torch.empty_like(like[:size])
        kept: dict[Any, tuple[Tensor, Tensor]] = self._scratch.__dict__
        held = kept.get(like.dtype)
        if held is None or held[0].numel() < size:
            held = kept[like.dtype] = (torch.empty_like(like[:size]), torch.empty_like(like[:size]))
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
