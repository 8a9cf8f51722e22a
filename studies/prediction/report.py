"""The report of a benchmark: figures, a table per case, what was wrong, and how to do it again."""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median

import numpy as np
import psutil
from scipy.stats import binom

from costmodel.calibration import FitReport
from costmodel.profile import Profile
from studies.prediction.predicting import PACE_CHANGED, Choice, Row

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
    def of(cls, rows: Sequence[Row]) -> Summary:
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
    held_out: tuple[Row, ...]
    tuning: tuple[Row, ...]
    ranks: tuple[Row, ...]
    choices: tuple[Choice, ...]
    profiles: Mapping[int, Profile]
    fits: Mapping[int, FitReport]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Everything that no constant was chosen by: held-out cases, several ranks, plans to choose from."""
        return (*self.held_out, *self.ranks, *self.choice_rows)

    @property
    def choice_rows(self) -> tuple[Row, ...]:
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
        parts = [self._head(), self._figures(), self._groups(), self._culprits(), self._calibration()]
        if self.choices:
            parts.insert(2, self._regret())
        parts.append("## Held-out cases, worst first\n\n" + _table(self.held_out))
        if self.ranks:
            parts.append("## Several ranks, worst first\n\n" + _table(self.ranks))
        if self.tuning:
            parts.append("## Tuning cases, worst first\n\n" + _table(self.tuning))
        return "\n\n".join(parts) + "\n"

    def _head(self) -> str:
        listed = ", ".join(f"{name} {number}" for name, number in versions().items())
        return f"""# Predicted against measured on {self.machine}

{self.date}, commit `{self.commit}`. {listed}.

    {self.command}

The machine is calibrated as `zosim calibrate` does it, once per number of threads; then each case is lowered,
simulated and run, several ranks as processes of one thread each. Models have random weights, batches random tokens. The held-out list is drawn by a seed, and no shape, batch
size or placement of it was looked at while the cost model was made; the calibration runs single kernels and whole
steps of models of other widths. Measured step times are medians over the half of the rounds in which other processes used
least of the processors; memory is arena plus live tensors, peaks over the first steps."""

    def _figures(self) -> str:
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
        lines = [
            "## Figures\n",
            f"| | goal | {' | '.join(f'{name} ({s.num_cases})' for name, s in columns.items())} |",
            "| --- | ---: |" + " ---: |" * len(columns),
        ]
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
        for words, name, goal in goals:
            values = " | ".join(f"{getattr(summary, name):.1%}" for summary in columns.values())
            lines.append(f"| {words} | {goal} | {values} |")
        verdict = "met" if whole.meets_goals else "**missed**"
        lines.append(f"\nGoals for step time and memory over all: {verdict}.")
        disturbed = sum(row.foreign_cores > _DISTURBED for row in self.held_out)
        lines.append(
            f"In {disturbed} of the {len(self.held_out)} held-out cases other processes used more than "
            f"{_DISTURBED} of a processor even in the quieter rounds."
        )
        own = ", ".join(
            f"{profile.values()['pace']:.2f} ({threads} thread{'s' if threads > 1 else ''})"
            for threads, profile in self.profiles.items()
            if "pace" in profile.values()
        )
        lines.append(
            f"Pace is what a reference computation takes over what it takes when no stranger shares the core's hardware: "
            f"{own or 'unknown'} while calibrating, {median(row.pace_before for row in self.rows):.2f} in the median before "
            f"cases. Undisturbed are cases after which it differed by at most {PACE_CHANGED:.0%} from that before them."
        )
        return "\n".join(lines)

    def _regret(self) -> str:
        regrets = [choice.regret for choice in self.choices]
        goals = " and ".join(f"{goal:.2f}" for goal in REGRET_GOAL)
        kept = sum(choice.keeps_limit for choice in self.choices)
        lines = [
            "## What the predicted choice costs\n",
            (
                f"Measured time of the placement predicted to be the fastest, over that of the fastest: median "
                f"{median(regrets):.3f}, worst {max(regrets):.3f} (goals {goals}). All placements compute the same on two "
                "cores: two threads, or two ranks of one. With a memory limit, which half of them keep as predicted, "
                "the choice is among those that were predicted to fit, the best among those that did; "
                f"{kept} of {len(self.choices)} choices did. All plans of a configuration take turns, round after round; "
                "one of them is measured twice, as two sessions: `twice` is the slower over the faster.\n"
            ),
            "| configuration | limit (MiB) | chosen | best | chosen (ms) | best (ms) | slowest (ms) | regret | twice |",
            "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for choice in self.choices:
            slowest = max(row.measured_s for row in choice.rows)
            limit = "none" if choice.limit_bytes is None else f"{choice.limit_bytes / 2**20:.1f}"
            lines.append(
                f"| {choice.best.name.partition(' thread')[0][:-2]} | {limit} | {choice.chosen.placement} | "
                f"{choice.best.placement} | {choice.chosen.measured_s * 1e3:.1f} | {choice.best.measured_s * 1e3:.1f} | "
                f"{slowest * 1e3:.1f} | {choice.regret:.3f} | {_ratio(choice.noise)} |"
            )
        return "\n".join(lines)

    def _groups(self) -> str:
        lines = [
            "## Held-out step time by group\n",
            "| group | cases | median error | 90th percentile | median signed |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, rows in _grouped(self.held_out):
            errors = [row.step_error for row in rows]
            absolute = np.abs(errors)
            lines.append(
                f"| {name} | {len(rows)} | {np.median(absolute):.1%} | {np.percentile(absolute, 90):.1%} | "
                f"{median(errors):+.1%} |"
            )
        return "\n".join(lines)

    def _culprits(self) -> str:
        lines = [
            "## Which instructions were wrong\n",
            (
                "Seconds on the predicted critical path less those on the measured one, as parts of the measured step; "
                "means over the held-out cases. The size says how much a label matters, the signed mean whether it is "
                "too slow (+) or too fast (-).\n"
            ),
            "| label | mean size | signed mean |",
            "| --- | ---: | ---: |",
        ]
        shares: dict[str, list[float]] = defaultdict(list)
        for row in self.held_out:
            for line in row.lines:
                shares[line.name].append(line.contribution_s / row.measured_s)
        count = len(self.held_out)
        ranked = sorted(shares.items(), key=lambda item: -sum(map(abs, item[1])))
        for name, values in ranked[:8]:
            lines.append(f"| {name} | {sum(map(abs, values)) / count:.1%} | {sum(values) / count:+.1%} |")
        return "\n".join(lines)

    def _calibration(self) -> str:
        lines = [
            "## Calibration\n",
            "| threads | measurements | median residual | identified constants | not identified |",
            "| ---: | ---: | ---: | ---: | --- |",
        ]
        for threads, fit in self.fits.items():
            open_names = ", ".join(f"`{name}`" for name in fit.unidentified if name.count(".") < 2) or "none"
            lines.append(
                f"| {threads} | {len(fit.residuals)} | {fit.median_error:.1%} | {len(fit.identified)} | {open_names} |"
            )
        return "\n".join(lines)


_DISTURBED = 0.1


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows by number of threads, format, residency and size of step."""
    groups = {
        "1 thread": lambda row: "1 thread," in row.name,
        "2 threads": lambda row: "2 threads," in row.name,
        "float32": lambda row: "fp32" in row.name,
        "bfloat16": lambda row: "bf16" in row.name,
        "resident": lambda row: "offloaded" not in row.placement,
        "offloaded": lambda row: "offloaded" in row.placement,
        "drawn ahead": lambda row: "draw ahead" in row.placement,
        "steps below 100 ms": lambda row: row.measured_s < 0.1,
        "steps of 100 ms and more": lambda row: row.measured_s >= 0.1,
    }
    for name, belongs in groups.items():
        chosen = [row for row in rows if belongs(row)]
        if chosen:
            yield name, chosen


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        (
            "| case | predicted (ms) | interval | measured (ms) | error | pace before | after | at that pace | memory (MiB): predicted | "
            "measured | error | limited by |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row.name} | {row.predicted_s * 1e3:.1f} | {row.low_s * 1e3:.1f}–{row.high_s * 1e3:.1f} | "
        f"{row.measured_s * 1e3:.1f} | {row.step_error:+.1%} | {row.pace_before:.2f} | {row.pace_after:.2f} | "
        f"{row.paced_error:+.1%} | "
        f"{row.predicted_bytes / 2**20:.2f} | {row.measured_bytes / 2**20:.2f} | {row.memory_error:+.2%} | "
        f"{row.limiter} |"
        for row in sorted(rows, key=lambda row: -abs(row.step_error))
    ]
    return "\n".join(lines)


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
