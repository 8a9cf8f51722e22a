"""The two disciplines by which perturbations get their random numbers.

``mezo``: one generator per step and perturbation, reset to the step's seed, which fills the trainable parameters one
draw each. Bits equal those of ``torch.manual_seed(seed)`` followed by one ``torch.normal`` per parameter. Its
state before each group is kept, so that a group can be drawn again without walking the others.

``counter``: a parameter is cut into blocks of fixed length, and each block has a generator of its own, seeded by a
permutation of the block's number that is keyed by (seed, step, perturbation). Any slice of any parameter is made from the
blocks that it touches, by any rank, in any order and by any number of threads. Block lengths differ between device
types, and so do torch's generators: bits agree between devices of one type.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from executors.randomness.samplers import DistributionSampler

MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def generator_on(device: torch.device, seed: int) -> Generator:
    """Return a generator of `device` as ``torch.manual_seed(seed)`` leaves it."""
    generator = Generator(device=device)
    generator.manual_seed(seed)
    return generator


def sample_into(
    out: Tensor, sampler: DistributionSampler, generator: Generator, factor: float | None
) -> None:
    """Fill `out` with a perturbation's next numbers, times `factor` if there is one."""
    if factor is None:
        sampler.fill(out, generator)
    else:
        sampler.fill_scaled(out, generator, factor)


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on every bit of every number and on their order."""
    state = 0
    for number in numbers:
        state = _mix64(state ^ (number & _MASK64))
    return state


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
