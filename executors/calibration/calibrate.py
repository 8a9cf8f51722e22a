"""Measures what this machine does per second, as work and seconds that a profile is fitted to.

Every probe runs code that a training step runs too: the executor's own sweeps, draws and copies, torch's kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median

import torch

from costmodel.measurement import Measurement
from executors.calibration.exchange_probes import exchange_probes
from executors.calibration.probes import kernel_probes
from executors.calibration.probing import Action, Probe
from executors.calibration.quiet import SLOWER, OtherLoad
from executors.steps.heap import keep_freed_memory
from topology.errors import RunError

DEFAULT_BUDGET_S = 20.0
_LEAST_ROUNDS = 3
"""Rounds that are made, and kept, whatever the budget and whatever others do."""

_SAMPLE_S = 2e-3
"""A sample repeats its probe until it lasts about this long: a clock and a call cost a microsecond."""

_MOST_REPEATS = 2000

OnRound = Callable[[float], None]
"""Told the share of the budget that is spent."""


@dataclass
class _Samples:
    """Seconds per run of one probe."""

    probe: Probe
    num_repeats: int = 1
    seconds: list[float] = field(default_factory=list)


def calibrate(
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    budget_s: float = DEFAULT_BUDGET_S,
    on_round: OnRound | None = None,
) -> list[Measurement]:
    """Return measurements of this machine.

    Parameters
    ----------
    device : str
        ``"cpu"`` or a CUDA device such as ``"cuda:0"``.
    num_threads : int, optional
        Threads of torch's kernels while measuring; by default as many as torch uses now.
    dtypes : sequence of str
        Formats to measure products, sweeps and draws in.
    budget_s : float
        Time to spend measuring, building the probes apart. At least three rounds are made whatever it is.
    on_round : callable, optional
        Told of progress after every round.

    Returns
    -------
    list of Measurement
        For ``costmodel.calibration.fit_profile``.

    Raises
    ------
    RunError
        If the device is not there, or the budget or the number of threads is not positive.

    Notes
    -----
    All probes run once per round, and rounds repeat until the budget is spent, so a disturbance meets every
    probe alike instead of all samples of one. The half of the rounds in which other processes used least of the
    processors is kept (at least three), and of it the samples near the fastest: their median.
    torch's number of threads and gradient mode are as before afterwards, its generators untouched.
    """
    if budget_s <= 0:
        raise RunError(f"budget_s={budget_s} must be above 0", hint="20 seconds suit a small machine")
    threads = num_threads or torch.get_num_threads()
    if threads < 1:
        raise RunError(f"num_threads={threads} must be at least 1")
    where = _device(device)
    if where.type == "cpu":
        keep_freed_memory()
    peer: AbstractContextManager[list[Probe]] = exchange_probes() if where.type == "cpu" else nullcontext([])
    with threads_set(threads), torch.no_grad(), peer as exchanges:
        probes = [*kernel_probes(where, dtypes), *exchanges]
        sampled = _sample(probes, where, budget_s, on_round)
    return [_measurement(samples, threads) for samples in sampled]


def _sample(
    probes: Sequence[Probe], device: torch.device, budget_s: float, on_round: OnRound | None
) -> list[_Samples]:
    began = time.perf_counter()
    sampled = [_Samples(probe, _num_repeats(probe, device)) for probe in probes]
    disturbance: list[float] = []
    while len(disturbance) < _LEAST_ROUNDS or time.perf_counter() - began < budget_s:
        others = OtherLoad()
        for samples in sampled:
            samples.seconds.append(_seconds(samples.probe, samples.num_repeats, device))
        disturbance.append(others.cores())
        if on_round is not None:
            on_round(min(1.0, (time.perf_counter() - began) / budget_s))
    kept = _quietest(disturbance)
    for samples in sampled:
        samples.seconds = [samples.seconds[index] for index in kept]
    return sampled


def _quietest(disturbance: Sequence[float]) -> list[int]:
    """Return which rounds to keep: the less disturbed half, at least as many as are made in any case."""
    ranked = sorted(range(len(disturbance)), key=lambda index: disturbance[index])
    return sorted(ranked[: max(_LEAST_ROUNDS, (len(ranked) + 1) // 2)])


def _num_repeats(probe: Probe, device: torch.device) -> int:
    """Warm the probe up, and return how often to run it for one sample."""
    _seconds(probe, 1, device)
    if probe.before is not None:
        return 1
    once = _seconds(probe, 1, device) * probe.num_done
    return max(1, min(_MOST_REPEATS, round(_SAMPLE_S / max(once, 1e-9))))


def _seconds(probe: Probe, num_repeats: int, device: torch.device) -> float:
    """Return the mean time of the work done once, by the device's own clock if it has one."""
    if probe.before is not None:
        probe.before()
    with _beside(probe.beside):
        if device.type == "cuda":
            total = _cuda_seconds(probe, num_repeats, device)
        else:
            begin = time.perf_counter()
            for _ in range(num_repeats):
                probe.run()
            total = time.perf_counter() - begin
    return total / (num_repeats * probe.num_done)


def _cuda_seconds(probe: Probe, num_repeats: int, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record(torch.cuda.current_stream(device))
    for _ in range(num_repeats):
        probe.run()
    end.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3


@contextmanager
def _beside(action: Action | None) -> Iterator[None]:
    """Run `action` over and over on another thread meanwhile."""
    if action is None:
        yield
        return
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            action()
            started.set()

    thread = threading.Thread(target=work, name="zosim-calibrate", daemon=True)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def threads_set(num_threads: int) -> Iterator[None]:
    """Let torch's kernels use so many threads for as long as the block lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"there is no device {name!r}", hint="use cpu, or cuda:0 and so on") from None
    if device.type == "cpu":
        return device
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= found:
        raise RunError(
            f"there is no device {name!r}: torch finds {found} CUDA devices", hint="calibrate cpu instead"
        )
    return device


def _measurement(samples: _Samples, num_threads: int) -> Measurement:
    probe, seconds = samples.probe, samples.seconds
    near = [second for second in seconds if second <= SLOWER * min(seconds)]
    return Measurement(
        name=probe.name,
        work=probe.work,
        seconds=median(near),
        fastest_s=min(seconds),
        num_samples=len(seconds),
        num_threads=num_threads,
        direction=probe.direction,
        contended=probe.beside is not None,
    )
