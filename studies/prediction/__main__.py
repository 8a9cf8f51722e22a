"""``python -m studies.prediction``: the benchmark of predictions on this machine, with its report."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from studies.prediction.report import Summary

OUT = Path("docs/benchmarks")


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report and its JSON.")] = OUT,
    held_out: Annotated[int, typer.Option(min=1, help="Number of held-out cases.")] = 24,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fraction of the cases, to see that all is well.")
    ] = False,
    tuning: Annotated[
        bool, typer.Option(help="Also run the list that the cost model was improved on.")
    ] = False,
    calibration_s: Annotated[float, typer.Option(min=1, help="Seconds per number of threads.")] = 20.0,
) -> None:
    """Calibrate this machine, predict and run cases that the calibration has not seen, and report the errors."""
    from studies.prediction.benchmark import run_benchmark, write

    logging.getLogger("transformers").setLevel(logging.ERROR)
    words = ["python -m studies.prediction", f"--held-out {held_out}", f"--calibration-s {calibration_s:g}"]
    words += ["--tuning"] if tuning else []
    words += ["--quick"] if quick else []
    benchmark = run_benchmark(
        num_held_out=min(held_out, 6) if quick else held_out,
        num_rank_cases=3 if quick else 10,
        num_choices=1 if quick else 3,
        with_tuning=tuning,
        calibration_s=calibration_s,
        command=" ".join(words),
        say=lambda text: print(text, file=sys.stderr),
    )
    path = write(benchmark, out)
    found = Summary.of(benchmark.rows)
    worst = max((choice.regret for choice in benchmark.choices), default=1.0)
    print(
        f"{found.num_cases} cases, step time: median error {found.step_median:.1%}, 90th percentile {found.step_p90:.1%}; "
        f"peak memory: {found.memory_median:.1%}, {found.memory_p90:.1%}; "
        f"coverage {found.covered:.0%}, median width {found.interval_width:.0%}; worst regret {worst:.3f}; report: {path}"
    )


if __name__ == "__main__":
    typer.run(main)
