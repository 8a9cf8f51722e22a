"""The residency axis: where parameters lie between their uses, and how those of the host come to the device and go back.

A block of OPT-125M in float32, which passes through one of three staging buffers: 7,087,872 numbers of 4 bytes, of whose 16 tensors each
may start up to 63 bytes late to be aligned, together a multiple of 64 bytes.

>>> from costmodel import read_model_spec
>>> from zosim.plans import Placement, Plan, Residency
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> plan = Plan(
...     model=read_model_spec("opt-125m"),
...     batch=1,
...     seq=16,
...     placement=placement,
...     residency=Residency(blocks="offloaded"),
... )
>>> listing = Listing()
>>> Homes(Rank(plan), listing).upload("block.4")
>>> (upload,) = listing.instructions
>>> for access in (*upload.reads, *upload.writes):
...     print(access.buffer, access.what, access.offset_bytes, access.size_bytes)
host.block.4 block.4 0 28352512
staging.1 block.4 0 28352512
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile

from costmodel.models.model_spec import ParamGroup, block_index
from costmodel.param_passes import cast_work, copy_work
from costmodel.work import Work
from zosim.eval_points import BASE, EvalPoint
from zosim.lowering.buckets import aligned, bucket_bytes
from zosim.lowering.rank import AxisWriter, Listing, Rank, is_embedding_or_head
from zosim.program.contents import FREED, UNSET, FrozenWeights, ParamGroupWeights
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Allocate, Cast, Collective, Copy, Free

_DISK_MOVES = ("read", "write")


class Homes(AxisWriter):
    """Where parameter groups lie, and their uploads and offloads.

    A group's bucket holds its frozen tensors first, then the trainable ones, each part aligned. Where ranks share
    blocks out, each part is as long as makes equal, aligned shares.
    """

    def __init__(self, rank: Rank, listing: Listing) -> None:
        super().__init__(rank, listing)
        self._num_shares = rank.plan.num_shares
        self._buckets: dict[tuple[str, str], tuple[int, int]] = {}
        self._homes: dict[str, str] = {}
        self._offsets: dict[tuple[str, str], int] = {}

    # -- sizes -------------------------------------------------------------------------------------------------

    def trainable_bytes(self, group: ParamGroup, dtype: str) -> int:
        """Return the bytes of the trainable part of the bucket of `group`."""
        return self._bucket(group, dtype)[1]

    def _group_bytes(self, group: ParamGroup, dtype: str) -> int:
        return sum(self._bucket(group, dtype))

    def _bucket(self, group: ParamGroup, dtype: str) -> tuple[int, int]:
        """Return the bytes of the frozen and of the trainable part of the bucket of `group`."""
        key = group.name, dtype
        if key not in self._buckets:
            num_frozen = group.num_parameters - group.num_trainable
            num_frozen_tensors = group.num_tensors - group.num_trainable_tensors
            stay, tuned = self._storage.frozen(group), self._storage.tuned(group)
            alignment_bytes = self._rank.alignment_bytes
            frozen = bucket_bytes(num_frozen, num_frozen_tensors, dtype, alignment_bytes, stay)
            trainable = bucket_bytes(
                group.num_trainable, group.num_trainable_tensors, dtype, alignment_bytes, tuned
            )
            # With space for equal, aligned shares, where the group is shared out.
            unit = alignment_bytes * (self._num_shares if self.is_offloaded(group) else 1)
            self._buckets[key] = aligned(frozen, unit), aligned(trainable, unit)
        return self._buckets[key]

    # -- places ------------------------------------------------------------------------------------------------

    @property
    def share_group(self) -> str:
        """Group that shares blocks out; empty if every rank has its own copy of all."""
        return "host" if self._plan.is_shared_out else ""

    def shares_of(self, accesses: Iterable[Access]) -> tuple[Access, ...]:
        """Return this rank's shares of `accesses`, or all of them where nothing is shared out."""
        return tuple(replace(access, share=self.share_group) for access in accesses)

    def is_offloaded(self, group: ParamGroup) -> bool:
        """Whether `group` lives on the host, or on its drive."""
        segment = group.segments[0]
        if is_embedding_or_head(segment):
            return self._plan.residency.embedding_and_head != "resident"
        return self._offloaded_number(segment) is not None

    def _offloaded_number(self, segment: str) -> int | None:
        """Return the number of the block of `segment` among those that do not stay on the device, if it is one."""
        return self._plan.residency.offloaded(block_index(segment), self._rank.model.num_blocks)

    def _on_disk(self, segment: str) -> int | None:
        """Return the number of the block of `segment` among those on the drive, if it is one."""
        if is_embedding_or_head(segment):
            return None
        return self._plan.residency.on_disk(block_index(segment), self._rank.model.num_blocks)

    def _offloaded(self, segment: str) -> tuple[ParamGroup, ...]:
        return tuple(group for group in self._rank.model.param_groups_of(segment) if self.is_offloaded(group))

    def home(self, group: ParamGroup) -> str:
        """Return the buffer that holds `group` between steps."""
        if group.name not in self._homes:
            self._homes[group.name] = f"{self._space(group)}.{group.name}"
        return self._homes[group.name]

    def _space(self, group: ParamGroup) -> Space:
        if not self.is_offloaded(group):
            return Space.DEVICE
        return Space.HOST if self._on_disk(group.segments[0]) is None else Space.DISK

    def _disk_buffer(self, segment: str, move: str) -> str:
        """Return the host memory by way of which a block on the drive goes to the device, or back."""
        number = self._on_disk(segment)
        assert number is not None
        # Blocks on the drive take turns among themselves: blocks of the host lie in between.
        return f"{move}.{number % self._plan.residency.num_staging_buffers}"

    def staging_buffer(self, segment: str) -> str:
        """Return the staging buffer that an offloaded `segment` passes through."""
        return f"staging.{self._buffer_name(segment)}"

    def transfer_buffer(self, segment: str) -> str:
        """Return the device buffer in which a staging buffer's contents cross the bus in another format."""
        return f"transfer.{self._buffer_name(segment)}"

    def _buffer_name(self, segment: str) -> str:
        # Blocks take turns; embedding and head, a whole step apart from each other, share a staging buffer of their own.
        if is_embedding_or_head(segment):
            return "edge"
        number = self._offloaded_number(segment)
        assert number is not None
        return str(number % self._plan.residency.num_staging_buffers)

    def buffer_of(self, group: ParamGroup, segment: str) -> str:
        """Return the device buffer in which `segment` finds `group` at its turn."""
        return self.staging_buffer(segment) if self.is_offloaded(group) else self.home(group)

    # -- accesses ----------------------------------------------------------------------------------------------

    def trainable(
        self, group: ParamGroup, buffer: str, step: int, what: ParamGroupWeights, dtype: str | None = None
    ) -> Access:
        """Return the access to the trainable part of `group` in `buffer`, in some state."""
        dtype = dtype or self._plan.weights.dtype
        frozen, size = self._bucket(group, dtype)
        return Access(buffer, what, step, size, self._offset_in(buffer, group, dtype) + frozen)

    def frozen(self, group: ParamGroup, buffer: str, dtype: str | None = None) -> tuple[Access, ...]:
        """Return the access to the frozen part of `group` in `buffer`, if it has one."""
        dtype = dtype or self._plan.weights.dtype
        size, _ = self._bucket(group, dtype)
        offset = self._offset_in(buffer, group, dtype)
        return (Access(buffer, FrozenWeights(group.name), None, size, offset),) if size else ()

    def weights(
        self,
        group: ParamGroup,
        buffer: str,
        step: int,
        eval_point: EvalPoint = BASE,
        dtype: str | None = None,
    ) -> tuple[Access, ...]:
        """Return the accesses to all of `group` in `buffer`."""
        frozen = self.frozen(group, buffer, dtype)
        if not group.num_trainable:
            return frozen
        return (
            *frozen,
            self.trainable(group, buffer, step, ParamGroupWeights(group.name, eval_point), dtype),
        )

    def _offset_in(self, buffer: str, group: ParamGroup, dtype: str) -> int:
        """Return where `group` starts in `buffer`: behind its neighbours in a staging buffer that they share, else at 0."""
        if buffer == self.home(group):
            return 0
        key = group.name, dtype
        if key not in self._offsets:
            neighbours = self._rank.model.param_groups_of(group.segments[0])
            before = takewhile(lambda neighbour: neighbour.name != group.name, neighbours)
            # Groups that stay on the device leave no gap in the staging buffer of their segment.
            self._offsets[key] = sum(self._group_bytes(g, dtype) for g in before if self.is_offloaded(g))
        return self._offsets[key]

    def at_rest(self, *, delayed_by: int) -> Iterator[Access]:
        """Yield what the home of every group holds between steps.

        Before the first step (`delayed_by` 1) that is the whole group, whose update may still be to come; after the flush
        (`delayed_by` 0) a rank answers for its own share alone.
        """
        for group in self._rank.param_groups:
            is_offloaded = self.is_offloaded(group)
            dtype = self._plan.transfer_dtype if is_offloaded else None
            step = -delayed_by if self._rank.is_delayed(group) else 0
            held = self.weights(group, self.home(group), step, dtype=dtype)
            yield from self.shares_of(held) if is_offloaded and not delayed_by else held

    # -- buffers -----------------------------------------------------------------------------------------------

    def buffers(self) -> Iterator[Buffer]:
        """Yield homes, staging buffers, and what crosses the bus in another format."""
        plan = self._plan
        for group in self._rank.param_groups:
            offloaded = self.is_offloaded(group)
            dtype = plan.transfer_dtype if offloaded else plan.weights.dtype
            shared = offloaded and bool(self.share_group)
            size = self._group_bytes(group, dtype)
            kept_in = self._storage.buffer_format([group], dtype)
            yield Buffer(self.home(group), self._space(group), size, "weights", kept_in, shared=shared)
        segments = tuple(filter(self._offloaded, self._rank.segments))
        yield from self._passed(segments, self.staging_buffer, plan.weights.dtype, "staging buffers")
        # Copies move bytes alone: what crosses in another format is cast in a buffer of its own.
        if plan.is_transfer_lossy:
            for name, size in self._largest(segments, self.transfer_buffer, plan.transfer_dtype).items():
                yield Buffer(name, Space.DEVICE, size, "transfer buffers", plan.transfer_dtype)
        segments = tuple(segment for segment in segments if self._on_disk(segment) is not None)
        for move in _DISK_MOVES:
            buffer_of = partial(self._disk_buffer, move=move)
            yield from self._passed(segments, buffer_of, plan.transfer_dtype, "disk buffers", Space.HOST)

    def _passed(
        self,
        segments: Sequence[str],
        buffer_of: Callable[[str], str],
        dtype: str,
        role: str,
        space: Space = Space.DEVICE,
    ) -> Iterator[Buffer]:
        """Yield the buffers that some segments pass through."""
        for name, size in self._largest(segments, buffer_of, dtype).items():
            # A buffer is bytes where any block that passes through it is in quantized values.
            passing = (g for s in segments if buffer_of(s) == name for g in self._offloaded(s))
            yield Buffer(name, space, size, role, self._storage.buffer_format(passing, dtype))

    @cached_property
    def _staging_sizes(self) -> dict[str, int]:
        segments = tuple(filter(self._offloaded, self._rank.segments))
        return self._largest(segments, self.staging_buffer, self._plan.weights.dtype)

    def _largest(
        self, segments: Iterable[str], buffer_of: Callable[[str], str], dtype: str
    ) -> dict[str, int]:
        """Return the bytes of the largest segment that passes through each of some buffers."""
        sizes: dict[str, int] = {}
        for segment in segments:
            size = sum(self._group_bytes(group, dtype) for group in self._offloaded(segment))
            sizes[buffer_of(segment)] = max(sizes.get(buffer_of(segment), 0), size)
        return sizes

    # -- transfers ---------------------------------------------------------------------------------------------

    def upload(self, segment: str, suffix: str = "") -> None:
        """Write the upload of what `segment` has on the host, if anything."""
        groups = self._offloaded(segment)
        if groups and not self._plan.residency.reuse_staging_buffers:
            self._allocate(segment, suffix)
        lossy, dtype = self._plan.is_transfer_lossy, self._plan.transfer_dtype
        for group in groups:
            step = -1 if self._rank.is_delayed(group) else 0
            # What comes up still lacks a delayed update, so it is of the step before.
            target = self.transfer_buffer(segment) if lossy else self.staging_buffer(segment)
            home = self.weights(group, self.home(group), step, dtype=dtype)
            here = self.weights(group, target, step, dtype=dtype)
            if self._space(group) is Space.DISK:
                held = self.weights(group, self._disk_buffer(segment, "read"), step, dtype=dtype)
                self._move(f"{group.name}/read{suffix}", Stream.DISK_READ, "read", segment, home, held)
                home = held
            if self._plan.residency.transfers == "sliced":
                self._upload_sliced(group, segment, home, here, suffix)
            else:
                work = copy_work(sum(access.size_bytes for access in home))
                name = f"{group.name}/upload{suffix}"
                self._emit(name, Copy(), Stream.H2D, "upload", segment, home, here, work)
            if lossy:
                self._widen(group, segment, step, suffix)

    def _upload_sliced(
        self,
        group: ParamGroup,
        segment: str,
        home: tuple[Access, ...],
        here: tuple[Access, ...],
        suffix: str,
    ) -> None:
        """Write the upload of this rank's share, and the exchange of shares."""
        own, total = self.shares_of(here), sum(access.size_bytes for access in here)
        share_bytes = total // self._num_shares
        name, reads = f"{group.name}/upload{suffix}", self.shares_of(home)
        self._emit(name, Copy(), Stream.H2D, "upload", segment, reads, own, copy_work(share_bytes))
        name, op = f"{group.name}/all_gather{suffix}", Collective("all_gather", self.share_group)
        # Links carry what peers have uploaded: all shares but the own one.
        work = Work(link_bytes=total - share_bytes)
        self._emit(name, op, Stream.LINK, "gather", segment, own, here, work)

    def offload(self, segment: str, *, changed: bool, suffix: str = "") -> None:
        """Write the offload of the trainable groups of `segment` if they have `changed`, and free a staging buffer that was allocated anew."""
        groups = self._offloaded(segment)
        lossy, dtype = self._plan.is_transfer_lossy, self._plan.transfer_dtype
        for group in groups:
            # What came up unchanged is still on the host; frozen weights never go back.
            if not (changed and group.num_trainable):
                continue
            # With a suffix this is the visit behind the projected gradient: what goes back has this step's update.
            step = 1 if suffix and not self._rank.is_delayed(group) else 0
            if lossy:
                # Cast on the device, so that the bus carries the narrow format.
                self._narrow(group, segment, step, suffix)
            source = self.transfer_buffer(segment) if lossy else self.staging_buffer(segment)
            what = ParamGroupWeights(group.name)
            read = self.trainable(group, source, step, what, dtype)
            left = self.trainable(group, self.home(group), step, what, dtype)
            work = copy_work(read.size_bytes // self._num_shares)
            name = f"{group.name}/offload{suffix}"
            held = left
            if self._space(group) is Space.DISK:
                held = self.trainable(group, self._disk_buffer(segment, "write"), step, what, dtype)
            reads, writes = self.shares_of((read,)), self.shares_of((held,))
            self._emit(name, Copy(), Stream.D2H, "offload", segment, reads, writes, work)
            if held is not left:
                name = f"{group.name}/write{suffix}"
                self._move(name, Stream.DISK_WRITE, "write", segment, (held,), (left,))
        if groups and not self._plan.residency.reuse_staging_buffers:
            self._free(segment, suffix)

    def _move(
        self,
        name: str,
        stream: Stream,
        label: str,
        segment: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
    ) -> None:
        """Write a copy between a drive and host memory."""
        work = Work(disk_bytes=sum(access.size_bytes for access in reads))
        self._emit(name, Copy(), stream, label, segment, reads, writes, work)

    def _widen(self, group: ParamGroup, segment: str, step: int, suffix: str) -> None:
        reads = self.weights(group, self.transfer_buffer(segment), step, dtype=self._plan.transfer_dtype)
        writes = self.weights(group, self.staging_buffer(segment), step)
        work = cast_work(
            group.num_parameters, source=self._plan.transfer_dtype, target=self._plan.weights.dtype
        )
        self._emit(
            f"{group.name}/widen{suffix}", Cast(), Stream.COMPUTE, "widen", segment, reads, writes, work
        )

    def _narrow(self, group: ParamGroup, segment: str, step: int, suffix: str) -> None:
        transfer, storage, what = (
            self._plan.transfer_dtype,
            self._plan.weights.dtype,
            ParamGroupWeights(group.name),
        )
        read = self.trainable(group, self.staging_buffer(segment), step, what)
        left = self.trainable(group, self.transfer_buffer(segment), step, what, transfer)
        work = cast_work(group.num_trainable, source=storage, target=transfer)
        name = f"{group.name}/narrow{suffix}"
        self._emit(name, Cast(), Stream.COMPUTE, "narrow", segment, (read,), (left,), work)

    def _allocate(self, segment: str, suffix: str) -> None:
        staging_buffer = self.staging_buffer(segment)
        size = self._staging_sizes[staging_buffer]
        # On the stream of uploads, which fill it. Nobody may read what new memory holds.
        work, left = (
            Work(num_allocations=1, allocation_bytes=size),
            (Access(staging_buffer, UNSET, None, size),),
        )
        name = f"{segment}/allocate{suffix}"
        self._emit(name, Allocate(staging_buffer), Stream.H2D, "allocate", segment, (), left, work)

    def _free(self, segment: str, suffix: str) -> None:
        staging_buffer = self.staging_buffer(segment)
        left = (Access(staging_buffer, FREED, None, self._staging_sizes[staging_buffer]),)
        # On the stream of offloads, since the staging buffer is full until its contents are on the host.
        name, work = f"{segment}/free{suffix}", Work(num_allocations=1)
        self._emit(name, Free(staging_buffer), Stream.D2H, "free", segment, (), left, work)
