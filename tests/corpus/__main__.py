"""``python -m tests.corpus freeze|compare FILE``."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")

NUM_RANDOM_RUNS, NUM_REQUESTS, SEED = 260, 300, 0
NUM_STEPS, NUM_STEPS_BEFORE_RESUMING = 4, 2
SUM_TOLERANCE = 1e-12
"""Relative; a sum in another order is the same prediction."""
PARTS = ("runs", "requests", "claims", "measured")


def main() -> int:
    """Freeze or compare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.corpus", description=__doc__)
    parser.add_argument("action", choices=["freeze", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--every", type=int, default=1, help="only every Nth case of runs and requests")
    parsed = parser.parse_args()
    makers: dict[str, Callable[[int], Iterator[tuple[str, Any]]]] = {
        "runs": runs,
        "requests": requests,
        "claims": claims,
        "measured": measured,
    }
    made: dict[str, dict[str, Any]] = {}
    for part in parsed.parts.split(","):
        made[part] = {}
        for name, outcome in makers[part](parsed.every):
            made[part][name] = outcome
            print(f"\r{part}: {len(made[part])}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    if parsed.action == "freeze":
        parsed.file.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        print(f"froze {', '.join(f'{len(cases)} {part}' for part, cases in made.items())} in {parsed.file}")
        return 0
    frozen = json.loads(parsed.file.read_text())
    differences = [
        line
        for part in made
        for line in differing(part, frozen[part], json.loads(json.dumps(made[part])), parsed.every)
    ]
    print("\n".join(differences) or f"no difference in {sum(map(len, made.values()))} cases")
    return 1 if differences else 0


def differing(part: str, frozen: dict[str, Any], made: dict[str, Any], every: int) -> Iterator[str]:
    """Yield a line for each case whose outcome is another, or that one of the two lacks."""
    for name in sorted(frozen.keys() | made.keys() if every == 1 else made.keys()):
        before, after = frozen.get(name, "no such case"), made.get(name, "no such case")
        if not is_same(before, after):
            yield f"{part}: {name}\n  before {json.dumps(before)}\n  after  {json.dumps(after)}"


def is_same(before: Any, after: Any) -> bool:
    """Whether two outcomes are equal, numbers up to :data:`SUM_TOLERANCE`."""
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=SUM_TOLERANCE)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(is_same(before[key], after[key]) for key in before)
    return bool(before == after)


def runs(every: int) -> Iterator[tuple[str, Any]]:
    """Yield hashes of weights and logs of tiny runs, or how they were refused."""
    from tests.corpus.cases import SHAPES, run_cases
    from tests.support.command import saved_lines, saved_model
    from tests.support.forked import copy_ranks

    copy_ranks()
    with tempfile.TemporaryDirectory() as folder:
        saved_lines(Path(folder) / "lines.jsonl")
        for shape in SHAPES:
            saved_model(shape, Path(folder))
        for number, case in enumerate(run_cases(NUM_RANDOM_RUNS, SEED)):
            if number % every == 0:
                yield case.name, _outcome_of_run(case, Path(folder), Path(folder) / f"run-{number}")


def _outcome_of_run(case: Any, folder: Path, out: Path) -> dict[str, Any]:
    usual = {"--batch": "4", "--lr": "1e-3", "--threads": "1", "--seed": "11"}
    given = (
        f"run --model {folder / case.shape} --data {folder}/lines.jsonl --out {out} --no-tensorboard".split()
    )
    given += case.options
    given += [word for flag, value in usual.items() if flag not in case.options for word in (flag, value)]
    first = NUM_STEPS_BEFORE_RESUMING if case.mode == "resumed" else NUM_STEPS
    code, error = _called(*given, "--steps", first)
    if code == 0 and case.mode == "resumed":
        code, error = _called(*given, "--steps", NUM_STEPS, "--resume")
    if code == 0 and case.mode == "replayed":
        code, error = _called("replay", out, "--model", folder / case.shape, "-o", out / "replayed")
    if code != 0:
        return {"exit": code, "error": error.replace(str(folder), "FOLDER")}
    tensors = sorted(path for path in out.rglob("*.safetensors") if "checkpoints" not in path.parts)
    rows = [
        {
            key: value
            for key, value in json.loads(line).items()
            if not key.endswith(("_s", "_unix", "time", "seconds"))
        }
        for line in (out / "steps.jsonl").read_text().splitlines()
    ]
    hashes = {str(path.relative_to(out)): _tensors_hash(path) for path in tensors}
    return {"weights": hashes, "log": _hash(json.dumps(rows, sort_keys=True))}


def _tensors_hash(path: Path) -> str:
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(
                tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            )
    return digest.hexdigest()[:16]


def requests(every: int) -> Iterator[tuple[str, Any]]:
    """Yield plan, programs and prediction of requests to the planner, or how they were refused."""
    from tests.corpus.cases import request_cases
    from zosim.lowering import lower_all
    from zosim.plans import Plan

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        for words in request_cases(NUM_REQUESTS, SEED)[::every]:
            code, error = _called("plan", *words, "-o", file)
            if code != 0:
                yield " ".join(words), {"exit": code, "error": error}
                continue
            simulated = io.StringIO()
            _called("simulate", file, "--json", stdout=simulated)
            prediction = json.loads(simulated.getvalue())
            kept = (
                "step_time_s",
                "step_time_low_s",
                "step_time_high_s",
                "device_bytes",
                "host_bytes",
                "makespan_s",
            )
            yield (
                " ".join(words),
                {
                    "plan": _hash(file.read_text()),
                    "programs": _hash(lower_all(Plan.load(file)).to_json()),
                    "prediction": {key: prediction[key] for key in kept},
                },
            )


def claims(_: int) -> Iterator[tuple[str, Any]]:
    """Yield the verdict of each claim, and what became of its planted faults."""
    command = [sys.executable, "-m", "zosim", "check", "--quick", "--mutate", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as checked:
        assert checked.stdout is not None
        for line in checked.stdout:
            entry = json.loads(line)
            faults = {
                fault["name"]: fault["verdict"] for check in entry["checks"] for fault in check["faults"]
            }
            yield entry["name"], {"verdict": entry["verdict"], "passed": entry["passed"], "faults": faults}


def measured(every: int) -> Iterator[tuple[str, Any]]:
    """Yield what is predicted for each published cell, and the medians of each stored benchmark, made anew from its rows."""
    from studies.prediction.predicting import case_rows
    from studies.prediction.report import summary
    from studies.published.dispatch import answers_of_all
    from studies.published.fitted_profile import load_published_profile
    from studies.published.rows import shipped_rows

    rows = shipped_rows()[::every]
    for number, answer in enumerate(answers_of_all(rows, load_published_profile(None))):
        yield f"{rows[number].place} {number * every}", answer.columns()
    for path in sorted(Path("docs/benchmarks").glob("*-prediction*.json")):
        cases = case_rows(json.loads(path.read_text())["held_out"]["rows"])
        yield path.stem, summary(cases)


def _called(*arguments: object, stdout: io.StringIO | None = None) -> tuple[int, str]:
    """Return exit code and the first line of what a command says to stderr, run in this process."""
    from tests.support.command import zosim

    errors = io.StringIO()
    with contextlib.redirect_stdout(stdout or io.StringIO()), contextlib.redirect_stderr(errors):
        code = zosim(*arguments)
    output = [line for line in errors.getvalue().splitlines() if line.startswith("error:")]
    return code, output[0] if output else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
