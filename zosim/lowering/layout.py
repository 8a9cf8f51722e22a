"""Where in which buffer everything of a step lies, and how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from costmodel.forward import activation_bytes
from costmodel.model_spec import EMBED, HEAD, ModelSpec, ParameterGroup, block_index
from costmodel.work import DTYPE_BYTES
from zosim.instructions import Access
from zosim.lowering.messages import most_message_bytes
from zosim.lowering.walk import drawn_late
from zosim.plans import Plan

ALIGNMENT_BYTES = 64
"""Every tensor of a bucket starts at a multiple of this: misaligned weights change the bits of a product."""

RNG_STATE_BYTES = 5056
"""State of torch's CPU generator (a CUDA generator's is smaller)."""

NUM_RNG_MARKS = 8
"""States that a walk over a group keeps on its way, so that as many threads can draw the group again."""

SHARED_DRAW_ELEMENTS = 1 << 16
"""Groups of at least this many elements keep such states, and are drawn again by several threads at once."""

JUMP_WORDS = 1 << 19
"""Random words that a CPU's generator passes over in the time that a jump takes, or a longer one."""

COUNTER_BLOCK_ELEMENTS = 1 << 14
"""Normals on a CPU that one generator of the ``counter`` discipline makes."""

COUNTER_SIGN_BLOCKS = 32
"""How many times as many signs it makes."""

Side = Literal["in", "out", "here"]
"""Where a message comes from or goes to: the stage before, the next one, or this one."""

SCALAR_BYTES = 8
DIRECTIONS = "directions"
ROWS = "direction_rows"
LOSS_BYTES = 16
"""A loss and the number of labels that it is the mean over."""
LOSSES = "losses"
OWN_LOSSES = "losses.own"
PACKED_LOSSES = "losses.packed"
GATHERED_LOSSES = "losses.gathered"
GRADIENTS = "projected_gradients"
BATCH = "batch"
COPY = "copy"
WALK = "rng"


def bucket_bytes(num_elements: int, num_tensors: int, dtype: str) -> int:
    """Return the most that `num_tensors` aligned tensors of `num_elements` together can take."""
    if num_elements == 0:
        return 0
    size = num_elements * DTYPE_BYTES[dtype] + num_tensors * (ALIGNMENT_BYTES - 1)
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Layout:
    """Names, sizes and ranges of one rank's buffers.

    A group's bucket holds its frozen tensors first, then the trainable ones, each part aligned. Where ranks share
    blocks out, each part is as long as makes equal, aligned shares.
    """

    plan: Plan
    rank: int = 0

    @property
    def model(self) -> ModelSpec:
        """The model that is tuned."""
        return self.plan.model

    @cached_property
    def own_points(self) -> tuple[str, ...]:
        """Evaluation points that this rank forwards."""
        return self.plan.points_of(self.rank)

    @cached_property
    def num_sequences(self) -> int:
        """Sequences that this rank forwards at each of its points."""
        return len(self.plan.rows_of(self.rank))

    @property
    def num_tokens(self) -> int:
        """Tokens of these sequences, padding included."""
        return self.num_sequences * self.plan.seq

    @property
    def share(self) -> str:
        """Group that shares blocks out; empty if every rank has its own copy of all."""
        return self.plan.residency.share_group if self.plan.is_shared_out else ""

    @cached_property
    def num_shares(self) -> int:
        """Members of that group."""
        return len(self.plan.groups[self.share][0]) if self.share else 1

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Segments that this rank runs."""
        return self.plan.segments_of(self.rank)

    @cached_property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """Parameter groups that this rank holds, in registration order."""
        own = set(self.segments)
        return tuple(group for group in self.model.groups if own & set(group.segments))

    @cached_property
    def kept_states(self) -> tuple[ParameterGroup, ...]:
        """Groups before which the ``mezo`` generator's state is kept, because they are drawn (again) behind others."""
        trainable = tuple(group for group in self.groups if group.num_trainable)
        if not self.plan.directions.kept:
            return trainable
        late = {group.name for group in drawn_late(self.plan, self.segments)}
        return tuple(group for group in trainable if group.name in late)

    def readers(self, group: ParameterGroup) -> tuple[str, ...]:
        """Return the segments of this rank that read `group`."""
        return self._readers[group.name]

    @cached_property
    def _readers(self) -> dict[str, tuple[str, ...]]:
        own = frozenset(self.segments)
        return {group.name: tuple(s for s in group.segments if s in own) for group in self.model.groups}

    def shared_out(self, accesses: Iterable[Access]) -> tuple[Access, ...]:
        """Return this rank's shares of `accesses`, or all of them where nothing is shared out."""
        return tuple(replace(access, share=self.share) for access in accesses)

    def is_edge(self, segment: str) -> bool:
        """Whether `segment` is the embedding or the head."""
        return segment in (EMBED, HEAD)

    def is_offloaded(self, group: ParameterGroup) -> bool:
        """Whether `group` lives on the host."""
        residency = self.plan.residency
        place = residency.edges if self.is_edge(group.segments[0]) else residency.blocks
        return place == "offloaded"

    def is_delayed(self, group: ParameterGroup) -> bool:
        """Whether the update of `group` waits for its turn in the next step."""
        return self.plan.schedule.update == "delayed" and not self.is_edge(group.segments[0])

    def home(self, group: ParameterGroup) -> str:
        """Return the buffer that holds `group` between steps."""
        return f"{'host' if self.is_offloaded(group) else 'device'}.{group.name}"

    def slot(self, segment: str) -> str:
        """Return the device slot that an offloaded `segment` passes through."""
        if self.is_edge(segment):
            return "slot.edge"
        return f"slot.{block_index(segment) % self.plan.residency.num_slots}"

    def staging(self, segment: str) -> str:
        """Return the device buffer in which a slot's contents cross the bus in another format."""
        return self.slot(segment).replace("slot", "staging")

    def place(self, group: ParameterGroup, segment: str) -> str:
        """Return the device buffer in which `segment` finds `group` at its turn."""
        return self.slot(segment) if self.is_offloaded(group) else self.home(group)

    def trainable(
        self, group: ParameterGroup, buffer: str, step: int, point: str = "", dtype: str | None = None
    ) -> Access:
        """Return the access to the trainable part of `group` in `buffer`."""
        dtype = dtype or self.plan.weights.dtype
        size = self.trainable_bytes(group, dtype)
        offset = self._frozen_bytes(group, dtype)
        return Access(buffer, group.name, step, size, point, offset + self._offset_in(buffer, group, dtype))

    def frozen(self, group: ParameterGroup, buffer: str, dtype: str | None = None) -> tuple[Access, ...]:
        """Return the access to the frozen part of `group` in `buffer`, if it has one."""
        dtype = dtype or self.plan.weights.dtype
        size = self._frozen_bytes(group, dtype)
        offset = self._offset_in(buffer, group, dtype)
        return (Access(buffer, f"{group.name}:frozen", None, size, "", offset),) if size else ()

    def weights(
        self, group: ParameterGroup, buffer: str, step: int, point: str = "", dtype: str | None = None
    ) -> tuple[Access, ...]:
        """Return the accesses to all of `group` in `buffer`."""
        trainable = (self.trainable(group, buffer, step, point, dtype),) if group.num_trainable else ()
        return (*self.frozen(group, buffer, dtype), *trainable)

    def group_bytes(self, group: ParameterGroup, dtype: str) -> int:
        """Return the bytes of the bucket of `group`."""
        return self._frozen_bytes(group, dtype) + self.trainable_bytes(group, dtype)

    def direction(
        self,
        group: ParameterGroup,
        query: int,
        step: int,
        *,
        offset_bytes: int,
        rows: bool = False,
        suffix: str = "",
    ) -> Access:
        """Return the access to the direction of `group`, or to the rows of it that the batch names.

        A direction that is kept has a buffer of its own, and whoever wants rows of it finds them there.
        """
        kept = self.plan.directions.kept
        if rows and not kept:
            size = self.rows_bytes
            return Access(ROWS, f"z:{group.name}:rows", step, size, f"q{query}", query * size)
        buffer, offset = (kept_direction(group, query), 0) if kept else (DIRECTIONS, offset_bytes)
        size = self.direction_bytes(group)
        return Access(buffer, f"z:{group.name}", step, size, f"q{query}{suffix}", offset)

    @property
    def is_swept(self) -> bool:
        """Whether all parameters are at one point together."""
        return self.plan.schedule.traversal == "sweep"

    @cached_property
    def num_copies(self) -> int:
        """Copies of a group that exist at one time, each at another point."""
        perturbed = [point for point in self.own_points if point]
        if self.plan.weights.perturbation == "serial" or not perturbed:
            return 0
        if not self.is_swept:
            return 2 if self.plan.directions.drawn_ahead else 1
        of_query = max(Counter(point[:-1] for point in perturbed).values())
        return min(len(perturbed), 2) if self.plan.directions.drawn_ahead else of_query

    def copy(self, group: ParameterGroup, segment: str, point: str, number: int) -> Access:
        """Return the access to the copy of `group` at `point` in one of the buffers for them."""
        dtype = self.plan.weights.dtype
        copied = self.copied(segment)
        before = copied[: copied.index(group)]
        offset = sum(self.trainable_bytes(other, dtype) for other in before)
        size = self.trainable_bytes(group, dtype)
        return Access(f"{COPY}.{number}", group.name, 0, size, point, offset)

    def takes_turns(self, segment: str) -> bool:
        """Whether copies of `segment` go into all of the buffers: embedding and head, often larger than a block, into one."""
        return self.is_swept or not self.is_edge(segment)

    def copied(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return the groups that are at a point together: those of a segment, or under a sweep all."""
        read = self.groups if self.is_swept else self.model.groups_of(segment)
        return tuple(group for group in read if group.num_trainable and not self.gathers(group, segment))

    def direction_bytes(self, group: ParameterGroup) -> int:
        """Return the bytes of a direction of `group`."""
        return bucket_bytes(group.num_trainable, group.num_trainable_tensors, self.plan.weights.dtype)

    @property
    def draws_in_halves(self) -> bool:
        """Whether a block's direction is drawn while that of the block before is used: by another stream."""
        return self.plan.directions.drawn_ahead and self.plan.weights.perturbation == "serial"

    @cached_property
    def block_direction_bytes(self) -> int:
        """Bytes of the largest direction of any block, or of the parts of one that are at hand together."""
        blocks = (segment for segment in self.segments if not self.is_edge(segment))
        return max((self.segment_direction_bytes(segment) for segment in blocks), default=0)

    def hidden(self, point: str, segment: str) -> Access:
        """Return the access to the hidden state that `segment` leaves at `point`."""
        buffer = f"hidden.{point or 'base'}"
        return Access(buffer, f"{segment}:out", 0, self.hidden_bytes(segment), point)

    def wire(self, point: str, cut: int, side: Side) -> Access:
        """Return the access to the message that crosses cut number `cut` at `point`, of the largest size it can have."""
        size = most_message_bytes(self.plan, cut, self.num_sequences)
        return Access(f"wire.{side}.{point or 'base'}", f"cut.{cut}:message", 0, size, point)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.plan.mesh.coordinates(self.rank).stage

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.plan.mesh.stage - 1

    def loss(self, point: str) -> Access:
        """Return the access to the loss at `point`."""
        return Access(LOSSES, "loss", 0, SCALAR_BYTES, point, SCALAR_BYTES * self.plan.points.index(point))

    def own_loss(self, point: str) -> Access:
        """Return the access to this rank's loss at `point`, with the labels that it is the mean over."""
        offset = LOSS_BYTES * self.own_points.index(point)
        return Access(OWN_LOSSES, "loss:own", 0, LOSS_BYTES, point, offset)

    def packed_losses(self) -> Access:
        """Return the access to this rank's losses at all points, those that others forward left empty."""
        return Access(PACKED_LOSSES, "losses", 0, LOSS_BYTES * len(self.plan.points))

    def gathered_losses(self) -> Access:
        """Return the access to all ranks' losses at all points, in rank order."""
        size = LOSS_BYTES * len(self.plan.points) * self.plan.placement.world_size
        return Access(GATHERED_LOSSES, "losses:gathered", 0, size)

    def gradient(self, query: int, step: int) -> Access:
        """Return the access to the projected gradient of `query`."""
        return Access(GRADIENTS, "g", step, SCALAR_BYTES, f"q{query}", SCALAR_BYTES * query)

    def batch(self) -> Access:
        """Return the access to the batch."""
        return Access(BATCH, "batch", 0, 3 * 8 * self.num_tokens)

    def rng_before(self, group: ParameterGroup, query: int, step: int) -> Access:
        """Return the access to the kept generator states before `group` and on the way through it."""
        size = NUM_RNG_MARKS * RNG_STATE_BYTES
        return Access(f"rng.{group.name}.q{query}", f"rng:{group.name}", step, size, f"q{query}")

    def rng_after(self, group: ParameterGroup, query: int) -> Access:
        """Return the access to the running generator state after `group`."""
        return Access(f"{WALK}.q{query}", f"rng:{group.name}+", 0, RNG_STATE_BYTES, f"q{query}")

    def _frozen_bytes(self, group: ParameterGroup, dtype: str) -> int:
        return self._bucket(group, dtype)[0]

    def trainable_bytes(self, group: ParameterGroup, dtype: str) -> int:
        """Return the bytes of the trainable part of the bucket of `group`."""
        return self._bucket(group, dtype)[1]

    def _bucket(self, group: ParameterGroup, dtype: str) -> tuple[int, int]:
        """Return the bytes of the frozen and of the trainable part of the bucket of `group`, counted once."""
        key = group.name, dtype
        if key not in self._buckets:
            num_frozen = group.num_parameters - group.num_trainable
            frozen = bucket_bytes(num_frozen, group.num_tensors - group.num_trainable_tensors, dtype)
            trainable = bucket_bytes(group.num_trainable, group.num_trainable_tensors, dtype)
            # With room for equal, aligned shares, where the group is shared out.
            unit = ALIGNMENT_BYTES * (self.num_shares if self.is_offloaded(group) else 1)
            self._buckets[key] = -(-frozen // unit) * unit, -(-trainable // unit) * unit
        return self._buckets[key]

    @cached_property
    def _buckets(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {}

    def _offset_in(self, buffer: str, group: ParameterGroup, dtype: str) -> int:
        """Return where `group` starts in `buffer`: behind its neighbours in a shared slot, else at 0."""
        if not buffer.startswith(("slot.", "staging.")):
            return 0
        offset = 0
        for neighbour in self.model.groups_of(group.segments[0]):
            if neighbour.name == group.name:
                break
            offset += self.group_bytes(neighbour, dtype) if self.is_offloaded(neighbour) else 0
        return offset

    def hidden_bytes(self, segment: str) -> int:
        """Return the bytes of what `segment` leaves at one point."""
        return activation_bytes(
            self.model,
            batch=self.num_sequences,
            seq=self.plan.seq,
            dtype=self.plan.compute_dtype,
            segment=segment,
        )

    @cached_property
    def rows_bytes(self) -> int:
        """Bytes of the rows of a direction that the batch names."""
        return self.num_tokens * self.model.embed_dim * DTYPE_BYTES[self.plan.weights.dtype]

    def segment_direction_bytes(self, segment: str) -> int:
        """Return the bytes of the directions of `segment` that are at hand together."""
        sizes = [
            self.direction_bytes(g) for g in self.model.groups_of(segment) if not self.gathers(g, segment)
        ]
        return (max if self.is_swept else sum)(sizes or [0])

    def gathers(self, group: ParameterGroup, segment: str) -> bool:
        """Whether `segment` reads `group` through gathered rows, because a later segment needs it unperturbed."""
        readers = self.readers(group)
        return not self.is_swept and group.num_trainable > 0 and len(readers) > 1 and segment == readers[0]


def kept_direction(group: ParameterGroup, query: int) -> str:
    """Return the buffer in which a direction stays from its draw to its update."""
    return f"{DIRECTIONS}.{group.name}.q{query}"
