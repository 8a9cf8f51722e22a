"""When a run has become periodic: from where on every step repeats an earlier one, shifted in time.

Every simulator asks this one detector, the closed form and those on events alike: it looks at times alone.

One instruction that takes 2 s in the first step and 3 s in all later ones, by start and end of each:

>>> detector = PeriodDetector()
>>> [detector.completed(np.array(times)) for times in ([0.0, 2.0], [2.0, 5.0], [5.0, 8.0])]
[None, None, Repeat(first_step=2, num_steps=1, num_rounds=0, period_s=3.0)]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zosim.timeline import Repeat

Array = npt.NDArray[np.float64]

# Rounding of times, relative to the time: what differs by less is equal.
TOLERANCE = 1e-12
# Longest cycle looked for: two critical circuits of different lengths can make steps alternate.
MAX_CYCLE = 4


class PeriodDetector:
    """Looks for a cycle in the times of completed steps.

    Streams run in order and dependencies reach back at most ``depth`` steps, so the state of a run at the end of
    step ``k`` is what has started by then and how far it has come. Nothing of a step later than ``k + a`` has
    started, where ``a`` is how far streams run ahead. If every instruction of the steps ``k - a - d - p + 1 .. k``
    starts and ends exactly one period later than its namesake ``p`` steps before (``d`` the depth), then the
    states at the ends of the steps ``k - a`` and ``k - a - p`` are equal but for the shift; equal states have
    equal futures, so the run is periodic for ever. Shared resources do not change the argument as long as only
    steps are running: rates depend on what is running, which is part of the state.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._times: list[Array] = []
        self._max_ahead = 0
        self._first_step = 0

    def completed(self, times: Array, run_ahead: int = 0, others_until_s: float = 0.0) -> Repeat | None:
        """Take in the next step, and return the cycle that it completes, if any.

        - `times`: starts and ends of the step's instructions, in seconds, always in the same order.
        - `run_ahead`: how many steps later the latest step is of which anything has started.
        - `others_until_s`: when the last instruction that is of no step ended, infinity while one is running: prologue and flush
          share resources, too, so what runs beside them says nothing about later steps, and the run is taken to begin after it.
        """
        if times.min() < others_until_s:
            self._first_step += len(self._times) + 1
            self._times.clear()
            return None
        self._times.append(times)
        self._max_ahead = max(self._max_ahead, run_ahead)
        last = len(self._times) - 1
        for num_steps in range(1, MAX_CYCLE + 1):
            needed = self._max_ahead + self._depth - 1 + num_steps
            if last - needed - num_steps + 1 >= 0 and self._repeats(last, num_steps, needed):
                period_s = float(self._times[last].max() - self._times[last - num_steps].max())
                return Repeat(self._first_step + last - num_steps + 1, num_steps, 0, period_s)
        return None

    def _repeats(self, last: int, num_steps: int, needed: int) -> bool:
        period_s = self._times[last].max() - self._times[last - num_steps].max()
        tolerance_s = TOLERANCE * abs(self._times[last].max())
        return all(
            np.abs(self._times[step] - self._times[step - num_steps] - period_s).max() <= tolerance_s
            for step in range(last, last - needed, -1)
        )


def shortened_steps(cycle: Repeat, num_steps: int, entered: int, depth: int) -> int | None:
    """Return the steps of a run that shows all there is to see, None if none can be left out.

    - `num_steps`: Of the whole run.
    - `entered`: Latest step that any stream had entered when the cycle was found.
    - `depth`: Steps that dependencies reach back.
    """
    # Streams must still have a step to go before the flush, and the flush must not reach back to here.
    cycles = (num_steps - (entered + 1 + depth)) // cycle.num_steps
    return num_steps - cycles * cycle.num_steps if cycles > 0 else None
