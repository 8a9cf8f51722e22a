"""``python -m studies.shaped.worker RATE LAYOUT OUT [WORDS]``: one rank of the cases of a network whose names have the words."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from executors.formats import TORCH_DTYPES
from executors.ranks.communicator import Communicator
from executors.ranks.launch import process_group
from executors.reference_speed import reference_now_s
from executors.runs.session import Session
from executors.turns import end_to_end
from studies.prediction.cases import Case
from studies.prediction.setting import batch_of, model_of
from studies.shaped.cases import NETWORKS, ShapedCase, cases_of
from studies.shaped.hosts import plan_of
from studies.shaped.links import LinkFigures, measure_link

_WARM_STEPS = 4
_LEAST_STEPS, _MOST_STEPS = 8, 40
_SECONDS = 2.0
_REFERENCE_S = 0.3


@dataclass(frozen=True)
class CaseSteps:
    """Seconds of the timed steps of a case, on rank 0."""

    name: str
    step_s: tuple[float, ...]
    seconds_by_label: dict[str, float]
    """Busy seconds of a step, by instructions' labels."""

    foreign_cores: float
    """Cores that other processes than the ranks (and the kernel, for the network) kept busy meanwhile."""

    before_s: float
    after_s: float
    """What the reference that tells the machine's pace took before and after, while all ranks ran it; their mean."""


@dataclass(frozen=True)
class NetworkSteps:
    """What one network did."""

    link: LinkFigures
    cases: tuple[CaseSteps, ...]


def main(rate: str, layout_name: str, out: Path, words: str = "") -> None:
    """Run the cases of a network one after the other; rank 0 writes what was measured."""
    from studies.shaped.network import rate_bits_per_s

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    layout = next(layout for layout in NETWORKS if layout.name == layout_name)
    cases = cases_of(rate, layout, words)
    with process_group("cpu") as info:
        ranks = Communicator({})
        link = measure_link(ranks, rate_bits_per_s(rate) / 8)
        steps = NetworkSteps(link, tuple(_run(case, ranks) for case in cases))
        if info.rank == 0:
            out.write_text(json.dumps(asdict(steps)))


def _run(case: ShapedCase, ranks: Communicator) -> CaseSteps:
    setting = case.setting
    model = model_of(setting.shape).to(TORCH_DTYPES[setting.dtype])
    batch = batch_of(Case(setting.shape, setting.batch, setting.seq, setting.dtype, 1, ""))
    with Session(plan_of(case), model, learning_rate=1e-7) as session:
        session.step(batch)
        warm_s = end_to_end(lambda: session.step(batch), _WARM_STEPS - 1)
        num_steps = _agreed(ranks, _SECONDS / median(warm_s))
        before_s = _reference_s(ranks)
        session.step(batch)
        before = _load(ranks)
        step_s = end_to_end(lambda: session.step(batch), num_steps)
        foreign_s = _load(ranks) - before
        after_s = _reference_s(ranks)
        labels = session.timeline().seconds_by_label(session.rank)
    foreign_cores = foreign_s / sum(step_s)
    return CaseSteps(case.name, step_s, labels, foreign_cores, before_s, after_s)


def _reference_s(ranks: Communicator) -> float:
    """Return what the reference takes now, in the mean over ranks."""
    own = torch.tensor(reference_now_s(_REFERENCE_S), dtype=torch.float64)
    return float(ranks.all_gather_host(own, "measuring the pace").mean())


def _load(ranks: Communicator) -> float:
    """Return the seconds for which the machine's processors have been busy with anything but the ranks."""
    own, all_ = psutil.Process().cpu_times(), psutil.cpu_times()
    of_ranks = ranks.all_gather_host(
        torch.tensor(own.user + own.system, dtype=torch.float64), "adding up loads"
    )
    return float(sum(all_) - all_.idle - getattr(all_, "iowait", 0.0) - of_ranks.sum())


def _agreed(ranks: Communicator, wanted: float) -> int:
    """Return rank 0's number of steps, which all ranks take."""
    number = max(_LEAST_STEPS, min(_MOST_STEPS, round(wanted)))
    return ranks.on_rank_0(lambda: number, "agreeing on the number of steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
