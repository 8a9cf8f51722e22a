"""Learning rates as pure functions of the step, so that replaying a run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, model_validator

from topology.errors import RunError
from zosim.plans import Section, Setting

Schedule = Literal["constant", "linear", "cosine"]


class LearningRate(Section):
    """The learning rate that each step's update is applied with.

    Raises RunError if a field is out of range.

    With ``t`` from 0: during warm-up ``lr0 · (t + 1) / (W + 1)``, so that no step is wasted at rate 0 and the
    first step after warm-up is the first at ``lr0``. Afterwards, with ``p = (t - W) / (T - W)``: constant
    ``lr0``, linear ``lr0 · (1 - p)``, cosine ``lr0 · (1 + cos πp) / 2``. Steps from ``T`` on keep ``p = 1``.
    Without warm-up the linear schedule is ``lr0 · (1 - t / T)`` in exactly these operations.

    >>> [LearningRate(schedule="linear", learning_rate=1.0, num_steps=4).at(t) for t in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    heading = "Estimator and optimizer"

    model_config = ConfigDict(strict=True)

    # ``"constant"``, ``"linear"`` (to zero) or ``"cosine"`` (half a period, to zero).
    schedule: Annotated[
        Schedule, Setting("--lr-schedule", "Schedule of the learning rate after the warm-up.", "numbers")
    ] = "constant"
    # The largest rate, ``lr0``.
    learning_rate: Annotated[float, Setting("--lr", "Peak learning rate.", "numbers")] = 1e-6
    # Steps of the whole run, ``T``; a resumed run must state the same number.
    num_steps: Annotated[
        int,
        Setting(
            "--steps",
            "Number of steps of the whole run, earlier parts of a resumed run included. Required unless --resume.",
            "numbers",
            heading="Run",
        ),
    ]
    # Steps ``W`` over which the rate climbs linearly before `schedule` takes over.
    warmup_steps: Annotated[
        int, Setting("--warmup", "Number of warm-up steps before the peak learning rate.", "numbers")
    ] = 0

    # The bounds stand here and not in the fields: their messages say what is usual.
    @model_validator(mode="after")
    def _in_range(self) -> LearningRate:
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise RunError(
                f"learning_rate={self.learning_rate} must be a finite number of at least 0",
                hint="zeroth-order runs often use 1e-6 (large models) to 1e-4 (small ones)",
            )
        if self.num_steps < 1:
            raise RunError(f"num_steps={self.num_steps} must be at least 1")
        if not 0 <= self.warmup_steps < self.num_steps:
            raise RunError(
                f"warmup_steps={self.warmup_steps} must be at least 0 and below num_steps={self.num_steps}",
                hint="a twentieth of the steps is common",
            )
        return self

    def at(self, step: int) -> float:
        """Return the learning rate of `step` (from 0). Raises ValueError if `step` is negative."""
        if step < 0:
            message = f"step={step} must be at least 0"
            raise ValueError(message)
        if step < self.warmup_steps:
            return self.learning_rate * ((step + 1) / (self.warmup_steps + 1))
        if self.schedule == "constant":
            return self.learning_rate
        past = min(step, self.num_steps) - self.warmup_steps
        progress = past / (self.num_steps - self.warmup_steps)
        decay = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * decay
