"""Several ranks are one device: what they draw, what they end with, and the estimate that they make together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from executors.ranks.communicator import Communicator
from executors.runs.session import Session
from executors.steps.arithmetic import projected_gradient
from proofs_checks.claims import Checks, corrected, counterexample, printed
from proofs_checks.exact import equal, exceeds, normal_nodes
from proofs_checks.faults import central_by_epsilon, losses_added
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted
from proofs_checks.setups.analytic import DIMENSION, PER_SEGMENT, AnalyticModel, plan_of
from proofs_checks.setups.executed import Case, against_literal, random_cases
from proofs_checks.setups.literal import perturbations_of_steps
from proofs_checks.setups.ranks import on_all_ranks
from zosim.plans import Estimator, Mesh, Perturbations, Placement, Plan

CASES = (
    Case(data=2, batch=3, rng="counter", num_perturbations=2),
    Case(perturb=2, batch=1, blocks="offloaded", update="delayed"),
    Case(
        data=2,
        perturb=2,
        batch=3,
        blocks="offloaded",
        transfers="sliced",
        update="delayed",
        rng="counter",
    ),
    Case(perturb=4, num_perturbations=2, inner="data", traversal="full", num_steps=1),
)
"""A batch in unlike shards; the two signs of a perturbation on two devices; both at once with sliced uploads; perturbations on devices of their own."""


def check_ranks(context: Context) -> Outcome:
    """Count perturbations, losses and weights of any rank that differ in a bit from those of a literal loop on one device."""
    cases = [*CASES, *random_cases("ranks", context.samples(60, 4), context.seed)]
    return against_literal(cases, context.seed)


# -- the estimate ----------------------------------------------------------------------------------------------------

NUM_SEQUENCES = 5
EPSILON = 0.05
_THETA = torch.linspace(-0.6, 0.9, DIMENSION, dtype=torch.float64)
_SLOPES = torch.stack(
    [torch.linspace(0.2 + i, 1.0 - 2 * i, DIMENSION, dtype=torch.float64) for i in range(NUM_SEQUENCES)]
)
"""``c_i`` of the loss ``c_i·θ`` of sequence ``i``: very unlike each other, as sequences are."""


class DataModel(AnalyticModel):
    """A model whose loss is the mean over its sequences of ``c_i·θ``; a sequence's label is its ``i``."""

    def __init__(self) -> None:
        super().__init__(lambda theta: theta.sum())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_ignored: Any) -> Any:
        """Return ``loss`` and ``logits``."""
        theta = super().forward(input_ids).logits[0, 0]
        loss = None if labels is None else (_SLOPES[labels[:, 1]] @ theta).mean()
        return SimpleNamespace(logits=theta.expand(*input_ids.shape, -1), loss=loss)


def _batch() -> dict[str, Tensor]:
    labels = torch.stack([torch.full((NUM_SEQUENCES,), -100), torch.arange(NUM_SEQUENCES)], dim=1)
    return {
        "input_ids": torch.zeros_like(labels),
        "attention_mask": torch.ones_like(labels),
        "labels": labels,
    }


def _on(mesh: Mesh) -> dict[str, Any]:
    ranks = range(mesh.world_size)
    return {
        "mesh": mesh,
        "placement": Placement(topology="none", devices=tuple(f"cpu{rank}" for rank in ranks)),
    }


def estimates_on(mesh: Mesh, num_steps: int, seed: int) -> Tensor:
    """Return the estimates ``g·z`` that the ranks of `mesh` apply, shape (n, d), each at the same weights."""
    first = DataModel()
    models = [copy.deepcopy(first) for _ in range(mesh.world_size)]
    plan: Plan = plan_of(
        models[0],
        batch=NUM_SEQUENCES,
        seq=2,
        estimator=Estimator(epsilon=EPSILON),
        perturbations=Perturbations(rng="counter"),
        **_on(mesh),
    )

    def rank(number: int, communicator: Communicator) -> Tensor:
        estimates_SP = torch.empty((num_steps, DIMENSION), dtype=torch.float64)
        model, batch = models[number], _batch()
        with Session(
            plan, model, learning_rate=1.0, seed=seed, num_timed_steps=0, communicator=communicator
        ) as session:
            session.flush()
            for row in estimates_SP:
                with torch.no_grad():
                    for parameter, values in zip(model.parameters(), _THETA.split(PER_SEGMENT), strict=True):
                        parameter.view(-1).copy_(values)
                    session.step(batch)
                    row.copy_(_THETA - torch.cat([parameter.view(-1) for parameter in model.parameters()]))
        return estimates_SP

    return on_all_ranks(plan, rank)[0]


def check_estimates(context: Context) -> Outcome:
    """Compare the estimate of every mesh with ``(c·z)z``, c the mean slope over the whole batch, perturbation by perturbation.

    A pair whose signs saw two shards would have ``g = (c₊ + c₋)·z/2 + (c₊ - c₋)·θ/2ε``: the same mean, and another estimate for
    every perturbation.
    """
    slope = _SLOPES.mean(0)
    meshes = (
        Mesh(data=2, perturb=2),
        Mesh(data=2),
        Mesh(perturb=2),
        Mesh(data=2, perturb=2, inner="data"),
        Mesh(data=4, perturb=2),
        Mesh(data=5),
    )[: context.samples(6, 2)]
    largest, lines = 0.0, []
    for mesh in meshes:
        applied = estimates_on(mesh, context.samples(30, 3), context.seed)
        wanted = torch.stack([(slope @ z) * z for z in perturbations_of_steps(len(applied), context.seed)])
        off = float((applied - wanted).abs().max() / wanted.abs().max())
        largest = max(largest, off) if not math.isnan(off) else math.nan
        lines.append(
            f"{mesh.describe()}: off by {off:.1e} over {len(applied)} steps of {NUM_SEQUENCES} sequences"
        )
    return Outcome(largest, 1e-9, "largest relative distance of an applied estimate", tuple(lines))


def check_two_shards(_context: Context) -> Outcome:
    """Compare mean and mean square of an estimate whose signs see two shards with those of one shard, by exact nodes."""
    first, second = (torch.tensor(slope, dtype=torch.float64) for slope in ((0.8, -0.3), (0.2, 0.5)))
    theta, apart, epsilon = torch.tensor([0.4, -0.2], dtype=torch.float64), 0.05, 1e-3
    nodes, weights = normal_nodes(2, 4)
    mean, square = torch.zeros(2, dtype=torch.float64), 0.0
    for z, probability in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        plus, minus = first @ (theta + epsilon * z) + apart, second @ (theta - epsilon * z)
        estimate = projected_gradient(plus, minus, epsilon, central=True).item() * z
        mean += probability * estimate
        square += probability * float(estimate @ estimate)
    slope, gap = (first + second) / 2, float((first - second) @ theta) + apart
    alike = 4 * float(slope @ slope)
    return everything_holds(
        {
            "E ĝ": equal(mean, slope, what="no bias"),
            "E|ĝ|²": equal(
                square, alike + 2 * gap**2 / (4 * epsilon**2), what="(d + 2)|c|² + d(L_i - L_j)²/4ε²"
            ),
            "against one shard": exceeds(square, alike, what="E|ĝ|²", factor=1000),
        }
    )


@planted("zosim.plans:Plan.rows_of", "signs that see two shards")
def signs_of_two_shards(shipped, self, rank):
    shard_of = {self.mesh.coordinates(other).data: other for other in range(self.mesh.world_size)}
    return shipped(self, shard_of[rank % self.mesh.data])


def with_rows(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault of ranks' losses, each with the number that it is the mean over."""

    @planted("executors.steps.ops.exchange:_mean_of", name)
    def fault(shipped, rows, *rest):
        return shipped(change(rows), *rest)

    return fault


CHECKS: Checks = {
    "distzo2-one-shard-a-pair": (
        corrected(
            check_estimates,
            signs_of_two_shards,
        ),
        counterexample(check_two_shards, central_by_epsilon),
    ),
    "ranks-are-one-device": printed(
        check_ranks,
        called_with(
            "executors.runs.session:Session.seeds_of",
            "every rank with seeds of its own",
            self=lambda it: altered(it, seed=it.seed + it.rank),
        ),
        with_rows(
            "the first rank's loss alone",
            lambda rows: torch.where((rows[:, 1:] >= 0).cumsum(0) > 1, -1, rows),
        ),
        with_rows(
            "later ranks' losses 3 % too large",
            lambda rows: torch.cat([rows[:1], rows[1:] * torch.tensor([1.03, 1])]),
        ),
        with_rows(
            "losses of shards averaged without their labels",
            lambda rows: torch.cat([rows[:, :1], rows[:, 1:].clamp(max=1)], 1),
        ),
        called_with("zosim.plans:Plan.rows_of", "every rank on the first shard", rank=0),
    ),
    "pairs-see-one-shard": printed(
        check_estimates,
        signs_of_two_shards,
        losses_added,
    ),
}
