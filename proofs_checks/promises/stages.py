"""Stages of a model draw one perturbation between them, not the same numbers twice, and send what the paper counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executors.models.spec import spec_of_model
from proofs_checks.claims import Checks, printed
from proofs_checks.faults import groups_from_the_seed
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.planting import Fault, altered, planted
from proofs_checks.setups.executed import Case, against_literal, executed, literally, random_cases
from proofs_checks.setups.placements import Trace, tiny_model, tiny_plan
from proofs_checks.statistics import compare_means
from zosim.analysis.counts import step_counts
from zosim.lowering import lower_all
from zosim.plans import Estimator, Mesh, Placement, Plan, Schedule, Split
from zosim.program.operations import Send

CASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "behind a block, full pass": (("block.0",), "full"),
    "inside a block, block by block": (("block.1.mlp",), "blockwise"),
    "three split points, block by block": (("block.0", "block.1.mlp", "block.2.mlp"), "blockwise"),
}
_NUM_PERTURBATIONS = 2


def staged(split_points: tuple[str, ...], traversal: str, **axes: Any) -> Plan:
    """Return the plan of a tiny model, its head tied to its token table, in stages that these split points part."""
    model = tiny_model("tied")
    split, mesh = Split(split_points=split_points), Mesh(stage=len(split_points) + 1)
    whole = tiny_plan(model, schedule=Schedule.model_validate({"traversal": traversal}), **axes)
    spec = spec_of_model(model, "tiny", split_blocks=split.split_blocks)
    devices = tuple(f"cpu{rank}" for rank in range(mesh.world_size))
    changed = {
        "model": spec.model_dump(mode="json"),
        "mesh": mesh.model_dump(mode="json"),
        "split": split.model_dump(mode="json"),
        "placement": Placement(topology="none", devices=devices).model_dump(mode="json"),
    }
    return Plan.model_validate(whole.model_dump(mode="json") | changed)


RUNS = (
    Case(split_points=("block.1.mlp",), num_perturbations=2),
    Case(split_points=("block.0", "block.1.mlp", "block.2.mlp"), rng="counter", num_steps=1),
    Case(model="untied", split_points=("block.1.mlp",), traversal="full", order="execution", num_steps=1),
)


def check_one_perturbation_each(context: Context) -> Outcome:
    """Count perturbations, losses and weights of any stage that differ in a bit from those of a literal loop on one device."""
    cases = [*RUNS, *random_cases("stages", context.samples(60, 4), context.seed)]
    return against_literal(cases, context.seed)


def check_independent(context: Context) -> Outcome:
    """Compare the mean product of the numbers that two stages draw with 0.

    Were each stage's generator reset to the step's seed, as algorithms 1 to 3 have it, the second would draw the
    numbers of the first again: the product's mean were 1, and ``E[g·u⁽¹⁾] = ∇₁f + ∇₂f``.
    """
    outcomes = []
    for rng in ("mezo", "counter"):
        case = Case(model="untied", split_points=("block.0",), rng=rng, num_steps=context.samples(30, 6))
        traces = executed(case, context.seed, literally(case, context.seed, 0))
        products = []
        for step in range(case.num_steps):
            first, second = (_sampled(trace, step) for trace in traces)
            length = min(len(first), len(second))
            products.append((first[:length] * second[:length]).double())
        theory = torch.zeros(1, dtype=torch.float64)
        outcomes.append(compare_means(rng, torch.cat(products)[:, None], theory))
    return worst(outcomes)


def _sampled(trace: Trace, step: int) -> Tensor:
    """Return the numbers of a stage's own blocks in one step, in their scale."""
    uses = [z for (at, _, group), z in trace.sampled.items() if at == step and group.startswith("block.")]
    return torch.cat(uses)


def check_counts(_context: Context) -> Outcome:
    """Compare messages per step with ``(P + 1)(M - 1)`` and ``2P(M - 1)``."""
    wrong, details = 0, []
    for difference, per_boundary in (
        ("forward", _NUM_PERTURBATIONS + 1),
        ("central", 2 * _NUM_PERTURBATIONS),
    ):
        for split_points, traversal in CASES.values():
            estimator = Estimator.model_validate(
                {"difference": difference, "num_perturbations": _NUM_PERTURBATIONS}
            )
            programs = lower_all(staged(split_points, traversal, estimator=estimator)).programs
            sent = sum(isinstance(item.op, Send) for program in programs for item in program.step)
            wrong += sent != per_boundary * len(split_points)
            details.append(
                f"{difference}, {len(split_points) + 1} stages, {traversal}: {sent} activations a step"
            )
    return Outcome(wrong, 0, "plans whose activations are not those counted", tuple(details))


def check_scalars(_context: Context) -> Outcome:
    """Compare losses that go from one rank to another with points times ``M - 1``, activations counted apart."""
    wrong, details = 0, []
    for difference, num_eval_points in (
        ("forward", _NUM_PERTURBATIONS + 1),
        ("central", 2 * _NUM_PERTURBATIONS),
    ):
        for split_points, traversal in CASES.values():
            estimator = Estimator.model_validate(
                {"difference": difference, "num_perturbations": _NUM_PERTURBATIONS}
            )
            counts = step_counts(lower_all(staged(split_points, traversal, estimator=estimator)))
            num_stages = len(split_points) + 1
            wrong += counts.num_scalars != num_eval_points * (num_stages - 1)
            wrong += counts.num_activations != num_eval_points * (num_stages - 1)
            # All ranks get all places of all others: a loss and its labels for every point.
            wrong += counts.scalar_bytes != 16 * num_eval_points * num_stages * (num_stages - 1)
            wrong += counts.num_gradients + counts.reduced_bytes
            details.append(
                f"{difference}, {num_stages} stages: {counts.num_scalars} scalars in {counts.scalar_bytes} bytes, "
                f"{_NUM_PERTURBATIONS * (num_stages - 1)} by the paper's P(M - 1)"
            )
    return Outcome(wrong, 0, "counts that are not those stated", tuple(details))


@planted("executors.steps.ops.exchange:_mean_of", "losses of the last stage 3 % too large")
def larger_losses(shipped, *given):
    loss = shipped(*given)
    return None if loss is None else 1.03 * loss


@planted("zosim.lowering.perturbations:sampling_order", "halves of a block drawn back half first")
def back_halves_first(shipped, plan):
    number = plan.model.segments.index
    return sorted(
        shipped(plan), key=lambda group: (number(group.segments[0]) // 2, -number(group.segments[0]))
    )


@planted("zosim.lowering.split:Boundaries.after", "a message behind every segment")
def message_behind_every_segment(shipped, self, segment, eval_point):
    shipped(altered(self, _rank=altered(self._rank, segments=(segment,))), segment, eval_point)


@planted("zosim.lowering.mesh:Losses.exchange_losses", "losses of stages that have none")
def losses_of_stages_without(shipped, self):
    with Fault("all are last", "zosim.lowering.rank:Rank.is_last_stage", lambda *_given: True).apply():
        shipped(self)


CHECKS: Checks = {
    "stages-are-one-device": printed(
        check_one_perturbation_each,
        groups_from_the_seed,
        larger_losses,
        back_halves_first,
    ),
    "stages-draw-independently": printed(check_independent, groups_from_the_seed),
    "stages-send-what-is-counted": printed(
        check_counts,
        message_behind_every_segment,
    ),
    "stages-send-only-scalars-back": printed(
        check_scalars,
        losses_of_stages_without,
    ),
}
