"""Solutions of the exercise on proofs: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations


def activation(bits):
    """One number at the largest code, one between 0 and the first."""
    return [0.9, 0.4 * 0.9 / (2 ** (bits - 1) - 1)]


def block(corner, across, own):
    return [[corner, 0, across, 0], [0, corner, 0, across], [across, 0, own, 0], [0, across, 0, own]]


def right(bits):
    return block(0, 1, 0), activation(bits)


WRONG = [
    (lambda _bits: 3, "a matrix and an activation"),
    (lambda bits: ([[1.0]], activation(bits)), "2n by 2n"),
    (lambda bits: (block(0, float("nan"), 0), activation(bits)), "finite"),
    (lambda bits: ([[0, 0, 1, 0], *block(0, 1, 0)[1:3], [0, 0, 0, 0]], activation(bits)), "symmetric"),
    (lambda bits: (block(0, 1, 0), [3 * x for x in activation(bits)]), "a norm of at most 1"),
    (lambda bits: (block(0, 1, 0.5), activation(bits)), "make it 0.1 or less"),
    (lambda _bits: (block(0, 1, 0), [0.5, 0.5]), "changes nothing"),
    (lambda bits: (block(0, 0.01, 0.1), activation(bits)), "which block of H"),
]
