"""Ranks that are missing, by name: who ended, and who was waited for in vain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from executors.ranks.launch import WAIT_HINT
from executors.ranks.rank_info import DIRECTORY_VARIABLE, give_up, last_words
from topology.errors import RunError

_GRACE_S = 2.0
"""How long a rank that waited in vain lets others say that they waited, too."""

_STORE_KEEPER = 0

_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv",
)


@dataclass(frozen=True)
class MissingRanks:
    """Makes errors that name ranks out of torch's.

    Attributes
    ----------
    rank : int
        This one.
    timeout_s : float
        For which it waits for others.
    """

    rank: int
    timeout_s: float

    @contextmanager
    def named(self, members: Sequence[int], what: str) -> Iterator[None]:
        """Do something that takes all `members`, and raise an error that names those who are missing.

        Raises
        ------
        RunError
        """
        try:
            yield
        except RuntimeError as error:
            absent = self._absent(members)
            if not absent:
                said = f"{what}: no rank is missing"
            elif any(words in str(error).lower() for words in _GONE):
                said = f"{what}: {named_ranks(absent)} ended"
            else:
                said = self._given_up(absent, what)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". This is")[0]
            raise RunError(f"{said} ({reason})", hint=WAIT_HINT) from error

    def _given_up(self, ranks: Sequence[int], what: str) -> str:
        said = f"{what}: waited {self.timeout_s:g} s for {named_ranks(ranks)}"
        give_up(ranks, said)
        return said

    def _absent(self, members: Sequence[int]) -> list[int]:
        """Return the members that do not say, within a short time, that they wait as well."""
        others = [rank for rank in members if rank != self.rank]
        answered = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone with its process
                self._strike_off(others)
                answered.set()

        # On a thread, since torch waits for ever for a store whose process stands still.
        threading.Thread(target=ask, name="zosim-missing-ranks", daemon=True).start()
        if not answered.wait(_GRACE_S + 1) and _STORE_KEEPER in others and _rank_0_keeps_the_store():
            return [_STORE_KEEPER]
        return others

    def _strike_off(self, others: list[int]) -> None:
        """Say that this rank waits, and strike off those of `others` that say so, too."""
        store = default_store()
        store.set(f"zosim/waited/{self.rank}", "1")
        end = time.monotonic() + _GRACE_S
        while others and time.monotonic() < end:
            others[:] = [rank for rank in others if not store.check([f"zosim/waited/{rank}"])]
            time.sleep(0.05)


def _rank_0_keeps_the_store() -> bool:
    """Whether the store is in the process of rank 0: there is neither a file nor a launcher that keeps it."""
    return DIRECTORY_VARIABLE not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_store() -> Store:
    """Return what all ranks can write to and read."""
    return dist.distributed_c10d._get_default_store()


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, each with the last instruction that it noted."""
    left = {rank: last_words(rank) for rank in ranks}
    return " and ".join(
        words.of(rank) + (f", last at {words.line}," if words.line else "") for rank, words in left.items()
    ).removesuffix(",")
