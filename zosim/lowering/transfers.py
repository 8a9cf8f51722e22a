"""How blocks that live on the host come to the device and go back: whole or in shares, as they are or narrower."""

from __future__ import annotations

from functools import cached_property

from costmodel.model_spec import ParameterGroup
from costmodel.sweeps import cast_work, copy_work
from costmodel.work import Work
from zosim.instructions import Access, Stream
from zosim.lowering.buffers import buffers_of
from zosim.lowering.listing import Listing
from zosim.operations import Allocate, Cast, Collective, Copy, Free


class Transfers:
    """Writes uploads and offloads.

    Parameters
    ----------
    listing : Listing
    """

    def __init__(self, listing: Listing) -> None:
        self.plan = listing.plan
        self.layout = listing.layout
        self._listing = listing

    def upload(self, segment: str, suffix: str = "") -> None:
        """Write the upload of what `segment` has on the host, if anything."""
        groups = self._listing.offloaded(segment)
        if not groups:
            return
        if not self.plan.residency.reuse_slots:
            self._allocate(segment, suffix)
        lossy = self.plan.is_transfer_lossy
        for group in groups:
            step = -1 if self.layout.is_delayed(group) else 0
            dtype = self.plan.transfer_dtype
            target = self.layout.staging(segment) if lossy else self.layout.slot(segment)
            home = self.layout.weights(group, self.layout.home(group), step, dtype=dtype)
            here = self.layout.weights(group, target, step, dtype=dtype)
            if self.plan.residency.transfers == "sliced":
                self._upload_sliced(group, segment, home, here, suffix)
            else:
                work = copy_work(sum(access.size_bytes for access in home))
                name = f"{group.name}/upload{suffix}"
                self._listing.emit(name, Copy(), Stream.H2D, "upload", segment, home, here, work)
            if lossy:
                self._cast(group, segment, step, f"{group.name}/widen{suffix}", widen=True)

    def _upload_sliced(
        self,
        group: ParameterGroup,
        segment: str,
        home: tuple[Access, ...],
        here: tuple[Access, ...],
        suffix: str,
    ) -> None:
        """Write the upload of this rank's share, and the exchange of shares."""
        layout = self.layout
        own, total = layout.shared_out(here), sum(access.size_bytes for access in here)
        self._listing.emit(
            f"{group.name}/upload{suffix}",
            Copy(),
            Stream.H2D,
            "upload",
            segment,
            layout.shared_out(home),
            own,
            copy_work(total // layout.num_shares),
        )
        self._listing.emit(
            f"{group.name}/all_gather{suffix}",
            Collective("all_gather", layout.share),
            Stream.LINK,
            "gather",
            segment,
            own,
            here,
            Work(link_bytes=total - total // layout.num_shares),
        )

    def offload(self, segment: str, *, changed: bool, suffix: str = "") -> None:
        """Write the offload of what `changed` of it, and give its slot back."""
        groups = self._listing.offloaded(segment)
        if not groups:
            return
        lossy = self.plan.is_transfer_lossy
        for group in groups:
            if not (changed and group.num_trainable):
                continue
            step = 1 if suffix and not self.layout.is_delayed(group) else 0
            if lossy:
                self._cast(group, segment, step, f"{group.name}/narrow{suffix}", widen=False)
            dtype = self.plan.transfer_dtype
            source = self.layout.staging(segment) if lossy else self.layout.slot(segment)
            read = self.layout.trainable(group, source, step, dtype=dtype)
            left = self.layout.trainable(group, self.layout.home(group), step, dtype=dtype)
            work = copy_work(read.size_bytes // self.layout.num_shares)
            name = f"{group.name}/offload{suffix}"
            reads, writes = self.layout.shared_out((read,)), self.layout.shared_out((left,))
            self._listing.emit(name, Copy(), Stream.D2H, "offload", segment, reads, writes, work)
        if not self.plan.residency.reuse_slots:
            self._free(segment, suffix)

    def _cast(self, group: ParameterGroup, segment: str, step: int, name: str, *, widen: bool) -> None:
        plan = self.plan
        slot, staging = self.layout.slot(segment), self.layout.staging(segment)
        if widen:
            reads = self.layout.weights(group, staging, step, dtype=plan.transfer_dtype)
            writes = self.layout.weights(group, slot, step)
            work = cast_work(group.num_parameters, source=plan.transfer_dtype, target=plan.weights.dtype)
        else:
            reads = (self.layout.trainable(group, slot, step),)
            writes = (self.layout.trainable(group, staging, step, dtype=plan.transfer_dtype),)
            work = cast_work(group.num_trainable, source=plan.weights.dtype, target=plan.transfer_dtype)
        label = "widen" if widen else "narrow"
        self._listing.emit(name, Cast(), Stream.COMPUTE, label, segment, reads, writes, work)

    def _allocate(self, segment: str, suffix: str) -> None:
        slot, size = self.layout.slot(segment), self._slot_bytes(segment)
        work = Work(num_allocations=1, allocation_bytes=size)
        left = Access(slot, "unset", None, size)
        self._listing.emit(
            f"{segment}/allocate{suffix}", Allocate(slot), Stream.H2D, "allocate", segment, (), (left,), work
        )

    def _free(self, segment: str, suffix: str) -> None:
        slot, size = self.layout.slot(segment), self._slot_bytes(segment)
        left = Access(slot, "freed", None, size)
        work = Work(num_allocations=1)
        self._listing.emit(
            f"{segment}/free{suffix}", Free(slot), Stream.D2H, "free", segment, (), (left,), work
        )

    def _slot_bytes(self, segment: str) -> int:
        return self._sizes[self.layout.slot(segment)]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {buffer.name: buffer.size_bytes for buffer in buffers_of(self.layout)}
