"""How much work ranks of one thread do at once on the cores of a host: less than each of them alone would."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from costmodel.profile import Constant, Profile
from executors.ranks.gloo import gloo_group
from executors.ranks.leftovers import held_directory
from executors.steps.heap import keep_freed_memory
from topology.errors import RunError

Gather = Callable[[float], Sequence[float]]
"""Tells all ranks' numbers, in rank order, to all of them."""

_NUM_BURSTS = 8
_BURST_S = 0.1
"""Seconds of computing between two exchanges, as between two losses of a step."""
_NUM_TURNS, _NUM_TOGETHER = 6, 3
_NUM_EXCHANGES = 50
_NUM_ROUNDS = 3
_NUM_MEASURED = 1
_MOST_RANKS = 16
_TIMEOUT_S = 60.0
_SOURCE = (
    "bursts of draws and products on every core at once, an exchange after each, against one core's alone"
)


def slowdowns() -> list[float]:
    """Return how many times as long work takes on all cores at once, as measured now; nothing where there is one core.

    Raises
    ------
    RunError
        If the ranks cannot be started.
    """
    world_size = min(len(os.sched_getaffinity(0)), _MOST_RANKS)
    return [] if world_size == 1 else [world_size / cores for cores in _measured(world_size)]


def with_slowdown(profile: Profile, slowdowns: Sequence[float]) -> Profile:
    """Return a CPU's profile with what ranks on all its cores take from each other, as it was at various times."""
    if not slowdowns:
        return profile
    constant = Constant(
        name="ranks_slowdown",
        value=median(slowdowns),
        low=min(slowdowns),
        high=max(slowdowns),
        unit="1",
        source=_SOURCE,
    )
    return profile.with_constants(constant, origin=profile.origin)


def _measured(world_size: int) -> list[float]:
    """Return what :func:`cores_together` finds, time and again, among new processes of one thread."""
    with held_directory("zosim-crowd-") as directory:
        store = str(directory / "store")
        words = [sys.executable, "-m", __name__, store, str(world_size)]
        ranks = [
            subprocess.Popen(
                [*words, str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said, _ = ranks[0].communicate(timeout=_TIMEOUT_S)
            return [float(cores) for cores in json.loads(said)]
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            raise RunError(
                f"{world_size} processes did not measure what they take from each other: {error}",
                hint="calibrate again when the machine has memory and cores free",
            ) from error
        finally:
            for rank in ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(1.0)
                rank.kill()
                rank.wait()


def cores_together(gather: Gather, rank: int, world_size: int, *, in_turn: bool = False) -> float:
    """Return the cores' worth of work that all ranks do at once; all of them call it together.

    Parameters
    ----------
    gather : callable
    rank, world_size : int
    in_turn : bool
        Whether a core's work is measured while all others rest, or while each has work of its own.

    Returns
    -------
    float
        At most the number of cores. What all ranks' work of a while comes to, where each would have a core of its own for
        it, and they exchange a number every now and then: ranks wait for the slowest, and those that share a core for
        their turns and its caches.
    """
    there = len(os.sched_getaffinity(0))
    burst = _burst(gather)
    exchange_s = median(_timed(lambda: gather(0.0), _NUM_EXCHANGES))

    def together() -> None:
        burst()
        gather(0.0)

    alone_s: list[float] = []
    taken_s: list[float] = []
    # Alone, together, and so on: the machine's pace changes meanwhile.
    for _ in range(_NUM_TURNS):
        for turn in range(min(there, world_size)) if in_turn else (rank,):
            # No more ranks than cores, and none waits for another.
            if turn == rank < there:
                alone_s += _timed(burst, 1)
            gather(0.0)
        # Who slept until now may wake on another's core, and is moved away from it within the first burst.
        taken_s += _timed(together, _NUM_TOGETHER)[1:]
    seconds_by_rank = gather(median(alone_s) if alone_s else 0.0)[:there]
    lasting_s = median(taken_s) - exchange_s
    return min(float(there), world_size * (sum(seconds_by_rank) / len(seconds_by_rank)) / lasting_s)


def lost_beside(exchanges: Callable[[], object], gather: Gather) -> tuple[float, float]:
    """Return the part of all ranks' work that is lost while they exchange, and the seconds that exchanging takes.

    Parameters
    ----------
    exchanges : callable
        Exchanges with all ranks, for some tenths of a second; runs on a thread beside the one that works, as in a run.
    gather : callable

    Notes
    -----
    All ranks call it together, and meet after every burst, as after the forwards of a step. What is lost is more than the
    time for which cores carry bytes: work finds its caches changed, and since one core does most of the carrying, the rank
    on it keeps the others waiting.
    """
    burst = _burst(gather)

    def together() -> None:
        burst()
        gather(0.0)

    rounds = []
    for _ in range(_NUM_ROUNDS):
        alone_s = median(_timed(together, _NUM_BURSTS // 2))
        rounds.append(_lost(exchanges, burst, gather, alone_s))
    parts, spans = zip(*rounds, strict=True)
    return median(parts), median(spans)


def _lost(
    exchanges: Callable[[], object], burst: Callable[[], None], gather: Gather, alone_s: float
) -> tuple[float, float]:
    """Return the same of one round, where a burst after which ranks meet takes so long without exchanges."""
    ended_s: list[float] = []

    def exchange() -> None:
        exchanges()
        ended_s.append(time.perf_counter())

    thread = threading.Thread(target=exchange, name="zosim-exchanges")
    gather(0.0)
    began = time.perf_counter()
    thread.start()
    num_done, until = 0, began
    while True:
        burst()
        if not all(gather(float(thread.is_alive()))):
            break
        num_done, until = num_done + 1, time.perf_counter()
    thread.join()
    span_s = max(gather(ended_s[0] - began))
    # Too short a round says nothing.
    lost = 1 - num_done * alone_s / (until - began) if num_done else 0.0
    return gather(lost)[0], span_s


def _piece() -> Callable[[], None]:
    """Return a little work of random numbers and products, on more than a core's caches hold."""
    a, b = torch.ones(128, 512), torch.ones(512, 2048)
    numbers = itertools.cycle(torch.empty(16, 1 << 16))

    def piece() -> None:
        next(numbers).normal_()
        torch.mm(a, b)

    return piece


def _burst(gather: Gather) -> Callable[[], None]:
    """Return some work, as much on every rank."""
    piece = _piece()
    num = round(gather(_BURST_S / median(_timed(piece)))[0])

    def burst() -> None:
        for _ in range(num):
            piece()

    return burst


def _timed(action: Callable[[], object], count: int = _NUM_BURSTS) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(count):
        action()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(ends)]


def _main(store: str, world_size: int, rank: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    group = gloo_group(
        FileStore(store, world_size),
        rank,
        world_size,
        timedelta(seconds=_TIMEOUT_S),
        lambda: [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")],
    )

    def gather(number: float) -> list[float]:
        own = torch.tensor([number], dtype=torch.float64)
        whole = torch.empty(world_size, dtype=torch.float64)
        group._allgather_base(whole, own).wait()  # type: ignore[attr-defined]
        return [float(each) for each in whole]

    cores = [cores_together(gather, rank, world_size, in_turn=True) for _ in range(_NUM_MEASURED)]
    if rank == 0:
        print(json.dumps(cores))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
