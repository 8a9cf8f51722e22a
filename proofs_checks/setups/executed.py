"""Runs of the executor under any plan, held against one literal loop on one device.

A case is a point on every axis that may not change a bit. What all of its ranks draw, compute and end with must be
what the literal loop draws, computes and ends with, whatever the mesh, the split points, the slices and the point of resumption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from costmodel.formats.distributions import DISTRIBUTIONS
from costmodel.models.model_spec import ModelSpec
from executors.models.spec import spec_of_model
from executors.ranks.communicator import Communicator
from executors.runs.records import StepRecord
from executors.runs.session import Session
from proofs_checks.outcomes import Outcome
from proofs_checks.setups.literal import LiteralRun, language_model_loss, seed_of
from proofs_checks.setups.placements import Trace, observe, same_bits, tiny_batches, tiny_model
from proofs_checks.setups.ranks import on_all_ranks
from topology.errors import PlanError
from zosim.plans import AXES as PLAN_AXES
from zosim.plans import Mesh, Plan, Split

_EPSILON = 1e-3
_WEIGHT_DECAY = 0.1


def learning_rate(step: int) -> float:
    """Return a rate that is another one in every step."""
    return 1e-2 / (step + 1)


@dataclass(frozen=True)
class Case:
    """A run: how it is computed, and by whom; fields that an axis of a plan has are called as there."""

    model: str = "tied"
    dtype: str = "float32"
    batch: int = 2
    num_steps: int = 2
    resumed_at: int = 0  # steps that are replayed from the literal loop's log, not run
    num_perturbations: int = 1
    difference: str = "central"
    rng: str = "mezo"
    distribution: str = "gaussian"
    rank: int | None = None
    lazy_steps: int | None = None
    order: str = "registration"
    perturbation: str = "serial"
    kept: bool = False
    sampled_ahead: bool = False
    data: int = 1
    perturb: int = 1
    inner: str = "perturb"
    split_points: tuple[str, ...] = ()  # between the stages, of which there is one more
    blocks: str = "resident"
    num_staging_buffers: int = 3
    transfers: str = "private"
    traversal: str = "blockwise"
    update: str = "immediate"
    num_sampling_threads: int = 1
    num_micro_batches: int = 1

    def plan(self) -> Plan:
        """Return the plan.

        Raises PlanError if the choices contradict each other.
        """
        axes: dict[str, dict[str, Any]] = {
            name: {field: getattr(self, field) for field in axis.model_fields if hasattr(self, field)}
            for name, axis in PLAN_AXES.items()
        }
        axes["mesh"]["stage"] = len(self.split_points) + 1
        axes["estimator"]["epsilon"] = _EPSILON
        devices = [f"cpu{rank}" for rank in range(Mesh.model_validate(axes["mesh"]).world_size)]
        axes["placement"] = {"topology": "none", "devices": devices}
        split_blocks = Split(split_points=self.split_points).split_blocks
        model = _spec(self.model, tuple(split_blocks))
        return Plan.model_validate({"model": model, "batch": self.batch, "seq": 7, **axes})

    def describe(self) -> str:
        """Return the fields that differ from a resident run, block by block."""
        changed = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if getattr(self, item.name) != item.default
        ]
        return ", ".join(changed) or "resident, block by block"


@cache
def _spec(name: str, split_blocks: tuple[int, ...]) -> ModelSpec:
    return spec_of_model(tiny_model(name), "tiny", split_blocks=split_blocks)


def literally(case: Case, seed: int, num_steps: int | None = None) -> LiteralRun:
    """Return the literal loop after so many steps of a case; of all by default."""
    run = LiteralRun(
        language_model_loss,
        tiny_model(case.model, getattr(torch, case.dtype)),
        seed,
        epsilon=_EPSILON,
        weight_decay=_WEIGHT_DECAY,
        num_perturbations=case.num_perturbations,
        num_shards=case.data * case.num_micro_batches,
        central=case.difference == "central",
        residual=case.difference == "residual",
        copies=case.perturbation == "copies",
        rng=case.rng,
        distribution=case.distribution,
        rank=case.rank or 1,
        lazy_steps=case.lazy_steps or 1,
        execution_order=case.order == "execution",
        split_blocks=tuple(Split(split_points=case.split_points).split_blocks),
    )
    for step, batch in enumerate(tiny_batches(case.num_steps, case.batch)[:num_steps]):
        run.step(batch, learning_rate(step))
    return run


def executed(case: Case, seed: int, literal: LiteralRun) -> list[Trace]:
    """Return what every rank did; steps before the point of resumption are replayed from the literal loop's log."""
    plan = case.plan()
    models = [tiny_model(case.model, getattr(torch, case.dtype)) for _ in range(plan.placement.world_size)]
    batches = tiny_batches(case.num_steps, case.batch)

    def rank(number: int, communicator: Communicator | None) -> Trace:
        trace = Trace()
        with Session(
            plan,
            models[number],
            learning_rate=learning_rate,
            weight_decay=_WEIGHT_DECAY,
            seed=seed,
            num_timed_steps=0,
            num_sampling_threads=case.num_sampling_threads,
            num_micro_batches=case.num_micro_batches,
            communicator=communicator,
        ) as session:
            for step in range(case.resumed_at):
                session.replay(_record(literal, seed, step))
            observe(session, trace)
            trace.records += [session.step(batch) for batch in batches[case.resumed_at :]]
            trace.weights.update(session.state_dict())
        return trace

    return list(on_all_ranks(plan, rank)) if plan.placement.world_size > 1 else [rank(0, None)]


def _record(literal: LiteralRun, seed: int, step: int) -> StepRecord:
    gradients = literal.gradients[step]
    zeros = tuple(0.0 for _ in gradients)
    return StepRecord(
        step=step,
        seeds=tuple(seed_of(seed, step, perturbation) for perturbation in range(len(gradients))),
        losses_plus=literal.losses_plus[step] or zeros,
        losses_minus=zeros if literal.central else None,
        loss_base=None if literal.central or literal.residual else 0.0,
        projected_gradients=gradients,
        learning_rate=learning_rate(step),
        seconds=0.0,
    )


def differences(case: Case, seed: int) -> list[str]:
    """Return what of a case is not, bit for bit, what the literal loop has: weights, gradients, perturbations by name."""
    literal = literally(case, seed)
    traces = executed(case, seed, literal)
    return [
        f"rank {rank}: {what}" for rank, trace in enumerate(traces) for what in _unlike(trace, literal)
    ] + _not_sampled(traces, literal, case)


def _unlike(trace: Trace, literal: LiteralRun) -> Iterator[str]:
    if trace.weights.keys() != literal.weights.keys():
        yield "holds other parameters"
    for name, value in trace.weights.items():
        if name in literal.weights and not same_bits(value, literal.weights[name]):
            yield f"weights of {name}"
    for record in trace.records:
        if record.projected_gradients != literal.gradients[record.step]:
            yield f"projected gradients of step {record.step}"
    for (step, perturbation, group), uses in trace.perturbations.items():
        wanted = _joined(literal.sampled, step, perturbation, trace.parameters[group])
        again = _joined(literal.sampled | literal.resampled, step, perturbation, trace.parameters[group])
        whole = [use for use in uses if use.numel() == wanted.numel()]  # factors are not products
        if not all(same_bits(use, wanted * _EPSILON) or same_bits(use, again * _EPSILON) for use in whole):
            yield f"perturbation of {group} in step {step}, perturbation {perturbation}"


def _joined(
    sampled: Mapping[tuple[int, int, str], Tensor],
    step: int,
    perturbation: int,
    parameters: Sequence[tuple[str, int]],
) -> Tensor:
    """Return the perturbation of a group's parameters."""
    return torch.cat([sampled[step, perturbation, name] for name, _ in parameters])


def _not_sampled(traces: Sequence[Trace], literal: LiteralRun, case: Case) -> list[str]:
    """Return parameters that no rank of a step drew: the union of what ranks draw must be the whole perturbation."""
    sampled = {
        (step, perturbation, name)
        for trace in traces
        for (step, perturbation, group) in trace.perturbations
        for name, _ in trace.parameters[group]
    }
    wanted = {key for key in literal.sampled if key[0] >= case.resumed_at}
    return [
        f"nobody drew {name} in step {step}, perturbation {perturbation}"
        for step, perturbation, name in sorted(wanted - sampled)
    ]


Choose = Callable[[Sequence[Any]], Any]
"""Returns one of several options: a random generator's choice, or a drawing of hypothesis, which shrinks towards the first."""

_ONE_DEVICE: Mapping[str, Sequence[Any]] = {
    "model": ("tied", "untied"),
    "dtype": ("float32", "float64", "bfloat16"),
    "batch": (2, 1, 3, 5),
    "num_steps": (2, 1, 3),
    "num_perturbations": (1, 2, 3),
    "difference": ("central", "forward"),
    "rng": ("mezo", "counter"),
    "distribution": ("gaussian", "rademacher", "factorised", "lozo", "lozo-released"),
    "order": ("registration", "execution"),
    "perturbation": ("serial", "copies"),
    "kept": (False, True),
    "sampled_ahead": (False, True),
    "blocks": ("resident", "offloaded"),
    "num_staging_buffers": (3, 1, 2),
    "traversal": ("blockwise", "full"),
    "update": ("immediate", "delayed"),
    "num_sampling_threads": (1, 2),
}
_RANKS: Mapping[str, Sequence[Any]] = {
    **_ONE_DEVICE,
    "data": (1, 2, 3),
    "perturb": (1, 2, 4),
    "inner": ("perturb", "data"),
    "transfers": ("private", "shared", "sliced"),
}
_STAGES: Mapping[str, Sequence[Any]] = {
    **_ONE_DEVICE,
    "data": (1, 2),
    "split_points": (
        ("block.0",),
        ("block.1.mlp",),
        ("block.1",),
        ("block.0.mlp", "block.1"),
        ("block.0", "block.1.mlp", "block.2.mlp"),
    ),
}
AXES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "one device": _ONE_DEVICE,
    "ranks": _RANKS,
    "stages": _STAGES,
}
"""What is chosen from, by who computes."""
_MOST_RANKS = 6


def case_of(kind: str, choose: Choose) -> Case | None:
    """Return a case, or None if what was chosen contradicts itself."""
    chosen = {name: choose(options) for name, options in AXES[kind].items()}
    chosen["resumed_at"] = choose(range(chosen["num_steps"]))
    if DISTRIBUTIONS[chosen["distribution"]].is_factored:
        chosen |= {"rank": choose((2, 1, 4)), "lazy_steps": choose((2, 1))}
    case = Case(**chosen)
    if case.data * case.perturb * (len(case.split_points) + 1) > _MOST_RANKS:
        return None
    try:
        case.plan()
    except PlanError:
        return None
    return case


def random_cases(kind: str, count: int, seed: int) -> Iterator[Case]:
    """Yield so many cases that do not contradict themselves."""
    generator = random.Random(f"{kind}, {seed}")
    while count:
        if (case := case_of(kind, generator.choice)) is not None:
            yield case
            count -= 1


def against_literal(cases: Sequence[Case], seed: int) -> Outcome:
    """Count what differs in a bit from the literal loop, up to the first case in which something does."""
    measured = "weights, gradients and perturbations that differ in a bit from a literal loop"
    lines: list[str] = []
    for case in cases:
        if unlike := differences(case, seed):
            wrong = f"{case.describe()}: {len(unlike)} differences, first {unlike[0]}"
            return Outcome(len(unlike), 0, measured, (wrong, *lines))
        lines.append(f"{case.describe()}: no difference")
    return Outcome(0, 0, measured, tuple(lines))
