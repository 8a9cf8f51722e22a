"""Forwards that wait for their turn: those of one kind and of the lowest priority run together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from executors.serving.engine import Request
from executors.serving.runtime import Runtime

_MAX_TOKENS = 16_384
"""Tokens of one forward: requests behind them wait for the next."""

Kind = Literal["scores", "next tokens"]


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    kind: Kind = field(compare=False)
    requests: Sequence[Request] = field(compare=False)
    answers: Future[list[Any]] = field(compare=False)


class Batcher:
    """Runs forwards on a thread of its own.

    Parameters
    ----------
    runtime : Runtime
        Called by no other thread but through :meth:`alone`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._at_work = threading.Lock()
        self._is_over = False
        self._number = 0
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    def submit(self, kind: Kind, requests: Sequence[Request], priority: int) -> Future[list[Any]]:
        """Return what will hold an answer for each request; a future that is cancelled before its turn costs nothing."""
        with self._changed:
            self._number += 1
            entry = _Waiting(priority, self._number, kind, requests, Future())
            if self._is_over:
                entry.answers.cancel()
            else:
                self._waiting.append(entry)
                self._changed.notify()
        return entry.answers

    def alone(self, action: Callable[[], Any]) -> Any:
        """Do something with the runtime between two forwards."""
        with self._at_work:
            return action()

    def close(self) -> None:
        """End the thread after the forward that runs; what waits is cancelled."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        for entry in self._waiting:
            entry.answers.cancel()

    def _work(self) -> None:
        while (chosen := self._next()) is not None:
            with self._at_work:
                self._answer(chosen)

    def _next(self) -> list[_Waiting] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over:
                return None
            self._waiting = sorted(entry for entry in self._waiting if not entry.answers.cancelled())
            chosen: list[_Waiting] = []
            num_tokens = 0
            for entry in self._waiting:
                first = self._waiting[0]
                if (entry.priority, entry.kind) != (first.priority, first.kind):
                    continue
                num_tokens += sum(len(request.tokens) for request in entry.requests)
                if not chosen or num_tokens <= _MAX_TOKENS:
                    chosen.append(entry)
            taken = {entry.number for entry in chosen}
            self._waiting = [entry for entry in self._waiting if entry.number not in taken]
        return [entry for entry in chosen if entry.answers.set_running_or_notify_cancel()]

    def _answer(self, chosen: Sequence[_Waiting]) -> None:
        if not chosen:
            return
        make = self.runtime.score if chosen[0].kind == "scores" else self.runtime.next_tokens
        requests = [request for entry in chosen for request in entry.requests]
        try:
            answers = [answer for part in _in_parts(requests) for answer in make(part)]
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            if len(chosen) == 1:
                chosen[0].answers.set_exception(error)
                return
            for entry in chosen:  # whose mistake it was
                self._answer([entry])
            return
        begin = 0
        for entry in chosen:
            end = begin + len(entry.requests)
            entry.answers.set_result(answers[begin:end])
            begin = end


def _in_parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yield requests in parts of which a forward has memory: one of very many is several forwards."""
    part: list[Request] = []
    num_tokens = 0
    for request in requests:
        num_tokens += len(request.tokens)
        if part and num_tokens > _MAX_TOKENS:
            yield part
            part, num_tokens = [], len(request.tokens)
        part.append(request)
    yield part
