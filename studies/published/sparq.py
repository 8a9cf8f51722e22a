"""SparQ's tables: which runs their communication volumes are of, and what constants a row may decide.

``volume = width · tokens · Σ bits / 8`` over the activations that cross per token of a step, at the MLP's width where
the paper splits. It states neither steps nor lengths, so the tokens that a run sent are constants: one for each data set
in first-order runs, and what part of them a model's zeroth-order runs sent. Conventions found in the numbers
(``python -m studies.sparq`` prints the arithmetic):

* first-order SGD sends 16 bits there and 16 back, AQ-SGD 4 and 8: 12/32 of it;
* zeroth-order SGD sends ``2P`` activations of 16 bits, SparQ ``P + 1`` of the bits fitted here: near ``b`` for ReLU, which
  is dense packing, and more elsewhere;
* the residual stream is in none of them;
* volumes of Table 2 are rounded to whole GB, of OPT-125M to tenths; those of Table 1 to hundredths.

Constants are fitted in logarithms, where the model is linear: a posterior in closed form, with the rounding of print as
noise. What two runs of one model on one data set have in common beyond constants is an effect of its own with a small
prior.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from studies.published.rows import PublishedRow
from topology.errors import ZosimError

PAPER = "SparQ"
VOLUME, KEPT = "comm_volume", "memory_extra_messages"
MESSAGES = "messages"
NUM_PERTURBATIONS = 5
FORWARD, CENTRAL = NUM_PERTURBATIONS + 1, 2 * NUM_PERTURBATIONS
BASE_BITS = 16

WIDTHS = {"OPT-125M": 3072, "OPT-1.3B": 8192, "OPT-6.7B": 16384, "GPT2": 3072, "Llama-1B": 8192}
"""Width of the MLP's inside."""

ACTIVATIONS = {"GPT2": "GELU", "Llama-1B": "SwiGLU"}
"""Activation function by model; ReLU elsewhere."""

DATASETS = ("SST-2", "WIC", "RTE")

_NARROW = 8192
_BITS_ANCHORS = (1, 4, 8)


class NotPredicted(ZosimError):  # noqa: N818 - reads as the statement it makes
    """A row of these tables without a prediction, with the reason."""


@dataclass(frozen=True)
class VolumeCase:
    """One communication volume."""

    model: str
    dataset: str
    # {"FO-SGD", "AQ-SGD", "ZO-SGD", "SparQ", "messages"}: ``"messages"`` are those that AQ-SGD keeps of every sample.
    method: str
    bits: int  # of an activation's values
    digits: int  # behind the point, as the table prints it
    num_eval_points: int = FORWARD  # activations that cross in a step of a zeroth-order run, each

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What is one run, however often it is printed."""
        return self.model, self.dataset, self.method, self.bits, self.num_eval_points

    @property
    def activation(self) -> str:
        """Activation function that the boundary is behind."""
        return ACTIVATIONS.get(self.model, "ReLU")

    @property
    def log_factor(self) -> float:
        """Logarithm of the decimal GB that one token with all constants 1 is."""
        bits = {"FO-SGD": 32, "AQ-SGD": 12, "ZO-SGD": CENTRAL * BASE_BITS, "SparQ": FORWARD}.get(
            self.method, 32
        )
        return math.log(WIDTHS[self.model] * bits / 8 / 1e9)

    @cached_property
    def effects(self) -> dict[str, float]:
        """Exponent of each constant."""
        if self.method == MESSAGES:
            factors = {f"kept|{self.dataset}": 1.0}
            if WIDTHS[self.model] < _NARROW:
                factors[f"kept_part|{self.model}|{self.dataset}"] = 1.0
            return factors
        factors = {f"tokens|{self.dataset}": 1.0}
        if self.model == "GPT2":
            factors[f"first_order_part|{self.model}|{self.dataset}"] = 1.0
        if self.method == "AQ-SGD" and self.activation != "ReLU":
            factors[f"compressed_part|{self.activation}"] = 1.0
            factors[f"compressed_effect|{self.model}|{self.dataset}"] = 1.0
        if self.method in ("ZO-SGD", "SparQ"):
            factors[f"zeroth_order_part|{self.model}"] = 1.0
            factors[f"data_effect|{self.dataset}"] = 1.0
            factors[f"run_effect|{self.model}|{self.dataset}"] = 1.0
        if self.method == "SparQ":
            for anchor, weight in _weights(self.bits).items():
                factors[f"bits|{self.activation}|{anchor}"] = weight
                kind = "one_bit_effect" if anchor == 1 else "bits_effect"
                factors[f"{kind}|{self.activation}|{anchor}|{self.dataset}"] = weight
            factors[f"density_effect|{self.activation}|{self.dataset}"] = 1.0
            if self.bits not in _BITS_ANCHORS:
                factors[f"between_effect|{self.activation}|{self.bits}|{self.dataset}"] = 1.0
        return factors


def _weights(bits: int) -> dict[int, float]:
    """Return the weights of the anchors between which a number of bits lies, in logarithms of bits."""
    if bits in _BITS_ANCHORS:
        return {bits: 1.0}
    low = max(anchor for anchor in _BITS_ANCHORS if anchor < bits)
    high = min(anchor for anchor in _BITS_ANCHORS if anchor > bits)
    part = math.log(bits / low) / math.log(high / low)
    return {low: 1 - part, high: part}


def volume_case(row: PublishedRow) -> VolumeCase:
    """Return what a volume's row is about.

    Raises NotPredicted if it is not of the models, data sets and methods of these tables.
    """
    model, dataset, method = row["model"], dataset_of(row), row["method"].split("(")[0].strip()
    if model not in WIDTHS:
        raise NotPredicted(f"model {model!r} is none of {', '.join(WIDTHS)}, whose runs are known")
    if dataset not in DATASETS:
        raise NotPredicted(f"data set {dataset!r} is none of {', '.join(DATASETS)}, whose tokens are known")
    if method not in ("FO-SGD", "AQ-SGD", "ZO-SGD", "SparQ"):
        raise NotPredicted(f"method {row['method']!r} is not one of these tables'")
    if row["quantity"] == KEPT:
        refuse_other_settings(row)
        return VolumeCase(model, dataset, MESSAGES, 32, 0)
    refuse_other_settings(row)
    return VolumeCase(
        model, dataset, method, _bits(row, method), _digits(row, model), _num_eval_points(row, method)
    )


def dataset_of(row: PublishedRow) -> str:
    """Return a row's data set, however it is spelled."""
    plain = re.sub(r"[\W_]", "", row["dataset"]).upper()
    return next((name for name in DATASETS if re.sub(r"\W", "", name) == plain), row["dataset"])


def refuse_other_settings(row: PublishedRow) -> None:
    """Raise if a row is not of the tables' setting.

    Raises NotPredicted if its unit, batch or number of stages is another.
    """
    for column, wanted in (("unit", "GB"), ("batch_size", "32"), ("gpus", "2")):
        if row[column] not in ("", wanted):
            raise NotPredicted(f"{column} {row[column]!r} is not that of these tables: {wanted}")


def _num_eval_points(row: PublishedRow, method: str) -> int:
    """Return the activations of a step: of ``2P`` points for ZO-SGD, of ``P + 1`` for SparQ unless it says central."""
    reported = re.search(r"P=(\d+)", row["note"])
    num_perturbations = int(reported[1]) if reported else NUM_PERTURBATIONS
    is_central = method == "ZO-SGD" or "central" in row["method"] + row["note"]
    return 2 * num_perturbations if is_central else num_perturbations + 1


def _bits(row: PublishedRow, method: str) -> int:
    if method in ("FO-SGD", "ZO-SGD"):
        return BASE_BITS
    match = re.search(r"(\d+)\s*-?bit", row["precision"]) or re.search(r"(\d+)Q", row["method"])
    bits = int(match[1]) if match else 0
    if not 1 <= bits <= 8:
        raise NotPredicted(f"precision {row['precision']!r} names no bits from 1 to 8")
    return bits


def _digits(row: PublishedRow, model: str) -> int:
    if row["table"] == "1":
        return 2
    return 1 if model == "OPT-125M" else 0


@dataclass(frozen=True)
class Printed:
    """A volume with its printed number, GB."""

    case: VolumeCase
    value: float
    row: PublishedRow

    @property
    def half_unit(self) -> float:
        """Half of the last digit."""
        return 0.5 * 10.0**-self.case.digits


def printed_volumes(rows: Iterable[PublishedRow]) -> list[Printed]:
    """Return the volumes that rows print, of each run the number with most digits; what is not of these runs is left out."""
    by_key: dict[tuple[object, ...], Printed] = {}
    for row in rows:
        if row["paper"] != PAPER or row["quantity"] not in (VOLUME, KEPT) or row.value is None:
            continue
        try:
            item = Printed(volume_case(row), row.value, row)
        except NotPredicted:
            continue
        known = by_key.get(item.case.key)
        if known is None or known.case.digits < item.case.digits:
            by_key[item.case.key] = item
    return list(by_key.values())
