"""Plans to choose from, measured in turn: those of one process and those of several ranks, round after round.

A machine does not stay the same from one minute to the next. Plans that differ by some percent are told apart only if
each round has all of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from executors.ranks.launch import launch, process_group
from studies.prediction.cases import Case
from studies.prediction.measuring import STEPS_PER_ROUND, MeasuredSteps, Turn
from topology.errors import RunError

NUM_ROUNDS = 27
_LOOK_EVERY_S = 0.01
_LONGEST_TURN_S = 240.0


class Baton:
    """Lets two groups of processes take turns: files in a folder say how many turns are over."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def wait(self, number: int) -> None:
        """Wait until so many turns are over.

        Raises
        ------
        RunError
            If that takes too long: the other group has failed.
        """
        until = time.monotonic() + _LONGEST_TURN_S
        while number and not (self._folder / str(number)).exists():
            if time.monotonic() > until:
                raise RunError(
                    f"turn {number} did not end within {_LONGEST_TURN_S:g} s",
                    hint="see the output of the other group of processes, which failed",
                )
            time.sleep(_LOOK_EVERY_S)

    def end(self, number: int) -> None:
        """Say that turn `number`, counted from 0, is over."""
        (self._folder / str(number + 1)).touch()


def measure_in_turn(cases: Sequence[Case], *, topology: str, device: str) -> list[MeasuredSteps]:
    """Return what cases of one process and of equally many ranks did, in the order of `cases`.

    Notes
    -----
    The two groups make their sessions one after the other, too. A process that waits for its turn sleeps.
    """
    alone = tuple(case for case in cases if case.num_ranks == 1)
    of_ranks = tuple(case for case in cases if case.num_ranks > 1)
    (num_ranks,) = {case.num_ranks for case in of_ranks}
    with (
        tempfile.TemporaryDirectory(prefix="zosim-turns-") as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        future = pool.submit(_alone, alone, topology, device, folder)
        from_ranks: list[MeasuredSteps] = launch(
            _in_rank, of_ranks, topology, device, folder, world_size=num_ranks
        )
        rest = {"alone": iter(future.result()), "ranks": iter(from_ranks)}
    return [next(rest["alone" if case.num_ranks == 1 else "ranks"]) for case in cases]


def _alone(cases: Sequence[Case], topology: str, device: str, folder: str) -> list[MeasuredSteps]:
    return _take_turns(cases, topology, device, Baton(folder), 0)


def _in_rank(cases: Sequence[Case], topology: str, device: str, folder: str) -> list[MeasuredSteps]:
    with process_group(device_type="cpu"):
        return _take_turns(cases, topology, device, Baton(folder), 1)


def _take_turns(
    cases: Sequence[Case], topology: str, device: str, baton: Baton, first: int
) -> list[MeasuredSteps]:
    """Make sessions in turn `first`, and run a round of each in every second turn after it."""
    baton.wait(first)
    turns = []
    for case in cases:
        torch.set_num_threads(case.num_threads)
        turns.append(Turn(case, topology, device))
    _end(baton, first)
    for number in range(1, NUM_ROUNDS + 1):
        baton.wait(2 * number + first)
        for turn in turns:
            torch.set_num_threads(turn.case.num_threads)
            turn.take(STEPS_PER_ROUND)
        _end(baton, 2 * number + first)
    return [turn.measured() for turn in turns]


def _end(baton: Baton, number: int) -> None:
    """End a turn once all of this group have."""
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        baton.end(number)
