"""Numbers rounded at random as runs round them: perturbations, and quantized weights; the uniforms enumerated, or drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from costmodel.formats import QuantFormat
from costmodel.formats.low_bits import QuantConfig
from costmodel.formats.roundings import RoundedPerturbation
from executors.low_bits.quantized import QuantizedTensor
from executors.randomness.counter import CounterKey
from executors.randomness.rounded import (
    NonzeroRows,
    Purpose,
    RoundedSampler,
    RoundingUniforms,
    SamplingKeys,
    rounding_key,
)
from executors.threads import SamplingThreads
from proofs_checks.planting import Fault, altered, called_with, planted

_CPU = torch.device("cpu")
NUM_UNIFORMS = 256
"""Uniforms in even steps: what is a multiple of one of them is enumerated exactly."""


@dataclass(frozen=True)
class Reaching(RoundedPerturbation):
    """A rounded perturbation with a range of its own, where plans take that of least error.

    >>> Reaching("gaussian", 8, limit=6.35).scale
    20.0
    """

    limit: float = 1.0  # largest number that is not clamped

    @property
    def reach(self) -> float:
        """The limit."""
        return self.limit


def sampler_of(rounding: RoundedPerturbation, shape: tuple[int, ...]) -> RoundedSampler:
    """Return what draws one parameter's perturbations in a run."""
    shapes = [torch.Size(shape)]
    return RoundedSampler(rounding, shapes, NonzeroRows(0, shapes, (), _CPU), _CPU, SamplingThreads(1))


def sampled_pair(rounding: RoundedPerturbation, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return two roundings of one perturbation as a run draws them, in values."""
    rounded_sampler, values = sampler_of(rounding, shape), []
    for is_second in (False, True):
        qvalues = torch.empty(shape, dtype=torch.int8)
        keys = SamplingKeys.of(seed, 0, 0, is_second=is_second)
        rounded_sampler.fill_counted([qvalues.view(-1)], [0], CounterKey.of(seed, 0, 0), keys)
        values.append(qvalues.double() * rounding.unit)
    return values


def uniforms_of(shape: tuple[int, ...], seed: int, purpose: Purpose) -> Tensor:
    """Return a run's random numbers of one rounding."""
    numel = torch.Size(shape).numel()
    return RoundingUniforms([numel], _CPU).between(0, numel, 0, rounding_key(seed, 0, 0, purpose)).view(shape)


def qvalues_of(numbers: Tensor, rounding: RoundedPerturbation, uniforms: Tensor | None) -> Tensor:
    """Return the quantized values that a run makes of a perturbation's numbers."""
    given = numbers.to(torch.float32, copy=True)
    return sampler_of(rounding, tuple(numbers.shape)).qvalues(
        given, None if uniforms is None else uniforms.clone()
    )


def qvalues_and_probabilities(value: float, rounding: RoundedPerturbation) -> list[tuple[int, float]]:
    """Return the quantized values that a run makes of one number, with their probabilities: over uniforms in even steps.

    >>> qvalues_and_probabilities(0.25, Reaching("gaussian", 4, limit=7.0))
    [(0, 0.75), (1, 0.25)]
    """
    even = (torch.arange(NUM_UNIFORMS, dtype=torch.float32) + 0.5) / NUM_UNIFORMS
    qvalues, counts = qvalues_of(torch.full_like(even, value), rounding, even).unique(return_counts=True)
    return [
        (qvalue, count / NUM_UNIFORMS)
        for qvalue, count in zip(qvalues.tolist(), counts.tolist(), strict=True)
    ]


def weights_at_random(
    given: Tensor, scale: float, bits: int, seed: int, purpose: Purpose = "update"
) -> Tensor:
    """Return numbers, shape (outputs, inputs), as weights with a zero point keep them that were 0 and moved there at random."""
    name = cast("QuantFormat", f"int{bits}")
    quantized = QuantizedTensor.empty(QuantConfig(name, "tensor", has_zero_point=True), given.shape, _CPU)
    zero_point = 2 ** (bits - 1)
    assert quantized.zeros is not None
    quantized.scales.fill_(1 / scale)
    quantized.zeros.fill_(zero_point)
    quantized.qvalues.copy_(quantized.joined(torch.full(given.shape, zero_point, dtype=torch.uint8)))
    uniforms = RoundingUniforms([given.numel()], _CPU)
    key = rounding_key(seed, 0, 0, purpose)
    quantized.apply(-given.float(), 1.0, partial(uniforms.between, parameter=0, key=key))
    return quantized.values(torch.float64)


def weight_value(qvalue: int, scale: float, zero_point: int) -> float:
    """Return the value of a weight of 8 bits that is stored as `qvalue` and the zero point."""
    quant_config, stored = (
        QuantConfig("int8", "tensor", has_zero_point=True),
        [[qvalue + zero_point], [zero_point]],
    )
    symbol, zero = torch.tensor(stored, dtype=torch.uint8).split(1)
    held = QuantizedTensor.of_symbols(quant_config, symbol, torch.tensor([[1 / scale]]), zero)
    return float(held.values(torch.float64))


# -- faults ------------------------------------------------------------------------------------------------------

_AT_RANDOM = "executors.low_bits.grids:Integers.at_random"


@planted(_AT_RANDOM, "cutting off towards zero before the uniform number is drawn")
def towards_zero(shipped, self, numbers, uniforms):
    return torch.where(numbers < 0, numbers.trunc(), shipped(self, numbers, uniforms))


@planted("executors.randomness.rounded:RoundedSampler.fill_counted", "two roundings of unlike perturbations")
def unlike_perturbations(shipped, self, views, parameters, _key, keys):
    shipped(self, views, parameters, keys.rounding, keys)


clamped_too_far = called_with(
    _AT_RANDOM,
    "grid values clamped one too far",
    self=lambda it: altered(it, low=it.low - 1, high=it.high + 1),
)
uniforms_high = called_with(
    _AT_RANDOM, "uniforms three percent high", uniforms=lambda uniforms: 1.03 * uniforms
)
half_a_step_on = called_with(
    _AT_RANDOM, "rounding that moves grid values", numbers=lambda numbers: numbers + 0.5
)
no_zero_point = called_with(
    "executors.low_bits.quantized:QuantizedTensor.values",
    "a zero point that is forgotten",
    self=lambda it: altered(it, zeros=None),
)
no_scale = called_with(
    "executors.low_bits.quantized:QuantizedTensor.values",
    "the paper's equation 5: the scale is not divided out",
    self=lambda it: altered(it, scales=torch.ones_like(it.scales)),
)
no_unit = Fault(
    "the paper's equation 5, of perturbations",
    "costmodel.formats.roundings:RoundedPerturbation.unit",
    lambda _shipped, self: float(self.bits > 0),
)
