"""DistZO2's statements: what ranks update, average, slice and send, and how much faster that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from costmodel.models.configs import spec_of_config
from executors.steps.arithmetic import ParamPass, projected_gradient
from executors.steps.micro_batches import accumulated
from proofs_checks.claims import Checks, conditioned, corrected, counterexample, printed
from proofs_checks.distzo2.sliced_transfers import programs
from proofs_checks.exact import at_most, equal, exceeds, is_true, normal_nodes, within
from proofs_checks.faults import (
    all_slices,
    central_by_epsilon,
    losses_added,
    second_by_epsilon,
    sent_to_itself,
)
from proofs_checks.oracles.statements import exchange_share, pair_speedup
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, planted, scaled
from proofs_checks.setups.executed import Case, differences
from proofs_checks.zo2.algorithms import DISTZO2_COPIES
from proofs_checks.zo2.step_time import block_bytes, machine, model, seconds
from zosim.analysis.counts import step_counts
from zosim.hardware.machine import Ring
from zosim.lowering import lower_all
from zosim.plans import Mesh, Placement, Plan, Residency, Schedule
from zosim.program.operations import Forward
from zosim.program.program_set import ProgramSet
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World


def _differences(case: Case, seed: int) -> Outcome:
    unlike = differences(case, seed)
    return is_true(not unlike, what=f"{case.describe()}: {unlike[:3] or 'no bit differs'}")


# -- perturbation parallelism -------------------------------------------------------------------------------------------


def updated_copies(*, restored: bool) -> tuple[list[Fraction], list[Fraction]]:
    """Return what two ranks hold after step 4, in rationals: the copy at ``+εz`` and the one at ``-εz``, updated.

    `restored`: whether each takes its perturbation back before the update, which the print does not say.
    """
    weights, z = ([Fraction(n, 8) for n in numbers] for numbers in ((3, -5, 7), (2, 9, -4)))
    epsilon, rate, g = Fraction(1, 1000), Fraction(1, 10), Fraction(7, 3)
    ranks = []
    for sign in (1, -1):
        copy = [w + sign * epsilon * u for w, u in zip(weights, z, strict=True)]
        if restored:
            copy = [w - sign * epsilon * u for w, u in zip(copy, z, strict=True)]
        ranks.append([w - rate * g * u for w, u in zip(copy, z, strict=True)])
    return ranks[0], ranks[1]


def check_perturbed_copies(_context: Context) -> Outcome:
    """Show that step 4 applied to the copies of step 2 leaves two ranks ``2εz`` apart."""
    first, second = updated_copies(restored=False)
    apart = [float(a - b) for a, b in zip(first, second, strict=True)]
    return equal(apart, [2 * 0.001 * u for u in (0.25, 1.125, -0.5)], what="W_D1 - W_D2 against 2εz")


def check_restored_copies(context: Context) -> Outcome:
    """Compare restored copies in rationals, and the shipped pair of ranks with a literal loop."""
    first, second = updated_copies(restored=True)
    return everything_holds(
        {
            "rationals": is_true(first == second, what="one update"),
            "shipped, two ranks": _differences(Case(perturb=2, num_steps=2), context.seed),
        }
    )


def check_restored_in_place(_context: Context) -> Outcome:
    """Count weights in float32 that ``+εz, -εz`` on one rank and ``-εz, +εz`` on the other leave in other bits."""
    generator = torch.Generator().manual_seed(3)
    weights, z = (torch.randn(10_000, generator=generator) for _ in range(2))
    weights *= 0.02  # as weights of language models are
    param_pass = ParamPass()
    copies = []
    for signs in ((1, -1), (-1, 1)):
        copy = weights.clone()
        for sign in signs:
            param_pass.perturb(copy, z, sign, 1e-3)
        copies.append(copy)
    unlike = int((copies[0] != copies[1]).sum())
    away = int((copies[0] != weights).sum())
    return everything_holds(
        {
            "ranks differ": exceeds(unlike, 1000, what="of 10,000 weights"),
            "a rank's own drift": exceeds(away, 500, what="of 10,000 weights not restored"),
            "by rounding alone": within(
                float((copies[0] - copies[1]).abs().max()), 1e-6, what="largest difference"
            ),
        }
    )


def check_slices_agree(context: Context) -> Outcome:
    """Compare the shipped ranks that offload slices of one block with a literal loop: they visit the same points."""
    return _differences(
        Case(perturb=2, blocks="offloaded", update="delayed", transfers="sliced", num_steps=2), context.seed
    )


# -- data parallelism -------------------------------------------------------------------------------------------------------

_LABELS = (3, 1)
_UNLIKE = torch.tensor([[0.9, -0.3], [-0.5, 1.2]], dtype=torch.float64)
"""Slopes of the mean loss of each shard."""


def _shards_estimate(labels: Sequence[int]) -> tuple[float, float, float]:
    """Return a step's g averaged over shards, of the shipped sum over labels, and of the whole batch."""
    z, epsilon = torch.tensor([0.7, -1.1], dtype=torch.float64), 1e-2
    losses = [[slope @ (sign * epsilon * z) for slope in _UNLIKE] for sign in (1, -1)]
    own = [
        projected_gradient(plus, minus, epsilon, central=True).item()
        for plus, minus in zip(*losses, strict=True)
    ]
    plus, minus = (accumulated(side, labels) for side in losses)
    whole = sum(n * float(slope @ z) for n, slope in zip(labels, _UNLIKE, strict=True)) / sum(labels)
    return sum(own) / len(own), projected_gradient(plus, minus, epsilon, central=True).item(), whole


def check_like_shards(_context: Context) -> Outcome:
    """Compare the mean of shards' projected gradients with the batch's, shards of as many labels."""
    mean, shipped, whole = _shards_estimate((2, 2))
    return everything_holds(
        {
            "mean of g_k": equal(mean, whole, what="g", tolerance=1e-7),
            "shipped": equal(shipped, whole, what="g", tolerance=1e-7),
        }
    )


def check_unlike_shards(context: Context) -> Outcome:
    """Show that shards of 3 and 1 labels have another mean than the batch, which the shipped ranks weigh by labels."""
    mean, shipped, whole = _shards_estimate(_LABELS)
    return everything_holds(
        {
            "mean of g_k": exceeds(abs(mean - whole), 0.2 * abs(whole), what="|mean - g|"),
            "shipped": equal(shipped, whole, what="g, weighted by labels", tolerance=1e-7),
            "shipped, 3 sequences on 2 ranks": _differences(Case(data=2, batch=3), context.seed),
        }
    )


def check_own_perturbations(_context: Context) -> Outcome:
    """Compare the mean update of replicas that share z with the gradient, and of those that do not with a K-th of a shard's."""
    nodes, weights = normal_nodes(2, 3)
    whole = _UNLIKE.mean(0)
    shared, own = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
    for z, p in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        shared += p * float(whole @ z) * z
        for other, q in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
            own += p * q * accumulated([_UNLIKE[0] @ z, _UNLIKE[1] @ other], [1, 1]) * z
    return everything_holds(
        {
            "one z": equal(shared, whole, what="E[g_avg·z]"),
            "z_k of its own, rank 1": equal(own, _UNLIKE[0] / 2, what="E[g_avg·z₁]"),
            "ranks drift apart": exceeds(float((_UNLIKE[0] - _UNLIKE[1]).norm() / 2), 0.5, what="‖mean updates' difference‖"),
        }
    )  # fmt: skip


def check_both_orders(context: Context) -> Outcome:
    """Compare the mean of pairs' differences with the difference of means, in rationals: either axis may be the inner one."""
    plus = [Fraction(n, 7) for n in (3, 11, -4, 8)]
    minus = [Fraction(n, 9) for n in (5, -2, 7, 1)]
    epsilon = Fraction(1, 500)
    inner = sum(((p - m) / (2 * epsilon) for p, m in zip(plus, minus, strict=True)), Fraction(0)) / 4
    outer = (sum(plus, Fraction(0)) / 4 - sum(minus, Fraction(0)) / 4) / (2 * epsilon)
    unlike = [
        case.describe()
        for case in (
            Case(data=2, perturb=2, num_steps=1),
            Case(data=2, perturb=2, inner="data", num_steps=1),
        )
        if differences(case, context.seed)
    ]
    return everything_holds(
        {
            "rationals": is_true(inner == outer, what="one g"),
            "shipped": is_true(not unlike, what=f"{unlike or 'both orders have the bits of one device'}"),
        }
    )


# -- counts ---------------------------------------------------------------------------------------------------------------------


def _on(mesh: Mesh, **axes: object) -> ProgramSet:
    ranks = tuple(f"gpu{rank}" for rank in range(mesh.world_size))
    return lower_all(
        Plan.model_validate(
            {
                "model": model(),
                "placement": Placement(topology="none", devices=ranks),
                "batch": mesh.data,
                "seq": 64,
                "mesh": mesh,
                **axes,
            }
        )
    )


def check_single_forwards(_context: Context) -> Outcome:
    """Count forwards of a block on each rank of a 2D mesh, and on one device."""
    parts = {}
    for mesh, wanted in ((Mesh(data=2, perturb=2), 1), (Mesh(perturb=2), 1), (Mesh(data=2), 2), (Mesh(), 2)):
        made = _on(mesh)
        most = 0
        for number in made.roles:
            counts = Counter(
                item.op.segment for item in made.programs[number].step if isinstance(item.op, Forward)
            )
            most = max(most, counts["block.0"])
        parts[mesh.describe() or "one device"] = equal(
            float(most), float(wanted), what="forwards of a block a rank"
        )
    return everything_holds(parts)


def check_lane_load(_context: Context) -> Outcome:
    """Compare bytes that a rank uploads and offloads sliced with an n-th of those whole, and what peers send with (n - 1)/n."""
    parts = {}
    for ranks in (2, 4):
        whole, sliced = (programs(ranks, kind).programs[0] for kind in ("private", "sliced"))
        for label in ("upload", "offload"):
            sizes = [
                sum(item.work.copy_bytes for item in program.step if item.label == label)
                for program in (whole, sliced)
            ]
            parts[f"{ranks} ranks, {label}"] = equal(
                sizes[1] / sizes[0], 1 / ranks, what="part of a whole block", tolerance=1e-3
            )
        whole_bytes = sum(item.work.copy_bytes for item in whole.step if item.label == "upload")
        gathered = sum(item.work.link_bytes for item in sliced.step if item.label == "gather")
        parts[f"{ranks} ranks, from peers"] = equal(
            gathered / whole_bytes, (ranks - 1) / ranks, what="part of a whole block", tolerance=1e-3
        )
    return everything_holds(parts)


def _gpt(width: int) -> Plan:
    config = {
        "model_type": "gpt2", "vocab_size": 100, "n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 64,
    }  # fmt: skip
    mesh = Mesh(data=2, perturb=2)
    return Plan(
        model=spec_of_config(config, name="tiny"),
        placement=Placement(topology="none", devices=tuple(f"gpu{rank}" for rank in range(4))),
        batch=2,
        seq=16,
        mesh=mesh,
    )


def check_scalars_alone(_context: Context) -> Outcome:
    """Compare what ranks send in a step for two models, one of them eight times as wide: the same few bytes."""
    counts = [step_counts(lower_all(_gpt(width))) for width in (16, 128)]
    return everything_holds(
        {
            "bytes": equal(
                counts[0].scalar_bytes, counts[1].scalar_bytes, what="scalar bytes, widths 16 and 128"
            ),
            "nothing else": is_true(
                all(c.size_bytes == c.scalar_bytes for c in counts), what="no gradients, no activations"
            ),
            "few": at_most(counts[1].scalar_bytes, 1024, what="bytes of four ranks"),
        }
    )


# -- times ------------------------------------------------------------------------------------------------------------------------


def check_negligible(_context: Context) -> Outcome:
    """Compare (3) with its first term where links are 100(n - 1) times a lane."""
    parts = {}
    for ranks in (2, 4, 8, 72):
        link = 100.0 * (ranks - 1)
        first, second = 1 / ranks, (ranks - 1) / ranks / link
        parts[f"{ranks} ranks"] = equal(
            second / first, exchange_share(ranks, link), what="second term over the first"
        )
        parts[f"{ranks} ranks, small"] = at_most(second / first, 0.0101, what="second term over the first")
    return everything_holds(parts)


def check_not_negligible(_context: Context) -> Outcome:
    """Show links a hundred times as fast as a lane at which the second term is the larger, and eight GPUs of today."""
    return everything_holds(
        {
            "201 ranks, links of 100 lanes": exceeds(
                exchange_share(201, 100.0), 1.0, what="second term over the first"
            ),
            "8 ranks, NVLink of 450 GB/s, PCIe of 64": exceeds(
                exchange_share(8, 450 / 64), 0.9, what="second term over the first"
            ),
        }
    )


def check_pair_speedup(context: Context) -> Outcome:
    """Compare simulated steps of one device and of a pair of ranks with lanes of their own with the closed form."""
    offloaded = {
        "residency": Residency(blocks="offloaded", num_staging_buffers=6),
        "schedule": Schedule(update="delayed"),
    }
    alone, pair = _on(Mesh(), **offloaded), _on(Mesh(perturb=2), **offloaded)
    compute = seconds(2, 0.0).block / 2
    parts = {}
    for load in (0.1, 1.5, 8.0) if context.size == "quick" else (0.1, 0.8, 1.0, 1.5, 2.0, 3.0, 8.0):
        one = machine(block_bytes() / (load * compute))
        ring = Ring(0.0, 1e18, num_ranks=2)
        two = [replace(one, rings={"host": ring, "world": ring, "pair": ring}) for _ in range(2)]
        measured = (
            simulate_many(fold(World.of(alone, [one]))).step_time_s
            / simulate_many(fold(World.of(pair, two))).step_time_s
        )
        # The head and the filling of the pipeline dilute it.
        parts[f"transfers of {load:g} forwards"] = equal(
            measured, pair_speedup(load, 1.0), what="speedup", tolerance=0.12
        )
        parts[f"transfers of {load:g} forwards, at most 2"] = at_most(measured, 2.0, what="speedup")
    return everything_holds(parts)


def literal_step(
    weights: Sequence[Fraction], z: Sequence[Fraction], rate: Fraction, epsilon: Fraction
) -> list[Fraction]:
    """Return a step of algorithm 1 on ``Σw³/3``, line by line, in rationals."""
    now = [w + epsilon * u for w, u in zip(weights, z, strict=True)]
    plus = sum(w**3 for w in now) / Fraction(3)
    now = [w - 2 * epsilon * u for w, u in zip(now, z, strict=True)]
    minus = sum(w**3 for w in now) / Fraction(3)
    now = [w + epsilon * u for w, u in zip(now, z, strict=True)]
    g = (plus - minus) / (2 * epsilon)
    return [w - rate * g * u for w, u in zip(now, z, strict=True)]


def check_algorithm_1(context: Context) -> Outcome:
    """Compare a step of algorithm 1 with equations 1 and 2, in rationals, and the shipped passes with a literal loop."""
    weights, z = [Fraction(3, 8), Fraction(-5, 7)], [Fraction(2, 5), Fraction(9, 4)]
    rate, epsilon = Fraction(1, 10), Fraction(1, 50)
    losses = [
        sum((w + sign * epsilon * u) ** 3 for w, u in zip(weights, z, strict=True)) / 3 for sign in (1, -1)
    ]
    g = (losses[0] - losses[1]) / (2 * epsilon)
    wanted = [w - rate * g * u for w, u in zip(weights, z, strict=True)]
    return everything_holds(
        {
            "rationals": is_true(literal_step(weights, z, rate, epsilon) == wanted, what="θ - ηgz"),
            "shipped, full pass": _differences(Case(traversal="full", num_steps=2), context.seed),
        }
    )


_UNWEIGHTED = called_with(
    "executors.steps.micro_batches:accumulated",
    "a mean over shards, not over labels",
    counts=lambda counts: [1] * len(counts),
)
_ALL_EVAL_POINTS = Fault(
    "points that all ranks evaluate",
    "zosim.plans:Plan.eval_points_of",
    lambda _shipped, self, *_: self.eval_points,
)
_SHARE = "proofs_checks.oracles.statements:exchange_share"


@planted("zosim.analysis.counts:step_counts", "losses counted as sums of gradients")
def losses_reduced(shipped, programs):
    counts = shipped(programs)
    return replace(counts, scalar_bytes=0, reduced_bytes=counts.scalar_bytes)


half_way_back = called_with(
    "executors.steps.arithmetic:ParamPass.perturb_scaled",
    "no way back from a perturbed copy",
    scale=lambda scale: scale if scale > 0 else -1,
)


CHECKS: Checks = {
    "distzo2-step-4-restores-first": (
        corrected(check_restored_copies, second_by_epsilon),
        counterexample(
            check_perturbed_copies,
            Fault(
                "copies that are restored after all",
                f"{__name__}:updated_copies",
                lambda shipped, **_: shipped(restored=True),
            ),
        ),
    ),
    "distzo2-slices-need-equal-drift": (
        conditioned(check_slices_agree, second_by_epsilon),
        counterexample(
            check_restored_in_place,
            called_with(
                "executors.steps.arithmetic:ParamPass.perturb",
                "perturbations of nothing",
                epsilon=lambda epsilon: 0 * epsilon,
            ),
        ),
    ),
    "distzo2-mean-of-unlike-shards": (
        conditioned(check_like_shards, central_by_epsilon),
        counterexample(check_unlike_shards, _UNWEIGHTED, central_by_epsilon),
    ),
    "distzo2-one-direction-for-all": printed(
        check_own_perturbations,
        losses_added,
    ),
    "distzo2-either-axis-inside": printed(check_both_orders, _UNWEIGHTED, central_by_epsilon),
    "distzo2-one-forward-a-rank": printed(check_single_forwards, _ALL_EVAL_POINTS),
    "distzo2-lane-load": printed(
        check_lane_load,
        all_slices,
        sent_to_itself,
    ),
    "distzo2-scalars-alone": printed(
        check_scalars_alone,
        losses_reduced,
    ),
    "distzo2-exchange-is-negligible": (
        conditioned(
            check_negligible,
            called_with(_SHARE, "n for n - 1", num_ranks=lambda num_ranks: num_ranks + 1),
        ),
        counterexample(
            check_not_negligible,
            called_with(_SHARE, "a ratio squared", link_over_lane=lambda link_over_lane: link_over_lane**2),
        ),
    ),
    "distzo2-pair-speedup": printed(
        check_pair_speedup,
        _ALL_EVAL_POINTS,
        scaled("proofs_checks.oracles.statements:pair_speedup", 0.85, "a bound of 1.7"),
    ),
    "distzo2-algorithm-1-is-its-equations": printed(
        check_algorithm_1,
        central_by_epsilon,
        half_way_back,
        called_with(f"{__name__}:literal_step", "half of the radius", epsilon=lambda epsilon: epsilon / 2),
    ),
    **DISTZO2_COPIES,
}
