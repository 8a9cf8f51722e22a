"""Shared activities as simpy events."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy
from simpy.events import EventPriority

from zosim.engines.fluid import SAME_INSTANT, Fluid
from zosim.hardware.machine import Activity

# After everything else that happens at the same instant.
_LAST = EventPriority(2)


class FluidProcess:
    """Activities under simpy's clock: settled after all else of an instant, taken when they end.

    Parameters
    ----------
    env : simpy.Environment
    fluid : Fluid
    """

    def __init__(self, env: simpy.Environment, fluid: Fluid) -> None:
        self.env = env
        self.fluid = fluid
        self._is_settled = True
        self._timer = 0

    def run(self, activity: Activity, key: tuple[int, int]) -> simpy.Event:
        """Start an activity; the event happens when it ends."""
        done = self.env.event()
        self.fluid.start(activity, key, self.env.now, done)
        self._touch()
        return done

    def _touch(self) -> None:
        if self._is_settled:
            self._is_settled = False
            self._call(self._settle, 0.0, _LAST)

    def _call(self, callback: Callable[[simpy.Event], None], delay_s: float, priority: EventPriority) -> None:
        event = self.env.event()
        event.callbacks.append(callback)
        event._ok, event._value = True, None
        self.env.schedule(event, priority, delay_s)

    def _settle(self, _: simpy.Event) -> None:
        self._is_settled = True
        now_s = self.env.now
        self.fluid.settle(now_s)
        end_s = self.fluid.next_end_s
        self._timer += 1
        number = self._timer
        if end_s < math.inf:
            self._call(lambda _: self._finish(number, end_s), max(end_s - now_s, 0.0), EventPriority(1))

    def _finish(self, number: int, end_s: float) -> None:
        """End what is due, unless rates have changed since this was scheduled."""
        if number != self._timer:
            return
        for done in self.fluid.take_ended(end_s + SAME_INSTANT * abs(end_s)):
            done.succeed()
        self._touch()
