"""Peak memory of SparQ's runs, over both GPUs, in GiB.

Zeroth-order runs hold weights and copies of logits; first-order ones the larger of three copies of the weights (the
third while weights are updated) and of two copies with activations, as :mod:`costmodel.models.backward` counts them. Weights are
float32: 26 is printed for OPT-6.7B, whose weights are 24.8 GiB in float32, 26.6 GB of 10^9 bytes. The longest batch
decides a peak, and the paper states no lengths, so the length at the peak is a constant of each data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from costmodel.models.backward import kept_bytes
from costmodel.models.configs import read_model_spec, spec_of_config
from costmodel.models.model_spec import ModelSpec
from studies.published.constants import FittedConstant
from studies.published.posterior import Posterior, TableFit, left_out_errors, posterior
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

CONSTANTS = (
    FittedConstant("length|SST-2", "token", "of the longest batch of SST-2", 50, 1.0),
    FittedConstant("length|WIC", "token", "of the longest batch of WIC", 80, 1.0),
    FittedConstant("length|RTE", "token", "of the longest batch of RTE", 250, 1.0),
    FittedConstant("logit_copies", "1", "float32 copies of the logits alive in the loss", 3, 0.5),
    FittedConstant("context", "GiB", "of both GPUs' contexts, in every figure", 0.3, 1.0),
    FittedConstant("part|GPT2", "1", "of activations and logits, that GPT2's figures show", 1, 0.5),
    FittedConstant("part|Llama-1B", "1", "of activations and logits, that Llama-1B's figures show", 1, 0.5),
)


@dataclass(frozen=True)
class PeakCase:
    """One printed peak."""

    model: str
    dataset: str
    is_first_order: bool
    value: float | None = None


def peak_case(row: PublishedRow) -> PeakCase:
    """Return what a peak's row is about.

    Raises NotPredicted if it is not of the models, data sets and methods of these tables.
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


def fit_peaks(known: Sequence[PeakCase]) -> TableFit:
    """Return the constants that explain printed peaks best, under a Cauchy loss."""
    left_out = left_out_errors(known, lambda others: _posterior(others).values, peak_gib)
    return TableFit(
        constants=_posterior(known).found,
        half_width=float(np.quantile(np.abs(left_out), 0.9)),
        num_cells=len(known),
    )


def _posterior(known: Sequence[PeakCase]) -> Posterior:
    def errors(values: Mapping[str, float]) -> list[float]:
        off = []
        for case in known:
            assert case.value is not None
            noise = math.hypot(_SCALE * case.value, _HALF_UNIT / math.sqrt(3))
            off.append(math.asinh((peak_gib(case, values)[0] - case.value) / noise))
        return off

    return posterior(CONSTANTS, errors)
