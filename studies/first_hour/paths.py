"""Every path of the executor, tiny, in some seconds: whether it runs on this device, and computes what it should.

Four steps of each are held against the literal loop to the bit, or where a path rounds elsewhere, against another path to
rounding. They are few and small so that all are known to work or not before the first long measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from costmodel.models.configs import LoRA, Prefix
from executors.models.random_models import random_model
from executors.runs.adapters import attach
from studies.first_hour.parity import SAME_BITS, literal_numbers, steps_of
from studies.first_hour.setting import Content, Setting

_NUM_STEPS = 4
_GRAPHS_BLOCKS = 20
"""From about fourteen on, streams that torch makes for each capture would come round to those that copy and draw."""

_REHEARSED_BLOCKS = 2
_TO_ROUNDING = 1e-2
"""Largest difference of losses in float16, as a part of them, between two orders of summing."""

_OFFLOADED = SAME_BITS["offloaded"]
_LINEARS = {"perturbations": {"distribution": "lozo", "rank": 2}}
PACKED_LINEARS: Mapping[str, Any] = {**_LINEARS, "weights": {"perturbation": "adapters"}}
_INT8: Mapping[str, Any] = {"weights": "int8", "activations": "int8-token"}
_FLOAT8: Mapping[str, Any] = {"weights": "float8_e4m3", "activations": "float8-token", "perturbation_bits": 5}

Check = Callable[[Setting], tuple[bool, str]]
"""Returns whether a path computes what it should, and in words what was compared."""


def placements(setting: Setting) -> Iterator[Content]:
    """Yield, path by path, whether placements, tuned parameters and packed points compute what they should."""
    names = ("resident", "offloaded") if setting.is_rehearsal else tuple(SAME_BITS)
    checks: dict[str, Check] = {
        f"{name}, the literal loop": partial(_as_literal, axes=SAME_BITS[name]) for name in names
    }
    lora, prefix = LoRA(rank=2, target_modules=("q_proj", "fc2")), Prefix(num_tokens=4)
    checks |= {
        "copies": partial(_runs, axes={"weights": {"perturbation": "copies"}}),
        "packed points": partial(_as_other, tuned="linears", axes=PACKED_LINEARS, other=_LINEARS),
        "adapters": partial(_as_other, tuned=lora, axes=_OFFLOADED, to_rounding=0.0),
        "prefix": partial(_as_other, tuned=prefix, axes=_OFFLOADED, to_rounding=0.0),
    }
    return checked(setting, checks)


def graphs(setting: Setting) -> Iterator[Content]:
    """Yield whether CUDA graphs of a model of many blocks compute what kernels launched one by one do."""
    num_blocks = _REHEARSED_BLOCKS if setting.is_rehearsal else _GRAPHS_BLOCKS
    return checked(
        setting,
        {
            f"graphs, {num_blocks} blocks, {name}": partial(
                _as_other,
                axes=SAME_BITS[name],
                other=SAME_BITS[name],
                num_blocks=num_blocks,
                graphs=True,
                to_rounding=0.0,
            )
            for name in ("resident", "offloaded")
        },
    )


def products(setting: Setting) -> Iterator[Content]:
    """Yield whether products of quantized values compute what products of the numbers that they stand for do."""
    checks: dict[str, Check] = {}
    for name, low_bits in {"_int_mm": _INT8, "_scaled_mm": _FLOAT8}.items():
        axes = {"perturbations": {"rng": "counter"}, "low_bits": low_bits}
        plain = {**axes, "low_bits": {**low_bits, "kernel": "dequantize"}}
        for placement in ("resident", "offloaded"):
            where = SAME_BITS[placement]
            checks[f"{name}, {placement}"] = partial(
                _as_other, axes={**where, **axes}, other={**where, **plain}
            )
    if setting.is_rehearsal:  # the simulated device has no product of e4m3
        checks = {name: check for name, check in checks.items() if "_int_mm" in name}
    return checked(setting, checks)


def checked(setting: Setting, checks: Mapping[str, Check]) -> Iterator[Content]:
    """Yield what is known so far, with each path that is begun and again with each that is done: a crash leaves the rest."""
    rows: list[dict[str, Any]] = []
    for name, check in checks.items():
        yield {"rows": rows, "is_right": False, "under_way": name}
        began = time.perf_counter()
        try:
            is_right, details = check(setting)
        except Exception as error:  # noqa: BLE001 - the paths that follow are worth having
            is_right, details = False, f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - began, 2)
        rows.append({"case": name, "is_right": is_right, "details": details, "seconds": seconds})
    yield {"rows": rows, "is_right": all(row["is_right"] for row in rows)}


def tiny_model(num_blocks: int = 3) -> nn.Module:
    """Return a tiny OPT in float16, always with the same weights."""
    model = random_model("opt", hidden=64, num_blocks=num_blocks, num_heads=2, vocab=96, max_positions=32)
    return model.to(torch.float16)


def _as_literal(setting: Setting, axes: Mapping[str, Any]) -> tuple[bool, str]:
    model = tiny_model()
    expected = literal_numbers(setting, model, _NUM_STEPS)
    _, found = steps_of(setting, model, axes, _NUM_STEPS)
    return found == expected, f"bits of four steps; first g {found[0]:.6e}, the loop's {expected[0]:.6e}"


def _runs(setting: Setting, axes: Mapping[str, Any]) -> tuple[bool, str]:
    losses, _ = steps_of(setting, tiny_model(), axes, _NUM_STEPS)
    return all(loss == loss and loss > 0 for loss in losses), f"losses {losses[0]:.6f} to {losses[-1]:.6f}"  # noqa: PLR0124 - NaN


def _as_other(
    setting: Setting,
    axes: Mapping[str, Any],
    other: Mapping[str, Any] | None = None,
    *,
    tuned: Any = None,
    num_blocks: int = 3,
    graphs: bool = False,
    to_rounding: float = _TO_ROUNDING,
) -> tuple[bool, str]:
    """Return whether a path's losses are those of another, by default of the resident one; with `to_rounding` 0, all bits."""
    models = [tiny_model(num_blocks) for _ in range(2)]
    if tuned is not None:
        for model in models:
            attach(model, tuned)
    losses, numbers = steps_of(setting, models[0], axes, _NUM_STEPS, graphs=graphs)
    expected_losses, expected = steps_of(setting, models[1], other or {}, _NUM_STEPS)
    error = max(abs(loss / wanted - 1) for loss, wanted in zip(losses, expected_losses, strict=True))
    if to_rounding == 0.0:
        return numbers == expected, f"bits of four steps; losses are {error:.1e} apart"
    return error <= to_rounding, f"losses are {error:.1e} of them apart"
