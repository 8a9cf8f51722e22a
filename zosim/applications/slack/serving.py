"""A server of requests that fills what they leave with background steps: events on a clock, and the closed form beside them.

The server takes up to as many waiting requests as a batch holds, and serves them together. A background step is one step of zeroth-order tuning, which is a few forwards
in a row; it starts when nobody waits. What a request that arrives meanwhile waits for is the policy:

``whole``
    The background step, to its end.
``segments``
    The part of the background step that runs, such as a block of the model; the others go on when nobody waits again.
``cancel``
    Nothing: the background step's work is lost.
``none``
    There are no background steps.

With one request to a batch, and arrivals at random, a server that always has a background step is an M/G/1 queue with vacations: a
request waits as without background steps, and for the rest of a segment besides [1]_. With services of ``s`` and segments of ``v`` seconds
that do not vary, at a load ``ρ = λ·s`` below 1,

    mean wait = λ·s² / (2·(1 - ρ)) + v / 2.

.. [1] Doshi, "Queueing systems with vacations, a survey", Queueing Systems 1, 1986, equation (2.4).
"""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import simpy
from numpy.typing import NDArray

from topology.errors import TrafficError

Times = NDArray[np.float64]

_COLUMNS = ("timestamp", "time", "arrival", "arrival_s", "arrived_at")
"""What public traces call the column, in lower case."""

_LARGEST = 10_000_000
"""Arrivals of one simulation, which take a minute."""


def poisson(rate_per_s: float, duration_s: float, seed: int, *, burst: float = 1.0) -> Times:
    """Return arrivals at random.

    `burst`: mean number of requests that arrive together, geometrically distributed; 1 for a Poisson process.

    Raises TrafficError if a number is not positive, or there would be too many.
    """
    if not (rate_per_s > 0 and duration_s > 0 and burst >= 1):
        raise TrafficError(
            f"--rate {rate_per_s}, --burst {burst} and --duration {duration_s} give no arrivals",
            hint="use a rate and a duration above 0, and bursts of 1 or more",
        )
    if rate_per_s * duration_s > _LARGEST:
        message = f"{rate_per_s * duration_s:.3g} requests are more than the maximum of {_LARGEST}"
        raise TrafficError(message, hint="reduce --duration")
    if burst > _LARGEST:
        raise TrafficError(f"--burst {burst:g} is more than the maximum of {_LARGEST} requests")
    random = np.random.default_rng(seed)
    num = int(random.poisson(rate_per_s * duration_s / burst))
    starts = np.sort(random.uniform(0, duration_s, num))
    return np.repeat(starts, random.geometric(1 / burst, num)) if burst > 1 else starts


def recorded(path: str | Path) -> Times:
    """Return the arrivals in a CSV file, in seconds after the first.

    Raises TrafficError if the file cannot be read, or has no such column or no arrivals.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            times = list(_parsed(csv.DictReader(file), path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TrafficError(f"cannot read the trace {path}: {error}") from error
    if not times:
        raise TrafficError(f"the trace {path} has no arrivals")
    seconds = np.sort(np.array(times))
    first: Times = seconds - seconds[0]
    return first


def _parsed(rows: csv.DictReader[str], path: str | Path) -> Iterator[float]:
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    column = next((names[name] for name in _COLUMNS if name in names), None)
    if column is None:
        raise TrafficError(
            f"the trace {path} has no column of arrival times; its columns: {', '.join(names) or 'none'}",
            hint=f"name the column one of {', '.join(_COLUMNS)}",
        )
    for row in rows:
        if rows.line_num > _LARGEST:
            raise TrafficError(
                f"the trace {path} has more than the maximum of {_LARGEST} lines", hint="cut it"
            )
        text = (row[column] or "").strip()
        try:
            number = float(text)
        except ValueError:
            try:
                number = datetime.fromisoformat(text).timestamp()
            except (ValueError, OverflowError):
                message = (
                    f"{path}, line {rows.line_num}: {text!r:.60} is neither a number of seconds nor a date with "
                    "a time"
                )
                raise TrafficError(message) from None
        if not np.isfinite(number):
            raise TrafficError(f"{path}, line {rows.line_num}: {text!r:.60} is not a finite time")
        yield number


Policy = Literal["none", "whole", "segments", "cancel"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

_MOST_EVENTS = 1_000_000
"""Of one policy, which take some ten seconds."""


@dataclass(frozen=True)
class Server:
    """How long things take on one machine."""

    # batch_s, request_s: seconds of a batch of requests, whatever is in it, and for each request besides.
    batch_s: float
    request_s: float
    max_batch: int  # requests of one batch
    step_s: float
    num_segments: int = 1  # segments of a background step after which it can stand still

    def __post_init__(self) -> None:
        is_timed = self.batch_s >= 0 and self.request_s >= 0 and self.batch_s + self.request_s > 0
        is_finite = math.isfinite(self.batch_s + self.request_s + self.step_s)
        if not (is_timed and is_finite and self.step_s > 0 and self.max_batch > 0 and self.num_segments > 0):
            raise TrafficError(
                f"invalid times or counts: batch {self.batch_s} s, request {self.request_s} s, background "
                f"step {self.step_s} s in {self.num_segments} segments",
                hint="times must be finite and above 0, counts whole numbers of 1 or more",
            )

    def service_s(self, num_requests: int) -> float:
        """Return the seconds of a batch."""
        return self.batch_s + self.request_s * num_requests

    def vacation_s(self, policy: Policy) -> float:
        """Return the longest that a request waits for a background step."""
        return {
            "none": 0.0,
            "whole": self.step_s,
            "segments": self.step_s / self.num_segments,
            "cancel": 0.0,
        }[policy]


@dataclass
class Served:
    """What came of it."""

    policy: Policy
    latencies_s: NDArray[np.float64]
    num_steps: int
    num_cancelled: int
    duration_s: float

    def quantile_s(self, part: float) -> float:
        """Return a quantile of the latencies."""
        return float(np.quantile(self.latencies_s, part))

    @property
    def mean_s(self) -> float:
        """The mean latency."""
        return float(self.latencies_s.mean())

    @property
    def steps_per_hour(self) -> float:
        """Background steps that were finished in an hour."""
        return 3600 * self.num_steps / self.duration_s


def serve(server: Server, arrivals: Times, policy: Policy) -> Served:
    """Return what becomes of requests that arrive at these times, and of background steps beside them.

    Raises TrafficError if there are no arrivals, or too many events.
    """
    if not len(arrivals):
        raise TrafficError("there are no arrivals", hint="raise --rate or --duration")
    num_segments = 0.0 if policy == "none" else float(arrivals[-1]) * server.num_segments / server.step_s
    if len(arrivals) + num_segments + server.num_segments > _MOST_EVENTS:
        raise TrafficError(
            f"{len(arrivals)} requests with up to {num_segments:.3g} segments of background steps are more "
            f"than the maximum of {_MOST_EVENTS} events",
            hint="use a shorter --duration or trace, or fewer --segments",
        )
    run = _ServedRun(server, arrivals, policy)
    run.environment.run(run.environment.process(run.serving()))
    return Served(
        policy,
        np.array(run.latencies),
        run.num_segments // server.num_segments,
        run.num_cancelled,
        max(run.environment.now, float(arrivals[-1])),
    )


def closed_mean_s(server: Server, rate_per_s: float, policy: Policy) -> float | None:
    """Return the mean latency of requests that arrive at random, each served alone; None where no formula is known.

    A cancelled background step takes nothing from them. Infinite where more arrives than is served.

    Requests of 10 ms keep the server busy for half of its time, so they wait 5 ms for each other. Beside background steps of 40 ms that are
    done to their ends they wait half a background step more:

    >>> server = Server(batch_s=0.0, request_s=0.01, max_batch=1, step_s=0.04)
    >>> [round(closed_mean_s(server, 50.0, policy), 6) for policy in ("none", "whole")]
    [0.015, 0.035]
    """
    if server.max_batch != 1:
        return None
    service = server.service_s(1)
    load = rate_per_s * service
    if load >= 1:
        return float("inf")
    waiting = rate_per_s * service**2 / (2 * (1 - load)) + server.vacation_s(policy) / 2
    return service + waiting


def closed_steps_per_hour(server: Server, rate_per_s: float, policy: Policy) -> float | None:
    """Return the background steps that fit into an hour beside requests served alone; None where no formula is known.

    Half of an hour is left, in background steps of 40 ms:

    >>> closed_steps_per_hour(Server(batch_s=0.0, request_s=0.01, max_batch=1, step_s=0.04), 50.0, "whole")
    45000.0
    """
    if server.max_batch != 1 or policy == "cancel":
        return None
    idle = max(0.0, 1 - rate_per_s * server.service_s(1))
    return 3600 * idle / server.step_s if policy != "none" else 0.0


@dataclass
class _ServedRun:
    server: Server
    arrivals: Times
    policy: Policy
    environment: simpy.Environment = field(default_factory=simpy.Environment)
    latencies: list[float] = field(default_factory=list)
    num_segments: int = 0
    num_cancelled: int = 0
    _taken: int = 0

    def serving(self) -> Generator[Any, Any, None]:
        """Serve until every request has been answered; between them, take background steps."""
        waiting: deque[float] = deque()
        while self._taken < len(self.arrivals) or waiting:
            self._take(waiting)
            if waiting:
                batch = [waiting.popleft() for _ in range(min(len(waiting), self.server.max_batch))]
                yield self.environment.timeout(self.server.service_s(len(batch)))
                self.latencies += [self.environment.now - arrived for arrived in batch]
            elif self.policy == "none":
                yield self.environment.timeout(self._until_next_s)
            elif self.policy == "cancel":
                yield from self._cancellable()
            else:
                yield self.environment.timeout(self.server.vacation_s(self.policy))
                self.num_segments += self.server.num_segments if self.policy == "whole" else 1

    def _cancellable(self) -> Generator[Any, Any, None]:
        until_next = self._until_next_s
        if until_next < self.server.step_s:
            yield self.environment.timeout(until_next)
            self.num_cancelled += 1
        else:
            yield self.environment.timeout(self.server.step_s)
            self.num_segments += self.server.num_segments

    def _take(self, waiting: deque[float]) -> None:
        while self._taken < len(self.arrivals) and self.arrivals[self._taken] <= self.environment.now:
            waiting.append(float(self.arrivals[self._taken]))
            self._taken += 1

    @property
    def _until_next_s(self) -> float:
        # Not below the least that moves the clock: a sum that rounds down would wait for ever.
        next_s = float(self.arrivals[self._taken])
        return max(next_s - self.environment.now, float(np.spacing(self.environment.now)))
