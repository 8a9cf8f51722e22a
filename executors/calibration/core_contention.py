"""What ranks of one thread take from each other on the cores of a host: they do less work at once, and their messages wait."""

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
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from executors.calibration.exchange_probes import loopback_pair
from executors.ranks.gloo import gloo_group
from executors.ranks.launch import module_command
from executors.ranks.stale_files import held_directory
from executors.steps.heap import keep_freed_memory
from topology.errors import RunError

Gather = Callable[[float], Sequence[float]]
"""Tells all ranks' numbers, in rank order, to all of them."""

Latest = Callable[[Sequence[float]], Sequence[float]]
"""Tells of moments, as this rank's clock has them, the later of its own and its neighbour's: clocks of one machine agree."""

_NUM_BURSTS = 8
_BURST_S = 0.1
"""Seconds of computing between two exchanges, as between two losses of a step."""
_NUM_TURNS, _NUM_TOGETHER = 6, 3
_NUM_EXCHANGES = 50
_NUM_ROUNDS = 3
_NUM_MESSAGES, _MESSAGE_BYTES, _CHUNKS_AHEAD = 40, 1 << 15, 2
"""Beside work: as long as slices of weights that small models gather, for which threads are woken and hardly a byte is copied."""
_MOST_RANKS = 16
_TIMEOUT_S = 120.0
_SOURCES = {
    "ranks_slowdown": "bursts of draws and products on every core at once, an exchange after each, against one core's alone",
    "busy_latency_s": "messages of 32 KiB between processes while every core computes, against as many while none does",
    "busy_core_s": "work on every core beside these messages, against as much without",
}


@dataclass(frozen=True)
class CrowdedCores:
    """What ranks take from each other where every core of a host has one, as measured once."""

    ranks_slowdown: float  # how many times as long work takes
    # busy_latency_s, busy_core_s: how much longer a message takes, and what work loses to it.
    busy_latency_s: float
    busy_core_s: float


def crowded_cores() -> list[CrowdedCores]:
    """Return what ranks take from each other now; nothing where there is one core.

    Raises RunError if the ranks cannot be started.
    """
    world_size = min(len(os.sched_getaffinity(0)), _MOST_RANKS)
    return [] if world_size == 1 else [_measured(world_size)]


def with_crowded_cores(profile: Profile, measured: Sequence[CrowdedCores]) -> Profile:
    """Return a CPU's profile with what ranks on all its cores take from each other, as it was at various times."""
    if not measured:
        return profile
    constants = []
    for name, source in _SOURCES.items():
        values = [getattr(item, name) for item in measured]
        ends = {"value": median(values), "low": min(values), "high": max(values)}
        constants.append(Constant(name=name, **ends, unit=CONSTANT_UNITS[name], source=source))
    return profile.with_constants(*constants, origin=profile.origin)


def _measured(world_size: int) -> CrowdedCores:
    """Return what new processes of one thread find."""
    with held_directory("zosim-crowd-") as directory:
        store = str(directory / "store")
        command, environment = module_command(__name__)
        ranks = [
            subprocess.Popen(
                [*command, store, str(world_size), str(rank)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                # Whoever is left behind by the others that are ended says so at length.
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=_TIMEOUT_S)
            return CrowdedCores(**json.loads(output))
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            raise RunError(
                f"{world_size} processes could not measure how they slow each other down: "
                + (
                    "they did not finish in time"
                    if isinstance(error, subprocess.TimeoutExpired)
                    else "one of them failed"
                ),
                hint="calibrate again when memory and cores are free",
            ) from error
        finally:
            for rank in ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(1.0)
                rank.kill()
                rank.wait()


def cores_together(gather: Gather, rank: int, world_size: int, *, in_turn: bool = False) -> float:
    """Return the cores' worth of work that all ranks do at once; all of them call it together.

    `in_turn`: whether a core's work is measured while all others rest, or while each has work of its own.

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

    `exchanges`: exchanges with all ranks, for some tenths of a second; runs on a thread beside the one that works, as in a run.

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
    fractions, spans = zip(*rounds, strict=True)
    return median(fractions), median(spans)


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


def costs_beside(message: Callable[[], object], latest: Latest, gather: Gather) -> tuple[float, float]:
    """Return by how much longer a message takes where all ranks compute, and what their work loses to it, in seconds.

    `message`: exchanges one with a neighbour.

    All ranks call it together. As in a step whose blocks' weights come ahead, a thread beside the one that computes exchanges a
    message whenever a piece of work begins, and work stops where it would be more than two chunks ahead. A message counts from
    when both ranks have asked for it. Means, as steps are sums. The scheduler lets a thread that was woken wait
    for its turn on a core that another one keeps busy, and a message wakes several: who asks for it, gloo's own, and those of the
    other rank. Work loses a core to them, and where they bring two ranks onto one core for a while, half of it.
    """
    chunk = _chunk()
    for action in (chunk, message):
        action()
    alone_s, _ = _beside(message, latest, lambda: None, ahead=0)
    undisturbed_s = []
    beside: list[tuple[list[float], float]] = []
    for _ in range(_NUM_ROUNDS):
        gather(0.0)
        undisturbed_s += _timed(chunk, _NUM_MESSAGES)
        gather(0.0)
        beside.append(_beside(message, latest, chunk, ahead=_CHUNKS_AHEAD))
    wait_s = fmean(second for seconds, _ in beside for second in seconds) - fmean(alone_s)
    lost_s = fmean(worked_s for _, worked_s in beside) - fmean(undisturbed_s)
    return max(0.0, wait_s), max(0.0, lost_s)


def _beside(
    message: Callable[[], object], latest: Latest, chunk: Callable[[], None], *, ahead: int
) -> tuple[list[float], float]:
    """Return the seconds of messages, each from when both ranks had asked for it and had the one before, and those of a piece."""
    started, done = threading.Semaphore(0), threading.Semaphore(0)
    started_s: list[float] = []
    ends_s = [0.0]
    worked_s = 0.0

    def exchange() -> None:
        for _ in range(_NUM_MESSAGES):
            started.acquire()
            message()
            ends_s.append(time.perf_counter())
            done.release()

    thread = threading.Thread(target=exchange, name="zosim-messages")
    thread.start()
    for number in range(_NUM_MESSAGES):
        started_s.append(time.perf_counter())
        started.release()
        chunk()
        worked_s += time.perf_counter() - started_s[number]
        if number >= ahead:
            done.acquire()
    thread.join()
    begins_s = latest([max(moments) for moments in zip(started_s, ends_s, strict=False)])
    seconds = [end - begin for begin, end in zip(begins_s, ends_s[1:], strict=True)]
    return seconds, worked_s / _NUM_MESSAGES


def _chunk() -> Callable[[], None]:
    """Return a little work of random numbers and products, on more than a core's caches hold."""
    a, b = torch.ones(128, 512), torch.ones(512, 2048)
    numbers = itertools.cycle(torch.empty(16, 1 << 16))

    def chunk() -> None:
        next(numbers).normal_()
        torch.mm(a, b)

    return chunk


def _burst(gather: Gather) -> Callable[[], None]:
    """Return some work, as much on every rank."""
    chunk = _chunk()
    num = round(gather(_BURST_S / median(_timed(chunk)))[0])

    def burst() -> None:
        for _ in range(num):
            chunk()

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

    cores = cores_together(gather, rank, world_size, in_turn=True)
    own, whole = (torch.zeros(num * _MESSAGE_BYTES, dtype=torch.uint8) for num in (1, 2))
    # One that is left over computes, and has nobody to tell.
    first, position = rank - rank % 2, rank % 2
    pair = None if first + 1 == world_size else loopback_pair(Path(f"{store}-{first}"), position)

    def message() -> None:
        if pair is not None:
            pair.all_gather(whole, own)

    def latest(moments_s: Sequence[float]) -> Sequence[float]:
        own_s = torch.tensor(moments_s, dtype=torch.float64)
        both_s = torch.stack((own_s, own_s))
        if pair is not None:
            pair.all_gather(both_s, own_s)
        return [float(moment) for moment in both_s.amax(0)]

    gather(0.0)
    wait_s, lost_s = costs_beside(message, latest, gather)
    if rank == 0:
        measured = CrowdedCores(world_size / cores, wait_s, lost_s)
        print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
