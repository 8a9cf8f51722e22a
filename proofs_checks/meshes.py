"""Several ranks are one device: what they draw, what they end with, and the estimate that they make together."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from executors.ranks.communicator import Communicator
from executors.runs.session import Session
from proofs_checks.analytic import DIMENSION, PER_SEGMENT, AnalyticModel, plan_of
from proofs_checks.claims import Claim, printed
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.placements import (
    Trace,
    num_unlike,
    observe,
    tiny_batches,
    tiny_model,
    tiny_plan,
    train,
)
from proofs_checks.ranks import on_all_ranks
from proofs_checks.statistics import compare_means
from zosim.plans import Directions, Estimator, Mesh, Placement, Plan, Residency, Schedule

_DELAYED = Schedule(update="delayed")
MESHES: Mapping[str, tuple[Mesh, dict[str, Any]]] = {
    "ddp, resident": (Mesh(data=2), {}),
    "pertp, offloaded": (Mesh(perturb=2), {"residency": Residency(blocks="offloaded"), "schedule": _DELAYED}),
    "pertp, shared": (
        Mesh(perturb=2),
        {"residency": Residency(blocks="offloaded", transfers="shared"), "schedule": _DELAYED},
    ),
    "2d, sliced": (
        Mesh(data=2, perturb=2),
        {"residency": Residency(blocks="offloaded", transfers="sliced"), "schedule": _DELAYED},
    ),
    "2d the other way round, swept": (
        Mesh(data=2, perturb=2, inner="data"),
        {"schedule": Schedule(traversal="sweep")},
    ),
    "two queries on four ranks": (Mesh(perturb=4), {}),
}
_QUICK = ("ddp, resident", "2d, sliced")
_SETTINGS: dict[str, Any] = {"learning_rate": lambda step: 1e-2 / (step + 1), "weight_decay": 0.1}
_NUM_QUERIES = 2


def _on(mesh: Mesh) -> dict[str, Any]:
    ranks = range(mesh.world_size)
    return {
        "mesh": mesh,
        "placement": Placement(topology="none", devices=tuple(f"cpu{rank}" for rank in ranks)),
    }


def check_ranks(context: Context) -> Outcome:
    """Count directions, losses and weights of any rank that differ from those of one device."""
    differing, details = 0, []
    for name, (mesh, axes) in MESHES.items():
        if context.size == "quick" and name not in _QUICK:
            continue
        for rng in ("mezo", "counter") if context.size == "full" else ("counter",):
            draws: dict[str, Any] = {
                "estimator": Estimator(num_queries=_NUM_QUERIES),
                "directions": Directions(rng=rng),
            }
            # Shards are the micro-batches of one device, whose losses it adds up in the same order.
            alone = train("tied", **draws, seed=context.seed, num_micro_batches=mesh.data, **_SETTINGS)
            traces = _trained(mesh, context.seed, {**axes, **draws})
            num_differences = sum(_differences(trace, alone) for trace in traces)
            num_differences += _resumed(mesh, context.seed, {**axes, **draws}, alone)
            differing += num_differences
            details.append(f"{name}, {rng}: {num_differences} differences over {mesh.world_size} ranks")
    return Outcome(differing, 0, "directions, losses and weights that differ in a bit", tuple(details))


def _trained(mesh: Mesh, seed: int, axes: Mapping[str, Any]) -> list[Trace]:
    """Return what every rank did in three steps."""
    models = [tiny_model("tied") for _ in range(mesh.world_size)]
    plan = tiny_plan(models[0], **{**axes, **_on(mesh)})

    def rank(number: int, communicator: Communicator) -> Trace:
        trace = Trace()
        with Session(
            plan, models[number], seed=seed, num_timed_steps=0, communicator=communicator, **_SETTINGS
        ) as session:
            observe(session, trace)
            trace.records += [session.step(batch) for batch in tiny_batches(3)]
            trace.weights.update(session.state_dict())
        return trace

    return list(on_all_ranks(plan, rank))


def _resumed(mesh: Mesh, seed: int, axes: Mapping[str, Any], alone: Trace) -> int:
    """Count what differs when the ranks go on where one device stopped after two steps."""
    models = [tiny_model("tied") for _ in range(mesh.world_size)]
    plan = tiny_plan(models[0], **{**axes, **_on(mesh)})

    def rank(number: int, communicator: Communicator) -> int:
        with Session(
            plan, models[number], seed=seed, num_timed_steps=0, communicator=communicator, **_SETTINGS
        ) as session:
            for record in alone.records[:2]:
                session.replay(record)
            record = session.step(tiny_batches(3)[2])
            unlike = num_unlike(session.state_dict(), alone.weights)
        return unlike + (record.projected_gradients != alone.records[2].projected_gradients)

    return sum(on_all_ranks(plan, rank))


def _differences(trace: Trace, alone: Trace) -> int:
    total = num_unlike(trace.weights, alone.weights)
    total += num_unlike(
        {key: uses[0] for key, uses in trace.directions.items()},
        {key: uses[0] for key, uses in alone.directions.items()},
    )
    pairs = zip(trace.records, alone.records, strict=True)
    return total + sum(mine.projected_gradients != theirs.projected_gradients for mine, theirs in pairs)


# -- moments ---------------------------------------------------------------------------------------------------

NUM_SEQUENCES = 4
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


def estimates_on(mesh: Mesh, num_steps: int, seed: int) -> Tensor:
    """Return the estimates ``g·z`` that the ranks of `mesh` apply, shape (n, d), each at the same weights."""
    first = DataModel()
    models = [copy.deepcopy(first) for _ in range(mesh.world_size)]
    plan: Plan = plan_of(
        models[0],
        batch=NUM_SEQUENCES,
        seq=2,
        estimator=Estimator(epsilon=EPSILON),
        directions=Directions(rng="counter"),
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


def check_moments(context: Context) -> Outcome:
    """Compare mean and mean square of the estimate with those of one device on the whole batch.

    Notes
    -----
    ``g = c·z`` with ``c`` the mean slope, so ``E[g·z] = c`` and ``E|g·z|² = (d + 2)·|c|²`` for normals. A pair whose
    signs saw two shards would have ``g = (c₊ + c₋)·z/2 + (c₊ - c₋)·θ/2ε``: the same mean, and a square that is larger
    by ``d·((c₊ - c₋)·θ)²/4ε²``.
    """
    slope = _SLOPES.mean(0)
    square = (DIMENSION + 2) * (slope @ slope)
    meshes = (
        Mesh(data=2),
        Mesh(perturb=2),
        Mesh(data=2, perturb=2),
        Mesh(data=2, perturb=2, inner="data"),
        Mesh(data=4, perturb=2),
    )
    outcomes = []
    for number, mesh in enumerate(meshes):
        if context.size == "quick" and number != 2:
            continue
        sampled = estimates_on(mesh, context.samples(1500, 150), context.seed + 1000 * number)
        columns = torch.cat([sampled, (sampled**2).sum(1)[:, None]], dim=1)
        expected = torch.cat([slope, square[None]])
        outcomes.append(compare_means(mesh.describe(), columns, expected))
    return worst(outcomes)


CLAIMS = (
    Claim(
        name="ranks-are-one-device",
        paper="distzo2",
        where=("Sec. 4.2", "Sec. 5.1"),
        quotation="Since both g and z are synchronized, the updates are consistent across devices without further communication.",
        statement=(
            "On any mesh, resident, offloaded, shared or sliced, every rank draws the directions that one device draws, and "
            "all ranks end every step with the bits of one device that forwards the shards as micro-batches; also when "
            "they go on from another mesh's log."
        ),
        hypotheses=("one torch build and thread count per rank; losses reduced in float64 in rank order"),
        references=(
            "DistZO2 sections 4.2, 5 and 6.2 (step 4 read so that a restored, not a perturbed copy is updated)"
        ),
        checks=(
            printed(
                check_ranks,
                Mutant(
                    "every rank with seeds of its own",
                    "executors.runs.session:Session.seeds_of",
                    "seed_of(self.seed, step, query)",
                    "seed_of(self.seed + self.rank, step, query)",
                ),
                Mutant(
                    "the first rank's loss alone",
                    "executors.steps.ops.exchange:_mean_of",
                    "len(holders) == 1",
                    "len(holders) >= 1",
                ),
                Mutant(
                    "shards that are not the batch's",
                    "zosim.plans:_share",
                    "begin = part * each + min(part, longer)",
                    "begin = 0 * part",
                ),
            ),
        ),
    ),
    Claim(
        name="pairs-see-one-shard",
        paper="distzo2",
        where=("Sec. 6.2",),
        quotation="Each GPU computes a forward pass for its assigned perturbation on its local batch partition.",
        statement=(
            "Mean and mean square of g·z are those of one device on the whole batch, under every mesh: both signs of a "
            "projected gradient see the same shard."
        ),
        hypotheses=("normals; a loss linear in θ, with unlike sequences"),
        references=("DistZO2 section 6.2, steps 2 and 3"),
        checks=(
            printed(
                check_moments,
                Mutant(
                    "signs that see two shards",
                    "zosim.plans:Plan.rows_of",
                    "self.mesh.coordinates(rank).data",
                    "rank % self.mesh.data",
                ),
                Mutant(
                    "shards' losses added, not averaged",
                    "executors.steps.micro_batches:accumulated",
                    "total / sum(counts)",
                    "total",
                ),
            ),
        ),
    ),
)
