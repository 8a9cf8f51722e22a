"""Solutions of the exercise of ``studies.quzo``, right and wrong."""

from __future__ import annotations

import torch


def right(values, step, highest, generator):
    scaled = values / step
    below = scaled.floor()
    up = torch.rand(values.shape, generator=generator, dtype=values.dtype) < scaled - below
    return (below + up).clamp(-highest, highest).long()


def nearest(values, step, highest, generator):
    return (values / step).round().clamp(-highest, highest).long()


def truncating(values, step, highest, generator):
    scaled = values / step
    below = scaled.trunc()
    up = torch.rand(values.shape, generator=generator, dtype=values.dtype) < scaled.frac()
    return (below + up).clamp(-highest, highest).long()


def one_number_for_all(values, step, highest, generator):
    scaled = values / step
    below = scaled.floor()
    up = torch.rand((), generator=generator, dtype=values.dtype) < scaled - below
    return (below + up).clamp(-highest, highest).long()


def number_per_row(values, step, highest, generator):
    scaled = values / step
    below = scaled.floor()
    shape = (*values.shape[:-1], 1) if values.dim() > 1 else values.shape
    up = torch.rand(shape, generator=generator, dtype=values.dtype) < scaled - below
    return (below + up).clamp(-highest, highest).long()


def other_way(values, step, highest, generator):
    scaled = values / step
    below = scaled.floor()
    up = torch.rand(values.shape, generator=generator, dtype=values.dtype) > scaled - below
    return (below + up).clamp(-highest, highest).long()


def unclamped(values, step, highest, generator):
    return right(values, step, 10**6, generator)


def wide_noise(values, step, highest, generator):
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    return (values / step + noise).round().clamp(-highest, highest).long()


def its_own_numbers(values, step, highest, generator):
    return right(values, step, highest, torch.Generator().manual_seed(torch.seed() % 2**31))


def in_place(values, step, highest, generator):
    qvalues = right(values, step, highest, generator)
    values.div_(step)
    return qvalues


def as_numbers(values, step, highest, generator):
    return right(values, step, highest, generator) * step


WRONG = [
    (nearest, "the same value always"),
    (truncating, "standard errors towards zero"),
    (one_number_for_all, "a random number of its own"),
    (number_per_row, "a random number of its own"),
    (other_way, "values on the grid must stay"),
    (unclamped, "clamp them"),
    (wide_noise, "only the two next to it"),
    (its_own_numbers, "draw from it and from nothing else"),
    (in_place, "have been changed"),
    (as_numbers, "int64 tensor"),
]
