"""The prediction benchmark step by step and in turns: what is kept, what is made again, and who waits for whom."""

from __future__ import annotations

import threading
from dataclasses import asdict
from functools import partial

import pytest

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.calibration import FitReport
from costmodel.scoring import Row
from studies.kept_results import KeptResults, OutOfTimeError
from studies.prediction.benchmark import Baton, content_of_fit, fit_of
from studies.prediction.predicting import Choice, PredictedCase, case_rows
from topology import load_preset
from topology.errors import RunError, ZosimError
from zosim.analysis.compare import ComparedLine


def row(name: str, measured_s: float) -> PredictedCase:
    lines = (ComparedLine("sample", 1.0, None, 0.5), ComparedLine("forward", None, 2.0, -0.25))
    step = {"predicted_s": 1.0, "low_s": 0.9, "high_s": 1.1, "measured_s": measured_s, "slowed_s": 1.0}
    memory = {"predicted_bytes": 100, "measured_bytes": 90}
    beside = {
        "foreign_cores": 0.0,
        "slowdown_before": 1.1,
        "slowdown_after": 1.2,
        "limiter": "sample",
        "lines": lines,
    }
    return PredictedCase(name=name, placement="delayed", **step, **memory, **beside)


def test_what_is_done_is_not_done_again(tmp_path):
    made = []

    def make():
        made.append(1)
        return {"rows": [asdict(row("a", 1.5))]}

    first = KeptResults(tmp_path).of("one", make)
    again = KeptResults(tmp_path, stop_after_s=-1.0)
    assert again.of("one", make) == first
    assert made == [1]
    assert case_rows(first["rows"]) == [row("a", 1.5)]
    with pytest.raises(OutOfTimeError):
        again.of("two", make)
    assert made == [1]
    assert again.commits == {first["commit"]}
    KeptResults().of("one", make)
    assert made == [1, 1]


def test_a_row_is_measured_once_and_cases_are_told_apart(tmp_path):
    made = []

    def measured(row: Row) -> Row:
        made.append(row.case)
        return row

    cases = ("opt, 2 x 8", "opt 2 x 8")
    rows = [Row(case, "step_s", 0.1 + k, 1.0, 0.9, None, "a group") for k, case in enumerate(cases)]
    for _ in range(2):
        kept_results = KeptResults(tmp_path)
        assert [kept_results.row(row.case, partial(measured, row)) for row in rows] == rows
    assert made == list(cases)


def test_a_spoilt_piece_is_named(tmp_path):
    (tmp_path / "one.json").write_text('{"rows": []')
    with pytest.raises(ZosimError, match=r"one\.json is not a result of a study"):
        KeptResults(tmp_path).of("one", dict)


def test_a_calibration_is_kept_whole(tmp_path):
    profile = datasheet_profile(load_preset("cpu-laptop"), "cpu0", num_threads=2)
    residuals = (Row("matmul", "seconds", 1.0, 1.1), Row("copy", "seconds", 2.0, 2.5, flag="beside others"))
    report = FitReport(residuals, ("dispatch_s",), {"gather_s": "unknown"}, 3.0, residuals[:1])
    kept = KeptResults(tmp_path).of("calibration", lambda: content_of_fit(profile, report))
    assert fit_of(kept) == (profile, report)
    assert fit_of(KeptResults(tmp_path).of("calibration", dict)) == (profile, report)


def test_two_parties_take_turns(tmp_path):
    order: list[tuple[int, int]] = []

    def party(first: int) -> None:
        baton = Baton(str(tmp_path))
        for number in range(first, 6, 2):
            baton.wait(number)
            order.append((number, first))
            baton.end(number)

    threads = [threading.Thread(target=party, args=(first,)) for first in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == [(number, number % 2) for number in range(6)]


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.prediction.benchmark._LONGEST_TURN_S", 0.05)
    with pytest.raises(RunError, match="turn 1 did not end"):
        Baton(str(tmp_path)).wait(1)


def test_a_plan_measured_twice_says_what_no_prediction_can_tell_apart():
    free, limited = Choice.with_and_without_limit((row("a", 1.0), row("b", 1.2)), row("b", 1.0))
    assert free.noise == limited.noise == pytest.approx(1.2)
    assert Choice((row("a", 1.0),)).noise is None
