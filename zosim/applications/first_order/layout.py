"""Which buffers a first-order step takes, and what lies where in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from costmodel.formats import DType
from costmodel.models.backward import kept_bytes, optimizer_bytes
from costmodel.models.forward import activation_bytes, shared_activation_bytes
from costmodel.models.model_spec import EMBED, HEAD, ParamGroup
from zosim.applications.first_order.settings import FirstOrder, num_kept_at_once
from zosim.lowering.buckets import alignment_of, bucket_bytes
from zosim.lowering.split import most_message_bytes
from zosim.plans import Plan
from zosim.program.contents import BATCH, Named, ParamGroupWeights
from zosim.program.instructions import Access, Buffer, Instruction, Space

Phase = Literal["forward", "backward"]
Side = Literal["in", "out"]

ID_BYTES = 3 * 8
_LOSS_BYTES = 8
_NUM_WIRES = 2


@dataclass(frozen=True)
class FirstOrderLayout:
    """Names, sizes and ranges of one rank's buffers."""

    plan: Plan
    settings: FirstOrder
    rank: int

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.plan.mesh.coordinates(self.rank).stage

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Segments that this rank runs."""
        return self.plan.segments_of(self.rank)

    @cached_property
    def param_groups(self) -> tuple[ParamGroup, ...]:
        """Parameter groups that this rank holds, in registration order."""
        own = set(self.segments)
        return tuple(group for group in self.plan.model.param_groups if own & set(group.segments))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Sequences of each microbatch."""
        num_microbatches = self.settings.num_microbatches
        each, longer = divmod(len(self.plan.rows_of(self.rank)), num_microbatches)
        return tuple(each + (number < longer) for number in range(num_microbatches))

    # -- operands ----------------------------------------------------------------------------------------------

    def weights(self, group: ParamGroup, step: int = 0) -> Access:
        """Return the access to the weights of `group`."""
        return Access(f"device.{group.name}", ParamGroupWeights(group.name), step, self._bucket_bytes(group))

    def gradient(self, group: ParamGroup, left: str) -> Access:
        """Return the access to its gradient, as the backward or sum called `left` leaves it."""
        what = Named(f"grad:{group.name}", left)
        return Access(f"gradient.{group.name}", what, 0, self._bucket_bytes(group))

    def state(self, group: ParamGroup, step: int) -> tuple[Access, ...]:
        """Return the access to the optimizer's state for it, if there is any."""
        num_own = -(-group.num_parameters // self.num_shards)
        size = optimizer_bytes(num_own, self.settings.optimizer, self._dtype)
        return (Access(f"optimizer.{group.name}", Named(f"state:{group.name}"), step, size),) if size else ()

    @cached_property
    def update_copy_bytes(self) -> int:
        """Bytes of the copy that an update makes of one moment, beyond those of the activations whose place it takes.

        What a program takes is counted as if all was there at once, see :func:`~zosim.planning.footprint.footprint`.
        """
        if not self.settings.foreach or self.settings.optimizer != "adam":
            return 0
        copied = sum(
            optimizer_bytes(-(-group.num_parameters // self.num_shards), "momentum")
            for group in self.param_groups
        )
        numbers = range(min(self.num_kept, self.settings.num_microbatches))
        gone = sum(self.kept_bytes(segment, number) for segment in self.segments for number in numbers)
        return max(0, copied - gone)

    def whole(
        self, buffer_type: Literal["gathered", "summand"], group: ParamGroup, buffer: int, left: str
    ) -> Access:
        """Return the access to all replicas' shares of a group's weights, or to a gradient before it is shared out."""
        size = bucket_bytes(
            group.num_parameters, group.num_tensors, self.plan.compute_dtype, alignment_of(self.plan)
        )
        return Access(f"{buffer_type}.{buffer}", Named(f"{group.name}:{buffer_type}", left), 0, size)

    def kept(self, segment: str, number: int) -> tuple[Access, ...]:
        """Return the access to what the forward of `segment` keeps for its backward, if anything."""
        size, buffer = self.kept_bytes(segment, number), number % self.num_kept
        what = Named(f"{segment}:kept", f"m{number}")
        return (Access(f"kept.{segment}.{buffer}", what, 0, size),) if size else ()

    def kept_bytes(self, segment: str, number: int) -> int:
        """Return the bytes of that."""
        if self.recomputes(segment):
            return self._handed_bytes(self.before(segment), number)
        return self.computed_bytes(segment, number)

    def recomputes(self, segment: str) -> bool:
        """Whether the forward of `segment` is run again before its backward."""
        return self.settings.recompute and segment not in (EMBED, HEAD)

    def computed_bytes(self, segment: str, number: int) -> int:
        """Return the bytes that a forward makes which its backward needs, kept or not."""
        return kept_bytes(
            self.plan.model,
            segment,
            batch=self.rows[number],
            seq=self.plan.seq,
            dtype=self.plan.compute_dtype,
            attention=self.plan.forward.attention,
            dropout=self.settings.dropout,
        )

    def hidden(self, segment: str, number: int) -> Access:
        """Return the access to the hidden state that `segment` leaves."""
        return Access(
            "hidden", Named(f"{segment}:hidden", f"m{number}"), 0, self._handed_bytes(segment, number)
        )

    def hidden_gradient(self, segment: str, number: int) -> Access:
        """Return the access to the gradient of that hidden state."""
        size = self._handed_bytes(segment, number)
        return Access("hidden.gradient", Named(f"{segment}:hidden:gradient", f"m{number}"), 0, size)

    def _handed_bytes(self, segment: str, number: int) -> int:
        return activation_bytes(
            self.plan.model,
            batch=self.rows[number],
            seq=self.plan.seq,
            dtype=self.plan.compute_dtype,
            segment=segment,
        )

    def wire(self, phase: Phase, side: Side, number: int) -> Access:
        """Return the access to a message, of the largest size that it can have."""
        is_next = (phase == "forward") == (side == "out")
        boundary = self.stage if is_next else self.stage - 1
        size = most_message_bytes(self.encoded(phase), boundary, self.rows[number])
        what = Named(f"boundary.{boundary}:{phase}", f"m{number}")
        return Access(f"wire.{phase}.{side}.{number % self.num_wires}", what, 0, size)

    def known(self, side: Side, number: int) -> tuple[Access, Access]:
        """Return where the last messages of a microbatch's samples are on the host, and on the device."""
        boundary = self.stage if side == "out" else self.stage - 1
        width = self._width_of(boundary)
        begin, size = sum(self.rows[:number]) * width, self.rows[number] * width
        host = Access(f"messages.{side}", Named(f"messages.{side}:samples"), None, size, begin)
        what = Named(f"known.{side}:message", f"m{number}")
        return host, Access(f"known.{side}.{number % self.num_wires}", what, 0, size)

    def _width_of(self, boundary: int) -> int:
        """Return the bytes of one sample's activation at a split point."""
        first = self.plan.mesh.pipelines[0]
        segment = self.plan.segments_of(first[boundary])[-1]
        return activation_bytes(
            self.plan.model, batch=1, seq=self.plan.seq, dtype=self.plan.compute_dtype, segment=segment
        )

    def loss(self, number: int) -> Access:
        """Return the access to the loss of a microbatch."""
        return Access("losses", Named("microbatch:loss", f"m{number}"), 0, _LOSS_BYTES, _LOSS_BYTES * number)

    @property
    def batch(self) -> Access:
        """The access to the batch."""
        return Access("batch", BATCH, 0, ID_BYTES * sum(self.rows) * self.plan.seq)

    # -- buffers -----------------------------------------------------------------------------------------------

    def at_rest(self) -> Iterator[Access]:
        """Yield what is there between steps."""
        for group in self.param_groups:
            yield self.weights(group)
            yield from self.state(group, 0)
        for side in self.sides if self.keeps("forward") else ():
            for number in range(self.settings.num_microbatches):
                yield self.known(side, number)[0]

    def buffers(self, instructions: Iterable[Instruction]) -> tuple[Buffer, ...]:
        """Return all buffers, each as large as the largest of what instructions put into it."""
        sizes: dict[str, int] = {}
        for instruction in instructions:
            for access in (*instruction.reads, *instruction.writes):
                sizes[access.buffer] = max(sizes.get(access.buffer, 0), access.end_bytes)
        for side in self.sides if self.keeps("forward") else ():
            boundary = self.stage if side == "out" else self.stage - 1
            least = self.settings.num_kept_samples * self._width_of(boundary) // self.num_replicas
            sizes[f"messages.{side}"] = max(sizes[f"messages.{side}"], least)
        return (*(self._buffer(name, size) for name, size in sizes.items()), *self._shared_buffers())

    def _buffer(self, name: str, size: int) -> Buffer:
        role, space, dtype, dynamic = _ROLES[name.split(".", maxsplit=1)[0]]
        return Buffer(name, space, size, role, dtype or self._dtype, dynamic=dynamic)

    def _shared_buffers(self) -> Iterator[Buffer]:
        size = shared_activation_bytes(
            self.plan.model,
            batch=max(self.rows),
            seq=self.plan.seq,
            dtype=self.plan.compute_dtype,
            attention=self.plan.forward.attention,
        )
        if size:
            yield Buffer("shared", Space.DEVICE, size, "activations", self._dtype)

    def _bucket_bytes(self, group: ParamGroup) -> int:
        num_own = -(-group.num_parameters // self.num_shards)
        return bucket_bytes(num_own, group.num_tensors, self._dtype, alignment_of(self.plan))

    # -- places ------------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.plan.num_stages - 1

    @property
    def sides(self) -> tuple[Side, ...]:
        """Which sides of this stage have a split point."""
        return (*(("in",) if self.stage else ()), *(() if self.is_last else ("out",)))

    @property
    def num_replicas(self) -> int:
        """Ranks of this stage."""
        return self.plan.num_batch_shards

    @property
    def num_shards(self) -> int:
        """Replicas among whom weights, gradients and the optimizer's state are shared out; 1 if they are not."""
        return self.num_replicas if self.settings.sharding == "full" else 1

    @property
    def num_wires(self) -> int:
        """Messages of one phase that the stage holds at one time."""
        return min(_NUM_WIRES, self.settings.num_microbatches)

    @cached_property
    def num_kept(self) -> int:
        """Microbatches whose activations the stage keeps at one time."""
        settings = self.settings
        return num_kept_at_once(
            settings.schedule, settings.num_microbatches, self.plan.num_stages, self.stage
        )

    def before(self, segment: str) -> str:
        """Return the segment before `segment`."""
        segments = self.plan.model.segments
        return segments[segments.index(segment) - 1]

    def is_at_both_ends(self, group: ParamGroup) -> bool:
        """Whether another stage holds the same table."""
        return self.plan.num_stages > 1 and not set(group.segments) <= set(self.segments)

    def reader_of_last_gradient(self, group: ParamGroup) -> str:
        """Return the segment whose backward is the last of this rank's that adds to a gradient."""
        return next(segment for segment in self.segments if segment in group.segments)

    def shape_of(self, number: int) -> dict[str, Any]:
        """Return what a forward or backward of a microbatch is like, as the cost model asks for it."""
        plan = self.plan
        return {
            "batch": self.rows[number],
            "seq": self.plan.seq,
            "dtype": plan.compute_dtype,
            "storage_dtype": plan.compute_dtype
            if self.num_shards > 1
            else "tf32"
            if plan.compute_dtype == "tf32"
            else plan.storage_dtype,
            "attention": self.plan.forward.attention,
        }

    def keeps(self, phase: Phase) -> bool:
        """Whether last messages are kept of what crosses in that phase."""
        return phase == "forward" and self.settings.num_kept_samples > 0

    def encoded(self, phase: Phase) -> Plan:
        """Return the plan with the codec of what crosses in that phase."""
        codec = self.settings.codec_of(phase)
        split = self.plan.split.model_copy(update={"codec": codec, "residual_codec": codec})
        return self.plan.model_copy(update={"split": split})

    @property
    def _dtype(self) -> DType:
        return self.plan.storage_dtype


_ROLES: dict[str, tuple[str, Space, str, bool]] = {
    "device": ("weights", Space.DEVICE, "", False),
    "gradient": ("gradients", Space.DEVICE, "", False),
    "gathered": ("gathered weights", Space.DEVICE, "", True),
    "summand": ("whole gradients", Space.DEVICE, "", True),
    "optimizer": ("optimizer state", Space.DEVICE, "float32", False),
    "kept": ("activations", Space.DEVICE, "", True),
    "hidden": ("activations", Space.DEVICE, "", True),
    "wire": ("messages", Space.DEVICE, "uint8", True),
    "known": ("messages", Space.DEVICE, "", True),
    "messages": ("kept messages", Space.HOST, "", False),
    "batch": ("batch", Space.DEVICE, "int64", False),
    "losses": ("scalars", Space.DEVICE, "float64", False),
}
"""Role, place, format (that of the weights if empty) and whether it comes and goes, by the first part of a name."""
