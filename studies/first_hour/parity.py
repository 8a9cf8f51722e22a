"""Whether a device computes what the reference computes: bits of the literal loop, numbers of the CPU to rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from executors.calibration.probing import token_batch
from executors.models.random_models import random_model
from executors.models.spec import plan_of_model
from executors.runs.session import Session
from studies.first_hour.setting import Content, Setting
from studies.speed.reference import literal_step
from zosim.plans import Placement

FAMILIES = ("opt", "llama", "gpt2")
_OFFLOADED: Mapping[str, Any] = {"residency": {"blocks": "offloaded"}, "schedule": {"update": "delayed"}}
SAME_BITS: Mapping[str, Mapping[str, Any]] = {
    "resident": {},
    "full": {"schedule": {"traversal": "full"}},
    "perturbations kept": {"perturbations": {"kept": True}},
    "offloaded": _OFFLOADED,
    "offloaded, immediate": {"residency": {"blocks": "offloaded"}},
    "offloaded, drawn ahead": {**_OFFLOADED, "perturbations": {"sampled_ahead": True}},
    "offloaded, new memory": {
        "residency": {"blocks": "offloaded", "reuse_staging_buffers": False},
        "schedule": {"update": "delayed"},
    },
}
"""Placements that have every bit of the literal loop. Perturbed copies have not: they never take a way back that rounds."""

_HIDDEN = 128
"""Wide enough that a device's library takes the kernels of real models."""

_RATE, _EPSILON, _NUM_STEPS = 1e-3, 1e-3, 3
_TO_ROUNDING = 2e-4
"""Largest difference of losses in float32, as a part of them, that sums in another order explain."""


def parity(setting: Setting) -> Content:
    """Return, by case, whether it is as it should be."""
    rows = []
    families = FAMILIES[:1] if setting.is_rehearsal else FAMILIES
    dtypes = ("float32",) if setting.is_rehearsal else ("float16", "float32", "bfloat16")
    for family in families:
        base = random_model(family, hidden=_HIDDEN, num_blocks=3, num_heads=2, vocab=96, max_positions=32)
        for dtype in dtypes:
            model = base.to(getattr(torch, dtype))
            rows += [{"case": f"{family}, {dtype}, {what}", "is_right": right, "details": details}
                     for what, right, details in _of_model(setting, model, dtype)]  # fmt: skip
    return {"rows": rows, "is_right": all(row["is_right"] for row in rows)}


def _of_model(setting: Setting, model: nn.Module, dtype: str) -> Iterator[tuple[str, bool, str]]:
    first, *_ = expected = literal_numbers(setting, model, _NUM_STEPS)
    names = ["resident", "offloaded"] if setting.is_rehearsal else list(SAME_BITS)
    for name in names:
        _, measured = steps_of(setting, model, SAME_BITS[name], _NUM_STEPS)
        yield f"{name}: bits of the literal loop", measured == expected, f"first g {measured[0]:.6e}"
    counted = {"perturbations": {"rng": "counter"}}
    there = [steps_of(setting, model, axes, _NUM_STEPS)[1] for axes in (counted, {**_OFFLOADED, **counted})]
    yield "counter draws: resident and offloaded alike", there[0] == there[1], f"first g {there[0][0]:.6e}"
    if dtype == "float32":
        losses = [_loss(model, device) for device in (setting.device, "cpu")]
        error = abs(losses[0] / losses[1] - 1)
        yield "loss of the CPU, to rounding", error <= _TO_ROUNDING, f"{error:.1e} of it apart"
    yield "its projected gradients are numbers", first == first and abs(first) > 0, f"{first:.6e}"  # noqa: PLR0124 - NaN


def padded_batch() -> dict[str, torch.Tensor]:
    """Return three sequences of tokens, one of which is padded."""
    batch = dict(token_batch(3, 16, 96))
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][1, 11:] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def literal_numbers(setting: Setting, model: nn.Module, num_steps: int) -> list[float]:
    """Return projected gradients of the authors' loop, and a sum over the bits that it leaves."""
    tuned = copy.deepcopy(model).to(setting.device).eval()
    data = {name: tensor.to(setting.device) for name, tensor in padded_batch().items()}
    numbers = [literal_step(tuned, data, step, _RATE, _EPSILON) for step in range(num_steps)]
    return [*numbers, sum_of_bits(tuned)]


def steps_of(
    setting: Setting, model: nn.Module, axes: Mapping[str, Any], num_steps: int, *, graphs: bool = False
) -> tuple[list[float], list[float]]:
    """Return losses of a session, and its projected gradients with a sum over the bits that it leaves, unless it is quantized."""
    tuned, batch = copy.deepcopy(model), padded_batch()
    placement = Placement(topology=setting.topology.name, devices=(setting.node,))
    axes = {"estimator": {"epsilon": _EPSILON}, **axes}
    plan = plan_of_model(tuned, batch=3, seq=16, placement=placement, **axes)
    with Session(plan, tuned, learning_rate=_RATE, device=setting.device, graphs=graphs) as session:
        records = [session.step(batch, seeds=(step,)) for step in range(num_steps)]
        bits = []
        if not plan.low_bits.quantizes_weights:
            with session.unsharded_model() as whole:
                bits = [sum_of_bits(whole)]
    losses = [record.losses_plus[0] for record in records]
    return losses, [*(record.projected_gradients[0] for record in records), *bits]


def sum_of_bits(model: nn.Module) -> float:
    """Return a number that another bit anywhere changes: each parameter's integers, weighted by their places."""
    total = 0
    for parameter in model.parameters():
        integer = {2: torch.int16, 4: torch.int32}[parameter.element_size()]
        bits = parameter.detach().cpu().contiguous().view(integer).flatten().long()
        total = (31 * total + int((bits * torch.arange(1, len(bits) + 1)).sum())) % (1 << 52)
    return float(total)


def _loss(model: nn.Module, device: str) -> float:
    data = {name: tensor.to(device) for name, tensor in padded_batch().items()}
    with torch.no_grad():
        return float(copy.deepcopy(model).to(device).eval()(**data).loss.item())
