"""Passes over quantized values and calls of quantized layers: their rates on a CPU, and their bytes elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from costmodel.formats import FORMATS

Memory = Literal["elementwise", "param_pass", "scratch"]
"""Where a pass finds its operands, as the bandwidths of :data:`costmodel.rates.profile.CONSTANT_UNITS` are named."""

QuantPass = Literal[
    "layers",
    "layers.sparse",
    "inputs",
    "sums",
    "gathering",
    "parting",
    "levels",
    "levels.float8",
    "levels.float4",
    "zeros",
    "side_path",
    "packing",
    "unpacking",
    "draws",
    "tensors",
    "tensors.sparse",
    "rounding",
    "signs",
    "matrices",
    "updates",
    "updates.float8",
    "updates.float4",
]


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of one pass over quantized values, or of one call."""

    # How often a CPU's core does it per second, before anything is known of it: what one core of an AMD EPYC (2026) was seen to do.
    core_rate: float
    memory: Memory = "param_pass"  # what its bandwidth is called where bytes say what it takes
    fixed_bytes: float = 0  # read and written each time
    num_numbers: float = 0  # numbers in the format that is computed in, besides

    def size_bytes(self, times: int, dtype: str) -> int:
        """Return the bytes that are read and written."""
        return round(times * (self.fixed_bytes + self.num_numbers * FORMATS[dtype].element_bytes))


PASSES: Mapping[QuantPass, PassCost] = {
    "layers": PassCost(1e4),  # called that multiply by quantized weights: Python, beside kernels
    "layers.sparse": PassCost(5e3),  # those along a sparse perturbation, besides
    "inputs": PassCost(1.3e9, "elementwise", 1, 4),  # numbers of a product, to a byte each
    "sums": PassCost(4e9, "elementwise", 4, 2),  # of products of bytes, scaled
    "gathering": PassCost(0.6e9, "elementwise", 12),  # sums of a sparse perturbation's rows, to their places
    "parting": PassCost(4e9, "param_pass", 1.5),  # weights of less than a byte, to one each
    "levels": PassCost(3.3e9, "param_pass", 1, 1),  # weights of a byte, to numbers
    "levels.float8": PassCost(0.3e9, "param_pass", 9, 1),
    "levels.float4": PassCost(0.9e9, "param_pass", 9, 1),
    "zeros": PassCost(1e10, "param_pass", 8),  # zero points of weights, besides
    "side_path": PassCost(3e9, "param_pass", 1, 2),  # a perturbation's quantized values, added to numbers
    "packing": PassCost(0.4e9, "scratch", 14),  # of a perturbation, into bytes that several share
    "unpacking": PassCost(0.6e9, "scratch", 14),  # and out of them
    "draws": PassCost(5e3),  # of quantized values, of any length: Python, beside kernels
    "tensors": PassCost(4e4),  # of each of these
    "tensors.sparse": PassCost(5e3),  # those of sparse perturbations, besides
    "rounding": PassCost(1e9, "scratch", 24),  # a perturbation's numbers, at random
    "signs": PassCost(1e10),  # drawn rounded, beside the draw
    "matrices": PassCost(5e3),  # of quantized values that an update changes: Python, beside kernels
    "updates": PassCost(0.25e9, "scratch", 100),  # of quantized values
    "updates.float8": PassCost(0.04e9, "scratch", 250),
    "updates.float4": PassCost(0.02e9, "scratch", 400),
}
"""How often is counted by :mod:`costmodel.formats.low_bits`. A CPU's profile has rates (``quant_rate``), which calibration finds, since what limits
passes there is arithmetic and Python as often as memory; elsewhere bytes say what they take."""


def traffic_bytes(passes: Iterable[tuple[QuantPass, int]], memory: Memory, dtype: str) -> int:
    """Return the bytes that those of some passes read and write whose bandwidth is that of `memory`.

    >>> traffic_bytes([("inputs", 10), ("updates", 7)], "elementwise", "bfloat16")
    90
    """
    return sum(PASSES[name].size_bytes(num, dtype) for name, num in passes if PASSES[name].memory == memory)
