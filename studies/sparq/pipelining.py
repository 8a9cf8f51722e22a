"""``python -m studies.sparq.pipelining``: how long two gloo stages idle in a step of several perturbations, predicted and measured.

The embedded task, split inside block 1, plain numbers, one thread for each stage; what differs is when a stage's weights
pass from point to point: one state of them, for which perturbations may be kept, or copies, which may be written ahead on a stream
of their own. Two minutes: this machine is calibrated for ranks of
one thread first. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executors.calibration.calibrating import calibrated
from executors.models.loading import load_model
from executors.models.pretrain import TaskSettings, pretrained_model
from executors.ranks.communicator import Communicator
from executors.ranks.launch import launch, process_group
from executors.runs.session import Session
from studies.records import records_in, write_records
from studies.sparq.training import INSIDE, CodecCase, batches_of, plan_of, tensors_of
from topology.hardware import resolve
from zosim.config import HOST
from zosim.console import stderr, stdout
from zosim.planning.predict import PlannedRun
from zosim.plans import Plan
from zosim.program.instructions import Stream
from zosim.report import Table

RESULTS = Path(__file__).with_name("pipelining.csv")
NUM_PERTURBATIONS = 4
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("blockwise", {"schedule": {"traversal": "blockwise"}}),
    ("sweep", {"schedule": {"traversal": "full"}}),
    ("sweep, perturbations kept", {"schedule": {"traversal": "full"}, "perturbations": {"kept": True}}),
    ("sweep, copies", {"schedule": {"traversal": "full"}, "weights": {"perturbation": "copies"}}),
    (
        "sweep, copies ahead",
        {
            "schedule": {"traversal": "full"},
            "weights": {"perturbation": "copies"},
            "perturbations": {"sampled_ahead": True},
        },
    ),
)
_WORK = (Stream.COMPUTE, Stream.SAMPLE)
_CALIBRATION_S = 12.0
_NUM_ROUNDS, _NUM_STEPS = 3, 6


@dataclass(frozen=True)
class Idle:
    """One case."""

    case: str
    # predicted_s, measured_s: of a step.
    predicted_s: float
    measured_s: float
    # predicted_first, predicted_second, measured_first, measured_second: part of a step in which a stage neither computes
    # nor prepares what it computes with.
    predicted_first: float
    measured_first: float
    predicted_second: float
    measured_second: float


def plans() -> list[Plan]:
    """Return the plan of every case, as long as the task's longest batch."""
    pretrained = pretrained_model()
    model = load_model(str(pretrained.model))
    batch = tensors_of(batches_of(pretrained, model, 0), 0)
    split = CodecCase("none", INSIDE).split()
    made = plan_of(model, split=split, num_stages=2).model_dump(mode="json")
    made["seq"] = batch["input_ids"].shape[1]
    made["estimator"]["num_perturbations"] = NUM_PERTURBATIONS
    return [
        Plan.model_validate(made | {axis: made[axis] | fields for axis, fields in axes.items()})
        for _, axes in CASES
    ]


def _measured(chosen: list[Plan], path: str) -> list[tuple[float, float, float]]:
    """Return the step time of each plan, and how long its stages idle, of the fastest of three rounds; in every rank."""
    torch.set_num_threads(1)
    with process_group("cpu"):
        rounds = [[_of(plan, path) for plan in chosen] for _ in range(_NUM_ROUNDS)]
    return [min(figures) for figures in zip(*rounds, strict=True)]


def _of(plan: Plan, path: str) -> tuple[float, float, float]:
    model = load_model(path)
    batch = tensors_of(batches_of(pretrained_model(), model, 0), 0)
    communicator = Communicator(plan.process_groups)
    settings: dict[str, Any] = {"learning_rate": TaskSettings().learning_rate, "communicator": communicator}
    with Session(plan, model, **settings) as session:
        for _ in range(_NUM_STEPS):
            session.step(batch)
        timeline = session.timeline()
    figures = [0.0, 0.0, 0.0]
    if communicator.is_first:
        figures = [timeline.step_time_s, *(1 - timeline.busy(_WORK, rank) for rank in (0, 1))]
    step_s, first, second = communicator.on_rank_0(lambda: figures, "idle times")
    return step_s, first, second


def measure() -> list[Idle]:
    """Return all cases, predicted and measured."""
    topology, chosen = resolve(HOST), plans()
    profile, _ = calibrated(topology, "cpu0", num_threads=1, budget_s=_CALIBRATION_S)
    figures = launch(_measured, chosen, str(pretrained_model().model), world_size=2)
    rows = []
    for (name, _), plan, (step_s, *idle) in zip(CASES, chosen, figures, strict=True):
        planned = PlannedRun(plan, topology, profile)
        first, second = (1 - planned.timeline_of(r).busy(_WORK, r) for r in (0, 1))
        rows.append(Idle(name, planned.step_time_s, step_s, first, idle[0], second, idle[1]))
    return rows


def main() -> None:
    """Measure, write the file, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print what is there, and measure nothing")
    if not parser.parse_args().table:
        torch.set_num_threads(1)
        write_records(RESULTS, measure())
        stderr.print(f"wrote {RESULTS}", markup=False)
    stdout.print(table(records_in(RESULTS, Idle)).to_markdown(), markup=False, soft_wrap=True)


def table(rows: list[Idle]) -> Table:
    """Return, of every case, what is predicted and what was measured."""
    columns: dict[str, Callable[[Idle], str]] = {
        f"{NUM_PERTURBATIONS} perturbations, central": lambda row: row.case,
        "step, ms": lambda row: f"{1e3 * row.predicted_s:.0f}",
        "step measured": lambda row: f"{1e3 * row.measured_s:.0f}",
        "first stage idle, %": lambda row: f"{100 * row.predicted_first:.0f}",
        "first measured": lambda row: f"{100 * row.measured_first:.0f}",
        "second, %": lambda row: f"{100 * row.predicted_second:.0f}",
        "second measured": lambda row: f"{100 * row.measured_second:.0f}",
    }
    return Table.of(rows, columns)


if __name__ == "__main__":
    main()
