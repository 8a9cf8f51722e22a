"""Several ranks in one process, a thread each: what they compute is the shipped executor's, only the wire is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from executors.ranks.communicator import Communicator
from executors.ranks.messages import LENGTH_BYTES, Packed, check_length
from topology.errors import RunError
from zosim.plans import Plan

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


class _Rendezvous:
    """Where the members of one group lay down what the others take."""

    def __init__(self, num_members: int) -> None:
        self.barrier = threading.Barrier(num_members)
        self.laid: list[Any] = [None] * num_members

    def exchange(self, position: int, own: Any) -> list[Any]:
        """Return what all members laid down, in rank order."""
        try:
            self.barrier.wait(_TIMEOUT_S)
            self.laid[position] = own
            self.barrier.wait(_TIMEOUT_S)
            messages = list(self.laid)
            self.barrier.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RunError(f"another rank stopped, or answered nothing for {_TIMEOUT_S:g} s") from None
        return messages


class ThreadedRanks:
    """The groups of a plan's ranks, as communicators of one process."""

    def __init__(self, plan: Plan) -> None:
        self.process_groups = {"world": (tuple(range(plan.placement.world_size)),), **plan.process_groups}
        self.exchanges = {
            (kind, name, part): _Rendezvous(len(part))
            for kind in ("program", "host loop")
            for name, parts in self.process_groups.items()
            for part in parts
        }

        self._mail: dict[tuple[int, int], SimpleQueue[Tensor | Packed]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def mail(self, sender: int, receiver: int) -> SimpleQueue[Tensor | Packed]:
        """Return the messages on their way from one rank to another."""
        with self._lock:
            return self._mail.setdefault((sender, receiver), SimpleQueue())

    def taken(self, sender: int, receiver: int) -> Tensor | Packed:
        """Return the next message, once it is there."""
        queue, end = self.mail(sender, receiver), time.monotonic() + _TIMEOUT_S
        while not self._closed and time.monotonic() < end:
            with suppress(Empty):
                return queue.get(timeout=0.05)
        raise RunError(f"rank {sender} stopped, or sent nothing for {_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed = True
        for rendezvous in self.exchanges.values():
            rendezvous.barrier.abort()


class _Unwatched:
    """Names nobody as missing: ranks of one process end together."""

    @staticmethod
    def named(members: Sequence[int], what: str) -> AbstractContextManager[None]:  # noqa: ARG004
        """Return a context that adds nothing to an error."""
        return nullcontext()


class InProcess:
    """One rank's communicator, with the interface of :class:`executors.ranks.communicator.Communicator`."""

    timeout_s = _TIMEOUT_S

    def __init__(self, threaded: ThreadedRanks, rank: int) -> None:
        self._threaded = threaded
        self.rank = rank
        self.world_size = len(threaded.process_groups["world"][0])
        self.is_first = rank == 0
        self.missing = _Unwatched()

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of `group` that this one is among."""
        return next(part for part in self._threaded.process_groups[group] if self.rank in part)

    def position(self, group: str) -> int:
        """Return this rank's place in `group`."""
        return self.members(group).index(self.rank)

    def all_gather(self, group: str, gathered: Tensor, own: Tensor, what: str) -> None:  # noqa: ARG002
        """Fill `gathered` with every member's `own`, in rank order."""
        parts = self._exchanged("program", group, own.clone())
        gathered.view(-1).copy_(torch.cat([part.view(-1) for part in parts]))

    def all_gather_host(self, own: Tensor, what: str) -> Tensor:  # noqa: ARG002
        """Return all ranks' `own` along a new first axis."""
        return torch.stack(self._exchanged("host loop", "world", own.clone()))

    def all_gather_json(self, own: Any, what: str, kind: Any = Any) -> list[Any]:  # noqa: ARG002
        """Return what all ranks have."""
        return self._exchanged("host loop", "world", own)

    def barrier(self, what: str) -> None:  # noqa: ARG002
        """Wait until all ranks are here."""
        self._exchanged("host loop", "world", None)

    def send(self, group: str, offset: int, message: Tensor | Packed, what: str) -> int:  # noqa: ARG002
        """Send bytes to a neighbour."""
        peer = self.members(group)[self.position(group) + offset]
        self._threaded.mail(self.rank, peer).put(message if isinstance(message, Packed) else message.clone())
        return _size(message) + LENGTH_BYTES

    def recv(
        self, group: str, offset: int, most_bytes: int, what: str, device: torch.device | None = None
    ) -> Tensor | Packed:
        """Return the next message of a neighbour."""
        peer = self.members(group)[self.position(group) + offset]
        message = self._threaded.taken(peer, self.rank)
        if isinstance(message, Packed) is (device is None):
            raise RunError(
                f"{what} is of type {type(message).__name__}, which its receiver does not take",
                hint="run both on one plan",
            )
        check_length(_size(message), most_bytes, what)
        return message

    def broadcast_host(self, group: str, owner: int, tensor: Tensor, what: str) -> None:  # noqa: ARG002
        """Fill `tensor` with the owner's."""
        parts = self._exchanged("host loop", group, tensor.clone())
        tensor.copy_(parts[self.members(group).index(owner)])

    def on_rank_0(self, make: Callable[[], Any], what: str) -> Any:  # noqa: ARG002
        """Return what `make` returns on rank 0, while the others wait."""
        return self._exchanged("host loop", "world", make() if self.is_first else None)[0]

    def refuse_unlike(self, facts: Mapping[str, Any]) -> None:
        """Raise if ranks do not agree."""
        if any(reported != facts for reported in self._exchanged("host loop", "world", dict(facts))):
            raise RunError(
                "the ranks begin with different facts", hint="start them with one plan and one base"
            )

    def _exchanged(self, kind: str, group: str, own: Any) -> list[Any]:
        rendezvous = self._threaded.exchanges[kind, group, self.members(group)]
        return rendezvous.exchange(self.position(group), own)


def on_all_ranks(plan: Plan, work: Callable[[int, Communicator], Result]) -> Sequence[Result]:
    """Return what `work` returns on every rank of `plan`, given the rank and its communicator.

    Raises Exception: what the first rank raised that did not merely miss another.
    """
    threaded = ThreadedRanks(plan)
    world_size = plan.placement.world_size

    def run(rank: int) -> Result:
        try:
            return work(rank, cast("Communicator", InProcess(threaded, rank)))
        except BaseException:
            threaded.close()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if "another rank stopped" not in str(error)), errors[0])
    return [future.result() for future in futures]


def _size(message: Tensor | Packed) -> int:
    return message.num_bytes if isinstance(message, Packed) else message.numel()
