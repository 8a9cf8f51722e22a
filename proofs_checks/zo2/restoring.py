"""What perturbing and restoring does to the weights, and when and with what they are updated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executors.runs.session import Session
from executors.steps.arithmetic import ParamPass
from proofs_checks.claims import Checks, corrected, counterexample, printed
from proofs_checks.exact import at_most
from proofs_checks.faults import empty_flush, present_rate, second_by_epsilon
from proofs_checks.outcomes import Context, Outcome
from proofs_checks.planting import Fault, planted
from proofs_checks.setups.analytic import BATCH, DIMENSION, AnalyticModel, plan_of
from proofs_checks.setups.executed import Case, against_literal, random_cases
from proofs_checks.setups.placements import (
    BLOCKWISE,
    DELAYED,
    FULL_PASS,
    OFFLOADED,
    Key,
    RecordedPass,
    Trace,
    same_bits,
    tiny_model,
    train,
)
from zosim.plans import Estimator, Perturbations, Weights

DTYPES = ("float64", "float32", "bfloat16", "float16")
EPSILON = 1e-3
_ROUND_TRIP = (1, -2, 1)


def _passes_by_key(trace: Trace) -> dict[Key, list[RecordedPass]]:
    """Return the perturbations of each step, index and group, in the order in which they ran."""
    by_key: dict[Key, list[RecordedPass]] = {}
    for recorded in trace.param_passes:
        by_key.setdefault(recorded.key, []).append(recorded)
    return by_key


def check_sequence(context: Context) -> Outcome:
    """Count perturbations that are out of sequence, or differ in a bit from the literal expression."""
    details, differing = [], 0
    for dtype in DTYPES:
        for name, axes in (("full pass", FULL_PASS), ("offloaded", OFFLOADED)):
            trace = train("tied", num_steps=2, dtype=dtype, seed=context.seed, **axes)
            sequences = sum(
                tuple(recorded.scale for recorded in param_passes) != _ROUND_TRIP
                for param_passes in _passes_by_key(trace).values()
            )
            unlike = sum(
                not same_bits(
                    recorded.after, recorded.before + (recorded.scale * trace.sampled[recorded.key]) * EPSILON
                )
                for recorded in trace.param_passes
            )
            details.append(
                f"{dtype}, {name}: {unlike} of {len(trace.param_passes)} differ from θ + (s·z)·ε, "
                f"{sequences} visits are not +1, -2, +1"
            )
            differing += sequences + unlike
    return Outcome(differing, 0, "perturbations that differ from the literal sequence", tuple(details))


def check_drift(context: Context) -> Outcome:
    """Compare what a round trip leaves of the weights with the bound on its rounding."""
    details, largest = [], 0.0
    for dtype in DTYPES:
        trace = train("untied", num_steps=context.samples(10, 2), dtype=dtype, seed=context.seed, **BLOCKWISE)
        ratios, changed, total = 0.0, 0, 0
        for param_passes in _passes_by_key(trace).values():
            drift = (param_passes[-1].after.double() - param_passes[0].before.double()).abs()
            ratios = max(ratios, float((drift / _rounding_bound(param_passes)).max()))
            changed += int((drift > 0).sum())
            total += drift.numel()
        largest = max(largest, ratios)
        details.append(
            f"{dtype}: a round trip changes {changed / total:.1%} of the weights, by {ratios:.2f} of the bound at most"
        )
    outcome = at_most(largest, 1.0, what="drift of a weight in a round trip, over its bound", slack=0.0)
    return replace(outcome, details=tuple(details))


def check_unrestored(context: Context) -> Outcome:
    """Count weights that a round trip changes, which must be those that NumPy's own arithmetic changes."""
    generator = np.random.default_rng(context.seed)
    wrong, details = 0, []
    for dtype in (np.float64, np.float32, np.float16):
        start = (0.02 * generator.standard_normal(2000)).astype(dtype)
        z = generator.standard_normal(2000).astype(dtype)
        theta = start.copy()
        for scale in _ROUND_TRIP:
            # A product in half precision is rounded once, from float32, in which torch has ε.
            wide = np.promote_types(dtype, np.float32).type
            theta = theta + (z.astype(wide) * wide(scale * EPSILON)).astype(dtype)
        shipped, param_pass = torch.from_numpy(start.copy()), ParamPass()
        for scale in _ROUND_TRIP:
            param_pass.perturb(shipped, torch.from_numpy(z), scale, EPSILON)
        changed = int((theta != start).sum())
        wrong += int((shipped.numpy() != theta).sum()) + (changed == 0)
        details.append(f"{dtype.__name__}: {changed} of {len(start)} weights end with other bits")
    return Outcome(
        wrong, 0, "weights that differ from NumPy's; formats that restore every bit", tuple(details)
    )


def _rounding_bound(param_passes: list[RecordedPass]) -> Tensor:
    """Return ``u·(|θ₁| + |θ₂| + |θ₃|)``, plus what products may lose below the normal range."""
    info = torch.finfo(param_passes[0].after.dtype)
    magnitudes = sum(recorded.after.double().abs() for recorded in param_passes)
    return torch.as_tensor(magnitudes * (info.eps / 2) + 2 * info.smallest_normal * info.eps)


def check_copies(context: Context) -> Outcome:
    """Count weights that evaluations change, and points that differ in a bit from the literal expression."""
    details, differing = [], 0
    still: dict[str, Any] = {"learning_rate": lambda _step: 0.0, "weight_decay": 0.0}
    for dtype in DTYPES:
        for name, axes in (("full pass", FULL_PASS), ("block by block", BLOCKWISE), ("offloaded", OFFLOADED)):
            copies: dict[str, Any] = {
                "weights": Weights(perturbation="copies"),
                "perturbations": Perturbations(sampled_ahead=True),
            }
            options = {"num_steps": context.samples(4, 2), "dtype": dtype, "seed": context.seed, **still}
            trace = train("tied", **axes, **copies, **options)
            start = {
                name: value.detach()
                for name, value in tiny_model("tied", getattr(torch, dtype)).named_parameters()
            }
            moved = sum(not same_bits(start[name], trace.weights[name]) for name in start)
            unlike = sum(
                not same_bits(
                    recorded.after, recorded.before + (recorded.scale * trace.sampled[recorded.key]) * EPSILON
                )
                for recorded in trace.param_passes
            )
            unlike += sum(
                [recorded.scale for recorded in param_passes] != [1, -1]
                or not same_bits(param_passes[0].before, param_passes[1].before)
                for param_passes in _passes_by_key(trace).values()
            )
            details.append(
                f"{dtype}, {name}: {moved} of {len(start)} tensors moved; {unlike} of {len(trace.param_passes)} points differ"
            )
            differing += moved + unlike
    return Outcome(differing, 0, "weights that moved, or points that differ from the literal", tuple(details))


def check_delayed(context: Context) -> Outcome:
    """Count what differs from a literal loop that updates at once, under a changing learning rate, with decay."""
    cases = [
        Case(num_steps=3, update="delayed", blocks=blocks, num_perturbations=perturbations)
        for blocks in ("resident", "offloaded")
        for perturbations in (1, 2)
    ]
    chosen = random_cases("one device", context.samples(100, 8), context.seed + 1)
    cases += [case for case in chosen if case.update == "delayed"]
    outcome = against_literal(cases, context.seed)
    still = sum(_unlike_decay(axes) for axes in (BLOCKWISE, DELAYED, OFFLOADED))
    detail = f"g = 0: {still} weights differ from θ - η_t·(0 + wd·θ)"
    return replace(outcome, statistic=outcome.statistic + still, details=(detail, *outcome.details))


def _unlike_decay(axes: Mapping[str, Any]) -> int:
    """Train a constant loss, so that g = 0, and compare with decay alone at each step's own learning rate."""
    rates = (0.5, 0.25, 0.125)
    model = AnalyticModel(lambda theta: 0.0 * theta.sum())
    expected = torch.linspace(1.0, 2.0, DIMENSION, dtype=torch.float64)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), expected.view(-1, 2), strict=True):
            parameter.view(-1).copy_(values)
    # Powers of two, and no random bit in what they multiply: perturbations restore exactly.
    plan = plan_of(
        model,
        estimator=Estimator(epsilon=2.0**-10),
        perturbations=Perturbations(distribution="rademacher"),
        **axes,
    )
    with Session(
        plan, model, learning_rate=rates.__getitem__, weight_decay=0.1, num_timed_steps=0
    ) as session:
        for rate in rates:
            session.step(BATCH)
            expected = expected - rate * (0.1 * expected)
        weights = torch.cat([tensor.flatten() for tensor in session.state_dict().values()])
    return int((weights - expected).abs().gt(1e-12).sum())


_PERTURB = "executors.steps.arithmetic:ParamPass.perturb"


@planted(_PERTURB, "a fused multiply-add")
def fused(_shipped, _self, theta, z, scale, epsilon, out=None):
    torch.add(theta, z, alpha=scale * epsilon, out=theta if out is None else out)


@planted(_PERTURB, "every perturbation in two halves")
def in_two_halves(shipped, self, theta, z, scale, epsilon, out=None):
    shipped(self, theta, z, scale, epsilon / 2, out)
    shipped(self, theta if out is None else out, z, scale, epsilon / 2)


def with_transitions(name: str, scales: Mapping[int, int]) -> Fault:
    """Return a fault of perturbations by other multiples of the perturbation, by multiple."""

    @planted("zosim.lowering.weights:EvalPoints.path", name)
    def fault(shipped, self, perturbation):
        return tuple(
            tuple(
                transition._replace(scale=scales.get(transition.scale, transition.scale))
                for transition in transitions
            )
            for transitions in shipped(self, perturbation)
        )

    return fault


@planted("executors.steps.ops.param_passes:ParamPasses.update", "no update where g = 0")
def no_update_of_zero(shipped, self, instruction):
    update, op = shipped(self, instruction), instruction.op

    def action(frame):
        if (source := frame.at(op.step)) is not None and source.gradients[op.perturbation]:
            update(frame)

    return action


CHECKS: Checks = {
    "perturb-sequence": printed(
        check_sequence,
        fused,
        in_two_halves,
        with_transitions("a second forward at +2ε", {-2: 1}),
    ),
    "restore-drift": (
        corrected(
            check_drift,
            Fault(
                "a second perturbation one percent short",
                _PERTURB,
                lambda shipped, self, theta, z, scale, epsilon, *out: shipped(
                    self, theta, z, scale, epsilon * (1 if scale > 0 else 0.99), *out
                ),
            ),
            second_by_epsilon,
        ),
        counterexample(check_unrestored, fused),
    ),
    "copies-leave-weights-alone": printed(
        check_copies,
        Fault(
            "copies written over the weights",
            "executors.steps.arithmetic:ParamPass.perturb_scaled",
            lambda shipped, self, theta, w, scale, _out: shipped(self, theta, w, scale),
        ),
        with_transitions("a second copy from the first", {-1: -2}),
    ),
    "delayed-equals-immediate": printed(
        check_delayed,
        present_rate,
        no_update_of_zero,
        empty_flush,
    ),
}
