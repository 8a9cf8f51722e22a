"""The report of a benchmark: figures, a table per case, what was wrong, and how to do it again."""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median

import numpy as np
import psutil
from scipy.stats import binom

from costmodel.rates.calibration import FitReport
from costmodel.rates.profile import Profile
from studies.prediction.predicting import PACE_CHANGED, Choice, PredictedCase
from zosim.report import Code, Part, Report, Table

STEP_GOAL = (0.08, 0.20)
MEMORY_GOAL = (0.05, 0.10)
"""Median and 90th percentile of the absolute relative errors."""

REGRET_GOAL = (1.05, 1.15)
"""Median and worst time of the predicted choice over that of the best one."""


@dataclass(frozen=True)
class Summary:
    """Figures over one list of cases."""

    num_cases: int
    step_median: float
    step_p90: float
    step_bias: float
    memory_median: float
    memory_p90: float
    largest_underestimate: float
    """Of peak memory, as a part of what was measured; 0 if none was underestimated."""
    covered: float
    interval_width: float
    """Median of the widths of the intervals, as parts of the prediction."""
    paced_median: float
    paced_p90: float
    paced_bias: float
    """Of step times predicted for the pace that was measured before each case."""

    @classmethod
    def of(cls, rows: Sequence[PredictedCase]) -> Summary:
        """Return the figures of these rows."""
        names = ("step_error", "memory_error", "paced_error")
        step, memory, paced = ([getattr(row, name) for row in rows] for name in names)
        return cls(
            num_cases=len(rows),
            step_median=float(np.median(np.abs(step))),
            step_p90=float(np.percentile(np.abs(step), 90)),
            step_bias=float(np.median(step)),
            memory_median=float(np.median(np.abs(memory))),
            memory_p90=float(np.percentile(np.abs(memory), 90)),
            largest_underestimate=max(0.0, -min(memory)),
            covered=sum(row.is_covered for row in rows) / len(rows),
            interval_width=float(np.median([(row.high_s - row.low_s) / row.predicted_s for row in rows])),
            paced_median=float(np.median(np.abs(paced))),
            paced_p90=float(np.percentile(np.abs(paced), 90)),
            paced_bias=float(np.median(paced)),
        )

    @property
    def coverage_band(self) -> tuple[float, float]:
        """Where 95 in 100 intervals of 90 % would have their coverage, by the binomial distribution."""
        low, high = binom.interval(0.95, self.num_cases, 0.9)
        return float(low) / self.num_cases, float(high) / self.num_cases

    @property
    def is_covered(self) -> bool:
        """Whether coverage lies in that band."""
        low, high = self.coverage_band
        return low <= self.covered <= high

    @property
    def meets_goals(self) -> bool:
        """Whether step time and memory are within both of their goals, and no memory was underestimated."""
        return self.largest_underestimate == 0 and all(
            error <= goal
            for error, goal in zip(
                (self.step_median, self.step_p90, self.memory_median, self.memory_p90),
                (*STEP_GOAL, *MEMORY_GOAL),
                strict=True,
            )
        )


@dataclass(frozen=True)
class Benchmark:
    """Everything that a report says."""

    date: str
    command: str
    commit: str
    machine: str
    held_out: tuple[PredictedCase, ...]
    tuning: tuple[PredictedCase, ...]
    ranks: tuple[PredictedCase, ...]
    choices: tuple[Choice, ...]
    profiles: Mapping[int, Profile]
    fits: Mapping[int, FitReport]
    is_of_codes: bool = False

    @property
    def rows(self) -> tuple[PredictedCase, ...]:
        """Everything that no constant was chosen by: held-out cases, several ranks, plans to choose from."""
        return (*self.held_out, *self.ranks, *self.choice_rows)

    @property
    def choice_rows(self) -> tuple[PredictedCase, ...]:
        """Every plan that there was to choose from, once."""
        return tuple(row for choice in self.choices if choice.limit_bytes is None for row in choice.rows)

    def to_json(self) -> str:
        """Return all rows, the constants and the residuals of the calibration."""
        data = {
            "date": self.date,
            "command": self.command,
            "commit": self.commit,
            "machine": self.machine,
            "versions": versions(),
            "held_out": {
                "summary": asdict(Summary.of(self.held_out)),
                "rows": [asdict(row) for row in self.held_out],
            },
            "all": {"summary": asdict(Summary.of(self.rows))},
            "ranks": [asdict(row) for row in self.ranks],
            "choices": [
                {
                    "regret": choice.regret,
                    "limit_bytes": choice.limit_bytes,
                    "keeps_limit": choice.keeps_limit,
                    "chosen": choice.chosen.name,
                    "best": choice.best.name,
                    "noise": choice.noise,
                }
                for choice in self.choices
            ],
            "choice_rows": [asdict(row) for row in self.choice_rows],
            "tuning": {
                "summary": asdict(Summary.of(self.tuning)) if self.tuning else None,
                "rows": [asdict(row) for row in self.tuning],
            },
            "profiles": {str(n): p.model_dump(mode="json") for n, p in self.profiles.items()},
            "calibration_residuals": {
                str(n): [asdict(row) for row in fit.residuals] for n, fit in self.fits.items()
            },
        }
        return json.dumps(data, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return the report."""
        return Report(
            f"Steps in codes, predicted against measured on {self.machine}"
            if self.is_of_codes
            else f"Predicted against measured on {self.machine}",
            *self._head(),
            self._figures(),
            self._regret(),
            self._groups(),
            self._culprits(),
            self._calibration(),
            Report("Held-out cases, worst first", _cases(self.held_out)),
            Report("Several ranks, worst first", _cases(self.ranks)),
            Report("Tuning cases, worst first", _cases(self.tuning)),
        ).to_markdown()

    def _head(self) -> Iterator[Part]:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"{self.date}, commit `{self.commit}`. {listed}."
        yield Code(self.command)
        yield """The machine is calibrated as `zosim calibrate` does it, once per number of threads; then each case is lowered,
simulated and run, several ranks as processes of one thread each. Models have random weights, batches random tokens. The held-out list is drawn by a seed, and no shape, batch
size or placement of it was looked at while the cost model was made; the calibration runs single kernels and whole
steps of models of other widths. Measured step times are medians over the half of the rounds in which other processes used
least of the processors; memory is arena plus live tensors, peaks over the first steps."""

    def _figures(self) -> Report:
        lists = {
            "all": self.rows,
            "held out": self.held_out,
            "several ranks": self.ranks,
            "to choose from": self.choice_rows,
            "tuning": self.tuning,
        }
        lists["undisturbed"] = tuple(row for row in self.rows if not row.is_disturbed)
        columns = {name: Summary.of(rows) for name, rows in lists.items() if rows}
        whole = columns["all"]
        band = " to ".join(f"{end:.0%}" for end in whole.coverage_band)
        goals = (
            ("step time, median absolute error", "step_median", f"≤ {STEP_GOAL[0]:.0%}"),
            ("step time, 90th percentile", "step_p90", f"≤ {STEP_GOAL[1]:.0%}"),
            ("step time, median signed error", "step_bias", ""),
            ("at the pace before each case, median", "paced_median", ""),
            ("at the pace before each case, 90th percentile", "paced_p90", ""),
            ("at the pace before each case, median signed", "paced_bias", ""),
            ("peak memory, median absolute error", "memory_median", f"≤ {MEMORY_GOAL[0]:.0%}"),
            ("peak memory, 90th percentile", "memory_p90", f"≤ {MEMORY_GOAL[1]:.0%}"),
            ("peak memory, largest underestimate", "largest_underestimate", "0 %"),
            ("measured step time inside the interval of 90 %", "covered", f"{band} of all"),
            ("median width of the interval", "interval_width", ""),
        )
        headings = ("", "goal", *(f"{name} ({summary.num_cases})" for name, summary in columns.items()))
        figures = [
            (words, goal, *(f"{getattr(summary, name):.1%}" for summary in columns.values()))
            for words, name, goal in goals
        ]
        verdict = "met" if whole.meets_goals else "**missed**"
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.held_out)
        disturbance = (
            f"In {disturbed} of the {len(self.held_out)} held-out cases other processes used more than "
            f"{_DISTURBED} of a processor even in the quieter rounds."
        )
        own = ", ".join(
            f"{profile.values()['pace']:.2f} ({threads} thread{'s' if threads > 1 else ''})"
            for threads, profile in self.profiles.items()
            if "pace" in profile.values()
        )
        pace = (
            f"Pace is what a reference computation takes over what it takes when no stranger shares the core's hardware: "
            f"{own or 'unknown'} while calibrating, {median(row.pace_before for row in self.rows):.2f} in the median before "
            f"cases. Undisturbed are cases after which it differed by at most {PACE_CHANGED:.0%} from that before them."
        )
        goals_met = f"Goals for step time and memory over all: {verdict}."
        return Report("Figures", Table(headings, figures, numeric=headings[1:]), goals_met, disturbance, pace)

    def _regret(self) -> Report:
        if not self.choices:
            return Report("")
        regrets = [choice.regret for choice in self.choices]
        goals = " and ".join(f"{goal:.2f}" for goal in REGRET_GOAL)
        kept = sum(choice.keeps_limit for choice in self.choices)
        words = (
            f"Measured time of the placement predicted to be the fastest, over that of the fastest: median "
            f"{median(regrets):.3f}, worst {max(regrets):.3f} (goals {goals}). All placements compute the same on two "
            "cores: two threads, or two ranks of one. With a memory limit, which half of them keep as predicted, "
            "the choice is among those that were predicted to fit, the best among those that did; "
            f"{kept} of {len(self.choices)} choices did. All plans of a configuration take turns, round after round; "
            "one of them is measured twice, as two sessions: `twice` is the slower over the faster."
        )
        columns: dict[str, Callable[[Choice], str]] = {
            "configuration": lambda choice: choice.best.name.partition(" thread")[0][:-2],
            "limit (MiB)": lambda choice: (
                "none" if choice.limit_bytes is None else f"{choice.limit_bytes / 2**20:.1f}"
            ),
            "chosen": lambda choice: choice.chosen.placement,
            "best": lambda choice: choice.best.placement,
            "chosen (ms)": lambda choice: f"{choice.chosen.measured_s * 1e3:.1f}",
            "best (ms)": lambda choice: f"{choice.best.measured_s * 1e3:.1f}",
            "slowest (ms)": lambda choice: f"{max(row.measured_s for row in choice.rows) * 1e3:.1f}",
            "regret": lambda choice: f"{choice.regret:.3f}",
            "twice": lambda choice: "-" if choice.noise is None else f"{choice.noise:.3f}",
        }
        numeric = [name for name in columns if name not in ("configuration", "chosen", "best")]
        return Report(
            "What the predicted choice costs", words, Table.of(self.choices, columns, numeric=numeric)
        )

    def _groups(self) -> Report:
        columns: dict[str, Callable[[tuple[str, list[PredictedCase]]], str]] = {
            "group": lambda group: group[0],
            "cases": lambda group: f"{len(group[1])}",
            "median error": lambda group: f"{np.median(np.abs([row.step_error for row in group[1]])):.1%}",
            "90th percentile": lambda group: (
                f"{np.percentile(np.abs([row.step_error for row in group[1]]), 90):.1%}"
            ),
            "median signed": lambda group: f"{median(row.step_error for row in group[1]):+.1%}",
        }
        return Report("Held-out step time by group", Table.of(_grouped(self.held_out), columns))

    def _culprits(self) -> Report:
        shares: dict[str, list[float]] = defaultdict(list)
        for row in self.held_out:
            for line in row.lines:
                shares[line.name].append(line.contribution_s / row.measured_s)
        count = len(self.held_out)
        ranked = sorted(shares.items(), key=lambda item: -sum(map(abs, item[1])))
        columns: dict[str, Callable[[tuple[str, list[float]]], str]] = {
            "label": lambda item: item[0],
            "mean size": lambda item: f"{sum(map(abs, item[1])) / count:.1%}",
            "signed mean": lambda item: f"{sum(item[1]) / count:+.1%}",
        }
        return Report(
            "Which instructions were wrong",
            "Seconds on the predicted critical path less those on the measured one, as parts of the measured step; "
            "means over the held-out cases. The size says how much a label matters, the signed mean whether it is "
            "too slow (+) or too fast (-).",
            Table.of(ranked[:8], columns),
        )

    def _calibration(self) -> Report:
        columns: dict[str, Callable[[tuple[int, FitReport]], str]] = {
            "threads": lambda item: f"{item[0]}",
            "measurements": lambda item: f"{len(item[1].residuals)}",
            "median residual": lambda item: f"{item[1].median_error:.1%}",
            "identified constants": lambda item: f"{len(item[1].identified)}",
            "not identified": lambda item: _open_names(item[1]),
        }
        words = [
            f"With {threads} thread{'s' if threads > 1 else ''}, disturbed: {words}."
            for threads, fit in self.fits.items()
            for words in fit.disturbances
        ]
        return Report("Calibration", Table.of(self.fits.items(), columns, numeric=list(columns)[:4]), *words)


def _open_names(fit: FitReport) -> str:
    return ", ".join(f"`{name}`" for name in fit.unidentified if name.count(".") < 2) or "none"


_DISTURBED = 0.1


def _grouped(rows: Sequence[PredictedCase]) -> Iterator[tuple[str, list[PredictedCase]]]:
    """Yield the rows by number of threads, format, residency and size of step."""
    ways = (
        "; 8 bits",
        "walked",
        "; signs;",
        "; 4 bits",
        "; 2 bits",
        "q-rge2",
        "zeros",
        "W8A8",
    )
    groups: dict[str, Callable[[PredictedCase], bool]] = {
        "1 thread": lambda row: "1 thread," in row.name,
        "2 threads": lambda row: "2 threads," in row.name,
        "float32": lambda row: "fp32" in row.name,
        "bfloat16": lambda row: "bf16" in row.name,
        "resident": lambda row: "offloaded" not in row.placement,
        "offloaded": lambda row: "offloaded" in row.placement,
        "drawn ahead": lambda row: "draw ahead" in row.placement,
        "steps below 100 ms": lambda row: row.measured_s < 0.1,
        "steps of 100 ms and more": lambda row: row.measured_s >= 0.1,
        **{way.strip("; "): partial(_is_placed, way) for way in ways},
    }
    for name, belongs in groups.items():
        chosen = [row for row in rows if belongs(row)]
        if chosen:
            yield name, chosen


def _is_placed(way: str, row: PredictedCase) -> bool:
    return way in row.placement


def _cases(rows: Sequence[PredictedCase]) -> Table:
    columns: dict[str, Callable[[PredictedCase], str]] = {
        "case": lambda row: row.name,
        "predicted (ms)": lambda row: f"{row.predicted_s * 1e3:.1f}",
        "interval": lambda row: f"{row.low_s * 1e3:.1f}–{row.high_s * 1e3:.1f}",
        "measured (ms)": lambda row: f"{row.measured_s * 1e3:.1f}",
        "error": lambda row: f"{row.step_error:+.1%}",
        "pace before": lambda row: f"{row.pace_before:.2f}",
        "after": lambda row: f"{row.pace_after:.2f}",
        "at that pace": lambda row: f"{row.paced_error:+.1%}",
        "memory (MiB): predicted": lambda row: f"{row.predicted_bytes / 2**20:.2f}",
        "memory (MiB): measured": lambda row: f"{row.measured_bytes / 2**20:.2f}",
        "memory: error": lambda row: f"{row.memory_error:+.2%}",
        "limited by": lambda row: row.limiter,
    }
    worst_first = sorted(rows, key=lambda row: -abs(row.step_error))
    return Table.of(worst_first, columns, numeric=list(columns)[1:-1])


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return {"Python": sys.version.split()[0]} | {
        name: version(name) for name in ("torch", "transformers", "numpy", "scipy")
    }


def machine_words(processor: str) -> str:
    """Return this machine in words."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"
    )
