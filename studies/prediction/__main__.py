"""``python -m studies.prediction``: the benchmark of predictions on this machine, with its report."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

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
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Cases whose weights are quantized, in place of all others.")
    ] = False,
    calibration_s: Annotated[float, typer.Option(min=1, help="Seconds per number of threads.")] = 20.0,
    threads: Annotated[
        list[int], typer.Option(min=1, help="Run cases of so many threads; may be repeated.")
    ] = [1, 2],  # noqa: B006 - typer copies it
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep what is done here, and go on from it. Remove it for another calibration."),
    ] = None,
    stop_after_s: Annotated[
        float, typer.Option(min=1, help="Begin nothing new after so long; go on with the same --folder.")
    ] = 1e9,
) -> None:
    """Calibrate this machine, predict and run cases that the calibration has not seen, and report the errors.

    In steps: with --folder and --stop-after-s it ends with exit status 75 while there is more to do.
    """
    from studies.kept_results import MORE_TO_DO, KeptResults, OutOfTimeError
    from studies.prediction.benchmark import run_benchmark, write
    from studies.prediction.report import MEMORY, STEP
    from studies.timed_cases import scored

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    logging.getLogger("transformers").setLevel(logging.ERROR)
    words = ["python -m studies.prediction", f"--held-out {held_out}", f"--calibration-s {calibration_s:g}"]
    words += ["--tuning"] if tuning else []
    words += ["--quick"] if quick else []
    words += ["--quantized"] if quantized else []
    words += [f"--threads {number}" for number in threads] if threads != [1, 2] else []
    try:
        benchmark = run_benchmark(
            num_held_out=min(held_out, 6) if quick else held_out,
            num_rank_cases=3 if quick else 10,
            num_choices=1 if quick else 3,
            with_tuning=tuning,
            is_quantized=quantized,
            threads=threads,
            calibration_s=calibration_s,
            command=" ".join(words),
            kept_results=KeptResults(folder, stop_after_s, say=say),
            say=say,
        )
    except OutOfTimeError:
        print("there is more to do: run the same command again", file=sys.stderr)
        raise typer.Exit(MORE_TO_DO) from None
    path = write(benchmark, out)
    step, memory = (scored({"all": benchmark.rows}, row)[0] for row in (STEP, MEMORY))
    worst = max((choice.regret for choice in benchmark.choices), default=1.0)
    print(
        f"{step.num_rows} cases, step time: median error {step.median:.1%}, 90th percentile {step.p90:.1%}; "
        f"peak memory: {memory.median:.1%}, {memory.p90:.1%}; "
        f"coverage {step.coverage:.0%}, median width {step.width:.2f}; worst regret {worst:.3f}; report: {path}"
    )


if __name__ == "__main__":
    typer.run(main)
