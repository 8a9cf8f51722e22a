"""Perturbation and update of flat parameters, rounded as the reference loop rounds them.

The reference loop writes ``θ + (s·z)·ε`` and ``θ - η·(g·z + wd·θ)``, every operation rounded to the format of the
parameter. Here the same operations run in place, with fewer multiplications:

* ``s`` is a power of two with a sign, so ``s·z`` is exact, and ``z·(s·ε)`` rounds the same real number to the same
  value. (Doubling ``z`` overflows only above half the largest number, which no perturbation reaches.)
* For the same reason ``z·(s·ε)`` is ``s·w`` with ``w = z·ε`` rounded once, unless ``w`` is subnormal. A perturbation that
  is used for perturbations alone is kept as ``w``, and ``θ + s·w`` is one pass: a multiple by a power of two rounds
  nothing, so it does not matter whether the addition is fused with it.
* Where every ``z`` is 1 or -1, all products are one number with a sign, and both passes are one addition.

``θ.add_(z, alpha=s·ε)`` for any other ``z`` would be as fast, and fuses two roundings into one.

.. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333, algorithm
   1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import frexp
from typing import TypeVar

import torch
from torch import Tensor

from executors.device_scalars import DeviceScalar
from executors.low_bits.packed import QValues

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of all temporaries of a pass together. On a CPU these stay in a shared cache, and each operation is long
against what it takes to call it and to gather torch's threads for it; on a GPU the chunk bounds them."""

_LAUNCHED_ALONE_ELEMENTS = 1 << 22
"""Elements of which an accelerator's pass takes longer than to launch it: smaller tensors share kernels."""


_Given = TypeVar("_Given")


class ParamPass:
    """Runs the passes over parameters, keeping scratch memory from one to the next.

    `chunk_elements`: elements of all temporaries together on a CPU; by default :data:`CHUNK_ELEMENTS`.
    """

    def __init__(self, chunk_elements: int | None = None) -> None:
        self._chunk_elements = chunk_elements
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        """Memory that is kept for temporaries."""
        return sum(kept.numel() * kept.element_size() for kept in self._scratch.values())

    def perturb(
        self, theta: Tensor, z: QValues, scale: int, epsilon: float, out: Tensor | None = None
    ) -> None:
        """Write ``θ + (s·z)·ε``.

        - `theta`, `z`: one-dimensional, of one length and format, or `z` the quantized values of a rounded perturbation, packed
          or not, whose unit is in `epsilon`.
        - `scale`: ``s``, a power of two with either sign.
        - `out`: another place, of the same length and format; by default `theta` itself.
        """
        _check_scale(scale)
        left = theta if out is None else out

        def write(begin: int, end: int, product: Tensor) -> None:
            # Two kernels, so that the product is rounded before the sum, as in MeZO's loop; one fused kernel rounds once.
            _multiplied(z[begin:end], scale * epsilon, product)
            torch.add(theta[begin:end], product, out=left[begin:end])

        self._in_chunks(theta, write, num_temporaries=1)

    def perturb_scaled(self, theta: Tensor, w: Tensor, scale: int, out: Tensor | None = None) -> None:
        """Write ``θ + s·w``, where ``w = z·ε`` has been rounded already."""
        _check_scale(scale)
        with torch.no_grad():
            # The product with a power of two is exact: `alpha` adds no rounding.
            torch.add(theta, w, alpha=scale, out=theta if out is None else out)

    def perturb_signs(
        self, theta: Tensor, z: Tensor, scale: int, epsilon: float, out: Tensor | None = None
    ) -> None:
        """Write ``θ + (s·z)·ε``, where every element of `z` is 1 or -1."""
        # Rounded to the format of `theta` first, as each of the products would be.
        step = torch.mul(torch.ones((), dtype=theta.dtype), scale * epsilon).item()
        with torch.no_grad():
            torch.add(theta, z, alpha=step, out=theta if out is None else out)

    def update(
        self,
        theta: Tensor,
        z: QValues,
        *,
        gradient: float | DeviceScalar,
        learning_rate: float,
        weight_decay: float | None,
        decaying: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Change `theta` to ``θ - η·(g·z + wd·θ)``, or to ``θ - η·(g·z)`` where `weight_decay` is None.

        - `theta`, `z`: one-dimensional, of one length and format, or `z` the quantized values of a rounded perturbation.
        - `decaying`: first element and end of the stretches that decay; by default all. A kernel then does all of them.

        A decay of 0 takes no passes of its own. What it may change, for a finite ``θ``, is the sign of a product
        that is zero: then ``θ - η·0`` differs only where ``θ`` is -0, and for ``θ = -0`` the term ``0·θ = -0``
        leaves the product's sign as it is.
        """
        factor = gradient.factor(theta.dtype) if isinstance(gradient, DeviceScalar) else gradient

        def write(begin: int, end: int, product: Tensor, *decay: Tensor) -> None:
            chunk = theta[begin:end]
            # The order of the reference loop: g·z, then the decay, then η. Another order rounds otherwise.
            _multiplied(z[begin:end], factor, product)
            if weight_decay and decaying is None:
                torch.mul(chunk, weight_decay, out=decay[0])
                product.add_(decay[0])
            elif weight_decay and decaying is not None:
                parts = [
                    (max(first, begin) - begin, min(last, end) - begin)
                    for first, last in decaying
                    if first < end and begin < last
                ]
                if parts:
                    decays = torch._foreach_mul([chunk[first:last] for first, last in parts], weight_decay)
                    torch._foreach_add_([product[first:last] for first, last in parts], decays)
            product.mul_(learning_rate)
            # In place, as is all above: a pass takes no memory beyond the scratch.
            chunk.sub_(product)

        self._in_chunks(theta, write, num_temporaries=2 if weight_decay else 1)

    def update_signs(
        self, theta: Tensor, z: Tensor, *, gradient: float | DeviceScalar, learning_rate: float
    ) -> None:
        """Change `theta` to ``θ - η·(g·z)``, where every element of `z` is 1 or -1."""
        if isinstance(gradient, DeviceScalar):  # the step's size is not known here
            self.update(theta, z, gradient=gradient, learning_rate=learning_rate, weight_decay=None)
            return
        # Two roundings, as the products ``g·z`` and ``η·(g·z)`` have; a sign changes neither.
        step = torch.ones((), dtype=theta.dtype).mul_(gradient).mul_(learning_rate).item()
        with torch.no_grad():
            theta.add_(z, alpha=-step)

    def perturb_several(
        self,
        thetas: Sequence[Tensor],
        zs: Sequence[QValues],
        scale: int,
        epsilon: float,
        outs: Sequence[Tensor] | None = None,
    ) -> None:
        """Do to each of several tensors what :meth:`perturb` does to one; on an accelerator, small ones share kernels."""
        _check_scale(scale)
        with torch.no_grad():
            for indices in _batches(thetas):
                lefts = [(thetas if outs is None else outs)[index] for index in indices]
                here, along = _chosen(indices, thetas), _chosen(indices, zs)
                if len(indices) == 1:
                    self.perturb(here[0], along[0], scale, epsilon, lefts[0])
                    continue
                sums = _products(along, here[0].dtype, [scale * epsilon] * len(indices))[1]
                torch._foreach_add_(sums, here)
                # Not added in place: `lefts` may be another place than `here`.
                torch._foreach_copy_(lefts, sums)

    def update_several(
        self,
        thetas: Sequence[Tensor],
        zs: Sequence[QValues],
        *,
        gradients: Sequence[float | DeviceScalar],
        learning_rate: float,
        weight_decay: float | None,
        decaying: Sequence[bool],
    ) -> None:
        """Do to each of several tensors what :meth:`update` does to one; on an accelerator, small ones share kernels.

        - `thetas`, `zs`: one-dimensional; `thetas` of one format, `zs` of that one, of whole numbers of a byte, or packed.
        - `gradients`: by tensor.
        - `decaying`: by tensor.
        """
        dtype = thetas[0].dtype if thetas else torch.float32
        factors: dict[int, float | Tensor] = {
            id(gradient): gradient.factor(dtype) if isinstance(gradient, DeviceScalar) else gradient
            for gradient in gradients
        }
        with torch.no_grad():
            for chosen in _batches(thetas):
                if len(chosen) == 1:
                    (index,) = chosen
                    self.update(
                        thetas[index],
                        zs[index],
                        gradient=gradients[index],
                        learning_rate=learning_rate,
                        weight_decay=weight_decay if decaying[index] else None,
                    )
                    continue
                # Those of one projected gradient become neighbours.
                indices = sorted(chosen, key=lambda index: id(gradients[index]))
                here, along = _chosen(indices, thetas), _chosen(indices, zs)
                flat, products = _products(along, dtype, [factors[id(gradients[index])] for index in indices])
                parts = [number for number, index in enumerate(indices) if weight_decay and decaying[index]]
                if parts and weight_decay:
                    decays = torch._foreach_mul([here[number] for number in parts], weight_decay)
                    torch._foreach_add_([products[number] for number in parts], decays)
                flat.mul_(learning_rate)
                torch._foreach_sub_(here, products)

    def _in_chunks(self, theta: Tensor, write: Callable[..., None], *, num_temporaries: int) -> None:
        total = theta.numel()
        most = CHUNK_ELEMENTS.get(theta.device.type, 1 << 20)
        if theta.device.type == "cpu" and self._chunk_elements:
            most = self._chunk_elements
        kept = self._kept(max(num_temporaries, min(most, total)), theta)
        size = kept.numel() // num_temporaries
        with torch.no_grad():
            # Element-wise passes have the same bits in any chunks.
            for begin in range(0, total, size):
                length = min(size, total - begin)
                write(begin, begin + length, *(kept[i * size :][:length] for i in range(num_temporaries)))

    def _kept(self, size: int, like: Tensor) -> Tensor:
        # Not kept on a GPU, where the caching allocator orders reuse by stream.
        if like.device.type != "cpu":
            return like.new_empty(size)
        if like.dtype not in self._scratch or self._scratch[like.dtype].numel() < size:
            self._scratch.pop(like.dtype, None)  # before the larger one is made
            self._scratch[like.dtype] = like.new_empty(size)
        return self._scratch[like.dtype][:size]


def _multiplied(z: Tensor, factor: float | Tensor, out: Tensor) -> None:
    """Write ``z·factor``, which is made in 32 bits and rounded.

    Quantized values become numbers of `out` first on a CPU: two passes in cache, that torch vectorises, where one over both formats takes half as
    long again. Formats of up to 32 bits hold quantized values of a byte exactly, and multiply in 32 bits, too.
    """
    if z.dtype == out.dtype or out.device.type != "cpu" or out.dtype == torch.float64:
        torch.mul(z, factor, out=out)
    else:
        torch.mul(out.copy_(z), factor, out=out)


def _check_scale(scale: int) -> None:
    assert abs(frexp(scale)[0]) == 0.5, "the product with z must be exact"


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of tensors that share kernels: on a CPU one at a time, elsewhere small ones together."""
    shared: list[int] = []
    elements = 0
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu" or tensor.numel() > _LAUNCHED_ALONE_ELEMENTS:
            yield [index]
            continue
        # Temporaries of one batch stay within the bound of a chunk.
        if elements + tensor.numel() > CHUNK_ELEMENTS.get(tensor.device.type, 1 << 20):
            yield shared
            shared, elements = [], 0
        shared.append(index)
        elements += tensor.numel()
    if shared:
        yield shared


def _chosen(indices: Sequence[int], given: Sequence[_Given]) -> list[_Given]:
    return [given[index] for index in indices]


def _products(
    zs: Sequence[QValues], dtype: torch.dtype, factors: Sequence[float | Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return ``z`` times its factor of several tensors, rounded once, side by side; and each of them.

    Whole numbers of a byte are numbers of any format, so that it does not matter that they become these first.
    """
    sizes = [z.numel() for z in zs]
    flat = torch.empty(sum(sizes), dtype=dtype, device=zs[0].device)
    products, begin = list(flat.split(sizes)), 0
    # The slice unpacks quantized values that share a byte.
    torch._foreach_copy_(products, [z[:] for z in zs])
    for _, group in groupby(range(len(zs)), key=lambda number: id(factors[number])):
        numbers = list(group)
        end = begin + sum(sizes[number] for number in numbers)
        flat[begin:end].mul_(factors[numbers[0]])
        begin = end
    return flat, products


def gathered_several(thetas: Sequence[Tensor], zs: Sequence[Tensor], step: float) -> list[Tensor]:
    """Return copies of tensors after a perturbation by `step` times their perturbations; on an accelerator in few kernels."""
    copies = list(thetas)
    for indices in _batches(thetas):
        here, along = _chosen(indices, thetas), _chosen(indices, zs)
        if len(indices) == 1:
            copies[indices[0]] = gathered(here[0], along[0], (1,), step)
            continue
        flat = [[tensor.reshape(-1) for tensor in tensors] for tensors in (here, along)]
        sums = _products(flat[1], here[0].dtype, [step] * len(indices))[1]
        torch._foreach_add_(sums, flat[0])
        for index, theta, total in zip(indices, here, sums, strict=True):
            copies[index] = total.view_as(theta)
    return copies


def gathered(theta: Tensor, z: Tensor, scales: tuple[int, ...], epsilon: float) -> Tensor:
    """Return a copy of `theta` after the perturbations by each of `scales` in turn.

    All are done, though they add up to one: every addition rounds, and the rows must have the bits of the table itself.
    """
    rows = theta.clone()
    for scale in scales:
        rows.add_(torch.mul(z, scale * epsilon, out=torch.empty_like(rows)))
    return rows


def projected_gradient(loss_plus: Tensor, loss_other: Tensor, epsilon: float, *, central: bool) -> Tensor:
    """Return ``g`` in the precision of the losses, a scalar where they are.

    `loss_plus`, `loss_other`: scalars: the loss at ``+ε``, and at ``-ε`` (central) or unperturbed (forward).

    .. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       definition 1.
    """
    return (loss_plus - loss_other) / (2 * epsilon if central else epsilon)
