"""What codecs cost on the machine that is calibrated, as constants of its profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import pstdev

from costmodel.formats.codec_time import MEASURED, CodecProfile, CodecWork, fit_codec_profile
from costmodel.rates.profile import Constant, Profile
from executors.calibration.codec_probes import measure_codecs, stage_probes

NUM_ROWS = 512
"""4 MB in float32: what crosses a boundary in steps that are short enough to matter."""

DEFAULT_BUDGET_S = 3.0
_SOURCE = "encoding and decoding tensors of 4 MB, one thread"
# 90 of 100 lie within so many standard deviations.
_WIDTH = 1.645
_LEAST_SPREAD = 1.1


def with_codec_constants(profile: Profile, *, budget_s: float = DEFAULT_BUDGET_S) -> Profile:
    """Return a profile with what codecs cost on this machine's processors.

    `budget_s`: seconds to measure for; three rounds are made whatever it is.
    """
    measured = measure_codecs(budget_s=budget_s, probes=list(stage_probes(NUM_ROWS)))
    constants = codec_constants(measured)
    return profile.with_constants(*constants, origin=profile.origin)


def codec_constants(measured: Sequence[tuple[CodecWork, float]]) -> list[Constant]:
    """Return the codecs' constants that come nearest to measured seconds, with how far off they are as an interval."""
    fitted = fit_codec_profile(measured, _SOURCE)
    spread = _spread(fitted, measured)
    return [
        Constant(
            name=MEASURED + name,
            value=seconds,
            low=seconds / spread,
            high=seconds * spread,
            unit="s",
            source=_SOURCE,
        )
        for name, seconds in fitted.seconds.items()
    ]


def _spread(fitted: CodecProfile, measured: Sequence[tuple[CodecWork, float]]) -> float:
    """Return the factor within which 90 of 100 probes lie."""
    ratios = [math.log(fitted.duration_s(work) / seconds) for work, seconds in measured]
    return max(_LEAST_SPREAD, math.exp(_WIDTH * pstdev(ratios)))
