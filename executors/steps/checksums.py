"""Checksums of a rank's weights, taken as a program changes them, and carried along with what it copies.

A program says of every instruction which bytes it writes. Weights whose bits are not those that the last of these
instructions left were changed by something else: a fault of the memory, or a stray write. Such a change stays in the
weights for good, and where no other rank holds them too, nothing else would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executors.steps.buffers import BufferStore
from executors.steps.frames import StepFrame
from executors.steps.ops.operands import Action
from executors.steps.streams import Backend
from zosim.program import Program
from zosim.program.contents import FrozenWeights, ParamGroupWeights
from zosim.program.instructions import Access, Instruction, Phase
from zosim.program.operations import Cast, Collective, Copy, Perturb, Update

_FACTOR = 6364136223846793005
"""Odd, so that the checksum of an earlier step never drops out of the number that it went into."""

_FEW = 1 << 14
"""Words of a checksum that have a weight each."""
_COLUMNS, _ROWS = 256, 512
"""Of the rectangle that more words are laid out in, and of the chunk of it that is read at a time: 1 MiB."""

_NEVER = torch.iinfo(torch.int64).max

AT_REST = "at rest"

Location = tuple[str, int, str]
"""Buffer, first byte, and name of the weights there."""


@dataclass(frozen=True, order=True)
class Disturbance:
    """Weights that something else than an instruction of this rank changed."""

    step: int  # in which that was noticed
    # Instruction that read other bits than were left for it, with its part; :data:`AT_REST` after a flush.
    where: str
    what: str  # name of the weights
    share: str = ""  # group among whose members the weights are shared out; empty where they are not
    position: int = 0  # place in that group of the member whose share was changed


class WeightChecksums:
    """Checksums of the weights that one rank holds, verified where the rank changes them next.

    `every_change`: whether a checksum is taken after every change. Otherwise only copies that ranks share have one, from an
    offload to the first change after the next upload.

    The checksum is a weighted sum of the bits as 64-bit integers, modulo 2^64 (:func:`bit_sum`). One changed bit always changes
    it, and so do words that change places. Weights that are shared out have one for each share, since each share has one writer.
    With `every_change`, a change in place reads the weights twice more: before, and after. Nothing is read back from a device
    before :meth:`disturbances`.
    """

    def __init__(
        self, program: Program, store: BufferStore, backend: Backend, *, every_change: bool = False
    ) -> None:
        self._store = store
        self._backend = backend
        self._every_change = every_change
        self._shared = {buffer.name for buffer in program.buffers if buffer.shared}
        self._kept: Kept = {}
        self._initial = [access for access in program.initial if store.is_weights(access)]
        self._at_rest = [access for access in program.final if store.is_weights(access)]
        self._num_shares = {
            _name(access): program.process_groups[access.share] for access in self._at_rest if access.share
        }
        self._share_of = {_name(access): access.share for access in self._at_rest}
        self._checksums: dict[Location, Tensor] = {}
        # By instruction and weights: the first step in which each share had other bits.
        self._first: dict[tuple[str, str], Tensor] = {}
        # Of every block that left its staging buffer for a copy that ranks share, as this rank computed it.
        leaving = [a for a in self._at_rest if a.share and isinstance(a.what, ParamGroupWeights)]
        self._left = {_name(a): torch.zeros((), dtype=torch.int64, device=backend.device) for a in leaving}

    def begin(self) -> None:
        """Take checksums of what the first step reads, once the weights are loaded."""
        for access in self._initial:
            if self._every_change or access.buffer in self._shared:
                self._checksums[_location(access)] = self._checksum(access)

    def watched(self, phase: Phase, instruction: Instruction, action: Action) -> Action:
        """Return `action` with checksums around it: carried by what copies weights, verified and taken by what changes them."""
        op = instruction.op
        if isinstance(op, Copy | Collective):
            return self._carrying(instruction, action)
        if not isinstance(op, Perturb | Update | Cast):
            return action
        written = [access for access in instruction.writes if self._store.is_weights(access)]
        read = [access for access in instruction.reads if self._store.is_weights(access)]
        if not isinstance(
            op, Cast
        ):  # a point that is written to another place leaves the weights as they are
            read = [access for access in read if _location(access) in map(_location, written)]
        if not read:
            return action
        where = f"{phase}/{instruction.id}"

        def change(frame: StepFrame) -> None:
            for access in read:
                self._verify(access, where, frame.step)
            action(frame)
            # Without `every_change`, weights in a staging buffer have no checksum from their first change to their offload.
            for access in written:
                if self._every_change:
                    self._checksums[_location(access)] = self._checksum(access)
                else:
                    self._checksums.pop(_location(access), None)

        return change

    def _carrying(self, instruction: Instruction, action: Action) -> Action:
        pairs = list(zip(instruction.reads, instruction.writes, strict=True))
        if not all(self._store.is_weights(access) for pair in pairs for access in pair):
            return action

        def carry(frame: StepFrame) -> None:
            for read, write in pairs:
                # Taken before the copy, so that bits which change on the way are noticed by whoever reads the copy.
                checksum = self._checksums.get(_location(read))
                if checksum is None and write.buffer in self._shared:
                    checksum = self._checksum(read)
                if checksum is None:
                    continue
                self._checksums[_location(write)] = checksum
                if write.buffer in self._shared and _name(write) in self._left:
                    # A polynomial of the checksums, so that their order counts, too.
                    self._left[_name(write)].mul_(_FACTOR).add_(self._backend.borrow(checksum).sum())
            action(frame)

        return carry

    def sums(self) -> dict[str, int]:
        """Return by name the checksum of what this rank holds for itself, and of all that it wrote to copies that ranks share.

        After a flush. Ranks that hold the same weights and computed the same have the same.
        """
        own = {_name(access): self._checksum(access) for access in self._at_rest if not access.share}
        return {what: int(total.sum()) for what, total in {**self._left, **own}.items()}

    def disturbances(self, num_steps: int | None = None) -> list[Disturbance]:
        """Return what else than this rank's instructions changed the weights, the earliest first.

        `num_steps`: steps behind the weights, which are then looked at where they lie; only after a flush.
        """
        if num_steps is not None:
            for access in self._at_rest:
                self._verify(access, AT_REST, num_steps)
        return sorted(
            Disturbance(step, where, what, self._share_of.get(what, ""), position)
            for (where, what), steps in self._first.items()
            for position, step in enumerate(steps.tolist())
            if step != _NEVER
        )

    def _verify(self, access: Access, where: str, step: int) -> None:
        expected = self._checksums.get(_location(access))
        if expected is None:
            return
        present = self._checksum(access)
        # Of a device, waiting for the answer would hold up the stream.
        if present.device.type == "cpu" and torch.equal(present, expected):
            return
        first = self._first.get((where, _name(access)))
        if first is None:
            first = self._first[where, _name(access)] = torch.full_like(present, _NEVER)
        is_other = present != self._backend.borrow(expected)
        # On the device, where the earliest step wins without the host.
        torch.minimum(first, torch.where(is_other, step, _NEVER), out=first)

    def _checksum(self, access: Access) -> Tensor:
        """Return one checksum for each share of some weights, on the device also of those that lie on the host."""
        sums = bit_sum(self._store.whole(access), self._num_shares.get(_name(access), 1), self._kept)
        return sums.to(self._backend.device)


def bit_sum(raw: Tensor, num_shares: int = 1, kept: Kept | None = None) -> Tensor:
    """Return a checksum of each of equal shares of some bytes: sums of their bits as 64-bit integers, weighted by place.

    Few words have a weight each. Many lie in rows of :data:`_COLUMNS`. The word in row ``i`` and column ``j`` counts ``cⱼ + uᵢ``
    times, modulo 2^64, so sums of rows and of columns are enough. All weights are odd: one bit always changes the sum. They
    are random: so do two words that change places, unless they agree in all but their highest bits. Of pairs that differ in
    bit ``b`` and in no lower one, one in 2^(63 - b) goes unnoticed.
    """
    words = raw.view(torch.int64)
    kept = {} if kept is None else kept
    if num_shares == 1:
        return _weighted(words, kept).view(1)
    # A share has a weight of its own, too, since sums of shares are added up.
    weights = _weights(num_shares, words.device, kept)
    return torch.stack([_weighted(phase, kept) for phase in words.view(num_shares, -1)]) * weights


def _weighted(words: Tensor, kept: Kept) -> Tensor:
    num, device = words.numel(), words.device
    if num <= _FEW:
        return _dot(words, _weights(num, device, kept))
    rows = words[: num // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    # Of a CPU, both sums read a chunk from its cache, one after the other.
    chunks = rows.split(_ROWS) if device.type == "cpu" else (rows,)
    sums = [(chunk.sum(0), chunk.sum(1)) for chunk in chunks]
    of_columns = sums[0][0] if len(sums) == 1 else torch.stack([each for each, _ in sums]).sum(0)
    of_rows = sums[0][1] if len(sums) == 1 else torch.cat([each for _, each in sums])
    total = _dot(of_columns, _weights(_COLUMNS, device, kept))
    total += _dot(of_rows, _weights(rows.shape[0], device, kept, less=1))
    rest = words[rows.numel() :]
    return total + _dot(rest, _weights(_FEW, device, kept)[: rest.numel()]) if rest.numel() else total


def _dot(words: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of products modulo 2^64; on a CPU without a temporary, which CUDA has no integer kernel for."""
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


Kept = dict[tuple[int, int, int], Tensor]
"""Weights by their number, what they are less, and the stream that made them."""


def _weights(num: int, device: torch.device, kept: Kept, less: int = 0) -> Tensor:
    """Return odd numbers, or such less 1, the same in every process, made once."""
    # Each stream has its own: nothing would order one that reads them behind the copy that another issued.
    # The default stream of a device is number 0: a host's weights are of none.
    stream = -1 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    key = num, less, stream
    if key not in kept:
        sampled = torch.randint(-(2**62), 2**62, (num,), generator=torch.Generator().manual_seed(num))
        kept[key] = (2 * sampled + 1 - less).to(device)
    return kept[key]


def _location(access: Access) -> Location:
    return access.buffer, access.offset_bytes, _name(access)


def _name(access: Access) -> str:
    """Return the name of weights, wherever they have been perturbed to."""
    what = access.what
    assert isinstance(what, ParamGroupWeights | FrozenWeights)
    return what.param_group if isinstance(what, ParamGroupWeights) else str(what)
