"""Runs whose arithmetic is not MeZO's own, beside loops of their own: quantized weights, and all points in one forward as adapters.

The other side of each comparison is a whole model of transformers, whose weights a loop sets; seeds, uniforms, grids and factors come from
their description, in :mod:`proofs_checks.setups.literal` or here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from executors.low_bits.quantized import QuantizedTensor
from executors.runs.adapters import attach
from executors.runs.records import StepRecord
from executors.runs.session import Session
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import Array, equal, exceeds, within
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, altered, called_with, planted, returning, scaled
from proofs_checks.setups import quantized_weights as quantized
from proofs_checks.setups.executed import learning_rate
from proofs_checks.setups.literal import (
    Batch,
    LiteralRun,
    block_seed,
    chained,
    language_model_loss,
    perturbations,
    seed_of,
)
from proofs_checks.setups.placements import OFFLOADED, tiny_batches, tiny_model, tiny_plan
from zosim.plans import Estimator, LowBits, Perturbations, Weights

_EPSILON, _DECAY, _NUM_PERTURBATIONS, _NUM_STEPS = 1e-2, 0.1, 2, 3

# -- quantized weights -------------------------------------------------------------------------------------------------

_BITS, _HIGHEST = 3, 3
_UNIT = 1.73 / _HIGHEST
"""Value of a quantized 1 of a perturbation of 3 bits, whose quantized values are -3 to 3 and whose largest value is 1.73."""

_BLOCK = 1 << 14
_PURPOSES = {"perturbation": 1, "second perturbation": 2, "update": 3}


def second_moment() -> float:
    """Return ``E[û²]`` of a normal, clamped to 1.73 and rounded at random to multiples of 1.73/3, on a fine grid."""
    u = np.linspace(-9, 9, 400_001)
    x = np.clip(u / _UNIT, -_HIGHEST, _HIGHEST)
    below = np.floor(x)
    squared = (below + 1 - x) * below**2 + (x - below) * (below + 1) ** 2
    density = np.exp(-u * u / 2) / np.sqrt(2 * np.pi)
    return float((squared * density).sum() * (u[1] - u[0])) * _UNIT**2


class QuantizedRun:
    """QuZO with int8 weights, a scale for each output, on a whole model whose weights are dequantized."""

    def __init__(
        self, model: nn.Module, seed: int, estimator: str, rng: str, names: set[str], *, is_rounded_once: bool
    ) -> None:
        self.model, self.seed, self.estimator, self.rng = model, seed, estimator, rng
        self.is_rounded_once = is_rounded_once
        self.plain = {n: p.detach().numpy().copy() for n, p in model.named_parameters() if n not in names}
        self.scales: dict[str, Array] = {}
        self.qvalues: dict[str, Array] = {}
        self._sizes = [(name, p.numel()) for name, p in model.named_parameters()]
        for name in names:
            weight = dict(model.named_parameters())[name].detach().numpy()
            scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
            self.scales[name], self.qvalues[name] = scale, np.rint(weight / scale)

    def values(self) -> dict[str, Array]:
        """Return what all weights are."""
        made = {name: (self.qvalues[name] * self.scales[name]).astype(np.float32) for name in self.qvalues}
        return self.plain | made

    def uniforms(self, step: int, perturbation: int, purpose: str) -> dict[str, Array]:
        """Return the numbers in [0, 1) that decide a rounding: blocks of 2¹⁴, counted over all parameters."""
        key, block, uniforms = chained(seed_of(self.seed, step, perturbation), _PURPOSES[purpose]), 0, {}
        for name, numel in self._sizes:
            pieces = []
            for begin in range(0, numel, _BLOCK):
                generator = torch.Generator().manual_seed(block_seed(key, step, perturbation, block))
                pieces.append(torch.empty(min(_BLOCK, numel - begin)).uniform_(generator=generator))
                block += 1
            uniforms[name] = torch.cat(pieces).numpy()
        return uniforms

    def perturbation(self, step: int, perturbation: int, purpose: str) -> dict[str, Array]:
        """Return quantized values of a perturbation, by parameter."""
        uniforms, qvalues = self.uniforms(step, perturbation, purpose), {}
        normals = perturbations(
            [(numel,) for _, numel in self._sizes],
            seed=seed_of(self.seed, step, perturbation),
            step=step,
            perturbation=perturbation,
            rng=self.rng,
            distribution="gaussian",
            dtype=torch.float32,
        )
        for (name, _), numbers in zip(self._sizes, normals, strict=True):
            scaled = numbers.numpy() * np.float32(1 / _UNIT)
            qvalues[name] = np.clip(np.floor(scaled + uniforms[name]), -_HIGHEST, _HIGHEST)
        return qvalues

    def gradient(self, step: int, perturbation: int, batch: Batch) -> float:
        """Return the difference of both losses over ``2ε``."""
        base, along, losses = self.values(), self.perturbation(step, perturbation, "perturbation"), []
        for sign in (1, -1):
            for name, parameter in self.model.named_parameters():
                updated = base[name] + sign * _EPSILON * _UNIT * along[name].reshape(base[name].shape)
                parameter.data = torch.from_numpy(updated.astype(np.float32))
            with torch.no_grad():
                losses.append(float(language_model_loss(self.model, batch)[0]))
        return (losses[0] - losses[1]) / (2 * _EPSILON)

    def update(self, step: int, gradients: tuple[float, ...]) -> None:
        """Move by the gradients of a step, perturbation by perturbation; quantized values by whole numbers, as chance has it, or all at once."""
        summed: dict[str, Array] = {}
        rate, divisor = learning_rate(step), second_moment() if self.estimator == "normalised" else 1.0
        purpose = "second perturbation" if self.estimator == "q-rge2" else "perturbation"
        for perturbation, gradient in enumerate(gradients):
            along = self.perturbation(step, perturbation, purpose)
            uniforms = self.uniforms(step, perturbation, "update")
            for name, numel in self._sizes:
                factor = gradient / _NUM_PERTURBATIONS / divisor * _UNIT
                decay = _DECAY if perturbation == 0 and not _is_spared(name) else 0.0
                if name in self.plain:
                    weight = self.plain[name]
                    change = factor * along[name].reshape(weight.shape) + decay * weight
                    self.plain[name] = (weight - rate * change).astype(np.float32)
                    continue
                qvalues = self.qvalues[name]
                step_of = rate * factor / self.scales[name].astype(np.float64)
                change = along[name].reshape(qvalues.shape) * step_of
                if self.is_rounded_once:
                    summed[name] = summed.get(name, 0.0) + change
                    if perturbation + 1 < len(gradients):
                        continue
                    change, decay = summed[name], 0.0 if _is_spared(name) else _DECAY
                change = change + rate * decay * qvalues
                assert numel == qvalues.size
                whole = np.floor(np.abs(change) + uniforms[name].reshape(qvalues.shape))
                self.qvalues[name] = np.clip(qvalues - np.copysign(whole, change), -127, 127)


def _is_spared(name: str) -> bool:
    return any(part in name for part in ("bias", "layer_norm", "layernorm"))


_QUANTIZED_RUNS: Mapping[str, Mapping[str, Any]] = {
    "normalised": {"perturbations": Perturbations()},
    "q-rge1": {"perturbations": Perturbations(rng="counter"), **OFFLOADED},
    "q-rge2": {"perturbations": Perturbations(), **OFFLOADED},
    "normalised, rounded once": {"perturbations": Perturbations()},
}
"""Axes of the plan by estimator, the last of which rounds all updates of a step together; each takes another path through the executor: resident or offloaded with delayed updates, by either discipline of random numbers."""


def _quantized_session(
    estimator: str, seed: int
) -> tuple[list[StepRecord], dict[str, Tensor], dict[str, Tensor], set[str]]:
    """Return records, weights and quantized values after some steps of the shipped runtime, and which weights are quantized."""
    model = tiny_model("tied")
    kind, _, is_rounded_once = estimator.partition(", ")
    low_bits = LowBits.model_validate(
        {
            "weights": "int8",
            "perturbation_bits": _BITS,
            "estimator": kind,
            "scales": "channel",
            "update_rounding": "step" if is_rounded_once else "perturbation",
        }
    )
    plan = tiny_plan(
        model,
        low_bits=low_bits,
        estimator=Estimator(epsilon=_EPSILON, num_perturbations=_NUM_PERTURBATIONS),
        **_QUANTIZED_RUNS[estimator],
    )
    options = {"learning_rate": learning_rate, "weight_decay": _DECAY, "seed": seed, "num_timed_steps": 0}
    with Session(plan, model, **options) as session:  # type: ignore[arg-type]
        records = [session.step(batch) for batch in tiny_batches(_NUM_STEPS)]
        session.flush()
        held = {tensor.name: tensor.held for tensor in session.forward_runner.tensors}
        qvalues = {
            name: each.levels().clone() for name, each in held.items() if isinstance(each, QuantizedTensor)
        }
        return records, session.state_dict(), qvalues, set(qvalues)


def check_qvalues_over_steps(context: Context) -> Outcome:
    """Compare projected gradients, quantized values and other weights of three steps in int8 with a loop in NumPy, for each estimator.

    Each step of the loop goes on from its own quantized values with the run's gradients, which are compared before: where two gradients differ in a
    last bit a value near the border of its rounding may go the other way, one in thousands.
    """
    parts = {}
    for estimator in _QUANTIZED_RUNS:
        records, weights, qvalues, names = _quantized_session(estimator, context.seed)
        rng = _QUANTIZED_RUNS[estimator]["perturbations"].rng
        kind, _, once = estimator.partition(", ")
        run = QuantizedRun(tiny_model("tied"), context.seed, kind, rng, names, is_rounded_once=bool(once))
        off, size = 0.0, 0.0
        before = {name: values.copy() for name, values in run.qvalues.items()}
        for step, (record, batch) in enumerate(zip(records, tiny_batches(_NUM_STEPS), strict=True)):
            for perturbation, gradient in enumerate(record.projected_gradients):
                off = max(off, abs(run.gradient(step, perturbation, batch) - gradient))
                size = max(size, abs(gradient))
            run.update(step, record.projected_gradients)
        unlike = sum(int((qvalues[name].numpy() != run.qvalues[name]).sum()) for name in names)
        updated = sum(int((before[name] != run.qvalues[name]).sum()) for name in names)
        total = sum(values.size for values in run.qvalues.values())
        far = max(float(np.abs(weights[n].numpy() - values).max()) for n, values in run.plain.items())
        parts[f"{estimator}, gradients"] = within(off, 1e-3 * size, what="largest distance, of the largest")
        parts[f"{estimator}, grid values"] = within(unlike, 1e-3 * total, what=f"unlike of {total}")
        parts[f"{estimator}, others"] = within(far, 1e-5, what="largest distance of what is no code")
        parts[f"{estimator}, it moves"] = exceeds(updated, 0.3 * total, what="grid values that moved")
    return everything_holds(parts)


# -- all points in one forward ----------------------------------------------------------------------------------------

_AXES = (
    {"distribution": "lozo", "rng": "mezo", "difference": "central"},
    {"distribution": "lozo", "rng": "counter", "difference": "forward"},
    {"distribution": "factorised", "rng": "mezo", "difference": "forward"},
)
_RANK, _LAZY_STEPS, _RADIUS = 2, 2, 1e-3


def _linears() -> nn.Module:
    """Return a tiny model in float64, of which linear layers of blocks are tuned."""
    model = tiny_model("untied", torch.float64)
    attach(model, "linears")
    return model


def _ragged_batches(count: int) -> list[Batch]:
    """Return batches of five sequences of 11 to 14 tokens that begin alike, some of whose tokens are labels."""
    generator, lengths = torch.Generator().manual_seed(5), (14, 12, 13, 11, 14)
    batches: list[Batch] = []
    for _ in range(count):
        ids = torch.randint(3, 48, (len(lengths), max(lengths)), generator=generator)
        ids[:, :9] = ids[0, :9]
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[1:, :10] = -100
        batches.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return batches


def _together(
    distribution: str, rng: str, difference: str, seed: int
) -> tuple[list[StepRecord], Mapping[str, Tensor]]:
    """Return records and weights of a run that forwards all points of a step at once."""
    model = _linears()
    plan = tiny_plan(
        model,
        dtype="float64",
        weights=Weights(perturbation="adapters"),
        perturbations=Perturbations.model_validate(
            {"distribution": distribution, "rank": _RANK, "lazy_steps": _LAZY_STEPS, "rng": rng}
        ),
        estimator=Estimator.model_validate(
            {"difference": difference, "epsilon": _RADIUS, "num_perturbations": _NUM_PERTURBATIONS}
        ),
    )
    plan = plan.model_validate(plan.model_dump(mode="json") | {"batch": 5, "seq": 14})
    with Session(
        plan,
        model,
        learning_rate=learning_rate,
        weight_decay=_DECAY,
        seed=seed,
        num_timed_steps=0,
        loss_dtype="fp64",
    ) as session:
        records = [session.step(batch) for batch in _ragged_batches(_NUM_STEPS)]
        session.flush()
        return records, dict(session.state_dict())


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the loss in the format of the logits; transformers has it in float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    uniforms = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -uniforms[labels != -100].mean(), int((labels != -100).sum())


def check_all_points_at_once(context: Context) -> Outcome:
    """Compare projected gradients and weights of runs that forward all points at once with those of the literal loop, point by point."""
    parts = {}
    for axes in _AXES:
        records, weights = _together(**axes, seed=context.seed)
        run = LiteralRun(
            _loss,
            _linears(),
            context.seed,
            epsilon=_RADIUS,
            weight_decay=_DECAY,
            num_perturbations=_NUM_PERTURBATIONS,
            central=axes["difference"] == "central",
            copies=True,
            rng=axes["rng"],
            distribution=axes["distribution"],
            rank=_RANK,
            lazy_steps=_LAZY_STEPS,
        )
        for step, batch in enumerate(_ragged_batches(_NUM_STEPS)):
            run.step(batch, learning_rate(step))
        name = f"{axes['distribution']}, {axes['rng']}, {axes['difference']}"
        for record, wanted in zip(records, run.gradients, strict=True):
            parts[f"{name}, g of step {record.step}"] = equal(
                record.projected_gradients, wanted, what="g", tolerance=1e-9
            )
        far = max(float((weights[name] - value.detach()).abs().max()) for name, value in run.tuned.items())
        parts[f"{name}, weights"] = within(far, 1e-11, what="largest distance of a weight")
    return everything_holds(parts)


# -- claims -----------------------------------------------------------------------------------------------------------

_BY_QVALUES = "executors.steps.ops.param_passes:ParamPasses._update_by_qvalues"

_GRIDS = "executors.low_bits.grids"

_UPDATE = "executors.low_bits.quantized:QuantizedTensor.update"
_SCALES = "executors.steps.ops.forward:Forwards._scales_of"


@planted(_UPDATE, "later perturbations 1 % short where all are rounded together")
def later_perturbations_short(shipped, cls, along, step):
    whole, step.gradient = step.gradient, step.gradient * (0.99 if step.sums else 1)
    shipped(cls, along, step)
    step.gradient = whole


@planted(_UPDATE, "decay twice a step")
def decay_twice(shipped, cls, along, step):
    step.rounded_decay *= 2
    shipped(cls, along, step)


@planted("executors.models.packing:_Forest.grow", "a token taken for the one that another sequence has there")
def alike_for_too_long(shipped, self):
    for row in self.rows:
        row[9:10] = self.rows[0][9:10]
    shipped(self)


@planted("executors.models.batched:BatchedModel.path", "side paths of the first point at all points")
def paths_of_the_first_point(shipped, self, parameter, factors, scales):
    path = shipped(self, parameter, factors, scales)
    return replace(path, inner=path.inner[0] if path.inner.dim() == 3 else path.inner)


CHECKS: Checks = {
    "grids-round-to-neighbours": printed(
        quantized.check_grids,
        called_with(
            f"{_GRIDS}:Floats.step",
            "a step that ignores subnormal numbers",
            self=lambda it: altered(it, smallest_exponent=-1000),
        ),
        scaled(f"{_GRIDS}:Floats.step", 0.5, "steps half as far apart"),
        scaled(f"{_GRIDS}:Grid.variance", 1.03, "a variance 3 % too large"),
        quantized.ROUNDED_DOWN,
        quantized.UNIFORMS_BETWEEN,
        quantized.CLAMP_WIDE,
        quantized.SAMPLED_NEAREST,
    ),
    "quantized-steps-are-a-literal-loop": printed(
        check_qvalues_over_steps,
        quantized.MOVE_LONG,
        quantized.MOVE_AWAY,
        quantized.UPDATE_UNIFORMS,
        quantized.SAME_KEY,
        quantized.SAMPLED_LONG,
        later_perturbations_short,
        called_with(_BY_QVALUES, "no second moment", op=lambda op: replace(op, divisor=1)),
        Fault(
            "a step's uniforms in every step",
            "executors.randomness.rounded:rounding_key",
            lambda shipped, seed, step, perturbation, purpose: shipped(
                seed, 0 if purpose == "update" else step, perturbation, purpose
            ),
        ),
        decay_twice,
    ),
    "all-points-at-once-are-point-by-point": printed(
        check_all_points_at_once,
        returning(_SCALES, "points without their signs", lambda it: [abs(scale) for scale in it]),
        alike_for_too_long,
        paths_of_the_first_point,
        returning(_SCALES, "a root too many", lambda it: [scale / 2**0.5 for scale in it]),
        returning(_SCALES, "a probe that is 3 % long", lambda it: [1.03 * scale for scale in it]),
    ),
}
