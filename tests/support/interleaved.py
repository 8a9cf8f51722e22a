"""Streams that take turns: which one goes on, and for how long, a seed says, down to single lines of the executor's own code.

What two streams do at once on a busy machine is an accident; here a seed says it, and it happens again. Each stream
is a thread, one of which runs at a time. Where it stands between two lines (or bytecodes) of `executors`, it may have to let others go
on: long enough for them to finish whole tasks, where the seed favours them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import executors
from executors.steps.streams import CpuBackend, Task, Ticket, failure_of
from zosim.program.instructions import Stream

_OURS = tuple(
    str(Path(executors.__file__).parents[1] / folder) for folder in ("executors", "tests/executors")
)
"""Where streams stop: the executor's code, and faults that tests plant in it."""

_PATIENCE_S = 5.0
"""For a stream that is to stop. One that waits for a lock that another holds does not: then the others go on meanwhile."""

_RATES = (0.0, 0.001, 0.01, 0.1, 0.5)
"""Chances to stop at a line, one of which each task is given."""


class _Done(Ticket):
    """Says whether a task has finished."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = False

    def wait(self) -> None:
        """Nobody waits: a task begins when all that it depends on has finished."""
        assert self.is_done


class _Turns(threading.Thread):
    """One stream."""

    def __init__(self, name: str, stops: Callable[[], bool]) -> None:
        super().__init__(name=f"zosim-{name}", daemon=True)
        self._stops = stops
        self._goes_on, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._job: Callable[[], None] | None = None
        self._is_away = False
        self._by_opcodes = False
        self.start()

    @property
    def is_amid(self) -> bool:
        """Whether it is in the middle of a task."""
        return self._job is not None

    def begin(self, job: Callable[[], None], *, by_opcodes: bool) -> None:
        """Take up a task."""
        self._job, self._by_opcodes = job, by_opcodes

    def go_on(self) -> None:
        """Let it run to where it stops next."""
        self._goes_on.release()
        self._is_away = not self._stopped.acquire(timeout=_PATIENCE_S)

    def is_back(self, *, waits: bool = False) -> bool:
        """Whether it has stopped, if need be by now."""
        if self._is_away and self._stopped.acquire(blocking=waits):
            self._is_away = False
        return not self._is_away

    def end(self) -> None:
        """Let the thread end."""
        self._goes_on.release()
        self.join()

    def run(self) -> None:
        """Do tasks."""
        with torch.no_grad():
            while True:
                self._goes_on.acquire()
                if self._job is None:
                    return
                sys.settrace(self._trace)
                try:
                    self._job()
                finally:
                    sys.settrace(None)
                    self._job = None
                    self._stopped.release()

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes = self._by_opcodes
        if self._stops():
            self._stopped.release()
            self._goes_on.acquire()
        return self._trace


class InterleavedBackend(CpuBackend):
    """A rank on a CPU whose streams take turns.

    - `seed`: Says whose turn it is; None runs every task from its beginning to its end in the order of the program.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)
        self._queues: dict[Stream, deque[tuple[Task, _Done]]] = {}
        self._turns: dict[Stream, _Turns] = {}
        self._favour: dict[Stream, float] = {}
        self._rate = 0.0
        self.turns_taken: list[Stream] = []

    def run(self, tasks: Sequence[Callable[[dict[str, Ticket]], Task]]) -> dict[str, Ticket]:
        """Queue all tasks, and let streams take turns until compute is through."""
        tickets: dict[str, Ticket] = {}
        for make in tasks:
            task, done = make(tickets), _Done()
            tickets[task.instruction.id] = done
            if self._random is None:
                self._do(task, done)
                self._go_on()
            else:
                self._queues.setdefault(task.instruction.stream, deque()).append((task, done))
        while self._is_busy(Stream.COMPUTE):
            self._one_turn()
        return tickets

    def drain(self) -> None:
        """Let all streams come to an end."""
        while any(map(self._is_busy, self._queues)):
            self._one_turn()
        self._go_on()

    def close(self) -> None:
        """End the threads."""
        self._queues.clear()
        while any(turns.is_amid for turns in self._turns.values()):
            self._one_turn()
        for turns in self._turns.values():
            turns.end()
        self._turns.clear()

    def _is_busy(self, stream: Stream) -> bool:
        turns = self._turns.get(stream)
        return bool(self._queues.get(stream)) or (turns is not None and turns.is_amid)

    def _one_turn(self) -> None:
        assert self._random is not None
        able = [stream for stream in Stream if self._can_go_on(stream)]
        if not able:
            away = [turns for turns in self._turns.values() if not turns.is_back()]
            assert away, "every stream waits for another"
            away[0].is_back(waits=True)
            return
        if self._random.random() < 0.1:
            self._favour = {stream: self._random.random() ** 6 + 1e-9 for stream in Stream}
        (stream,) = self._random.choices(able, [self._favour.get(stream, 1.0) for stream in able])
        turns = self._turns.get(stream)
        if turns is None:
            turns = self._turns[stream] = _Turns(stream, self._stops)
        if not turns.is_amid:
            task, done = self._queues[stream].popleft()
            turns.begin(lambda: self._do(task, done), by_opcodes=self._random.random() < 0.2)
        self._rate = self._random.choice(_RATES)
        self.turns_taken.append(stream)
        turns.go_on()
        self._go_on()

    def _can_go_on(self, stream: Stream) -> bool:
        turns, queue = self._turns.get(stream), self._queues.get(stream)
        if turns is not None and turns.is_amid:
            return turns.is_back()
        return bool(queue) and all(t.is_done for t in queue[0][0].after if isinstance(t, _Done))

    def _stops(self) -> bool:
        assert self._random is not None
        return self._random.random() < self._rate

    def _do(self, task: Task, done: _Done) -> None:
        try:
            task.action()
        except Exception as error:  # noqa: BLE001 - whatever went wrong is reported with the instruction's name
            self._failure = self._failure or failure_of(task, error)
        done.is_done = True


@contextmanager
def interleaved(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> Iterator[None]:
    """Let sessions that are made meanwhile run on streams that take turns."""
    with monkeypatch.context() as patch:
        patch.setattr("executors.runs.session.backend_for", lambda _device: InterleavedBackend(seed))
        yield
