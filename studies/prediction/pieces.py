"""A benchmark in pieces: what is done is kept in a folder, so that it can be stopped and gone on with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from costmodel.rates.calibration import FitReport
from costmodel.rates.profile import Profile
from costmodel.scoring import Row
from studies.checkout import commit
from studies.prediction.predicting import PredictedCase
from topology.errors import ZosimError
from topology.reading import read_json_object
from zosim.analysis.compare import ComparedLine

Content = dict[str, Any]


class OutOfTimeError(Exception):
    """The time for one go is over; what is done has been kept."""


class Pieces:
    """What has been done so far.

    Parameters
    ----------
    folder : path, optional
        Where pieces are kept, one file each; without one they are all made anew.
    stop_after_s : float
        No piece is begun once so much time has passed.
    """

    def __init__(self, folder: Path | None = None, stop_after_s: float = float("inf")) -> None:
        self._folder = folder
        self._until = time.monotonic() + stop_after_s
        self.commits: set[str] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def of(self, name: str, make: Callable[[], Content]) -> Content:
        """Return a piece: what a file holds already, or what `make` returns, which is then kept.

        Raises
        ------
        OutOfTimeError
            If it is still to be made and there is no time.
        ZosimError
            If the file is no such piece.
        """
        path = None if self._folder is None else self._folder / f"{name}.json"
        if path is not None and path.exists():
            content = _read(path)
        else:
            if time.monotonic() > self._until:
                raise OutOfTimeError
            text = json.dumps({"commit": commit(), **make()})
            if path is not None:
                path.write_text(text + "\n", encoding="utf-8")
            content = json.loads(text)
        self.commits.add(content["commit"])
        return content


def _read(path: Path) -> Content:
    hint = "remove it, and it is made again"
    content: Content = read_json_object(path, "piece of a benchmark", ZosimError, hint=hint)
    if "commit" not in content:
        raise ZosimError(f"{path} is no piece of a benchmark: it names no commit", hint=hint)
    return content


def content_of_rows(rows: list[PredictedCase]) -> list[Content]:
    """Return rows as JSON has them."""
    return [asdict(row) for row in rows]


def rows_of(content: list[Content]) -> list[PredictedCase]:
    """Return the rows of :func:`content_of_rows`."""
    return [
        PredictedCase(**{**row, "lines": tuple(ComparedLine(**line) for line in row["lines"])})
        for row in content
    ]


def content_of_fit(profile: Profile, fit: FitReport) -> Content:
    """Return a calibration as JSON has it."""
    return {"profile": profile.model_dump(mode="json"), "fit": asdict(fit)}


def fit_of(content: Mapping[str, Any]) -> tuple[Profile, FitReport]:
    """Return the calibration of :func:`content_of_fit`."""
    fit = dict(content["fit"])
    for name in ("residuals", "steps"):
        fit[name] = tuple(Row(**row) for row in fit[name])
    for name in ("identified", "disturbances"):
        fit[name] = tuple(fit.get(name, ()))
    return Profile.model_validate(content["profile"]), FitReport(**fit)
