"""Constants behind SparQ's communication volumes: what each is, and what printed rows say about it.

The model is linear in logarithms, so the posterior is in closed form, with the rounding of print as noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.stats import norm

from studies.published.constants import FittedConstant, prior_of
from studies.published.posterior import FoundConstant, found_constants
from studies.published.sparq import Printed, VolumeCase

_RUN_NOISE = 0.01


def term_of(name: str) -> FittedConstant:
    """Return the constant or effect called `name`. Raises KeyError if there is none of that kind."""
    kind, *words = name.split("|")
    where = " ".join(words)
    if kind == "tokens":
        return FittedConstant(name, "token", f"sent by first-order runs on {where}", 5e5, 1.5)
    if kind == "first_order_part":
        return FittedConstant(name, "1", f"of these tokens, sent by first-order runs of {where}", 1.0, 0.6)
    if kind == "zeroth_order_part":
        return FittedConstant(name, "1", f"of these tokens, sent by zeroth-order runs of {where}", 0.2, 0.6)
    if kind == "bits":
        return FittedConstant(name, "bit", f"sent for each element of {where} bits", float(words[1]), 0.3)
    if kind == "kept":
        return FittedConstant(
            name, "token", f"whose messages AQ-SGD keeps of {where}, 32 bits a number", 1e6, 1.5
        )
    if kind == "kept_part":
        return FittedConstant(name, "1", f"of these, kept by {where}", 1.0, 0.3)
    if kind == "compressed_part":
        return FittedConstant(name, "1", f"AQ-SGD of 12/32, {where}", 1.0, 0.1)
    sigma, meaning = _EFFECTS[kind]
    is_known_to_vary = words[0] in _VARYING
    return FittedConstant(name, "1", f"{meaning}: {where}", 1.0, _VARIATION if is_known_to_vary else sigma)


_EFFECTS = {
    "data_effect": (0.04, "zeroth-order runs on a data set"),
    "run_effect": (0.05, "zeroth-order runs of a model on a data set"),
    "compressed_effect": (0.05, "AQ-SGD's runs of a model on a data set"),
    "density_effect": (0.05, "bits for each element on a data set"),
    "bits_effect": (0.05, "bits for each element on a data set, at some bits"),
    "one_bit_effect": (0.2, "bits for each element on a data set, at one bit"),
    "between_effect": (0.08, "bits for each element, between those measured"),
}
"""Standard deviations in logarithms; chosen after seeing what left-out cells say."""

_VARYING, _VARIATION = ("GPT2", "Llama-1B", "GELU", "SwiGLU"), 0.25
"""Whose runs contradict each other by tens of percent, where OPT's do by a few."""


class VolumeFit(BaseModel):
    """What rows say about all constants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    terms: tuple[FoundConstant, ...]
    covariance: tuple[tuple[float, ...], ...]  # of the logarithms
    num_cells: int

    @property
    def constants(self) -> tuple[FoundConstant, ...]:
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

    A printed number is the volume within half of its last digit, as likely everywhere; in logarithms that is taken for
    a normal of the same variance, ``(half / value)² / 3``.
    """
    names = list(dict.fromkeys(name for item in known for name in item.case.effects))
    terms = [term_of(name) for name in names]
    matrix = np.array([[item.case.effects.get(name, 0.0) for name in names] for item in known])
    seen = np.array([math.log(item.value) - item.case.log_factor for item in known])
    variance = np.array([_RUN_NOISE**2 + (item.half_unit / item.value) ** 2 / 3 for item in known])
    prior = prior_of(terms)
    covariance = np.linalg.inv(prior.information(matrix, 1 / variance))
    x = prior.x + covariance @ ((matrix.T / variance) @ (seen - matrix @ prior.x))
    return VolumeFit(
        terms=found_constants(terms, x, np.sqrt(np.diag(covariance))),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        num_cells=len(known),
    )


@dataclass(frozen=True)
class PredictedVolume:
    """A volume as its table would print it, and as it is, GB."""

    # printed, low, high: expected printed number, and the printed numbers of the ends of the 90 % interval.
    printed: float
    low: float
    high: float
    exact: float  # before rounding


def predicted_volume(case: VolumeCase, fit: VolumeFit) -> PredictedVolume:
    """Return a volume as its table would print it.

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
        probability = norm.cdf(above, mean, sigma) - norm.cdf(below, mean, sigma)
        rounded = float((probability * places * unit).sum() / probability.sum())
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
