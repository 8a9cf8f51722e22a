"""Hold predicted against measured times of packed steps: ``python -m studies.zoinfer.predicting --threads 1``.

Each case is a batch of prompts, answers behind each of them, and perhaps an instruction that all begin with, scored as adapters along factors (``lozo``)
and with what is learnt as increments beside a frozen base. What batches hold is counted in them, as ``zosim run`` does. The machine is calibrated first, unless
``--profile`` names what `zosim calibrate -o` wrote. At last comes what a compaction of increments takes, of which a prediction counts a step's share: it is one
in as many steps as ``V`` stays.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.estimate import estimate
from costmodel.models.configs import LoRA
from costmodel.param_passes import closing_work
from costmodel.rates.profile import Profile
from costmodel.scoring import Row, Score, scores
from executors.calibration.calibrating import calibrated
from executors.models.increments import Increments
from executors.models.packing import facts_of
from executors.models.spec import spec_of_model
from executors.runs.adapters import attach
from executors.runs.session import Session
from executors.turns import in_turns
from studies.zoinfer.__main__ import Data, batch_of, model_of
from topology.graph import Topology
from topology.hardware import resolve
from zosim.analysis.scoreboard import rows_table, score_table
from zosim.console import emit, stderr
from zosim.hardware.machine import Machine
from zosim.hardware.profiles import Profiles
from zosim.lowering import lower
from zosim.plans import Plan
from zosim.report import Report
from zosim.simulators.simulate import simulate

_NODE = "cpu0"
_RANK, _LAZY_STEPS, _BOUND = 2, 50, 64
_NUM_COMPACTIONS = 5
_TUNED = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Case:
    """Prompts, and the answers behind each."""

    shape: str
    # batch, answers, instruction: prompts; answers of one token behind each; tokens that all prompts begin with.
    batch: int
    answers: int = 1
    instruction: int = 0

    def batches(self, model: nn.Module, count: int) -> list[Data]:
        """Return batches of the case."""
        options = argparse.Namespace(tokens=26, spread=0.4, longest=128, options=self.answers, device="cpu")
        batches = [batch_of(model, self.batch, number, options) for number in range(count)]
        for batch in batches:
            begun = slice(1, self.instruction)
            kept = batch["labels"][:, begun] == -100  # an answer stays where it is
            common = 7 * batch["attention_mask"][:, begun]
            batch["input_ids"][:, begun] = torch.where(kept, common, batch["input_ids"][:, begun])
        return batches


CASES = (
    Case("1m", 16),
    Case("1m", 64),
    Case("1m", 16, answers=2),
    Case("1m", 16, answers=5, instruction=12),
    Case("1m", 64, instruction=12),
    Case("125m", 16),
    Case("125m", 64),
    Case("125m", 16, answers=2),
    Case("125m", 16, answers=5, instruction=12),
)


def measured_s(session: Session, batches: list[Data]) -> float:
    """Return the median time of a step, the first two left out."""
    steps = {"step": lambda number: session.step(batches[number])}
    return in_turns(steps, len(batches) - 2, num_warm_rounds=2)["step"].median_s


def session_of(case: Case, model: nn.Module, batches: list[Data], held_as: str) -> Session:
    """Return a session whose plan knows what batches hold, and whose factors are held as ``"adapters"`` of a step or in ``"increments"``."""
    if held_as == "increments":
        attach(
            model,
            LoRA(
                rank=_RANK,
                target_modules=_TUNED,
                lazy_steps=_LAZY_STEPS,
                max_rank=2 * _RANK,
            ),
        )
    num_sequences = len(batches[0]["input_ids"])
    perturbations: dict[str, Any] = {"distribution": "lozo", "rank": _RANK, "lazy_steps": _LAZY_STEPS}
    plan = Plan.model_validate(
        {
            "model": spec_of_model(model, name=case.shape),
            "placement": {"topology": "host", "devices": [_NODE]},
            "batch": num_sequences,
            "seq": max(batch["input_ids"].shape[1] for batch in batches),
            "weights": {"perturbation": "adapters"},
            "perturbations": {} if held_as == "increments" else perturbations,
            "forward": facts_of(batches),
        }
    )
    return Session(plan, model, learning_rate=1e-7, num_sampling_threads=torch.get_num_threads())


def compaction_s(model: nn.Module) -> float:
    """Return what compacting the increments beside perturbations and values takes, from two ranks above the bound."""
    generator = torch.Generator().manual_seed(0)

    def random_slots() -> list[Increments]:
        pairs = [
            [torch.randn(side, _BOUND + _RANK, generator=generator) for side in shape]
            for shape in _tuned_shapes(model)
        ]
        return [Increments([left], [right]) for left, right in pairs]

    made = [random_slots() for _ in range(_NUM_COMPACTIONS)]

    def compact(number: int) -> None:
        for increments in made[number]:
            increments.compact(_BOUND)

    return in_turns({"compact": compact}, len(made), num_warm_rounds=0)["compact"].median_s


def predicted_compaction_s(model: nn.Module, profile: Profile) -> float:
    """Return what that is predicted to take."""
    works = (closing_work(*shape, rank=_RANK, closed_rank=_BOUND) for shape in _tuned_shapes(model))
    return sum(estimate(work, profile).seconds for work in works)


def _tuned_shapes(model: nn.Module) -> list[torch.Size]:
    return [
        module.weight.shape for name, module in model.named_modules() if name.rpartition(".")[2] in _TUNED
    ]


def _profile(path: Path | None, topology: Topology, threads: int, budget_s: float) -> Profile:
    if path is not None:
        return Profiles(topology, path=path, num_threads=threads).of(_NODE)
    return calibrated(topology, _NODE, num_threads=threads, budget_s=budget_s)[0]


def main() -> None:
    """Calibrate, and print a line for each case and each way to hold factors."""
    options = _options()
    topology = resolve("host")
    profile = _profile(options.profile, topology, options.threads, options.calibration_s)
    torch.set_num_threads(options.threads)
    machine = Machine.from_topology(topology, _NODE, profile)
    rows = []
    for case in CASES:
        if options.shape and case.shape != options.shape:
            continue
        base = model_of(case.shape, torch.float32, "cpu")
        count = options.steps if case.shape == "125m" else 5 * options.steps
        batches = case.batches(base, count)
        for held_as in ("adapters", "increments"):
            with session_of(case, copy.deepcopy(base), batches, held_as) as session:
                predicted_s = simulate(lower(session.plan), machine).step_time_s
                name = f"{case.shape}, {case.batch} x {case.answers}, {case.instruction} shared, {held_as}"
                rows.append(Row(name, "step_s", measured_s(session, batches), predicted_s, group=held_as))
            stderr.print(name, markup=False)
    scored = score_table([*scores(rows), Score.of(rows, "all")])
    emit(None, json=False, text=Report("", rows_table(rows), scored))
    for shape in dict.fromkeys(case.shape for case in CASES):
        if options.shape in (None, shape):
            model = model_of(shape, torch.float32, "cpu")
            expected, seconds = predicted_compaction_s(model, profile), compaction_s(model)
            print(
                f"{shape}: compacting increments to rank {_BOUND} is predicted to take {expected * 1e3:.1f} ms and takes "
                f"{seconds * 1e3:.1f} ms, once in {_LAZY_STEPS} steps"
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.zoinfer.predicting", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=sorted({case.shape for case in CASES}), default=None)
    parser.add_argument(
        "--steps", type=int, default=6, help="of each case at 125m; of smaller shapes five times as many"
    )
    parser.add_argument("--profile", type=Path, default=None, help="in place of a calibration")
    parser.add_argument(
        "--calibration-s", type=float, default=20.0, help="seconds that a calibration measures"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
