"""How long programs take: events on a clock, by two simulators that agree."""

from __future__ import annotations

from typing import Literal

Simulator = Literal["lockstep", "simpy"]
"""What plays the events: arrays over ranks that move in step, one rank for all that behave alike; or a simpy process for every stream
of every rank, which is the simulator to read, and what the other is held against."""
