"""Waiting for a rank that may take as long as it likes, as long as it lives: it counts up a number of the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch._C._distributed_c10d import Store

T = TypeVar("T")
_NAP_S = 0.05


class Silent(RuntimeError):  # noqa: N818 - reads as the statement it makes
    """A store that does not answer, or a heart that does not beat."""


def answered(question: Callable[[], T], timeout_s: float) -> T:
    """Return what a store answers.

    Parameters
    ----------
    question : callable
        Asks it.
    timeout_s : float

    Raises
    ------
    Silent
        If it takes longer: torch waits for ever for a store whose process stands still.
    RuntimeError
        If the store is gone.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that asked
            errors.append(error)

    thread = threading.Thread(target=ask, name="zosim-ask", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise Silent(f"no answer for {timeout_s:g} s")
    return answers[0]


@contextmanager
def beating(store: Store, key: str, period_s: float) -> Iterator[None]:
    """Count up a number of the store for as long as this process is not stopped."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(period_s):
            store.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, name="zosim-heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(period_s)


def wait_while_beating(store: Store, key: str, timeout_s: float) -> None:
    """Wait until a heart's work is done.

    Raises
    ------
    Silent
        If it has not beaten for `timeout_s`.
    RuntimeError
        If the store is gone with it.
    """
    beats, seen = 0, time.monotonic()
    while not answered(lambda: store.check([f"{key}/done"]), timeout_s):
        found = answered(lambda: store.add(f"{key}/beats", 0), timeout_s)
        if found != beats:
            beats, seen = found, time.monotonic()
        if time.monotonic() - seen > timeout_s:
            raise Silent(f"no sign of life for {timeout_s:g} s")
        time.sleep(_NAP_S)
