"""The benchmark: calibrate, predict, measure, report."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from costmodel.calibration import FitReport
from costmodel.profile import Profile
from executors.calibration.calibrate import DEFAULT_BUDGET_S
from executors.calibration.calibrating import calibrated
from studies.checkout import commit
from studies.prediction.cases import Case, choice_cases, held_out_cases, rank_cases, tuning_cases
from studies.prediction.measuring import measure, measure_ranks
from studies.prediction.predicting import Choice, Row, predict, predict_ranks
from studies.prediction.report import Benchmark, machine_words
from topology import Topology, detect
from topology.errors import ZosimError

Say = Callable[[str], None]


def run_benchmark(
    *,
    num_held_out: int = 24,
    num_rank_cases: int = 10,
    num_choices: int = 3,
    with_tuning: bool = False,
    threads: Sequence[int] = (1, 2),
    calibration_s: float = DEFAULT_BUDGET_S,
    command: str = "",
    say: Say = lambda _: None,
) -> Benchmark:
    """Return predictions and measurements of the held-out list, and of the tuning list beside it.

    Parameters
    ----------
    num_held_out : int
        The first so many of the held-out cases.
    num_rank_cases : int
        The first so many of the cases of several ranks.
    num_choices : int
        Configurations for which all placements are measured, to see what the predicted choice costs.
    with_tuning : bool
    threads : sequence of int
        Numbers of threads whose cases are run.
    calibration_s : float
        Seconds that the calibration of one number of threads measures.
    command : str
        What to type to do it again, for the report.
    say : callable
        Told what is being done.
    """
    topology = detect()
    device = topology.of_kind("cpu")[0].id
    profiles: dict[int, Profile] = {}
    fits: dict[int, FitReport] = {}
    for number in threads:
        say(f"calibrating with {number} threads")
        profiles[number], fits[number] = calibrated(
            topology, device, num_threads=number, budget_s=calibration_s
        )
    lists = {"held out": held_out_cases(num_held_out), "tuning": tuning_cases() if with_tuning else []}
    rows = {
        name: _rows([case for case in cases if case.num_threads in profiles], profiles, topology, device, say)
        for name, cases in lists.items()
    }
    choices = choice_cases(num_choices)
    ranks = rank_cases(num_rank_cases)
    wanted = [*ranks, *(case for cases in choices for case in cases)]
    of_case = _rows_of_ranks([case for case in wanted if case.num_ranks > 1], profiles, topology, device, say)
    alone = [case for case in wanted if case.num_ranks == 1]
    of_case |= dict(zip(alone, _rows(alone, profiles, topology, device, say), strict=True))
    return Benchmark(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        command=command or " ".join(sys.argv),
        commit=commit(),
        machine=machine_words(topology.device_spec(device).name),
        held_out=tuple(rows["held out"]),
        tuning=tuple(rows["tuning"]),
        ranks=tuple(of_case[case] for case in ranks if case in of_case),
        choices=tuple(
            choice
            for cases in choices
            for choice in Choice.with_and_without_limit(
                tuple(of_case[case] for case in cases if case in of_case)
            )
        ),
        profiles=profiles,
        fits=fits,
    )


def _rows(
    cases: Sequence[Case], profiles: dict[int, Profile], topology: Topology, device: str, say: Say
) -> list[Row]:
    measured = measure(
        cases, topology=topology.name, device=device, on_case=lambda which: say(f"running cases {which}")
    )
    return predict(measured, profiles, topology, device)


def _rows_of_ranks(
    cases: Sequence[Case], profiles: dict[int, Profile], topology: Topology, device: str, say: Say
) -> dict[Case, Row]:
    found: dict[Case, Row] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        alike = [case for case in cases if case.num_ranks == num_ranks]
        say(f"running {len(alike)} cases of {num_ranks} ranks")
        try:
            measured = measure_ranks(alike, topology=topology.name, device=device)
        except ZosimError as error:
            # What other cases took is not thrown away for it.
            say(f"cases of {num_ranks} ranks are left out: {error.message}")
            continue
        found |= dict(zip(alike, predict_ranks(measured, profiles[1], topology), strict=True))
    return found


def write(benchmark: Benchmark, folder: Path) -> Path:
    """Write the report and the JSON next to it, and return the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = max(benchmark.profiles.values(), key=lambda profile: profile.num_cores).num_cores
    report = folder / f"{benchmark.date}-cpu-{cores}core-prediction.md"
    report.write_text(benchmark.to_markdown(), encoding="utf-8")
    report.with_suffix(".json").write_text(benchmark.to_json(), encoding="utf-8")
    return report
