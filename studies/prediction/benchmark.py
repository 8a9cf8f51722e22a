"""The benchmark: calibrate, predict, measure, report."""

from __future__ import annotations

import datetime
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from costmodel.rates.calibration import FitReport
from costmodel.rates.profile import Profile
from costmodel.scoring import Row
from executors.calibration.calibrate import DEFAULT_BUDGET_S
from executors.calibration.calibrating import calibrated
from executors.ranks.launch import launch, process_group
from studies.kept_results import Content, KeptResults
from studies.prediction.cases import (
    REPEATED,
    Case,
    choice_cases,
    held_out_cases,
    quantized_cases,
    quantized_tuning_cases,
    rank_cases,
    tuning_cases,
)
from studies.prediction.measuring import (
    SESSIONS_AT_ONCE,
    STEPS_PER_ROUND,
    MeasuredSteps,
    Turn,
    measure,
    measure_ranks,
)
from studies.prediction.predicting import Choice, PredictedCase, case_rows, predict
from studies.prediction.report import Benchmark, describe_machine
from topology import Topology, detect
from topology.errors import RunError, ZosimError

NUM_ROUNDS = 27
_LOOK_EVERY_S = 0.01
_LONGEST_TURN_S = 240.0


class Baton:
    """Lets two groups of processes take turns: files in a folder say how many turns are over."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def wait(self, number: int) -> None:
        """Wait until so many turns are over. Raises RunError if that takes too long: the other group has failed."""
        until = time.monotonic() + _LONGEST_TURN_S
        while number and not (self._folder / str(number)).exists():
            if time.monotonic() > until:
                raise RunError(
                    f"turn {number} did not end within {_LONGEST_TURN_S:g} s",
                    hint="see the output of the other group of processes, which failed",
                )
            time.sleep(_LOOK_EVERY_S)

    def end(self, number: int) -> None:
        """Say that turn `number`, counted from 0, is over."""
        (self._folder / str(number + 1)).touch()


def measure_in_turn(cases: Sequence[Case], *, topology: str, device: str) -> list[MeasuredSteps]:
    """Return what cases of one process and of equally many ranks did, in the order of `cases`.

    The two groups make their sessions one after the other, too. A process that waits for its turn sleeps.
    """
    alone = tuple(case for case in cases if case.num_ranks == 1)
    of_ranks = tuple(case for case in cases if case.num_ranks > 1)
    (num_ranks,) = {case.num_ranks for case in of_ranks}
    with (
        tempfile.TemporaryDirectory(prefix="zosim-turns-") as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        future = pool.submit(_alone, alone, topology, device, folder)
        from_ranks: list[MeasuredSteps] = launch(
            _in_rank, of_ranks, topology, device, folder, world_size=num_ranks
        )
        rest = {"alone": iter(future.result()), "ranks": iter(from_ranks)}
    return [next(rest["alone" if case.num_ranks == 1 else "ranks"]) for case in cases]


def _alone(cases: Sequence[Case], topology: str, device: str, folder: str) -> list[MeasuredSteps]:
    return _take_turns(cases, topology, device, Baton(folder), 0)


def _in_rank(cases: Sequence[Case], topology: str, device: str, folder: str) -> list[MeasuredSteps]:
    with process_group(device_type="cpu"):
        return _take_turns(cases, topology, device, Baton(folder), 1)


def _take_turns(
    cases: Sequence[Case], topology: str, device: str, baton: Baton, first: int
) -> list[MeasuredSteps]:
    """Make sessions in turn `first`, and run a round of each in every second turn after it."""
    baton.wait(first)
    turns = []
    for case in cases:
        torch.set_num_threads(case.num_threads)
        turns.append(Turn(case, topology, device))
    _end(baton, first)
    for number in range(1, NUM_ROUNDS + 1):
        baton.wait(2 * number + first)
        for turn in turns:
            torch.set_num_threads(turn.case.num_threads)
            turn.take(STEPS_PER_ROUND)
        _end(baton, 2 * number + first)
    return [turn.measured() for turn in turns]


def _end(baton: Baton, number: int) -> None:
    """End a turn once all of this group have."""
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        baton.end(number)


Say = Callable[[str], None]


def run_benchmark(
    *,
    num_held_out: int = 24,
    num_rank_cases: int = 10,
    num_choices: int = 3,
    with_tuning: bool = False,
    is_quantized: bool = False,
    threads: Sequence[int] = (1, 2),
    calibration_s: float = DEFAULT_BUDGET_S,
    command: str = "",
    kept_results: KeptResults | None = None,
    say: Say = lambda _: None,
) -> Benchmark:
    """Return predictions and measurements of the held-out list, and of the tuning list beside it.

    - `num_held_out`: the first so many of the held-out cases.
    - `num_rank_cases`: the first so many of the cases of several ranks.
    - `num_choices`: configurations for which all placements are measured, to see what the predicted choice costs.
    - `is_quantized`: take the lists of quantized weights, in one process each, in place of all others.
    - `threads`: numbers of threads whose cases are run. Ranks are of one thread: without it they are left out.
    - `calibration_s`: seconds that the calibration of one number of threads measures.
    - `command`: what to type to do it again, for the report.
    - `kept_results`: where what is done is kept.
    - `say`: told what is being done.

    Raises OutOfTimeError if `kept_results` has no time for the next result.
    """
    topology = detect()
    run = _BenchmarkRun(topology, topology.of_type("cpu")[0].id, kept_results or KeptResults(), say)
    for number in threads:
        run.calibrate(number, calibration_s)
    unseen, seen = (
        (quantized_cases, quantized_tuning_cases) if is_quantized else (held_out_cases, tuning_cases)
    )
    held_out = run.rows("held-out", unseen(num_held_out))
    tuning = run.rows("tuning", seen() if with_tuning else [])
    ranks = run.rows_of_ranks(rank_cases(num_rank_cases)) if 1 in threads and not is_quantized else []
    choices = choice_cases(num_choices) if {1, 2} <= set(threads) and not is_quantized else []
    chosen = [
        choice for number, cases in enumerate(choices) for choice in run.choices(f"choice-{number}", cases)
    ]
    return Benchmark(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        command=command or " ".join(sys.argv),
        commit=", ".join(sorted(run.kept_results.commits)),
        is_quantized=is_quantized,
        machine=describe_machine(topology.device_spec(run.device).name),
        held_out=tuple(held_out),
        tuning=tuple(tuning),
        ranks=tuple(ranks),
        choices=tuple(chosen),
        profiles=run.profiles,
        fits=run.fits,
    )


@dataclass
class _BenchmarkRun:
    """One go at a benchmark."""

    topology: Topology
    device: str
    kept_results: KeptResults
    say: Say
    profiles: dict[int, Profile] = field(default_factory=dict)
    fits: dict[int, FitReport] = field(default_factory=dict)

    def calibrate(self, threads: int, budget_s: float) -> None:
        """Find out what the machine does with so many threads."""

        def make() -> Content:
            made = calibrated(self.topology, self.device, num_threads=threads, budget_s=budget_s)
            return content_of_fit(*made)

        name = f"calibration-{threads}-{budget_s:g}s"
        self.profiles[threads], self.fits[threads] = fit_of(self.kept_results.of(name, make))

    def rows(self, name: str, cases: Sequence[Case]) -> list[PredictedCase]:
        """Return the rows of cases of one process, as many at a time as take turns."""
        cases = [case for case in cases if case.num_threads in self.profiles]
        all_rows: list[PredictedCase] = []
        for begin in range(0, len(cases), SESSIONS_AT_ONCE):
            chosen = cases[begin : begin + SESSIONS_AT_ONCE]
            all_rows += self._kept_rows(f"{name}-{begin}", chosen, self._alone)
        return all_rows

    def rows_of_ranks(self, cases: Sequence[Case]) -> list[PredictedCase]:
        """Return the rows of cases of several ranks, in their order; those that cannot be run here are left out."""
        row_of: dict[Case, PredictedCase] = {}
        for num_ranks in sorted({case.num_ranks for case in cases}):
            alike = [case for case in cases if case.num_ranks == num_ranks]
            rows = self._kept_rows(f"ranks-{num_ranks}", alike, self._of_ranks)
            row_of |= dict(zip(alike, rows, strict=False))
        return [row_of[case] for case in cases if case in row_of]

    def choices(self, name: str, cases: Sequence[Case]) -> tuple[Choice, ...]:
        """Return what there was to choose from in one configuration, with and without a limit of memory."""
        *rows, again = self._kept_rows(name, [*cases, _most_alike(cases)], self._in_turn)
        return Choice.with_and_without_limit(tuple(rows), again)

    def _kept_rows(
        self, name: str, cases: Sequence[Case], measured: Callable[[Sequence[Case]], list[PredictedCase]]
    ) -> list[PredictedCase]:
        def make() -> Content:
            rows = [asdict(row) for row in measured(cases)]
            return {"cases": [case.name for case in cases], "rows": rows}

        # Lists may have grown since a result was made.
        digest = zlib.crc32("; ".join(case.name for case in cases).encode())
        return case_rows(self.kept_results.of(f"{name}-{digest:08x}", make)["rows"])

    def _alone(self, cases: Sequence[Case]) -> list[PredictedCase]:
        measured = measure(cases, topology=self.topology.name, device=self.device)
        return predict(measured, self.profiles, self.topology)

    def _of_ranks(self, cases: Sequence[Case]) -> list[PredictedCase]:
        try:
            measured = measure_ranks(cases, topology=self.topology.name, device=self.device)
        except ZosimError as error:
            # What other cases took is not thrown away for it.
            self.say(f"{len(cases)} cases of several ranks are left out: {error.message}")
            return []
        return predict(measured, self.profiles, self.topology)

    def _in_turn(self, cases: Sequence[Case]) -> list[PredictedCase]:
        measured = measure_in_turn(cases, topology=self.topology.name, device=self.device)
        return predict(measured, self.profiles, self.topology)


def _most_alike(cases: Sequence[Case]) -> Case:
    """Return the case that is measured twice, to see how far two measurements of one plan are apart."""
    return next(case for case in cases if case.placement == REPEATED)


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


def write(benchmark: Benchmark, folder: Path) -> Path:
    """Write the report and the JSON next to it, and return the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = max(benchmark.profiles.values(), key=lambda profile: profile.num_cores).num_cores
    name = f"{benchmark.date}-cpu-{cores}core-prediction"
    report = folder / f"{name}{'-quantized' * benchmark.is_quantized}.md"
    report.write_text(benchmark.to_markdown(), encoding="utf-8")
    report.with_suffix(".json").write_text(benchmark.to_json(), encoding="utf-8")
    return report
