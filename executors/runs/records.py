"""Losses and projected gradients of one step, in memory and as rows of a log, and signs in them that a run diverges."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from executors.randomness.rng import mixed
from executors.steps.frames import StepFrame
from topology.errors import RunError
from zosim.eval_points import BASE, EvalPoint

_NUM_SEEDS = 1_000_000_000
"""Seeds are drawn below this, as the reference loop draws them."""

RECENT_STEPS = 10
"""Steps whose median loss is followed."""
_LEAST_STEPS = 5
_FACTOR = 2.0
_MARGIN = 1.0


@dataclass(frozen=True)
class StepRecord:
    """Losses and projected gradients of one step.

    Attributes
    ----------
    step : int
        Number of the step, from 0.
    seeds, losses_plus, losses_minus, projected_gradients : tuple
        One element per perturbation; `losses_minus` is of a central difference, else None.
    loss_base : float or None
        Loss at the unperturbed weights (a mean over tokens, in nats), for a forward difference.
    learning_rate : float
        The one that this step's projected gradients are applied with.
    seconds : float
        Wall-clock time to the losses: from the call, or from those of the step before where they came later.
    losses_before : tuple of float or None
        Losses of the step before, for a difference from these; in the first step its own.
    """

    step: int
    seeds: tuple[int, ...]
    losses_plus: tuple[float, ...]
    losses_minus: tuple[float, ...] | None
    loss_base: float | None
    projected_gradients: tuple[float, ...]
    learning_rate: float
    seconds: float
    losses_before: tuple[float, ...] | None = None

    @property
    def loss(self) -> float:
        """Loss of the first perturbation at ``+ε``, the number that MeZO logs."""
        return self.losses_plus[0]

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Return the record that :meth:`rows` wrote."""
        first = rows[0]
        central = first.get("loss_minus") is not None
        return cls(
            step=first["step"],
            seeds=tuple(row["seed"] for row in rows),
            losses_plus=tuple(row["loss_plus"] for row in rows),
            losses_minus=tuple(row["loss_minus"] for row in rows) if central else None,
            loss_base=first.get("loss_base"),
            projected_gradients=tuple(row["projected_grad"] for row in rows),
            learning_rate=first["learning_rate"],
            seconds=first["seconds"],
            losses_before=tuple(row["loss_before"] for row in rows) if "loss_before" in first else None,
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row of ``steps.jsonl`` per perturbation."""
        for perturbation, seed in enumerate(self.seeds):
            base = {} if self.loss_base is None else {"loss_base": self.loss_base}
            if self.losses_before is not None:
                base["loss_before"] = self.losses_before[perturbation]
            yield {
                "step": self.step,
                "perturbation": perturbation,
                "seed": seed,
                **base,
                "loss_plus": self.losses_plus[perturbation],
                "loss_minus": None if self.losses_minus is None else self.losses_minus[perturbation],
                "projected_grad": self.projected_gradients[perturbation],
                "learning_rate": self.learning_rate,
                "seconds": self.seconds,
            }


def seed_of(seed: int, step: int, perturbation: int) -> int:
    """Return the seed of one step and perturbation of a run."""
    return mixed(seed, step, perturbation) % _NUM_SEEDS


def record_of(frame: StepFrame, begin_s: float) -> StepRecord:
    """Return the record of a step that was begun at `begin_s`, waiting for its numbers."""
    perturbations = range(len(frame.seeds))
    # The last perturbation's come last, so that one wait is enough.
    gradients = {
        perturbation: float(frame.gradients[perturbation]) for perturbation in reversed(perturbations)
    }
    losses = {eval_point: float(loss) for eval_point, loss in frame.losses_read.items()}
    central = EvalPoint(0, -1) in losses
    return StepRecord(
        step=frame.step,
        seeds=frame.seeds,
        losses_plus=tuple(losses[EvalPoint(perturbation, 1)] for perturbation in perturbations),
        losses_minus=tuple(losses[EvalPoint(perturbation, -1)] for perturbation in perturbations)
        if central
        else None,
        loss_base=losses.get(BASE),
        projected_gradients=tuple(gradients[perturbation] for perturbation in perturbations),
        learning_rate=frame.learning_rate,
        seconds=time.perf_counter() - begin_s,
        losses_before=None
        if central or BASE in losses
        else tuple(float(frame.losses_before[EvalPoint(perturbation, 1)]) for perturbation in perturbations),
    )


class LossNotFinite(RunError):  # noqa: N818 - reads as the statement it makes
    """Raised for a projected gradient that is not finite. It may have reached the weights: rebuild them from the log."""


def refuse_nonfinite(record: StepRecord) -> None:
    """Raise LossNotFinite if a projected gradient is not finite."""
    if all(map(math.isfinite, record.projected_gradients)):
        return
    others = record.losses_minus or record.losses_before or (record.loss_base,)
    gradients, plus, other = (
        ", ".join(f"{number:g}" for number in numbers if number is not None)
        for numbers in (record.projected_gradients, record.losses_plus, others)
    )
    raise LossNotFinite(
        f"training diverged in step {record.step}: the losses are {plus} and {other}, and the projected gradient is {gradients}",
        hint="lower the learning rate; if the first step fails, look for a batch without labels, use --dtype float32 or "
        "bfloat16 instead of float16, and leave weights unquantized: some models' code reads them past their layers",
    )


@dataclass
class DivergenceWatch:
    """Detects divergence by the median loss of the latest :data:`RECENT_STEPS` steps.

    A run diverges when the median exceeds twice its lowest value so far (at first, the first loss), and by more than
    one. A single batch does not move a median; a step that blows up shows within five steps.
    """

    # Steps behind the weights when that median was lowest: the last good state of a run that diverges.
    best_step: int = 0
    _best: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def diverges(self, num_steps: int, loss: float) -> bool:
        """Note the loss of the latest of `num_steps` steps, which was taken at the weights before that step.

        Returns whether the run diverges.
        """
        self._recent.append(loss)
        if self._best is None:
            self._best = loss
        level = median(self._recent)
        if len(self._recent) == RECENT_STEPS and level < self._best:
            # The loss is that of the weights before the step.
            self._best, self.best_step = level, num_steps - 1
        return len(self._recent) >= _LEAST_STEPS and self._is_far(level)

    def last_good(self, num_steps: int) -> int:
        """Return the number of steps behind the last good weights of a run whose loss after `num_steps` is not finite."""
        ruined = bool(self._recent) and self._is_far(median(self._recent))
        return self.best_step if ruined else max(num_steps - 1, 0)

    def _is_far(self, level: float) -> bool:
        assert self._best is not None
        return level > _FACTOR * self._best and level > self._best + _MARGIN
