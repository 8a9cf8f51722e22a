"""How much work ranks do at once: the arithmetic on a clock of our own, and real processes."""

import math
import os
import queue
import threading
from types import SimpleNamespace

import pytest
import torch

from costmodel.devices.datasheet import datasheet_profile
from executors.calibration import core_contention
from executors.calibration.core_contention import (
    cores_together,
    costs_beside,
    crowded_cores,
    lost_beside,
    with_crowded_cores,
)
from topology import detect


class Clock:
    """Work that takes `together` times as long in all bursts but the first of a turn, which is alone."""

    def __init__(self, monkeypatch, together):
        self.now, self.slowdown, self.together, self.num_gathers = 0.0, 1.0, together, 0
        monkeypatch.setattr(core_contention.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(core_contention.torch, "mm", self.work)

    def work(self, *_):
        self.now += 0.01 * self.slowdown

    def gather(self, number):
        # The size of a burst and the exchanges that are timed come first.
        self.num_gathers += 1
        num_bursts = self.num_gathers - core_contention._NUM_EXCHANGES - 1
        num_each = 1 + core_contention._NUM_TOGETHER
        self.slowdown = self.together if num_bursts > 0 and num_bursts % num_each else 1.0
        return [number]


@pytest.mark.parametrize("together", [1.0, 1.25, 2.0])
def test_cores_are_what_work_at_once_comes_to(monkeypatch, together):
    clock = Clock(monkeypatch, together)
    found = cores_together(clock.gather, 0, 1)
    assert found == pytest.approx(min(len(os.sched_getaffinity(0)), 1 / together))


class BusyClock:
    """Work that takes `beside` times as long while something else goes on, which is as long as so many pieces of it."""

    def __init__(self, monkeypatch, beside, num_pieces):
        self.now, self.beside, self.num_pieces = 0.0, beside, num_pieces
        self.left, self.ended, self.exchanging = 0, threading.Event(), None
        started = threading.Thread.start

        def start(thread):
            if thread.name == "zosim-exchanges":
                self.ended.clear()
                self.left, self.exchanging = self.num_pieces, thread
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        monkeypatch.setattr(core_contention.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(core_contention.torch, "mm", self.work)

    def work(self, *_):
        self.now += 0.01 * (self.beside if self.left else 1.0)
        if self.left:
            self.left -= 1
            if not self.left:
                self.ended.set()
                self.exchanging.join()  # it ends now, whenever the machine lets it run

    def exchanges(self):
        self.ended.wait()

    def gather(self, number):
        return [number]


@pytest.mark.parametrize("beside", [1.0, 1.5, 3.0])
def test_what_is_lost_beside_exchanges_is_what_bursts_take_longer(monkeypatch, beside):
    clock = BusyClock(monkeypatch, beside, num_pieces=400)
    lost, span_s = lost_beside(clock.exchanges, clock.gather)
    assert lost == pytest.approx(1 - 1 / beside)
    assert span_s == pytest.approx(4.0 * beside)


class ThreadClocks(threading.local):
    """A clock for each thread: one that waits for a semaphore goes on at the moment at which another released it."""

    now_s = 0.0

    def semaphore(self, _):
        released = queue.SimpleQueue()

        def acquire():
            self.now_s = max(self.now_s, released.get())

        return SimpleNamespace(acquire=acquire, release=lambda: released.put(self.now_s))


@pytest.mark.parametrize(("waited_s", "lost_s"), [(0.0, 0.0), (0.004, 0.0), (0.002, 0.003)])
def test_what_a_message_costs_is_what_it_and_work_take_longer_together(monkeypatch, waited_s, lost_s):
    clocks, threads, chunks = ThreadClocks(), [], []

    def thread(**options):
        threads.append(threading.Thread(**options))
        return threads[-1]

    def message():
        # Only the chunk that warms up comes before the messages that are sent alone.
        clocks.now_s += 0.001 + waited_s * (len(chunks) > 1)

    def chunk():
        chunks.append(clocks.now_s)
        clocks.now_s += 0.008 + lost_s * any(thread.is_alive() for thread in threads)

    fake = SimpleNamespace(Semaphore=clocks.semaphore, Thread=thread)
    monkeypatch.setattr(core_contention, "threading", fake)
    monkeypatch.setattr(core_contention, "time", SimpleNamespace(perf_counter=lambda: clocks.now_s))
    monkeypatch.setattr(core_contention, "_chunk", lambda: chunk)
    found = costs_beside(message, lambda moments_s: moments_s, lambda number: [number])
    assert found == pytest.approx((waited_s, lost_s))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks of one core have nobody beside them")
@pytest.mark.slow
def test_processes_measure_what_they_take_from_each_other():
    threads = torch.get_num_threads()
    machine = detect()
    profile = with_crowded_cores(datasheet_profile(machine, machine.of_type("cpu")[0].id), crowded_cores())
    slowdown, wait, lost = (
        profile.constant(name) for name in ("ranks_slowdown", "busy_latency_s", "busy_core_s")
    )
    # Other tests beside them, in one half of the measurement or the other, make these as large or small as they like.
    assert 0.0 < slowdown.low <= slowdown.value <= slowdown.high < math.inf
    assert 0.0 <= wait.low <= wait.value <= wait.high < math.inf
    assert 0.0 <= lost.low <= lost.value <= lost.high < math.inf
    assert (slowdown.unit, wait.unit, lost.unit) == ("1", "s", "s")
    assert torch.get_num_threads() == threads
