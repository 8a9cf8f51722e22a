"""What the hour is made of, in an order in which the most valuable evidence comes first.

The device's own figures; whether every path works at all; what a step takes, and how far predictions are off; the bits of more
families and formats; calibration; larger models; what takes minutes and is known from other machines.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from executors.calibration.calibrating import calibrated
from executors.calibration.device_facts import device_facts, with_facts
from executors.calibration.device_state import device_state
from executors.calibration.whole_steps import STEP_SHAPES
from executors.devices import device_module
from executors.models.random_models import random_model
from executors.report import facts_table
from studies.first_hour.parity import parity
from studies.first_hour.paths import graphs, placements, products
from studies.first_hour.questions import questions
from studies.first_hour.setting import Content, Setting
from studies.first_hour.steps import Case, cases, timed_case, zo2_case
from topology.errors import RunError

_FACTS_S, _PATHS_S = 180.0, 90.0
"""What is known at once must not wait for what hangs."""

_NUM_LINES = 12
_KILLED_AT = (1, 5, 9)
"""Lines of the log at which a run is killed, one after the other."""


@dataclass(frozen=True)
class Part:
    """One thing to find out, in a process of its own."""

    name: str  # a file's name
    title: str
    # Returns what it found, or yields what it has found so far.
    make: Callable[[Setting], Content | Iterator[Content]]
    limit_s: float = math.inf  # seconds after which it is ended


def parts_of(setting: Setting) -> list[Part]:
    """Return the parts in their order."""
    return list(_parts(setting))


def _parts(setting: Setting) -> Iterator[Part]:
    yield Part("device", "the device", facts, _FACTS_S)
    yield Part("paths", "every path, tiny", placements, _PATHS_S)
    yield Part("graphs", "graphs of many blocks, tiny", graphs, _PATHS_S)
    yield Part("products", "products of quantized values, tiny", products, _PATHS_S)
    yield Part("questions", "what only a device can answer", questions, _PATHS_S)
    first, middle, last = cases(setting)
    yield from _steps(first)
    yield Part("parity", "parity with the reference", parity)
    yield Part("calibration", "calibration", calibration)
    yield from _steps(middle)
    yield Part("kills", "runs that are killed and go on", kills)
    yield Part("tests", "the tests that need a device", cuda_tests)
    yield from _steps(last)


def _steps(cases: Iterable[Case]) -> Iterator[Part]:
    has_zo2 = find_spec("zo2") is not None
    for case in cases:
        yield Part(f"step-{case.name}", f"a step of {case.name}", partial(timed_case, case=case))
        if has_zo2 and case.shape != "30b" and case.dtype == "float16" and not case.graphs:
            yield Part(f"zo2-{case.name}", f"zo2's own step of {case.name}", partial(zo2_case, case=case))


def facts(setting: Setting) -> Iterator[Content]:
    """Yield the device's name, memory and state as its driver reports it, and versions; then launches, copies, pinning, attention.

    First of all, in a process that has done nothing: what follows finds memory that torch has pinned or kept.
    """
    properties = device_module(torch.device(setting.device)).get_device_properties(setting.device)
    known = {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "hardware": setting.topology.name,
        "transformers": metadata.version("transformers"),
        "state": asdict(state) if (state := device_state(setting.device)) is not None else None,
    }
    yield known
    yield {**known, "figures": facts_table(device_facts(setting.device)).to_data()}


def cuda_tests(setting: Setting) -> Content:
    """Return how the tests ended that need a device, or that there is nothing to run them with."""
    if find_spec("pytest") is None:
        return {"left_out": "pytest is not installed"}
    # Other releases of torch and transformers than the project's tests are run with warn of other things.
    words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]
    status, output = setting.processes.run([*words, "tests/executors/steps/test_executors_cuda.py"])
    return {"is_right": status == 0, "output": output}


def calibration(setting: Setting) -> Content:
    """Measure the device, keep the profile for the parts that follow, and return how well it explains what was measured."""
    shapes = STEP_SHAPES[:2] if setting.is_rehearsal else STEP_SHAPES
    profile, fit = calibrated(
        setting.topology,
        setting.node,
        device=setting.device,
        budget_s=setting.calibration_s,
        step_shapes=shapes,
    )
    figures = device_facts(setting.device)
    profile = with_facts(profile, figures)
    profile.save(setting.kept_profile)
    return {
        "median_error": fit.median_error,
        "num_measurements": len(fit.residuals),
        "figures": facts_table(figures).to_data(),
        "profile": json.loads(setting.kept_profile.read_text(encoding="utf-8")),
    }


def kills(setting: Setting) -> Content:
    """Kill a run again and again, and return whether it ends as one does that was left alone."""
    folder = setting.folder / "kills"
    shutil.rmtree(folder, ignore_errors=True)  # of this part, when it was cut short
    folder.mkdir(parents=True)
    model = random_model("opt", hidden=64, num_blocks=2, num_heads=2, vocab=96, max_positions=32)
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    lines = [torch.randint(3, 96, (9,), generator=generator).tolist() for _ in range(16)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in lines))
    rows = {}
    for residency in ("offloaded",) if setting.is_rehearsal else ("resident", "offloaded"):
        words = ["run", "--model", str(folder / "model"), "--data", str(data), "--batch", "4", "--lr", "1e-3"]
        words += ["--device", setting.device, "--residency", residency, "--no-launch", "--no-tensorboard"]
        words += ["--steps", str(_NUM_LINES)]
        alone, killed = (folder / f"{residency}-{name}" for name in ("alone", "killed"))
        status, output = setting.processes.zosim(*words, "--out", str(alone))
        if status != 0:
            raise RunError(f"a run that was not killed exited with status {status}: {output}")
        for number, line in enumerate(_KILLED_AT[1:2] if setting.is_rehearsal else _KILLED_AT):
            again = ["--resume"] if number else []
            setting.processes.killed_zosim(killed / "steps.jsonl", line, *words, "--out", str(killed), *again)
        status, output = setting.processes.zosim(*words, "--out", str(killed), "--resume")
        if status != 0:
            raise RunError(f"a killed run did not resume: {output}")
        rows[residency] = _losses(alone) == _losses(killed)
    return {"is_right": all(rows.values()), "rows": rows}


def _losses(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [(row["loss_plus"], row["projected_grad"]) for row in map(json.loads, lines)]
