"""Notices when a run is being ruined: a loss that leaves for good."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW_STEPS = 10
_FACTOR = 2.0
_MARGIN = 1.0


@dataclass
class DivergenceWatch:
    """Follows the median loss of the latest :data:`WINDOW_STEPS` steps.

    Attributes
    ----------
    best_step : int
        Steps behind the weights when that median was lowest: the last good state.

    Notes
    -----
    A run diverges when the median exceeds twice its lowest value so far, and by more than one. Medians of ten do not
    heed single batches; a step that blows up shows within five steps.
    """

    best_step: int = 0
    _best: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def diverges(self, num_steps: int, loss: float) -> bool:
        """Note the loss that the latest of `num_steps` steps found at the weights before it.

        Returns
        -------
        bool
            Whether the run diverges.
        """
        self._recent.append(loss)
        if len(self._recent) < WINDOW_STEPS:
            return False
        level = median(self._recent)
        if self._best is None or level < self._best:
            # The loss was found at the weights before the step.
            self._best, self.best_step = level, num_steps - 1
            return False
        return level > _FACTOR * self._best and level > self._best + _MARGIN
