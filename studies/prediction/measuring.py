"""Measured step times of cases: short rounds, interleaved, with what else the machine was doing meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import torch

from executors.calibration.background_load import OtherLoad
from executors.ranks.launch import launch, process_group
from executors.reference_speed import reference_now_s
from executors.turns import end_to_end
from studies.prediction.cases import Case
from studies.prediction.setting import batch_of, session_of
from zosim.plans import Plan
from zosim.timeline import Timeline

NUM_ROUNDS = 5
STEPS_PER_ROUND = 4
"""Timed steps of a round; one step before them, whose caches and pending copies belong to another case, is not."""

SHORT_STEP_S = 0.02
"""Cases with steps shorter than this run three times as many of them per round."""

SESSIONS_AT_ONCE = 6
"""Cases that take turns, and whose models are in memory at the same time."""

_WARM_STEPS = 4
_RANK_ROUNDS = 5

REFERENCE_S = 0.1
"""Time for which the machine's pace is measured before a round and after it."""

OnCase = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """Step times of one round."""

    step_s: tuple[float, ...]
    foreign_cores: float
    """Cores that other processes kept busy meanwhile."""
    before_s: float = 0.0
    after_s: float = 0.0
    """What the reference that tells the machine's pace took before and after."""


@dataclass
class MeasuredSteps:
    """What a case did."""

    case: Case
    plan: Plan
    timeline: Timeline
    device_bytes: int
    host_bytes: int
    arena_bytes: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def undisturbed_rounds(self) -> list[Round]:
        """The half of the rounds in which others disturbed least."""
        ranked = sorted(self.rounds, key=lambda item: item.foreign_cores)
        return ranked[: max(1, (len(ranked) + 1) // 2)]

    @property
    def step_s(self) -> float:
        """Median step time of the undisturbed rounds."""
        return median(second for item in self.undisturbed_rounds for second in item.step_s)

    @property
    def foreign_cores(self) -> float:
        """Mean number of cores that others used in the undisturbed rounds."""
        return sum(item.foreign_cores for item in self.undisturbed_rounds) / len(self.undisturbed_rounds)

    @property
    def references_s(self) -> tuple[float, float]:
        """Means of what the reference that tells the machine's pace took before the undisturbed rounds, and after them."""
        return fmean(item.before_s for item in self.undisturbed_rounds), fmean(
            item.after_s for item in self.undisturbed_rounds
        )

    @property
    def num_samples(self) -> int:
        """Timed steps that :attr:`step_s` is the median of."""
        return sum(len(item.step_s) for item in self.undisturbed_rounds)


def measure(
    cases: Sequence[Case], *, topology: str, device: str, on_case: OnCase = lambda _: None
) -> list[MeasuredSteps]:
    """Return what each case did, in the order of `cases`.

    A step's time runs from the end of one step to the end of the next, as a training loop sees it: copies that one
    step leaves behind slow the next. torch's number of threads is as before afterwards.
    """
    before = torch.get_num_threads()
    measurements: list[MeasuredSteps] = []
    try:
        for begin in range(0, len(cases), SESSIONS_AT_ONCE):
            chosen = cases[begin : begin + SESSIONS_AT_ONCE]
            on_case(f"{begin + 1}-{begin + len(chosen)} of {len(cases)}")
            measurements += _take_turns(chosen, topology, device)
    finally:
        torch.set_num_threads(before)
    return measurements


def measure_ranks(cases: Sequence[Case], *, topology: str, device: str) -> list[MeasuredSteps]:
    """Return what cases of equally many ranks did, which are started once for all of them."""
    if not cases:
        return []
    (num_ranks,) = {case.num_ranks for case in cases}
    measured: list[MeasuredSteps] = launch(_in_rank, tuple(cases), topology, device, world_size=num_ranks)
    return measured


def _in_rank(cases: Sequence[Case], topology: str, device: str) -> list[MeasuredSteps]:
    torch.set_num_threads(1)
    with process_group(device_type="cpu"):
        return [_of_ranks(case, topology, device) for case in cases]


def _of_ranks(case: Case, topology: str, device: str) -> MeasuredSteps:
    turn = Turn(case, topology, device)
    for _ in range(_RANK_ROUNDS):
        turn.take(STEPS_PER_ROUND)
    return turn.measured()


def _take_turns(cases: Sequence[Case], topology: str, device: str) -> list[MeasuredSteps]:
    turns = []
    for case in cases:
        torch.set_num_threads(case.num_threads)
        turns.append(Turn(case, topology, device))
    for _ in range(NUM_ROUNDS):
        for turn in turns:
            torch.set_num_threads(turn.case.num_threads)
            turn.take(STEPS_PER_ROUND * (3 if turn.last_warm_s < SHORT_STEP_S else 1))
    return [turn.measured() for turn in turns]


class Turn:
    """A session of a case whose rounds others come between.

    - `last_warm_s`: What the last of the steps took that memory is observed in and caches are warmed by.
    """

    def __init__(self, case: Case, topology: str, device: str) -> None:
        self.case = case
        self._session = session_of(case, topology=topology, device=device)
        self._taken: list[Round] = []
        for step in range(_WARM_STEPS):
            begin = time.perf_counter()
            self._session.step(batch_of(case, step))
            self.last_warm_s = time.perf_counter() - begin

    def take(self, num_steps: int) -> None:
        """Run a round: as many timed steps, and one before them.

        Every rank must ask for as many: what one of them saw of the time may not decide.
        """
        session, batch = self._session, batch_of(self.case, self._session.num_steps)
        before_s = reference_now_s(REFERENCE_S)
        session.step(batch)
        others = OtherLoad()
        steps = end_to_end(lambda: session.step(batch), num_steps)
        # The other ranks are not background load.
        foreign_cores = max(0.0, others.cores() - (self.case.num_ranks - 1))
        self._taken.append(Round(steps, foreign_cores, before_s, reference_now_s(REFERENCE_S)))

    def measured(self) -> MeasuredSteps:
        """Return what the case did, and end its session."""
        session, taken = self._session, self._taken
        memory = session.memory()
        # Rounds of other cases lie between rounds, so lines are compared within the last one.
        timeline = replace(session.timeline(), first_periodic_step=session.num_steps - len(taken[-1].step_s))
        measurement = MeasuredSteps(
            self.case,
            session.plan,
            timeline,
            memory.device_bytes,
            memory.host_bytes,
            memory.device_bytes - memory.live_bytes,
            taken,
        )
        session.close()
        return measurement
