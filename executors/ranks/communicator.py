"""Communication between the ranks of a run: exchanges of the program, and messages between host loops.

Three things keep exchanges from waiting for each other in a circle. Those of a program are made by one thread, in the
order of the program. What host loops tell each other has a process group of its own. And every wait ends: with the
exchange, or after a timeout with an error that names the ranks that were not there.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from executors.devices import device_named
from executors.ranks.accelerators import backends_of, identity_of, refuse_shared
from executors.ranks.gloo import DOUBLING_BYTES, DuplexPair, doubling_all_gather, shared_gloo
from executors.ranks.launch import DEFAULT_TIMEOUT_S
from executors.ranks.messages import Messages, Packed
from executors.ranks.missing_ranks import MissingRanks, named_ranks
from executors.ranks.rank_info import is_launched
from topology.errors import RunError, ZosimError

WORLD = "world"
PIPELINE = "pipeline"
ProcessGroups = Mapping[str, Sequence[Sequence[int]]]
T = TypeVar("T")

_HEARTBEAT = -1
"""In place of the length of an answer: rank 0 is still at work."""

_ANSWER: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

_LONGEST_TEXT = 100


class Communicator:
    """A rank's view of the others.

    - `process_groups`: named groups, each a partition of the ranks; ``"world"`` is always there.
    - `device`: ``"cpu"``, or this rank's own, such as ``"cuda:1"``, between which parameters go by NCCL. Losses are numbers of
      the host, and go by gloo in either case: the host has to read them, and gloo can say who does not answer.

    Raises RunError if the process group was not made (:func:`executors.ranks.launch.process_group`), or has another size.

    - `num_calls`, `num_bytes`: Exchanges of the program by group, and what each brought to this rank beside its own part.
    """

    def __init__(
        self,
        process_groups: ProcessGroups,
        *,
        device: str = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not dist.is_initialized():
            raise RunError(
                "the ranks have no process group",
                hint="start the script with torchrun, and create sessions inside "
                "executors.ranks.launch.process_group()",
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self.missing = MissingRanks(self.rank, timeout_s)
        self._device_type = device.partition(":")[0]
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._members = {WORLD: tuple(range(self.world_size))}
        for name, subgroups in process_groups.items():
            own_subgroups = [tuple(subgroup) for subgroup in subgroups if self.rank in subgroup]
            # A partition has every rank in exactly one subgroup.
            if len(own_subgroups) != 1 or sum(map(len, subgroups)) != self.world_size:
                raise RunError(
                    f"group {name} is {[list(subgroup) for subgroup in subgroups]}, but {self.world_size} ranks run",
                    hint="start as many ranks as the plan has",
                )
            self._members[name] = own_subgroups[0]
        with self.missing.joining():
            self._groups = {name: self._made(subgroups) for name, subgroups in process_groups.items()}
            self._pairs = self._pairs_among({WORLD: [range(self.world_size)], **process_groups})
            self._control = dist.new_group(backend=_host_backend(), timeout=self._timeout)
            self.messages = self._made_messages(process_groups.get(PIPELINE, ()))
        if self._device_type != "cpu":
            own = device_named(device)
            refuse_shared(self.all_gather_json(identity_of(own), "comparing devices"))
            if self.messages is not None:
                self.messages.connect(own)

    def _made(self, subgroups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this rank's process group of a partition."""
        lists = [list(subgroup) for subgroup in subgroups]
        backend = backends_of(self._device_type, _host_backend())
        # Not by a DeviceMesh: its groups would wait for half an hour.
        own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
            lists, timeout=self._timeout, backend=backend
        )[0]
        return own

    def _pairs_among(self, process_groups: ProcessGroups) -> dict[str, DuplexPair]:
        """Return this rank's duplex connection in each group of two; groups of the same ranks share one."""
        if _host_backend() == "fake":
            return {}
        made: dict[tuple[tuple[int, ...], ...], DuplexPair | None] = {}
        pairs = {}
        for name, subgroups in process_groups.items():
            key = tuple(tuple(subgroup) for subgroup in subgroups)
            if key not in made:
                made[key] = DuplexPair.among(
                    subgroups, self.rank, backend=_host_backend(), timeout=self._timeout
                )
            if (pair := made[key]) is not None:
                pairs[name] = pair
        return pairs

    def _made_messages(self, subgroups: Sequence[Sequence[int]]) -> Messages | None:
        """Return what carries messages within this rank's pipeline; None where no pipeline has several ranks."""
        if all(len(subgroup) == 1 for subgroup in subgroups):
            return None
        host = _host_backend()
        is_host = self._device_type == "cpu" or host == "fake"
        device = host if is_host else dist.get_default_backend_for_device(self._device_type)
        return Messages(
            subgroups,
            self.rank,
            backend=host,
            device_backend=device,
            timeout=self._timeout,
            naming=self.missing.named,
        )

    def members(self, group: str) -> tuple[int, ...]:
        """Return the members of `group` that include this rank, in rank order.

        Raises RunError if there is no such group.
        """
        try:
            return self._members[group]
        except KeyError:
            raise RunError(f"the ranks have no group {group!r}, but " + ", ".join(self._members)) from None

    def position(self, group: str) -> int:
        """Return this rank's position in `group`, from 0."""
        return self.members(group).index(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    # -- of the program ----------------------------------------------------------------------------------------

    def all_gather(self, group: str, gathered: Tensor, own: Tensor, what: str) -> None:
        """Fill `gathered` with every member's `own`, in rank order; `own` may be this rank's part of it.

        Raises RunError if a rank is gone or does not come in time; the message names it.
        """
        members = self.members(group)
        self.num_calls[group] += 1
        self.num_bytes[group] += (gathered.numel() - own.numel()) * own.element_size()
        if len(members) == 1:
            gathered.copy_(own.view_as(gathered))
            return
        with self.missing.named(members, what):
            # Two ranks use both directions of their link at once; a few bytes go in few rounds; the rest in a ring.
            if own.device.type == "cpu" and group in self._pairs:
                self._pairs[group].all_gather(gathered, own)
            elif own.device.type == "cpu" and gathered.nbytes <= DOUBLING_BYTES and _host_backend() != "fake":
                position = self.position(group)
                doubling_all_gather(gathered, own, members, position, self._groups.get(group))
            else:
                all_gather_flat(gathered, own, group=self._groups.get(group))

    def send(self, group: str, offset: int, message: Tensor | Packed, what: str) -> int:
        """Send a message to the member of a pipeline that is `offset` places on; return how many bytes went.

        Raises RunError if a rank is gone or does not come in time; the message names it.
        """
        return self._messages(group).send(self._neighbour(group, offset), message, what)

    def recv(
        self, group: str, offset: int, most_bytes: int, what: str, device: torch.device | None = None
    ) -> Tensor | Packed:
        """Return the next message of the member of a pipeline that is `offset` places on: bytes, or on a device numbers.

        Raises RunError if a rank is gone or does not come in time, or the message has more than `most_bytes`.
        """
        return self._messages(group).recv(self._neighbour(group, offset), most_bytes, what, device)

    def _neighbour(self, group: str, offset: int) -> int:
        return self.members(group)[self.position(group) + offset]

    def _messages(self, group: str) -> Messages:
        if self.messages is None or group != PIPELINE:
            raise RunError(f"group {group} has no channel for messages between its members")
        return self.messages

    # -- of host loops -----------------------------------------------------------------------------------------

    def all_gather_host(self, own: Tensor, what: str) -> Tensor:
        """Return all ranks' `own`, host tensors of one shape, stacked along a new first axis."""
        rows = own.new_zeros((self.world_size, *own.shape))
        rows[self.rank] = own
        with self.missing.named(self.members(WORLD), what):
            all_gather_flat(rows.view(-1), own.contiguous().view(-1), group=self._control)
        return rows

    def all_gather_json(self, own: T, what: str, row_type: Any = Any) -> list[T]:
        """Return all ranks' `own` in rank order, sent as JSON and validated as `row_type`.

        Raises RunError if what a rank sent is not.
        """
        adapter: TypeAdapter[T] = TypeAdapter(row_type)
        payload = adapter.dump_json(own)
        # Lengths first, since a gather takes tensors of one shape.
        sizes = self.all_gather_host(torch.tensor(len(payload)), what).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(payload)] = _tensor_of(payload)
        rows = self.all_gather_host(padded, what)
        return [
            _parsed(adapter, _bytes_of(row[:size]), rank, what)
            for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def on_rank_0(self, make: Callable[[], T], what: str) -> T:
        """Run `make` on rank 0 and return its result, sent as JSON, on all ranks; an error of its is raised on all.

        Rank 0 may take as long as it likes, as long as it shows signs of life: the others wait for one after the other.

        Raises ZosimError as `make` did on rank 0.
        Raises RunError if rank 0 shows no sign of life for the timeout.
        """
        payload = b""
        if self.is_first:
            made: dict[str, Any]
            try:
                with heartbeat(lambda: self._broadcast(torch.tensor(_HEARTBEAT)), self.timeout_s / 8):
                    made = {"value": make()}
            except ZosimError as error:
                made = {"error": error.message, "hint": error.hint}
            payload = json.dumps(made).encode()
        size = torch.tensor(len(payload) if self.is_first else _HEARTBEAT)
        with self.missing.named(self.members(WORLD), what):
            self._broadcast(size)
            # The others take heartbeats until a length comes; rank 0 has sent its own by then.
            while size == _HEARTBEAT:
                self._broadcast(size)
            data = _tensor_of(payload) if self.is_first else torch.zeros(int(size), dtype=torch.uint8)
            self._broadcast(data)
        answer = _parsed(_ANSWER, _bytes_of(data), 0, what)
        if "error" in answer:
            raise RunError(answer["error"], hint=answer["hint"])
        return cast("T", answer["value"])

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._control)

    def refuse_unlike(self, facts: Mapping[str, Any]) -> None:
        """Raise if ranks differ in one of `facts`.

        Raises RunError: on all ranks; the message names the fact, the ranks that have another one than rank 0, and both values.
        """
        rows = self.all_gather_json(dict(facts), "comparing what ranks begin with")
        for name, value in rows[0].items():
            others = [rank for rank, row in enumerate(rows) if row[name] != value]
            if others:
                raise RunError(
                    f"ranks must start with the same {name}, but {named_ranks(others)} and rank 0 differ"
                    + _compared(rows[others[0]][name], value),
                    hint="give all ranks the same files, options and packages; for different processors set "
                    "ATEN_CPU_CAPABILITY=avx2",
                )

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.all_gather_host(torch.zeros(1, dtype=torch.uint8), what)

    def broadcast_host(self, group: str, owner: int, tensor: Tensor, what: str) -> None:
        """Fill `tensor`, bytes of the host, with that of rank `owner`, on all members of a pipeline."""
        self._messages(group).broadcast(owner, tensor, what)


@contextmanager
def heartbeat(beat: Callable[[], None], period_s: float) -> Iterator[None]:
    """Call `beat` every `period_s` seconds, on a thread of its own, for the length of the block."""
    ended = threading.Event()

    def run() -> None:
        # A peer that is gone is named by the exchange that follows the block.
        with suppress(RuntimeError):
            while not ended.wait(period_s):
                beat()

    thread = threading.Thread(target=run, name="zosim-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def all_gather_flat(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None) -> None:
    """Fill `gathered` with every member's `own`, in rank order, by torch's own collective."""
    # Newer versions of torch warn about the older name.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(gathered, own, group=group)


def _host_backend() -> str:
    return "fake" if dist.get_backend() == "fake" else shared_gloo()


def _tensor_of(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _parsed(adapter: TypeAdapter[T], payload: bytes, rank: int, what: str) -> T:
    try:
        return adapter.validate_json(payload)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise RunError(
            f"{what}: rank {rank} sent an invalid message ({reason})",
            hint="run all ranks on one release; see SECURITY.md if other users reach the ports of a run",
        ) from None


def _compared(value: Any, of_rank_0: Any) -> str:
    """Describe two values; "" where they are too long to be read."""
    text = f" ({value}, not {of_rank_0})"
    return text if len(text) <= _LONGEST_TEXT else ""


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def default_communicator(
    process_groups: ProcessGroups, device: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Communicator | None:
    """Return this rank among the ranks of `process_groups`; None for a rank alone.

    Raises RunError if the plan has several ranks, and this process is alone.
    """
    world_size = sum(map(len, process_groups.get(WORLD, ((0,),))))
    if world_size == 1:
        return None
    if not is_launched() and not dist.is_initialized():
        raise RunError(
            f"the plan has {world_size} ranks, but this process runs alone",
            hint="`zosim run` starts the ranks of a host; start your own loop with torchrun",
        )
    return Communicator(process_groups, device=device, timeout_s=timeout_s)
