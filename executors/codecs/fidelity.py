"""What a codec does to an activation, and to the difference between two of them that a projected gradient is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from costmodel.formats.codecs import CodecSpec
from executors.codecs.quantizing import dequantize, quantize
from topology.errors import CodecError


def relative_error(tensor: Tensor, spec: CodecSpec, generator: Generator | None = None) -> float:
    """Return ``κ = ‖x - C(x)‖ / ‖x‖``; 0 for a tensor of zeros that comes back as it was.

    SparQ's assumption 5 asks for ``κ < 1``. Rounding to the nearest of values among which 0 is cannot break it.
    Stochastic rounding can: its error has the variance ``f·(1 - f)·s²`` where most numbers are small against ``s``.
    """
    if spec.bits is None:
        return 0.0
    wide = tensor.detach().double()
    off, size = (received(tensor, spec, generator).double() - wide).norm(), wide.norm()
    return float(off / size) if float(size) else float("inf") if float(off) else 0.0


def received(tensor: Tensor, spec: CodecSpec, generator: Generator | None = None) -> Tensor:
    """Return what arrives of `tensor`: the values that its message would be decoded to."""
    return tensor if spec.bits is None else dequantize(quantize(tensor, spec, generator))


@dataclass(frozen=True, slots=True)
class Visibility:
    """Whether a quantized activation still sees a perturbation of the parameters before it."""

    epsilon: float  # smoothing radius at which the activations were taken
    changed: float  # part of the elements whose symbol differs between the two signs
    # ``‖(C(a⁺) - C(a⁻)) - (a⁺ - a⁻)‖ / ‖a⁺ - a⁻‖``: what the codec adds to a difference, against the difference. A
    # projected gradient through a linear rest of the model, whose weights point anywhere, is off by this factor.
    noise_to_signal: float
    smallest_epsilon: float  # where the two are equal, by the law of `exponent`
    # The noise of the ratio falls as ``ε^-exponent``: 1 for independent roundings, ½ for the nearest or for the same
    # random numbers at both signs, where an element is off only if a threshold lies between its two values.
    exponent: float

    @property
    def warning(self) -> str | None:
        """What to tell a user who quantizes so at this ε; None if the difference outweighs the noise."""
        if self.noise_to_signal <= 1:
            return None
        return (
            f"at ε={self.epsilon:g} quantization adds {self.noise_to_signal:.1f} times the difference that the "
            f"gradient is made of ({self.changed:.2%} of the symbols differ); ε of about {self.smallest_epsilon:.1g} "
            "or more bits would make it visible"
        )


def visibility(
    plus: Tensor, minus: Tensor, spec: CodecSpec, *, epsilon: float, seed: int = 0, shared_noise: bool = True
) -> Visibility:
    """Return how well the difference of two activations survives the codec.

    - `plus`, `minus`: the same activation, forwarded at ``θ + εz`` and at ``θ - εz``.
    - `spec`: with bits.
    - `epsilon`: ``ε > 0``.
    - `seed`: of stochastic rounding.
    - `shared_noise`: whether both signs are rounded with the same random numbers.

    Raises CodecError if the activations do not differ, or the codec cannot represent them.
    """
    true = plus.detach().double() - minus.detach().double()
    if not bool(true.any()):
        raise CodecError(
            f"the activations at +eps and -eps are identical, with eps={epsilon:g}",
            hint="nothing before the split point is perturbed, or eps is below the resolution of the format",
        )
    seeds = (seed, seed if shared_noise else seed + 1)
    generators = [torch.Generator(plus.device).manual_seed(number) for number in seeds]
    sent = [quantize(a, spec, generator) for a, generator in zip((plus, minus), generators, strict=True)]
    noise = dequantize(sent[0]).double() - dequantize(sent[1]).double() - true
    ratio = float(noise.norm() / true.norm())
    changed = float((sent[0].symbols != sent[1].symbols).double().mean())
    independent = spec.rounding == "stochastic" and not shared_noise
    exponent = 1.0 if independent else 0.5
    return Visibility(epsilon, changed, ratio, epsilon * ratio ** (1 / exponent), exponent)
