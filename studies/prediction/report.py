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
from typing import Any

import psutil

from costmodel.rates.calibration import FitReport
from costmodel.rates.profile import Profile
from costmodel.scoring import Row, Score, coverage_band
from studies.prediction.predicting import Choice, PredictedCase
from studies.timed_cases import Groups, case_columns, describe_slowdown, grouped, scored, step_tables
from zosim.analysis.scoreboard import rows_table, score_data, score_table
from zosim.report import Code, Element, Report, Table

STEP_GOAL = (0.08, 0.20)
MEMORY_GOAL = (0.05, 0.10)
"""Median and 90th percentile of the absolute relative errors."""

REGRET_GOAL = (1.05, 1.15)
"""Median and worst time of the predicted choice over that of the best one."""

QuantityOf = Callable[[PredictedCase], Row]
STEP: QuantityOf = lambda case: case.step
MEMORY: QuantityOf = lambda case: case.memory


def largest_underestimate(memory: Score) -> float:
    """Return by which part peak memory was underestimated most; 0 if it never was."""
    return max(0.0, -min(memory.errors))


def meets_goals(rows: Sequence[PredictedCase]) -> bool:
    """Return whether step time and memory are within both of their goals, and no memory was underestimated."""
    step, memory = (Score.of(map(row_of, rows)) for row_of in (STEP, MEMORY))
    return step.meets(STEP_GOAL) and memory.meets(MEMORY_GOAL) and largest_underestimate(memory) == 0


def summary(rows: Sequence[PredictedCase]) -> dict[str, Any]:
    """Return the scores of some cases as JSON has them."""
    quantities: dict[str, QuantityOf] = {"step": STEP, "paced": lambda case: case.paced, "memory": MEMORY}
    return {name: score_data(Score.of(map(row_of, rows), name)) for name, row_of in quantities.items()}


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
    is_quantized: bool = False

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
                "summary": summary(self.held_out),
                "rows": [asdict(row) for row in self.held_out],
            },
            "all": {"summary": summary(self.rows)},
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
                "summary": summary(self.tuning) if self.tuning else None,
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
            f"Steps on quantized weights, predicted against measured on {self.machine}"
            if self.is_quantized
            else f"Predicted against measured on {self.machine}",
            *self._head(),
            self._figures(),
            self._regret(),
            self._culprits(),
            self._calibration(),
            Report("Held-out cases, worst first", _cases(self.held_out)),
            Report("Several ranks, worst first", _cases(self.ranks)),
            Report("Tuning cases, worst first", _cases(self.tuning)),
        ).to_markdown()

    def _head(self) -> Iterator[Element]:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"{self.date}, commit `{self.commit}`. {listed}."
        yield Code(self.command)
        yield """The machine is calibrated as by `zosim calibrate`, once for each number of threads. Then each case is lowered, simulated and run. Several ranks are processes
of one thread each. Models have random weights, batches random tokens.

The held-out list is sampled by a seed. No shape, batch size or placement of it was looked at while the cost model was made. The calibration runs single kernels, and whole
steps of models of other widths. Measured step times are medians over the half of the rounds in which other processes used
least of the processors. Memory is arena plus live tensors, with peaks over the first steps."""

    def _figures(self) -> Report:
        lists = {
            "all": self.rows,
            "held out": self.held_out,
            "several ranks": self.ranks,
            "to choose from": self.choice_rows,
            "tuning": self.tuning,
            "undisturbed": tuple(row for row in self.rows if not row.is_disturbed),
            **{f"held out, {name}": rows for name, rows in grouped(self.held_out, _GROUPS).items()},
        }
        memory = scored(lists, MEMORY)
        under = {score.name: f"{100 * largest_underestimate(score):.1f}" for score in memory}
        band = " to ".join(f"{end:.0%}" for end in coverage_band(len(self.rows)))
        verdict = "met" if meets_goals(self.rows) else "**missed**"
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.held_out)
        own = ", ".join(
            f"{profile.values()['slowdown']:.2f} ({threads} thread{'s' if threads > 1 else ''})"
            for threads, profile in self.profiles.items()
            if "slowdown" in profile.values()
        )
        return Report(
            "Figures",
            *step_tables(lists, STEP_GOAL),
            score_table(
                memory,
                "cases",
                goals={"all": MEMORY_GOAL},
                more={"underestimate %": under},
                title="Peak memory",
            ),
            f"Goals for step time and memory over all, where no memory may be underestimated: {verdict}. Of as many intervals "
            f"of 90 %, {band} hold.",
            f"In {disturbed} of the {len(self.held_out)} held-out cases other processes used more than "
            f"{_DISTURBED} of a processor even in the quieter rounds.",
            describe_slowdown(own or "unknown", self.rows),
        )

    def _regret(self) -> Report:
        if not self.choices:
            return Report("")
        regrets = [choice.regret for choice in self.choices]
        goals = " and ".join(f"{goal:.2f}" for goal in REGRET_GOAL)
        kept = sum(choice.keeps_limit for choice in self.choices)
        words = (
            f"Measured time of the placement predicted to be the fastest, over that of the fastest: median "
            f"{median(regrets):.3f}, worst {max(regrets):.3f} (goals {goals}). All placements compute the same on two "
            "cores: two threads, or two ranks of one. Half of the configurations have a memory limit. The choice is then among plans "
            "that were predicted to fit, and the best among those that did fit; "
            f"{kept} of {len(self.choices)} choices did. All plans of a configuration take turns, round after round. "
            "One of them is measured twice, as two sessions: `twice` is the slower over the faster."
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
            "Seconds on the predicted critical path minus those on the measured one, relative to the measured step. "
            "Means over the held-out cases: the size says how much a label matters, the signed mean whether it is "
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


def _is_placed(way: str, row: PredictedCase) -> bool:
    return way in row.placement


_WAYS = ("; 8 bits", "walked", "; signs;", "; 4 bits", "; 2 bits", "q-rge2", "zeros", "W8A8")
_GROUPS: Groups[PredictedCase] = {
    "1 thread": lambda row: "1 thread," in row.name,
    "2 threads": lambda row: "2 threads," in row.name,
    "float32": lambda row: "fp32" in row.name,
    "bfloat16": lambda row: "bf16" in row.name,
    "resident": lambda row: "offloaded" not in row.placement,
    "offloaded": lambda row: "offloaded" in row.placement,
    "drawn ahead": lambda row: "draw ahead" in row.placement,
    "steps below 100 ms": lambda row: row.measured_s < 0.1,
    "steps of 100 ms and more": lambda row: row.measured_s >= 0.1,
    **{way.strip("; "): partial(_is_placed, way) for way in _WAYS},
}
"""Held-out cases by number of threads, format, residency and size of step."""


def _cases(rows: Sequence[PredictedCase]) -> Table:
    columns: dict[str, Callable[[PredictedCase], str]] = {
        **case_columns(),
        "memory (MiB): predicted": lambda row: f"{row.predicted_bytes / 2**20:.2f}",
        "memory (MiB): measured": lambda row: f"{row.measured_bytes / 2**20:.2f}",
        "memory: error": lambda row: f"{row.memory.error:+.2%}",
        "limited by": lambda row: row.limiter,
    }
    return rows_table(rows, columns, row_of=STEP)


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return {"Python": sys.version.split()[0]} | {
        name: version(name) for name in ("torch", "transformers", "numpy", "scipy")
    }


def describe_machine(processor: str) -> str:
    """Return this machine in words."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"
    )
