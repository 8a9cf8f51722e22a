"""Names the ranks that are missing: those that ended, and those that others waited for in vain.

A rank that waited in vain cannot tell by itself whether the rank that it waited for is the one that is missing: that one may
wait, in another exchange, for a third. So it calls the roll. Every rank answers, on a thread of its own, for which ranks it
waits at the moment; a process that is stopped or gone does not. From answer to answer the way leads to the ranks that are
missing: those on it that do not answer, or, where all do, those that wait for nobody and do not come either.

Rank 2 waits for rank 0, and rank 0 for rank 1, which is stopped:

>>> missing_from({2: [0], 0: [1], 1: None, 3: [1]}.get, 2)
[1]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from pydantic import TypeAdapter, ValidationError
from torch._C._distributed_c10d import HashStore, Store

from executors.ranks.launch import WAIT_HINT
from executors.ranks.rank_info import RankInfo, give_up, last_report, rank_0_keeps_the_store
from topology.errors import RunError

_PERIOD_S = 0.5
"""Between two looks of a rank whether the roll is called."""

_SETTLE_S = 2 * _PERIOD_S
"""Until answers count: whoever was about to begin or to end an exchange has corrected its answer by then."""

_GRACE_S = 5.0
"""How long an answer may take, on a machine that is busy with other things."""

_CALLED = "zosim/roll-called"
_STORE_KEEPER = 0
_ANSWER: TypeAdapter[list[int]] = TypeAdapter(list[int])

_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv",
)

_LATE = ("timed out", "timeout")
"""What torch's errors say of a wait that took as long as it may."""

_now_s = time.monotonic

_CONNECT_HINT = (
    "ranks of one host connect over the loopback interface: see that it is up (ip link show lo) and that no firewall "
    "closes it; ranks of several hosts need the ports that docs/explanation/network-security.md names"
)


def missing_from(waits_of: Callable[[int], Sequence[int] | None], rank: int) -> list[int]:
    """Return the ranks that are missing, as `rank` sees it; none where ranks wait for each other in a circle.

    `waits_of`: takes a rank, and returns for which ranks it waits, None if it does not answer.
    """
    waits: dict[int, Sequence[int] | None] = {}
    ahead = [rank]
    while ahead:
        one = ahead.pop()
        if one not in waits:
            waits[one] = waits_of(one)
            ahead += waits[one] or ()
    silent = [one for one, awaited in waits.items() if awaited is None]
    return sorted(silent or [one for one, awaited in waits.items() if not awaited])


class _Waits:
    """The ranks that the threads of this process currently wait for.

    - `store`: Where ranks call the roll and answer; of this process alone until :func:`answering` brings one of all ranks.
    """

    def __init__(self) -> None:
        self.store: Store = HashStore()
        self._members: dict[object, Sequence[int]] = {}

    @contextmanager
    def noted(self, members: Sequence[int]) -> Iterator[None]:
        """Wait for `members` for the length of the block; for ever, where that fails: others may ask after this rank has given up."""
        wait = object()
        self._members[wait] = members
        yield
        del self._members[wait]

    def besides(self, rank: int) -> list[int]:
        """Return the ranks that are waited for, without `rank`, which is this one."""
        return sorted({member for members in [*self._members.values()] for member in members} - {rank})


@cache
def _waits() -> _Waits:
    """Return what all threads of this process share."""
    return _Waits()


@contextmanager
def answering(rank: int, store: Store) -> Iterator[None]:
    """Answer roll calls as rank `rank` for the length of the block; after a failure, until the process ends.

    `store` is one that all ranks write to and read.
    """
    _waits.cache_clear()
    _waits().store = store
    ended = threading.Event()

    def run() -> None:
        answer = ""
        with suppress(RuntimeError):  # the store is gone with its process
            # Another connection: while a thread waits for a key of a TCPStore, others wait for that thread. Old torch has none.
            store: Store = getattr(roll_store(), "clone", roll_store)()
            while not ended.wait(_PERIOD_S):
                before = answer
                if store.check([_CALLED]) and (answer := str(_waits().besides(rank))) != before:
                    store.set(_key(rank), answer)

    thread = threading.Thread(target=run, name="zosim-roll-call", daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join(_PERIOD_S)


def _key(rank: int) -> str:
    return f"zosim/waits-for/{rank}"


@dataclass(frozen=True)
class MissingRanks:
    """Turns torch's errors into errors that name the missing ranks."""

    rank: int
    timeout_s: float

    @contextmanager
    def named(self, members: Sequence[int], what: str) -> Iterator[None]:
        """Run a block that needs all `members`; its errors become RunErrors that name those that are missing."""
        with _waits().noted(members):
            begin_s = _now_s()
            try:
                yield
            except (RuntimeError, TimeoutError) as error:
                waited_s, text, hint = _now_s() - begin_s, str(error).lower(), WAIT_HINT
                is_late = isinstance(error, TimeoutError) or any(report in text for report in _LATE)
                absent = self._absent(members)
                if absent and any(report in text for report in _GONE):
                    complaint = f"{what}: {named_ranks(absent)} ended"
                elif absent:
                    waited_s = self.timeout_s if is_late else waited_s
                    complaint = f"{what}: waited {waited_s:.3g} s for {named_ranks(absent)}"
                    give_up(absent, complaint)
                elif "connect" in text:
                    complaint, hint = f"{what}: all ranks are there, but they cannot connect", _CONNECT_HINT
                elif is_late:
                    complaint = f"{what}: no rank is missing, all wait for each other"
                else:
                    complaint = f"{what}: it failed, and no rank is missing"
                reason = str(error).strip().partition("\n")[0].partition(". This is")[0]
                raise RunError(f"{complaint} ({reason})" if reason else complaint, hint=hint) from error

    def joining(self) -> AbstractContextManager[None]:
        """Make process groups, which takes all ranks; as :meth:`named`."""
        size = RankInfo.here().world_size
        return self.named(range(size), f"rank {self.rank} could not join the others of {size} ranks")

    def _absent(self, members: Sequence[int]) -> list[int]:
        """Return the ranks that keep `members` from their rendezvous: all ranks that live answer within a short time."""
        others = [rank for rank in members if rank != self.rank]
        if not others:
            return []
        outcome: list[list[int]] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone with its process
                outcome.append(self._call_the_roll(others))

        # On a thread, since torch waits for ever for a store whose process stands still.
        thread = threading.Thread(target=ask, name="zosim-missing-ranks", daemon=True)
        thread.start()
        thread.join(_GRACE_S + 1)
        if outcome:
            return outcome[0]
        return [_STORE_KEEPER] if self.rank != _STORE_KEEPER and rank_0_keeps_the_store() else others

    def _call_the_roll(self, others: list[int]) -> list[int]:
        store, begin = roll_store(), time.monotonic()

        def waits_of(rank: int) -> list[int] | None:
            return others if rank == self.rank else _answer(store, rank)

        # Also for those who call the roll when this rank has ended.
        store.set(_key(self.rank), str(others))
        store.set(_CALLED, "1")
        while True:
            missing, waited_s = missing_from(waits_of, self.rank), time.monotonic() - begin
            all_answered = all(waits_of(rank) is not None for rank in missing)
            if waited_s > _GRACE_S or (all_answered and waited_s > _SETTLE_S):
                return missing
            time.sleep(0.05)


def _answer(store: Store, rank: int) -> list[int] | None:
    """Return the ranks that another rank says it waits for; None if it has not answered."""
    if not store.check([_key(rank)]):
        return None
    try:
        answer = _ANSWER.validate_json(store.get(_key(rank)))
    except ValidationError:  # nothing that a rank says
        return None
    return answer if all(0 <= other < RankInfo.here().world_size for other in answer) else None


def roll_store() -> Store:
    """Return the store in which ranks call the roll and answer."""
    return _waits().store


def named_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks, each with the last instruction that it noted."""
    left = {rank: last_report(rank) for rank in ranks}
    return " and ".join(
        report.of(rank) + (f", last at {report.line}," if report.line else "")
        for rank, report in left.items()
    ).removesuffix(",")
