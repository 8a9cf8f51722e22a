"""What rows of SparQ's tables say about their constants, as a part of a published profile."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from studies.published.posterior import TableFit
from studies.published.rows import PublishedRow
from studies.published.sparq import printed_volumes
from studies.published.sparq_memory import fit_peaks, printed_peaks
from studies.published.sparq_volumes import VolumeFit, fit_volumes


class SparqFit(BaseModel):
    """What rows of SparQ's tables say about their constants; None for what no row was there to fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    volumes: VolumeFit | None = None
    peaks: TableFit | None = None


def calibrate_sparq(rows: Sequence[PublishedRow]) -> SparqFit | None:
    """Return what rows say about the constants of SparQ's tables; None if there is none of these tables."""
    volumes, peaks = printed_volumes(rows), printed_peaks(rows)
    if not volumes and not peaks:
        return None
    return SparqFit(
        volumes=fit_volumes(volumes) if volumes else None,
        peaks=fit_peaks(peaks) if len(peaks) > 1 else None,
    )
