"""Notices when a run is being ruined: a loss that leaves for good."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW_STEPS = 10
_LEAST_STEPS = 5
_FACTOR = 2.0
_MARGIN = 1.0


@dataclass
class DivergenceWatch:
    """Follows the median loss of the latest :data:`WINDOW_STEPS` steps.

    Attributes
    ----------
    best_step : int
        Steps behind the weights when that median was lowest: the last good state of a run that diverges.

    Notes
    -----
    A run diverges when the median exceeds twice its lowest value so far (at first, the first loss), and by more than
    one. A single batch does not move a median; a step that blows up shows within five steps.
    """

    best_step: int = 0
    _best: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def diverges(self, num_steps: int, loss: float) -> bool:
        """Note the loss of the latest of `num_steps` steps, which is that of the weights before it.

        Returns
        -------
        bool
            Whether the run diverges.
        """
        self._recent.append(loss)
        if self._best is None:
            self._best = loss
        level = median(self._recent)
        if len(self._recent) == WINDOW_STEPS and level < self._best:
            # The loss is that of the weights before the step.
            self._best, self.best_step = level, num_steps - 1
        return len(self._recent) >= _LEAST_STEPS and self._is_far(level)

    def last_good(self, num_steps: int) -> int:
        """Return the steps behind the last good state of a run whose losses after `num_steps` are no numbers."""
        ruined = bool(self._recent) and self._is_far(median(self._recent))
        return self.best_step if ruined else max(num_steps - 1, 0)

    def _is_far(self, level: float) -> bool:
        assert self._best is not None
        return level > _FACTOR * self._best and level > self._best + _MARGIN
