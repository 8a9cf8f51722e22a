"""SparQ's tables: which runs their communication volumes are of, and what constants a row may decide.

``volume = width · tokens · Σ bits / 8`` over the activations that cross per token of a step, at the MLP's width where
the paper cuts. It states neither steps nor lengths, so the tokens that a run sent are constants: one for each data set
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.stats import norm

from costmodel.published import Row
from topology.errors import ZosimError

PAPER = "SparQ"
VOLUME, KEPT = "comm_volume", "memory_extra_messages"
MESSAGES = "messages"
NUM_QUERIES = 5
FORWARD, CENTRAL = NUM_QUERIES + 1, 2 * NUM_QUERIES
BASE_BITS = 16

WIDTHS = {"OPT-125M": 3072, "OPT-1.3B": 8192, "OPT-6.7B": 16384, "GPT2": 3072, "Llama-1B": 8192}
"""Width of the MLP's inside."""

ACTIVATIONS = {"GPT2": "GELU", "Llama-1B": "SwiGLU"}
"""Activation function by model; ReLU elsewhere."""

DATASETS = ("SST-2", "WIC", "RTE")

_RUN_NOISE = 0.01
_NARROW = 8192
_BITS_ANCHORS = (1, 4, 8)


class NotPredicted(ZosimError):  # noqa: N818 - reads as the statement it makes
    """A row of these tables about which nothing can be said, with the reason."""


@dataclass(frozen=True)
class Term:
    """A constant, or the effect of one run, with what would have been said of it beforehand.

    Attributes
    ----------
    name, unit, meaning : str
    prior : float
    sigma : float
        Standard deviation of the prior's logarithm.
    """

    name: str
    unit: str
    meaning: str
    prior: float
    sigma: float


def term_of(name: str) -> Term:
    """Return the constant or effect called `name`.

    Raises
    ------
    KeyError
        If there is none of that kind.
    """
    kind, *words = name.split("|")
    where = " ".join(words)
    if kind == "tokens":
        return Term(name, "token", f"sent by first-order runs on {where}", 5e5, 1.5)
    if kind == "first_order_part":
        return Term(name, "1", f"of these tokens, sent by first-order runs of {where}", 1.0, 0.6)
    if kind == "zeroth_order_part":
        return Term(name, "1", f"of these tokens, sent by zeroth-order runs of {where}", 0.2, 0.6)
    if kind == "bits":
        return Term(name, "bit", f"sent for each element of {where} bits", float(words[1]), 0.3)
    if kind == "kept":
        return Term(name, "token", f"whose messages AQ-SGD keeps of {where}, 32 bits a number", 1e6, 1.5)
    if kind == "kept_part":
        return Term(name, "1", f"of these, kept by {where}", 1.0, 0.3)
    if kind == "compressed_part":
        return Term(name, "1", f"AQ-SGD of 12/32, {where}", 1.0, 0.1)
    return Term(name, "1", f"{_EFFECTS[kind][1]}: {where}", 1.0, _EFFECTS[kind][0])


_EFFECTS = {
    "data_effect": (0.03, "zeroth-order runs on a data set"),
    "run_effect": (0.02, "zeroth-order runs of a model on a data set"),
    "density_effect": (0.1, "bits for each element on a data set"),
    "bits_effect": (0.05, "bits for each element on a data set, at some bits"),
    "one_bit_effect": (0.15, "bits for each element on a data set, at one bit"),
    "between_effect": (0.08, "bits for each element, between those measured"),
}


@dataclass(frozen=True)
class VolumeCase:
    """One communication volume.

    Attributes
    ----------
    model, dataset : str
    method : {"FO-SGD", "AQ-SGD", "ZO-SGD", "SparQ", "messages"}
        ``"messages"`` are those that AQ-SGD keeps of every sample.
    bits : int
        Of an activation's values.
    digits : int
        Behind the point, as the table prints it.
    num_points : int
        Activations that cross in a step of a zeroth-order run, each.
    """

    model: str
    dataset: str
    method: str
    bits: int
    digits: int
    num_points: int = FORWARD

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What is one run, however often it is printed."""
        return self.model, self.dataset, self.method, self.bits, self.num_points

    @property
    def activation(self) -> str:
        """Activation function that the cut is behind."""
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
            found = {f"kept|{self.dataset}": 1.0}
            if WIDTHS[self.model] < _NARROW:
                found[f"kept_part|{self.model}|{self.dataset}"] = 1.0
            return found
        found = {f"tokens|{self.dataset}": 1.0}
        if self.model == "GPT2":
            found[f"first_order_part|{self.model}|{self.dataset}"] = 1.0
        if self.method == "AQ-SGD" and self.activation != "ReLU":
            found[f"compressed_part|{self.activation}"] = 1.0
        if self.method in ("ZO-SGD", "SparQ"):
            found[f"zeroth_order_part|{self.model}"] = 1.0
            found[f"data_effect|{self.dataset}"] = 1.0
            found[f"run_effect|{self.model}|{self.dataset}"] = 1.0
        if self.method == "SparQ":
            for anchor, weight in _weights(self.bits).items():
                found[f"bits|{self.activation}|{anchor}"] = weight
                kind = "one_bit_effect" if anchor == 1 else "bits_effect"
                found[f"{kind}|{self.activation}|{anchor}|{self.dataset}"] = weight
            found[f"density_effect|{self.activation}|{self.dataset}"] = 1.0
            if self.bits not in _BITS_ANCHORS:
                found[f"between_effect|{self.activation}|{self.bits}|{self.dataset}"] = 1.0
        return found


def _weights(bits: int) -> dict[int, float]:
    """Return the weights of the anchors between which a number of bits lies, in logarithms of bits."""
    if bits in _BITS_ANCHORS:
        return {bits: 1.0}
    low = max(anchor for anchor in _BITS_ANCHORS if anchor < bits)
    high = min(anchor for anchor in _BITS_ANCHORS if anchor > bits)
    part = math.log(bits / low) / math.log(high / low)
    return {low: 1 - part, high: part}


def volume_case(row: Row) -> VolumeCase:
    """Return what a volume's row is about.

    Raises
    ------
    NotPredicted
        If it is not of the models, data sets and methods of these tables.
    """
    model, dataset, method = row["model"], row["dataset"], row["method"].split("(")[0].strip()
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
        model, dataset, method, _bits(row, method), _digits(row, model), _num_points(row, method)
    )


def refuse_other_settings(row: Row) -> None:
    """Raise if a row is not of the tables' setting.

    Raises
    ------
    NotPredicted
        If its unit, batch or number of stages is another.
    """
    for column, wanted in (("unit", "GB"), ("batch_size", "32"), ("gpus", "2")):
        if row[column] not in ("", wanted):
            raise NotPredicted(f"{column} {row[column]!r} is not that of these tables: {wanted}")


def _num_points(row: Row, method: str) -> int:
    """Return the activations of a step: of ``2P`` points for ZO-SGD, of ``P + 1`` for SparQ unless it says central."""
    said = re.search(r"P=(\d+)", row["note"])
    num_queries = int(said[1]) if said else NUM_QUERIES
    is_central = method == "ZO-SGD" or "central" in row["method"] + row["note"]
    return 2 * num_queries if is_central else num_queries + 1


def _bits(row: Row, method: str) -> int:
    if method in ("FO-SGD", "ZO-SGD"):
        return BASE_BITS
    found = re.search(r"(\d+)\s*-?bit", row["precision"]) or re.search(r"(\d+)Q", row["method"])
    bits = int(found[1]) if found else 0
    if not 1 <= bits <= 8:
        raise NotPredicted(f"precision {row['precision']!r} names no bits from 1 to 8")
    return bits


def _digits(row: Row, model: str) -> int:
    if row["table"] == "1":
        return 2
    return 1 if model == "OPT-125M" else 0


@dataclass(frozen=True)
class Printed:
    """A volume with its printed number, GB."""

    case: VolumeCase
    value: float
    row: Row

    @property
    def half_unit(self) -> float:
        """Half of the last digit."""
        return 0.5 * 10.0**-self.case.digits


def printed_volumes(rows: Iterable[Row]) -> list[Printed]:
    """Return the volumes that rows print, of each run the number with most digits."""
    found: dict[tuple[object, ...], Printed] = {}
    for row in rows:
        if row["paper"] != PAPER or row["quantity"] not in (VOLUME, KEPT) or row.value is None:
            continue
        item = Printed(volume_case(row), row.value, row)
        known = found.get(item.case.key)
        if known is None or known.case.digits < item.case.digits:
            found[item.case.key] = item
    return list(found.values())


class FittedTerm(BaseModel):
    """A constant or effect as fitted: value and 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    low: float
    high: float
    unit: str
    meaning: str


class VolumeFit(BaseModel):
    """What rows say about all constants.

    Attributes
    ----------
    terms : tuple of FittedTerm
    covariance : tuple of tuple of float
        Of the logarithms.
    num_cells : int
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    terms: tuple[FittedTerm, ...]
    covariance: tuple[tuple[float, ...], ...]
    num_cells: int

    @property
    def constants(self) -> tuple[FittedTerm, ...]:
        """Terms that are not the effect of single runs."""
        return tuple(term for term in self.terms if "_effect|" not in term.name)

    def log_volume(self, case: VolumeCase) -> tuple[float, float]:
        """Return the logarithm of a volume in GB, and its standard deviation."""
        place = {term.name: number for number, term in enumerate(self.terms)}
        mean, variance = case.log_factor, _RUN_NOISE**2
        weights = np.zeros(len(place))
        for name, weight in case.effects.items():
            if name in place:
                weights[place[name]] = weight
                mean += weight * math.log(self.terms[place[name]].value)
            else:
                prior = term_of(name)
                mean += weight * math.log(prior.prior)
                variance += (weight * prior.sigma) ** 2
        return mean, math.sqrt(variance + float(weights @ np.array(self.covariance) @ weights))


def fit_volumes(known: Sequence[Printed]) -> VolumeFit:
    """Return the posterior of all constants, given printed volumes.

    Notes
    -----
    A printed number is the volume within half of its last digit, as likely everywhere; in logarithms that is taken for
    a normal of the same variance, ``(half / value)² / 3``.
    """
    names = list(dict.fromkeys(name for item in known for name in item.case.effects))
    terms = [term_of(name) for name in names]
    matrix = np.array([[item.case.effects.get(name, 0.0) for name in names] for item in known])
    seen = np.array([math.log(item.value) - item.case.log_factor for item in known])
    variance = np.array([_RUN_NOISE**2 + (item.half_unit / item.value) ** 2 / 3 for item in known])
    mean = np.log([term.prior for term in terms])
    precision = np.diag([term.sigma**-2 for term in terms]) + (matrix.T / variance) @ matrix
    covariance: NDArray[np.float64] = np.linalg.inv(precision)
    x = mean + covariance @ ((matrix.T / variance) @ (seen - matrix @ mean))
    spread = 2 * np.sqrt(np.diag(covariance))
    return VolumeFit(
        terms=tuple(
            FittedTerm(
                name=term.name,
                value=float(np.exp(at)),
                low=float(np.exp(at - half)),
                high=float(np.exp(at + half)),
                unit=term.unit,
                meaning=term.meaning,
            )
            for term, at, half in zip(terms, x, spread, strict=True)
        ),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        num_cells=len(known),
    )


@dataclass(frozen=True)
class PredictedVolume:
    """A volume as its table would print it, and as it is, GB.

    Attributes
    ----------
    printed, low, high : float
        Expected printed number, and the printed numbers of the ends of the 90 % interval.
    exact : float
        Before rounding.
    """

    printed: float
    low: float
    high: float
    exact: float


def predicted_volume(case: VolumeCase, fit: VolumeFit) -> PredictedVolume:
    """Return a volume as its table would print it.

    Notes
    -----
    The prediction is the mean of rounded volumes: where one printed number is nearly certain, that number, and between
    two where it is not.
    """
    mean, sigma = fit.log_volume(case)
    unit = 10.0**-case.digits
    low, high = math.exp(mean - _Z90 * sigma), math.exp(mean + _Z90 * sigma)
    first, last = math.floor(math.exp(mean - 5 * sigma) / unit), math.ceil(math.exp(mean + 5 * sigma) / unit)
    exact = math.exp(mean)
    rounded = exact
    if last - first <= _MOST_PLACES:
        places = np.arange(max(first, 0), last + 1)
        below, above = np.log(np.maximum(places - 0.5, 1e-12) * unit), np.log((places + 0.5) * unit)
        chance = norm.cdf(above, mean, sigma) - norm.cdf(below, mean, sigma)
        rounded = float((chance * places * unit).sum() / chance.sum())
    ends = round(low, case.digits), round(high, case.digits)
    return PredictedVolume(rounded, min(ends[0], rounded), max(ends[1], rounded), exact)


_Z90 = 1.645
_MOST_PLACES = 100_000


def held_out_volumes(known: Sequence[Printed]) -> list[tuple[Printed, PredictedVolume]]:
    """Return every printed volume with what all others say about it."""
    return [
        (item, predicted_volume(item.case, fit_volumes([other for other in known if other is not item])))
        for item in known
    ]
