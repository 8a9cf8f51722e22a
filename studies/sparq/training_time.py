"""``python -m studies.sparq.training_time``: step times of the embedded task on two gloo stages, predicted and measured.

A minute: this machine is calibrated for ranks of one thread first. Nothing else should run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from costmodel.formats.codecs import codec_spec
from costmodel.scoring import Row
from executors.calibration.background_load import OtherLoad
from executors.calibration.calibrating import calibrated
from executors.codecs import quantize
from executors.models.loading import load_model
from executors.models.model import Batch, SegmentedModel
from executors.models.pretrain import Pretrained, TaskSettings, pretrained_model
from executors.models.split_points import SplitPoint, boundary_tensors
from executors.ranks.launch import launch, process_group
from executors.ranks.mesh import on_one_rank
from executors.runs.session import Session
from executors.turns import end_to_end
from studies.records import write_records
from studies.sparq.training import BETWEEN, INSIDE, CodecCase, batches_of, plan_of, tensors_of
from topology.hardware import resolve
from zosim.analysis.scoreboard import rows_table
from zosim.config import HOST
from zosim.console import stderr, stdout
from zosim.planning.predict import PlannedRun
from zosim.plans import Plan

RESULTS = Path(__file__).with_name("training_time.csv")
CASES = (
    (CodecCase("one device", INSIDE), ""),
    (CodecCase("inside, none", INSIDE), "dense"),
    (CodecCase("inside, 4", INSIDE, "q4:affine-zero"), "dense"),
    (CodecCase("inside, 4", INSIDE, "q4:affine-zero"), "smallest"),
    (CodecCase("inside, 4, residual 8", INSIDE, "q4:affine-zero", "q8"), "smallest"),
    (CodecCase("between, none", BETWEEN), "dense"),
    (CodecCase("between, 8", BETWEEN, "none", "q8"), "dense"),
)
"""Cases with their encoding; one device does without stages."""

_CALIBRATION_S = 15.0
_WARM_STEPS, _STEPS = 4, 12


@dataclass(frozen=True)
class Timed:
    """A case, predicted and measured."""

    case: str
    encoding: str
    # predicted_s, low_s, high_s: step time with its interval.
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float  # median
    bytes_per_step: float  # On the wire
    foreign_cores: float  # that others used meanwhile


def row_of(timed: Timed) -> Row:
    """Return a case's step as a row of predicted against measured."""
    name = f"{timed.case}, {timed.encoding}" if timed.encoding else timed.case
    return Row(name, "step_s", timed.measured_s, timed.predicted_s, timed.low_s, timed.high_s)


def plan_for(pretrained: Pretrained, case: CodecCase, encoding: str) -> Plan:
    """Return the plan of a case, as long as the task's longest batch."""
    model = load_model(str(pretrained.model))
    batch = tensors_of(batches_of(pretrained, model, 0), 0)
    staged = plan_of(model, split=case.split(encoding or "dense"), num_stages=2).model_dump(mode="json")
    staged["seq"] = batch["input_ids"].shape[1]
    staged["split"]["densities"] = (_density(SegmentedModel(model), batch, case),)
    plan = Plan.model_validate(staged)
    return plan if encoding else on_one_rank(plan)


def _density(model: SegmentedModel, batch: Batch, case: CodecCase) -> float:
    """Return the part of the activation's symbols (between blocks: of the hidden state's) that is not the most frequent."""
    inside = case.split_point == INSIDE
    spec = codec_spec(case.codec if inside else case.residual_codec)
    if spec.bits is None:
        return 1.0
    with torch.no_grad():
        found = boundary_tensors(model, batch)[SplitPoint(1, inside)]["activation" if inside else "hidden"]
    symbols = quantize(found, spec).symbols
    return 1 - float(symbols.flatten().long().bincount().max()) / symbols.numel()


def _measured(plans: list[Plan], model: str) -> list[tuple[float, float, float]]:
    """Return the median step time of each plan, bytes per step, and what others used; in every rank."""
    torch.set_num_threads(1)
    with process_group("cpu"):
        return [_of(plan, model) for plan in plans]


def _of(plan: Plan, path: str) -> tuple[float, float, float]:
    model = load_model(path)
    batch = tensors_of(batches_of(pretrained_model(), model, 0), 0)
    settings: dict[str, Any] = {"learning_rate": TaskSettings().learning_rate, "num_timed_steps": 0}
    with Session(plan, model, **settings) as session:
        for _ in range(_WARM_STEPS):
            session.step(batch)
        others = OtherLoad()
        steps = end_to_end(lambda: session.step(batch), _STEPS)
        foreign = max(0.0, others.cores() - plan.placement.world_size + 1)
        messages = session.messages_per_step()
    return median(steps), 0.0 if messages is None else messages["bytes_per_step"], foreign


def measure() -> list[Timed]:
    """Return all cases, predicted and measured."""
    pretrained, topology = pretrained_model(), resolve(HOST)
    profile, _ = calibrated(topology, "cpu0", num_threads=1, budget_s=_CALIBRATION_S)
    plans = [plan_for(pretrained, case, encoding) for case, encoding in CASES]
    figures: list[tuple[float, float, float]] = []
    for world_size in (1, 2):
        chosen = [plan for plan in plans if plan.placement.world_size == world_size]
        figures += launch(_measured, chosen, str(pretrained.model), world_size=world_size)
    rows = []
    for (case, encoding), plan, (seconds, size, foreign) in zip(CASES, plans, figures, strict=True):
        prediction = PlannedRun(plan, topology, profile).prediction
        span = (prediction.step_time_s, prediction.low_s, prediction.high_s)
        rows.append(Timed(case.name, encoding, *span, seconds, size, foreign))
    return rows


def main() -> None:
    """Measure, write the file, and print it."""
    torch.set_num_threads(1)
    rows = measure()
    write_records(RESULTS, rows)
    columns: dict[str, Callable[[Timed], str]] = {
        "bytes a step": lambda row: f"{row.bytes_per_step:.0f}",
        "others' cores": lambda row: f"{row.foreign_cores:.1f}",
    }
    stdout.print(rows_table(rows, columns, row_of=row_of, title="Two gloo stages on this machine"))
    stderr.print(f"wrote {RESULTS}", markup=False)


if __name__ == "__main__":
    main()
