"""``python -m studies.rounding``: how far the restore drifts, and which updates leave a trace, by format."""

from __future__ import annotations

import torch
from torch import Tensor

from executors.steps.arithmetic import ParamPass
from zosim.console import stdout
from zosim.report import Table

NUM_WEIGHTS = 100_000
WEIGHT_STD = 0.02
EPSILON = 1e-3
STEPS = (1, 100, 1000)
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEPT_IN = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
SIZES = (1e-6, 1e-5, 1e-4)


def weights(dtype: torch.dtype) -> Tensor:
    """Return normal weights of standard deviation :data:`WEIGHT_STD`."""
    torch.manual_seed(0)
    return (torch.randn(NUM_WEIGHTS, dtype=torch.float64) * WEIGHT_STD).to(dtype)


def drift(dtype: torch.dtype) -> tuple[float, dict[int, float]]:
    """Return the share of weights that one step at learning rate 0 changes, and the root mean square after some."""
    base = weights(dtype)
    theta, param_pass, changed, drift_at = base.clone(), ParamPass(), 0.0, {}
    for step in range(1, max(STEPS) + 1):
        z = torch.randn(NUM_WEIGHTS, dtype=dtype)
        for scale in (1, -2, 1):
            param_pass.perturb(theta, z, scale, EPSILON)
        if step == 1:
            changed = float((theta != base).double().mean())
        if step in STEPS:
            drift_at[step] = float((theta.double() - base.double()).square().mean().sqrt())
    return changed, drift_at


def surviving(kept_in: torch.dtype, size: float) -> float:
    """Return the share of updates ``size·z``, made in float32, that the format in which weights are kept shows."""
    kept = weights(torch.float32).to(kept_in)
    theta, z = kept.float(), torch.randn(NUM_WEIGHTS)
    ParamPass().update(theta, z, gradient=1.0, learning_rate=size, weight_decay=None)
    return float((theta.to(kept_in).float() != kept.float()).double().mean())


def main() -> None:
    """Print both tables of docs/benchmarks/rounding.md."""
    torch.set_num_threads(1)
    rows = []
    for dtype in FORMATS:
        changed, drift_at = drift(dtype)
        rows.append((_name(dtype), f"{changed:.0%}", *(f"{drift_at[steps]:.1e}" for steps in STEPS)))
    stdout.print(Table(("format", "changed by one step", *(f"drift after {steps}" for steps in STEPS)), rows))
    kept = [(_name(dtype), *(f"{surviving(dtype, size):.0%}" for size in SIZES)) for dtype in KEPT_IN]
    stdout.print(Table(("kept in", *(f"updates of {size:g}·z that leave a trace" for size in SIZES)), kept))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("fn")


if __name__ == "__main__":
    main()
