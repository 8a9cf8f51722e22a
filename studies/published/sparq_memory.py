"""Peak memory of SparQ's runs, over both GPUs, in GiB.

Zeroth-order runs hold weights and copies of logits; first-order ones the larger of three copies of the weights (the
third while weights are updated) and of two copies with activations, as :mod:`costmodel.backward` counts them. Weights are
float32: 26 is printed for OPT-6.7B, whose weights are 24.8 GiB in float32, 26.6 GB of 10^9 bytes. The longest batch
decides a peak, and the paper states no lengths, so the length at the peak is a constant of each data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.optimize import least_squares

from costmodel.backward import kept_bytes
from costmodel.configs import read_model_spec, spec_of_config
from costmodel.model_spec import ModelSpec
from studies.published.rows import PublishedRow
from studies.published.sparq import DATASETS, PAPER, NotPredicted, dataset_of, refuse_other_settings

PEAK = "memory_peak_total"
GIBIBYTE = 2**30

_BATCH = 32
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
_SIZES = ("125M", "1.3B", "2.7B", "6.7B", "13B")
_NAMES = {f"OPT-{size}": f"opt-{size.lower()}" for size in _SIZES} | {"GPT2": "gpt2"}
_HALF_UNIT = 0.5
_SCALE = 0.02

CONSTANTS: dict[str, tuple[str, str, float, float]] = {
    "length|SST-2": ("token", "of the longest batch of SST-2", 50, 1.0),
    "length|WIC": ("token", "of the longest batch of WIC", 80, 1.0),
    "length|RTE": ("token", "of the longest batch of RTE", 250, 1.0),
    "logit_copies": ("1", "float32 copies of the logits alive in the loss", 3, 0.5),
    "context": ("GiB", "of both GPUs' contexts, in every figure", 0.3, 1.0),
    "part|GPT2": ("1", "of activations and logits, that GPT2's figures show", 1, 0.5),
    "part|Llama-1B": ("1", "of activations and logits, that Llama-1B's figures show", 1, 0.5),
}
"""Unit, meaning, prior and standard deviation of its logarithm."""


@dataclass(frozen=True)
class PeakCase:
    """One printed peak.

    Attributes
    ----------
    model, dataset : str
    is_first_order : bool
    value : float or None
    """

    model: str
    dataset: str
    is_first_order: bool
    value: float | None = None


class MemoryConstant(BaseModel):
    """A constant with its value and 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    low: float
    high: float
    unit: str
    meaning: str


class MemoryFit(BaseModel):
    """Constants of the peaks.

    Attributes
    ----------
    constants : tuple of MemoryConstant
    half_width : float
        Of the 90 % interval in logs: what nine tenths of the residuals are within, each cell left out.
    num_cells : int
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    constants: tuple[MemoryConstant, ...]
    half_width: float
    num_cells: int

    @property
    def values(self) -> dict[str, float]:
        """Values by name."""
        return {constant.name: constant.value for constant in self.constants}


def peak_case(row: PublishedRow) -> PeakCase:
    """Return what a peak's row is about.

    Raises
    ------
    NotPredicted
        If it is not of the models, data sets and methods of these tables.
    """
    method = row["method"].split("(")[0].strip()
    dataset = dataset_of(row)
    if row["model"] not in (*_NAMES, "Llama-1B") or dataset not in DATASETS:
        raise NotPredicted(f"no memory is known of {row['model']!r} on {row['dataset']!r}")
    if method not in ("FO-SGD", "AQ-SGD", "ZO-SGD", "SparQ"):
        raise NotPredicted(f"method {row['method']!r} is not one of these tables'")
    refuse_other_settings(row)
    return PeakCase(row["model"], dataset, method in ("FO-SGD", "AQ-SGD"))


def printed_peaks(rows: Iterable[PublishedRow]) -> list[PeakCase]:
    """Return the peaks that rows print, once for two methods that share one; what is not of these runs is left out."""
    by_key = {}
    for row in rows:
        if row["paper"] == PAPER and row["quantity"] == PEAK and row.value is not None:
            try:
                case = replace(peak_case(row), value=row.value)
            except NotPredicted:
                continue
            by_key[case.model, case.dataset, case.is_first_order] = case
    return list(by_key.values())


@cache
def _spec(model: str) -> ModelSpec:
    return spec_of_config(_LLAMA, name=model) if model == "Llama-1B" else read_model_spec(_NAMES[model])


def peak_gib(case: PeakCase, values: Mapping[str, float]) -> tuple[float, str]:
    """Return the peak in GiB, and what most of it is."""
    spec, part = _spec(case.model), values.get(f"part|{case.model}", 1.0)
    length, weights = values[f"length|{case.dataset}"], spec.num_parameters * 4 / GIBIBYTE
    logits = _BATCH * length * spec.vocab_size * 4 / GIBIBYTE * values["logit_copies"]
    if not case.is_first_order:
        parts = {"weights": weights, "logits": logits * part}
    elif weights < (kept := _activations_gib(case.model, length) * part + logits * part):
        parts = {"weights and gradients": 2 * weights, "activations": kept}
    else:
        parts = {"weights, gradients and their update": 3 * weights}
    return sum(parts.values()) + values["context"], max(parts, key=parts.__getitem__)


def _activations_gib(model: str, length: float) -> float:
    """Return what all blocks keep, between whole lengths as between them."""
    low = max(1, math.floor(length))
    at = [_blocks_bytes(model, number) / GIBIBYTE for number in (low, low + 1)]
    return at[0] + (at[1] - at[0]) * (length - low)


@cache
def _blocks_bytes(model: str, length: int) -> int:
    spec = _spec(model)
    return spec.num_blocks * kept_bytes(spec, "block.0", batch=_BATCH, seq=length, attention="eager")


def fit_peaks(known: Sequence[PeakCase]) -> MemoryFit:
    """Return the constants that explain printed peaks best, under a Cauchy loss."""
    x, spread = _fitted(known)
    residuals = [_left_out(known, number) for number in range(len(known))]
    return MemoryFit(
        constants=tuple(
            MemoryConstant(
                name=name,
                value=float(np.exp(at)),
                low=float(np.exp(at - half)),
                high=float(np.exp(at + half)),
                unit=CONSTANTS[name][0],
                meaning=CONSTANTS[name][1],
            )
            for name, at, half in zip(CONSTANTS, x, spread, strict=True)
        ),
        half_width=float(np.quantile(np.abs(residuals), 0.9)),
        num_cells=len(known),
    )


def _left_out(known: Sequence[PeakCase], number: int) -> float:
    x, _ = _fitted([case for place, case in enumerate(known) if place != number])
    case = known[number]
    assert case.value is not None
    return math.log(peak_gib(case, _values(x))[0] / case.value)


def _values(x: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(CONSTANTS, np.exp(x).tolist(), strict=True))


def _fitted(known: Sequence[PeakCase]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    prior = np.log([constant[2] for constant in CONSTANTS.values()])
    sigma = np.array([constant[3] for constant in CONSTANTS.values()])

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        values = _values(x)
        off = []
        for case in known:
            assert case.value is not None
            noise = math.hypot(_SCALE * case.value, _HALF_UNIT / math.sqrt(3))
            off.append((peak_gib(case, values)[0] - case.value) / noise)
        return np.concatenate([np.arcsinh(np.array(off)), (x - prior) / sigma])

    solution = least_squares(residuals, prior)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return solution.x, 2 * np.sqrt(np.diag(covariance))
