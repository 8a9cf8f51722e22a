"""Copy this file, write the function, and try it: ``zosim study check proof_against_code mine.py``."""

from __future__ import annotations


def counterexample(bits: int) -> tuple[list[list[float]], list[float]]:
    """Return a Hessian and an activation that meet every hypothesis of SparQ's lemma 1 and break its bound.

    `bits`: of the codec: it rounds the activation to the nearest of ``2^(bits-1) - 1`` grid values on either side of 0, up to its
    largest magnitude.

    Returns
    -------
    hessian : list of list of float
        ``H`` of ``F∘S₂(a; y) = ½(a; y)ᵀH(a; y)``, 2n by 2n, activation first; its block of parameters has norm 0.1 or less.
    activation : list of float
        ``a``, n numbers of norm 1 or less.
    """
    raise NotImplementedError("write it")
