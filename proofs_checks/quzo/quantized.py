"""What rounding a perturbation to few bits does to an estimate, on average."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from proofs_checks.claims import Checks, conditioned, counterexample, printed
from proofs_checks.oracles.estimates import quantized_estimate_factor
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.setups import quantized_weights as quantized
from proofs_checks.setups.roundings import (
    Reaching,
    clamped_too_far,
    no_zero_point,
    qvalues_of,
    sampled_pair,
    towards_zero,
    uniforms_of,
    unlike_perturbations,
    weights_at_random,
)
from proofs_checks.statistics import compare_means, compare_two_points

BITS = tuple(range(2, 9))
_NUM_ELEMENTS = 4
_CLAMPED, _WIDE = 2.0, 6.0
"""Largest levels, in standard deviations of the perturbation: one that clamps 5 % of it, and one that clamps nothing."""


def check_estimators(context: Context) -> Outcome:
    """Compare Q-RGE1 and Q-RGE2 of a linear loss with the gradient times moments in closed form.

    ``E[(û₁·∇)û₂] = m·∇`` is asserted of its parts: ``E[q₁q₂]`` of one element, over all elements at once, and products of unlike
    elements, which vanish. Their variances do not grow with the dimension.
    """
    outcomes = []
    cases = [(bits, reach) for bits in BITS for reach in (_CLAMPED, _WIDE)]
    for number, (bits, reach) in enumerate(cases):
        rounding = Reaching("gaussian", bits, limit=reach)
        count = context.samples(400_000, 100_000)
        pair = sampled_pair(rounding, (count, _NUM_ELEMENTS), context.seed + number)
        kinds: tuple[tuple[Literal["q-rge1", "q-rge2"], Tensor], ...] = (
            ("q-rge1", pair[0]),
            ("q-rge2", pair[1]),
        )
        for kind, used in kinds:
            moment, declared = quantized_estimate_factor(kind, bits, rounding.scale), rounding.mean_of(kind)
            if abs(declared / moment - 1) > 1e-9:
                return Outcome(math.inf, 0.0, f"{kind} declares {declared}, its closed form is {moment}")
            outcomes.append(
                compare_means(
                    f"{bits} bits up to ±{reach:g}, {kind} (expected {moment:.4f}·∇)",
                    (pair[0] * used).view(-1, 1),
                    torch.tensor([moment], dtype=torch.float64),
                )
            )
            apart = (pair[0] * used.roll(1, dims=1)).view(-1, 1)
            theory = torch.zeros(1, dtype=torch.float64)
            outcomes.append(
                compare_means(f"{bits} bits up to ±{reach:g}, {kind}, unlike elements", apart, theory)
            )
    return worst(outcomes)


_WITHIN = (0.0, 0.31, -0.77, 1.5, -1.999)
_BEYOND = (2.4, -5.0, 2.001, 100.0)


def check_perturbations(numbers: tuple[float, ...], context: Context) -> Outcome:
    """Compare what runs round given numbers of a perturbation to, and how often up, with the quantized values next to them and the clamped numbers.

    Two values and their mean fix the variance, ``f(1 - f)/s²``.
    """
    count = context.samples(400_000, 40_000)
    given = torch.tensor(numbers, dtype=torch.float64)
    outcomes = []
    for bits in BITS:
        uniforms = uniforms_of((count, len(numbers)), context.seed + bits, "perturbation")
        rounding = Reaching("gaussian", bits, limit=_CLAMPED)
        qvalues = qvalues_of(given.expand(count, -1), rounding, uniforms).double()
        outcomes.append(
            _rounded(
                f"{bits} bits", qvalues / rounding.scale, given.clamp(-_CLAMPED, _CLAMPED), rounding.scale
            )
        )
    return worst(outcomes)


def check_weights(context: Context) -> Outcome:
    """Compare what weights with a zero point, moved from 0 by given numbers, are and how often they are up, with the numbers."""
    count = context.samples(400_000, 40_000)
    given = torch.tensor(_WITHIN, dtype=torch.float64)
    outcomes = []
    for bits in BITS:
        scale = Reaching("gaussian", bits, limit=_CLAMPED).scale
        rounded = weights_at_random(given.expand(count, -1), scale, bits, context.seed + bits)
        outcomes.append(_rounded(f"{bits} bits, a zero point", rounded, given, scale))
    return worst(outcomes)


def _rounded(name: str, rounded: Tensor, kept: Tensor, scale: float) -> Outcome:
    """Compare roundings with numbers within the range, of which there are no others than both neighbours."""
    qvalues = (rounded * scale).round()
    neighbours = torch.stack([(kept * scale).floor(), (kept * scale).ceil()])
    if not bool(((qvalues == neighbours[0]) | (qvalues == neighbours[1])).all()):
        return Outcome(math.inf, 0.0, f"{name}: a number is rounded to no neighbouring level")
    return compare_two_points(name, rounded, kept)


CHECKS: Checks = {
    "stochastic-rounding-unbiased": (
        conditioned(partial(check_perturbations, _WITHIN), quantized.SAMPLED_NEAREST, towards_zero),
        conditioned(check_weights, quantized.UPDATE_NEAREST, quantized.UPDATE_UNIFORMS, no_zero_point),
        counterexample(partial(check_perturbations, _BEYOND), clamped_too_far),
    ),
    "quantized-rge": printed(
        check_estimators, quantized.SAMPLED_NEAREST, towards_zero, quantized.SAME_KEY, unlike_perturbations
    ),
}
