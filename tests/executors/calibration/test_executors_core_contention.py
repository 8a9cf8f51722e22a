"""How much work ranks do at once: the arithmetic on a clock of our own, and real processes."""

import math
import os
import threading
import time

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
from tests.support.waiting import wait_until
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
        self.left, self.ended = 0, threading.Event()
        monkeypatch.setattr(core_contention.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(core_contention.torch, "mm", self.work)

    def work(self, *_):
        self.now += 0.01 * (self.beside if self.left else 1.0)
        if self.left:
            self.left -= 1
            if not self.left:
                self.ended.set()

    def exchanges(self):
        self.ended.wait()

    def gather(self, number):
        return [number]


@pytest.mark.parametrize("beside", [1.0, 1.5, 3.0])
def test_what_is_lost_beside_exchanges_is_what_bursts_take_longer(monkeypatch, beside):
    clock = BusyClock(monkeypatch, beside, num_pieces=400)
    started = threading.Thread.start

    def start(thread):
        if thread.name == "zosim-exchanges":
            clock.ended.clear()
            clock.left = clock.num_pieces
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def is_measured():
        lost, span_s = lost_beside(clock.exchanges, clock.gather)
        # A burst of ten pieces may still count after the last of the four hundred; more where a thread is not let run.
        return lost == pytest.approx(1 - 1 / beside, abs=0.05) and span_s == pytest.approx(
            4.0 * beside, abs=0.2
        )

    wait_until(is_measured, "a moment in which both threads run")


@pytest.mark.parametrize(("waited_s", "lost_s"), [(0.0, 0.0), (0.004, 0.0), (0.002, 0.003)])
def test_what_a_message_costs_is_what_it_and_work_take_longer_together(monkeypatch, waited_s, lost_s):
    computes, asks = threading.Event(), threading.Event()

    def message():
        asks.set()
        time.sleep(0.001)
        time.sleep(waited_s * computes.is_set())

    def chunk():
        computes.set()
        time.sleep(0.008)
        time.sleep(lost_s * asks.is_set())
        asks.clear()
        computes.clear()

    monkeypatch.setattr(core_contention, "_NUM_MESSAGES", 15)
    monkeypatch.setattr(core_contention, "_chunk", lambda: chunk)

    def is_measured():
        asks.clear()
        found = costs_beside(message, lambda moments_s: moments_s, lambda number: [number])
        return found == pytest.approx((waited_s, lost_s), abs=0.001)

    # Sleeping threads are woken late where other tests keep the cores.
    wait_until(is_measured, "a moment in which threads wake in time")


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
