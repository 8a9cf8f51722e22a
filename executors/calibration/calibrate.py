"""Measures what this machine does per second, as work and seconds that a profile is fitted to.

Every probe runs code that a training step runs too: the executor's own passes over parameters, sampling and copies, torch's kernels.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from costmodel.rates.measurement import Measurement
from costmodel.rates.slowdown import Slowdown, WorkType
from executors.calibration.background_load import waited_s
from executors.calibration.exchange_probes import exchange_probes
from executors.calibration.probes import kernel_probes
from executors.calibration.probing import Action, Probe
from executors.devices import device_named, on_stream
from executors.reference_speed import UNDISTURBED, Reference, full_speed_s, intervals_of, slowdown_of
from executors.steps.heap import keep_freed_memory
from executors.threads import use_threads
from topology.errors import RunError

DEFAULT_BUDGET_S = 20.0
_LEAST_ROUNDS = 3
"""Rounds that are made, and kept, whatever the budget and whatever others do."""

_SAMPLE_S = 2e-3
"""A sample repeats its probe until it lasts about this long: a clock and a call cost a microsecond."""

_MOST_REPEATS = 2000

_SLOWED = 1.3
"""Times the shortest from which the reference says how far other work follows it."""

_FAR = 3.0
"""What took so many times the shortest met a process of this machine, which is no matter of slowdown."""

_LOST = 2.0
"""A probe that others kept from more than half of what it needs tells only how long its work takes at most."""

_PER_INTERVAL = 40
"""References, two for each sample of some milliseconds."""

_ENOUGH = 10
_LEAST_FRACTION = 0.05
_WORK_TYPES: Mapping[str, WorkType] = {
    **dict.fromkeys(("matmul", "attention", "factor"), "products"),
    **dict.fromkeys(("draw", "skip", "jump", "rows"), "sampling"),
    **dict.fromkeys(("perturb", "update", "elementwise", "softmax", "cast", "copy", "allocate"), "passes"),
    "dispatch": "calls",
}
"""Kinds of work by the first words of probes' names."""

_MOST_WAITED, _WAITED = 0.99, 0.05
_NUM_WARM = 3
_PATIENCE = 2.0
"""Times the budget that may pass until all probes have seen full speed."""

OnRound = Callable[[float], None]
"""Called with the share of the budget that is spent."""


@dataclass
class _Samples:
    """Seconds per run of one probe."""

    probe: Probe
    num_repeats: int = 1
    seconds: list[float] = field(default_factory=list)
    references: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of the reference before and after each."""
    waits: list[float] = field(default_factory=list)
    """Part of each in which a thread of it waited for a core."""

    def delays(self, fast_s: float) -> list[float]:
        """Return how many times as long each took as alone at full speed, at which the reference takes `fast_s`, as far as one can tell."""
        shortest_s = min(self.seconds)
        return [
            max(max(pair) / fast_s / (1 - wait), second / shortest_s if second > _FAR * shortest_s else 0.0)
            for second, pair, wait in zip(self.seconds, self.references, self.waits, strict=True)
        ]

    def kept(self, fast_s: float) -> list[tuple[float, float]]:
        """Return delay and seconds of the samples that nobody disturbed, or of the few that were disturbed least."""
        ranked = sorted(zip(self.delays(fast_s), self.seconds, strict=True))
        return ranked[: max(_LEAST_ROUNDS, self.num_undisturbed(fast_s))]

    def num_undisturbed(self, fast_s: float) -> int:
        """Return how many were alone and at full speed."""
        return sum(delay <= UNDISTURBED for delay in self.delays(fast_s))


def calibrate(
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    budget_s: float = DEFAULT_BUDGET_S,
    on_round: OnRound | None = None,
) -> tuple[list[Measurement], Slowdown | None]:
    """Return measurements of this machine at its full pace, and the pace that it had meanwhile.

    - `device`: ``"cpu"`` or a CUDA device such as ``"cuda:0"``.
    - `num_threads`: threads of torch's kernels while measuring; by default as many as torch uses now.
    - `dtypes`: formats to measure products, passes over parameters and sampling in.
    - `budget_s`: time to spend measuring, building the probes apart. At least three rounds are made whatever it is.
    - `on_round`: called with the progress after every round.

    Raises RunError if the device is not there, or the budget or the number of threads is not positive.

    Returns
    -------
    measurements : list of Measurement
        For ``costmodel.rates.calibration.fit_profile``.
    slowdown : Pace or None
        None of a GPU.

    Notes
    -----
    All probes run once per round, and rounds repeat until the budget is spent, so a disturbance meets every
    probe alike instead of all samples of one. On a CPU those samples are kept (at least three) that were at full speed, as a
    reference before and after each tells, and that waited for no core, as the kernel tells: their median. What others
    disturbed all the time is marked as a bound.
    torch's number of threads and gradient mode are as before afterwards, its generators untouched.
    """
    if budget_s <= 0:
        raise RunError(
            f"budget_s={budget_s} must be above 0", hint="20 seconds are enough for a small machine"
        )
    threads = num_threads or torch.get_num_threads()
    if threads < 1:
        raise RunError(f"num_threads={threads} must be at least 1", hint="use the number of cores, or fewer")
    where = device_named(device)
    if where.type == "cpu":
        keep_freed_memory()
    with threads_set(threads), torch.no_grad():
        sampled = _sample(list(kernel_probes(where, dtypes)), where, budget_s, on_round)
    fast_s = full_speed_s(_references(sampled))
    measurements = [_measurement(samples, threads, fast_s) for samples in sampled]
    return measurements, _slowdown(sampled, measurements, fast_s) if where.type == "cpu" else None


def calibrate_exchanges(num_threads: int, *, budget_s: float) -> list[Measurement]:
    """Return measurements of exchanges between two processes of this machine.

    Comes last in a process: from then on torch's kernels find more threads than cores, and no longer wait for each other
    awake, so that whatever several threads share takes longer.
    """
    with threads_set(num_threads), torch.no_grad(), exchange_probes() as probes:
        sampled = _sample(probes, torch.device("cpu"), budget_s, None)
    fast_s = full_speed_s(_references(sampled))
    return [_measurement(samples, num_threads, fast_s) for samples in sampled]


def _sample(
    probes: Sequence[Probe], device: torch.device, budget_s: float, on_round: OnRound | None
) -> list[_Samples]:
    began = time.perf_counter()
    sampled = [_Samples(probe, _num_repeats(probe, device)) for probe in probes]
    reference = Reference() if device.type == "cpu" else None
    num_rounds = 0
    while num_rounds < _LEAST_ROUNDS or time.perf_counter() - began < budget_s:
        for samples in sampled:
            _take(samples, reference, device)
        num_rounds += 1
        if on_round is not None:
            on_round(min(1.0, (time.perf_counter() - began) / budget_s))
    while (waiting := _never_at_full_speed(sampled)) and time.perf_counter() - began < _PATIENCE * budget_s:
        for samples in waiting:
            _take(samples, reference, device)
    return sampled


def _never_at_full_speed(sampled: Sequence[_Samples]) -> list[_Samples]:
    """Return those of which other processes have disturbed all samples but a few."""
    fast_s = full_speed_s(_references(sampled))
    return [samples for samples in sampled if samples.num_undisturbed(fast_s) < _LEAST_ROUNDS]


def _references(sampled: Sequence[_Samples]) -> list[float]:
    return [second for samples in sampled for pair in samples.references for second in pair]


def _take(samples: _Samples, reference: Reference | None, device: torch.device) -> None:
    """Add a sample, with the reference around it."""
    before_s = reference.seconds() if reference else 1.0
    ready_s, began = waited_s(), time.perf_counter()
    samples.seconds.append(_seconds(samples.probe, samples.num_repeats, device))
    lasted_s, ready_s = time.perf_counter() - began, waited_s() - ready_s
    after_s = reference.seconds() if reference else 1.0
    samples.references.append((before_s, after_s))
    # What runs beside a probe may keep it waiting: that is what is asked.
    has_reference = reference is not None and samples.probe.concurrent is None
    samples.waits.append(min(_MOST_WAITED, max(0.0, ready_s) / lasted_s) if has_reference else 0.0)


def _num_repeats(probe: Probe, device: torch.device) -> int:
    """Warm the probe up, and return how often to run it for one sample."""
    _seconds(probe, 1, device)
    if probe.before is not None:
        return 1
    # A process that came between would have a probe of microseconds measured once a sample.
    once = min(_seconds(probe, 1, device) for _ in range(_NUM_WARM)) * probe.num_done
    return max(1, min(_MOST_REPEATS, round(_SAMPLE_S / max(once, 1e-9))))


def _seconds(probe: Probe, num_repeats: int, device: torch.device) -> float:
    """Return the mean time of the work done once, by the device's own clock if it has one."""
    if probe.before is not None:
        probe.before()
    with _concurrent(probe.concurrent, device):
        if device.type != "cpu":
            total = _device_seconds(probe, num_repeats, device)
        else:
            begin = time.perf_counter()
            for _ in range(num_repeats):
                probe.run()
            total = time.perf_counter() - begin
    return total / (num_repeats * probe.num_done)


def _device_seconds(probe: Probe, num_repeats: int, device: torch.device) -> float:
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    begin.record(torch.accelerator.current_stream(device))
    for _ in range(num_repeats):
        probe.run()
    end.record(torch.accelerator.current_stream(device))
    torch.accelerator.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3


@contextmanager
def _concurrent(action: Action | None, device: torch.device) -> Iterator[None]:
    """Run `action` over and over on another thread meanwhile; on an accelerator on a stream of its own, one at a time."""
    if action is None:
        yield
        return
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        own = None if device.type == "cpu" else torch.Stream(device)
        with nullcontext() if own is None else on_stream(own):
            while not stop.is_set():
                action()
                started.set()
                if own is not None:
                    own.synchronize()

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
    use_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measurement(samples: _Samples, num_threads: int, fast_s: float) -> Measurement:
    probe, kept = samples.probe, samples.kept(fast_s)
    seconds = [second for _, second in kept]
    return Measurement(
        name=probe.name,
        work=probe.work,
        seconds=median(seconds),
        fastest_s=min(seconds),
        num_samples=len(seconds),
        num_threads=num_threads,
        direction=probe.direction,
        contended=probe.concurrent is not None,
        is_bound=median(delay for delay, _ in kept) > _LOST,
    )


def _slowdown(sampled: Sequence[_Samples], measurements: Sequence[Measurement], fast_s: float) -> Slowdown:
    """Return the pace while these samples were taken, and how far their kinds of work followed it."""
    followed: dict[WorkType, list[float]] = defaultdict(list)
    for samples, measured in zip(sampled, measurements, strict=True):
        work_type = None if measured.contended else _WORK_TYPES.get(measured.operation)
        for second, pair, wait in zip(samples.seconds, samples.references, samples.waits, strict=True):
            is_slowed = _SLOWED * fast_s <= min(pair) and max(pair) <= _FAR * fast_s and wait <= _WAITED
            if work_type is not None and is_slowed:
                followed[work_type].append((second / measured.seconds - 1) / (fmean(pair) / fast_s - 1))
    fractions = {
        work_type: max(_LEAST_FRACTION, median(ratios))
        for work_type, ratios in followed.items()
        if len(ratios) >= _ENOUGH
    }
    # In the order of time: rounds of all probes, without what was added for some.
    in_order = [
        second
        for around in zip(*(s.references for s in sampled), strict=False)
        for pair in around
        for second in pair
    ]
    return Slowdown(fast_s, *slowdown_of(intervals_of(in_order, fast_s, _PER_INTERVAL)), fractions)
