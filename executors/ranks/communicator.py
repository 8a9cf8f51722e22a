"""The ranks of a run as one of them sees them: exchanges of the program, and words between host loops.

Three things keep exchanges from waiting for each other in a circle. Those of a program are made by one thread, in the
order of the program. What host loops tell each other has a process group of its own. And every wait ends: with the
exchange, or after a timeout with an error that names the ranks that were not there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from executors.ranks.absence import RollCall, default_store, named_ranks
from executors.ranks.doubling import MOST_BYTES, doubling_all_gather
from executors.ranks.duplex import Duplex
from executors.ranks.gloo import shared_gloo
from executors.ranks.heart import beating, wait_while_beating
from executors.ranks.launch import DEFAULT_TIMEOUT_S
from executors.ranks.messages import Messages
from executors.ranks.notes import is_launched
from executors.ranks.packed import Packed
from topology.errors import RunError, ZosimError
from zosim.plans import Mesh

WORLD = "world"
PIPELINE = "pipeline"
Groups = Mapping[str, Sequence[Sequence[int]]]


class Communicator:
    """A rank's view of the others.

    Parameters
    ----------
    groups : mapping of str to sequence of sequence of int
        Named groups, each a partition of the ranks; ``"world"`` is always there.
    device_type : str
        ``"cpu"``, or ``"cuda"`` to exchange parameters between devices by NCCL. Losses are numbers of the host, and
        go by gloo in either case: the host has to read them, and gloo can say who does not answer.
    timeout_s : float
        After which a rank that waits for others gives up.

    Attributes
    ----------
    rank, world_size : int
    num_calls, num_bytes : Counter
        Exchanges of the program by group, and what each brought to this rank beside its own part.
    messages : Messages or None
        To and from other stages, where there are any.

    Raises
    ------
    RunError
        If the process group was not made (:func:`executors.ranks.launch.process_group`), or has another size.
    """

    def __init__(
        self, groups: Groups, *, device_type: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if not dist.is_initialized():
            raise RunError(
                "the ranks have no process group yet",
                hint="start the script with torchrun, and make sessions inside executors.ranks.launch.process_group()",
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._roll = RollCall(self.rank, timeout_s)
        self._device_type = device_type
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._members = {WORLD: tuple(range(self.world_size))}
        for name, parts in groups.items():
            found = [tuple(part) for part in parts if self.rank in part]
            if len(found) != 1 or sum(map(len, parts)) != self.world_size:
                raise RunError(
                    f"group {name} is {[list(part) for part in parts]}, but {self.world_size} ranks run",
                    hint="start as many ranks as the plan has",
                )
            self._members[name] = found[0]
        self._groups = {name: self._made(parts) for name, parts in groups.items()}
        self._pairs = self._pairs_among({WORLD: [range(self.world_size)], **groups})
        self._control = dist.new_group(backend=_host_backend(), timeout=self._timeout)
        self.messages = self._messages_within(groups.get(PIPELINE, ()))
        self._marks = 0

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def _made(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this rank's process group of a partition."""
        lists = [list(part) for part in parts]
        host = _host_backend()
        backend = f"cpu:{host},cuda:nccl" if self._device_type == "cuda" and host != "fake" else host
        # Not by a DeviceMesh: its groups would wait for half an hour.
        own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
            lists, timeout=self._timeout, backend=backend
        )[0]
        return own

    def _pairs_among(self, groups: Groups) -> dict[str, Duplex]:
        """Return what this rank exchanges over with the other one of each group of two; groups of the same ranks share."""
        if _host_backend() == "fake":
            return {}
        found: dict[tuple[tuple[int, ...], ...], Duplex | None] = {}
        pairs = {}
        for name, parts in groups.items():
            key = tuple(tuple(part) for part in parts)
            if key not in found:
                found[key] = Duplex.among(parts, self.rank, backend=_host_backend(), timeout=self._timeout)
            if (pair := found[key]) is not None:
                pairs[name] = pair
        return pairs

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of `group` that this one is among, in rank order.

        Raises
        ------
        RunError
            If there is no such group.
        """
        try:
            return self._members[group]
        except KeyError:
            raise RunError(f"the ranks have no group {group!r}, but " + ", ".join(self._members)) from None

    def position(self, group: str) -> int:
        """Return this rank's place in `group`, from 0."""
        return self.members(group).index(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        """Return torch's view of a plan's mesh, its axes ``data``, ``perturb`` and, if there are any, ``stage`` named."""
        names: tuple[str, ...] = ("data", "perturb") if mesh.inner == "perturb" else ("perturb", "data")
        names += ("stage",) if mesh.stage > 1 else ()
        ranks = torch.arange(self.world_size).view([getattr(mesh, name) for name in names])
        return DeviceMesh(self._device_type, ranks, mesh_dim_names=names)

    # -- of the program ----------------------------------------------------------------------------------------

    def all_gather(self, group: str, gathered: Tensor, own: Tensor, what: str) -> None:
        """Fill `gathered` with every member's `own`, in rank order; `own` may be this rank's part of it.

        Raises
        ------
        RunError
            If a rank is gone or does not come in time; the message names it.
        """
        members = self.members(group)
        self.num_calls[group] += 1
        self.num_bytes[group] += (gathered.numel() - own.numel()) * own.element_size()
        if len(members) == 1:
            gathered.copy_(own.view_as(gathered))
            return
        with self._roll.naming(members, what):
            if own.device.type == "cpu" and group in self._pairs:
                self._pairs[group].all_gather(gathered, own)
            elif own.device.type == "cpu" and self._is_small(gathered):
                place = self.position(group)
                doubling_all_gather(gathered, own, members, place, self._groups.get(group))
            else:
                _all_gather(gathered, own, group=self._groups.get(group))

    @staticmethod
    def _is_small(gathered: Tensor) -> bool:
        return gathered.nbytes <= MOST_BYTES and _host_backend() != "fake"

    def send(self, group: str, offset: int, message: Tensor | Packed, what: str) -> int:
        """Send a message to the member of a pipeline that is `offset` places on; return how many bytes went.

        Raises
        ------
        RunError
            If a rank is gone or does not come in time; the message names it.
        """
        return self._messages(group).send(self._neighbour(group, offset), message, what)

    def recv(
        self, group: str, offset: int, most_bytes: int, what: str, device: torch.device | None = None
    ) -> Tensor | Packed:
        """Return the next message of the member of a pipeline that is `offset` places on: bytes, or on a device numbers.

        Raises
        ------
        RunError
            If a rank is gone or does not come in time, or the message has more than `most_bytes`.
        """
        return self._messages(group).recv(self._neighbour(group, offset), most_bytes, what, device)

    def _neighbour(self, group: str, offset: int) -> int:
        return self.members(group)[self.position(group) + offset]

    def _messages(self, group: str) -> Messages:
        if self.messages is None or group != PIPELINE:
            raise RunError(f"the members of group {group} send each other no messages")
        return self.messages

    def _messages_within(self, parts: Sequence[Sequence[int]]) -> Messages | None:
        """Return this rank's messages to others of its pipeline, if it has any."""
        if all(len(part) == 1 for part in parts):
            return None
        naming = partial(self._roll.naming, self.members(WORLD))
        host = _host_backend()
        device = "nccl" if self._device_type == "cuda" and host != "fake" else host
        return Messages(
            parts,
            self.rank,
            backend=host,
            device_backend=device,
            timeout=self._timeout,
            naming=naming,
        )

    # -- of host loops -----------------------------------------------------------------------------------------

    def gathered(self, own: Tensor, what: str) -> Tensor:
        """Return all ranks' `own`, numbers of the host that are alike in shape, along a new first axis."""
        rows = own.new_zeros((self.world_size, *own.shape))
        rows[self.rank] = own
        with self._roll.naming(self.members(WORLD), what):
            _all_gather(rows.view(-1), own.contiguous().view(-1), group=self._control)
        return rows

    def gathered_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return all ranks' payloads, which may differ in length."""
        sizes = self.gathered(torch.tensor(len(payload)), what).tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(payload)] = _tensor_of(payload)
        rows = self.gathered(padded, what)
        return [_bytes_of(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def told(self, payload: bytes, what: str) -> bytes:
        """Return rank 0's payload; the others' are not looked at."""
        size = torch.tensor(len(payload))
        with self._roll.naming((0,), what):
            dist.broadcast(size, 0, group=self._control)
            data = torch.zeros(max(1, int(size)), dtype=torch.uint8)
            if self.is_first:
                data[: len(payload)] = _tensor_of(payload)
            dist.broadcast(data, 0, group=self._control)
        return _bytes_of(data[: int(size)])

    def first_says(self, make: Callable[[], Any], what: str) -> Any:
        """Return what rank 0 makes, as JSON carries it; what it refuses, all ranks refuse.

        Raises
        ------
        ZosimError
            As `make` did on rank 0.
        """
        said: dict[str, Any] = {}
        if self.is_first:
            try:
                said = {"value": make()}
            except ZosimError as error:
                said = {"error": error.message, "hint": error.hint}
        said = json.loads(self.told(json.dumps(said).encode(), what))
        if "error" in said:
            raise RunError(said["error"], hint=said["hint"])
        return said["value"]

    def refuse_unlike(self, facts: Mapping[str, Any]) -> None:
        """Raise if ranks do not agree on `facts`, by name.

        Raises
        ------
        RunError
            On all ranks; the message names the fact and the ranks that have another one than rank 0.
        """
        told = self.gathered_bytes(json.dumps(dict(facts)).encode(), "comparing what ranks begin with")
        rows = [json.loads(text) for text in told]
        for name, value in rows[0].items():
            others = [rank for rank, row in enumerate(rows) if row[name] != value]
            if others:
                raise RunError(
                    f"ranks do not begin with the same {name}: {named_ranks(others)} not with that of rank 0",
                    hint="give all ranks the same files and options",
                )

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.gathered(torch.zeros(1, dtype=torch.uint8), what)

    def complete(self, group: str, whole: Tensor, what: str) -> None:
        """Fill in the parts of `whole`, bytes of the host, that the other members of `group` hold."""
        members = self.members(group)
        each = whole.numel() // len(members)
        begin = each * self.position(group)
        with self._roll.naming(members, what):
            _all_gather(whole, whole[begin : begin + each], group=self._groups[group])

    def spread(self, group: str, owner: int, tensor: Tensor, what: str) -> None:
        """Fill `tensor`, bytes of the host, with that of rank `owner`, on all members of a pipeline."""
        self._messages(group).spread(owner, tensor, what)

    def first_does(self, action: Callable[[], Any], what: str) -> Any:
        """Let rank 0 do something while the others wait, however long it takes, and return what came of it there.

        A rank 0 that does not show a sign of life for the timeout is given up.
        """
        self._marks += 1
        key = f"zosim/first/{self._marks}"
        if self.world_size == 1:
            return action()
        store = default_store()
        if self.is_first:
            with beating(store, key, self.timeout_s / 8):
                result = action()
            store.set(f"{key}/done", "1")
            return result
        with self._roll.naming((0,), what):
            wait_while_beating(store, key, self.timeout_s)
        return None


def _all_gather(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None) -> None:
    # Newer versions of torch warn about the older name.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(gathered, own, group=group)


def _host_backend() -> str:
    return "fake" if dist.get_backend() == "fake" else shared_gloo()


def _tensor_of(payload: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.zeros(0, dtype=torch.uint8)
    )


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def default_communicator(
    groups: Groups, device_type: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Communicator | None:
    """Return this rank among the ranks of `groups`; None for a rank alone.

    Raises
    ------
    RunError
        If the plan has several ranks, and this process is alone.
    """
    world_size = sum(map(len, groups.get(WORLD, ((0,),))))
    if world_size == 1:
        return None
    if not is_launched() and not dist.is_initialized():
        raise RunError(
            f"the plan has {world_size} ranks, and this process is alone",
            hint="`zosim run` starts the ranks of a host; a loop of one's own is started by torchrun",
        )
    return Communicator(groups, device_type=device_type, timeout_s=timeout_s)
