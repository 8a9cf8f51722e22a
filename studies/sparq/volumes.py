"""Printed communication volumes as bits per element, and the densities that each encoding would need for them.

The paper states neither the number of steps nor the length of sequences. Two runs of one model on one data set share
both, so the ratio of their volumes does not depend on them: it compares activations per step, and bits per element.

Symbols: ``P`` perturbations per step, 5; ``n`` activations that cross per step, ``P + 1`` for forward differences and ``2P``
for central ones; ``b`` bits of a value; ``w`` bits of an index; ``ρ`` the part of the values that is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from studies.published.rows import shipped_rows
from studies.published.sparq import CENTRAL, FORWARD, PAPER, VOLUME, WIDTHS, volume_case

BASELINES = (
    ("central, 16 bits", CENTRAL, 16),
    ("forward, 16 bits", FORWARD, 16),
    ("forward, 32 bits", FORWARD, 32),
)
"""What the paper's ZO-SGD may have sent: it does not say."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What a printed number may have been before it was rounded."""

    low: float
    high: float

    def over(self, other: Interval) -> Interval:
        """Return the quotient."""
        return Interval(self.low / other.high, self.high / other.low)

    def times(self, factor: float) -> Interval:
        """Return a multiple, with a factor above 0."""
        return Interval(self.low * factor, self.high * factor)

    def holds(self, value: float) -> bool:
        """Whether `value` may be what was meant."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"


@dataclass(frozen=True, slots=True)
class Volume:
    """A printed communication volume."""

    table: int
    model: str
    dataset: str
    method: str
    bits: int  # of an activation's values
    gigabytes: Interval


def printed(text: str) -> Interval:
    """Return what a number printed as `text` may have been.

    >>> str(printed("1.20"))
    '1.2 to 1.2'
    >>> printed("8").low
    7.5
    """
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return Interval(float(text) - half, float(text) + half)


def read_volumes() -> list[Volume]:
    """Return all printed volumes."""
    volumes = []
    for row in shipped_rows(PAPER):
        if row["quantity"] == VOLUME and row["value"]:
            case = volume_case(row)
            volumes.append(
                Volume(
                    int(row["table"]), case.model, case.dataset, case.method, case.bits, printed(row["value"])
                )
            )
    return volumes


def find(
    volumes: list[Volume], model: str, dataset: str, method: str, bits: int | None = None
) -> Volume | None:
    """Return a run's volume, from the table that prints more digits."""
    matching = [
        volume
        for volume in volumes
        if (volume.model, volume.dataset, volume.method) == (model, dataset, method)
        and bits in (None, volume.bits)
    ]
    return min(matching, key=lambda volume: volume.gigabytes.high - volume.gigabytes.low, default=None)


def bits_per_element(sent: Volume, baseline: Volume, *, activations: float, baseline_bits: float) -> Interval:
    """Return the bits of ``sent`` for each element of the activations, given those of a baseline with the same steps.

    ``e = V/V₀ · B₀`` where `baseline_bits` counts all ``n₀`` messages of a step, and `activations` is ``n``.
    """
    return sent.gigabytes.over(baseline.gigabytes).times(baseline_bits / activations)


def density_needed(bits: Interval, value_bits: int, index_bits: int) -> Interval:
    """Return the density with which values and indices take so many bits per element: ``ρ = e/(b + w)``."""
    return bits.times(1 / (value_bits + index_bits))


def tokens(volume: Volume, *, activations: float, bits: float) -> Interval:
    """Return how many tokens a volume is, if `activations` tensors of the MLP's width cross for each, at `bits`."""
    per_token = activations * WIDTHS[volume.model] * bits / 8
    return volume.gigabytes.times(1e9 / per_token)


@dataclass(frozen=True, slots=True)
class EncodingFinding:
    """One SparQ volume against the ZO-SGD run of the same model and data."""

    volume: Volume
    baseline: str  # what ZO-SGD is supposed to have sent
    bits: Interval  # per element
    is_dense: bool  # whether ``b`` bits for every element explain it
    density: dict[int, Interval]  # needed by values and indices, by the index's bits


def findings(volumes: list[Volume]) -> Iterator[EncodingFinding]:
    """Yield every SparQ volume that has a ZO-SGD run beside it, under each supposition."""
    for volume in volumes:
        against = find(volumes, volume.model, volume.dataset, "ZO-SGD")
        if (
            volume.method != "SparQ"
            or against is None
            or find(volumes, volume.model, volume.dataset, "SparQ", volume.bits) is not volume
        ):
            continue
        index = (WIDTHS[volume.model] - 1).bit_length()
        for name, num_messages, width in BASELINES:
            bits = bits_per_element(volume, against, activations=FORWARD, baseline_bits=num_messages * width)
            density = {w: density_needed(bits, volume.bits, w) for w in (index, 16, 32)}
            yield EncodingFinding(volume, name, bits, bits.holds(volume.bits), density)
