"""The forward axis: a segment at an evaluation point, and the batch that it is of."""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.forward import forward_work, shared_activation_bytes
from costmodel.low_bits import coded_forward_work
from costmodel.model_spec import EMBED, HEAD
from costmodel.sweeps import copy_work
from costmodel.work import Work
from zosim.instructions import Access, Buffer, Space, Stream
from zosim.lowering.directions import Directions
from zosim.lowering.listing import Listing
from zosim.lowering.mesh import Losses
from zosim.lowering.rank import Rank
from zosim.lowering.split import Cuts
from zosim.lowering.weights import Points
from zosim.operations import Forward, Load
from zosim.points import BASE, Point


class Forwards:
    """Writes the load of a batch, and forwards.

    Parameters
    ----------
    rank : Rank
    listing : Listing
    directions : Directions
    points : Points
    cuts : Cuts
    losses : Losses
    """

    def __init__(
        self, rank: Rank, listing: Listing, directions: Directions, points: Points, cuts: Cuts, losses: Losses
    ) -> None:
        self._rank = rank
        self._plan = rank.plan
        self._listing = listing
        self._directions = directions
        self._points = points
        self._cuts = cuts
        self._losses = losses
        self._works: dict[tuple[str, bool], Work] = {}

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of hidden states, of what all blocks read, and of the batch."""
        rank, plan = self._rank, self._plan
        dtype = "float32" if plan.compute_dtype == "tf32" else plan.compute_dtype
        first = rank.model.segments.index(rank.segments[0])
        received = rank.model.segments[max(first - 1, 0) : first]
        size = max(map(rank.hidden_bytes, (*received, *rank.segments)))
        for point in rank.own_points:
            yield Buffer(f"hidden.{point}", Space.DEVICE, size, "activations", dtype, dynamic=True)
        shared = shared_activation_bytes(
            plan.model,
            batch=rank.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            attention=plan.forward.attention,
        )
        if shared:
            yield Buffer("shared", Space.DEVICE, shared, "activations", dtype)
        yield Buffer("batch", Space.DEVICE, rank.batch().size_bytes, "batch", "int64")

    def load(self) -> None:
        """Write the load of the batch."""
        batch = self._rank.batch()
        work = copy_work(batch.size_bytes) + Work(calls=("batch",))
        self._listing.emit("load", Load(), Stream.H2D, "load", EMBED, (), (batch,), work)

    def model(self, point: Point) -> None:
        """Write the forwards of all segments at `point`."""
        for segment in self._rank.segments:
            self.segment(segment, point)

    def segment(self, segment: str, point: Point) -> None:
        """Write the forward of `segment` at `point`, if that is one of this rank's."""
        rank = self._rank
        if point not in rank.number_of_own:
            return
        self._cuts.before(segment, point)
        gathered = [
            group for group in rank.trainable(segment) if point.is_perturbed and rank.gathers(group, segment)
        ]
        reads: list[Access] = []
        for group in rank.model.groups_of(segment):
            reads += self._points.weights(group, segment, BASE if group in gathered else point)
        # Rows go through what the table itself goes through later in the step: earlier queries leave their rounding,
        # unless they are over, or leave the table alone.
        by_query = self._plan.schedule.traversal == "querywise"
        first = point.query if by_query or self._points.are_copies else 0
        reads += [
            self._directions.rows(group, visited)
            for group in gathered
            for visited in range(first, point.query + 1)
        ]
        if segment in (EMBED, HEAD):
            reads.append(rank.batch())
        if segment != EMBED:
            previous = rank.model.segments[rank.model.segments.index(segment) - 1]
            reads.append(rank.hidden(point, previous))
        left = self._losses.left_by_head(point) if segment == HEAD else rank.hidden(point, segment)
        beside = [
            group.name
            for group in rank.model.groups_of(segment)
            if point.is_perturbed and rank.is_beside(group)
        ]
        op = Forward(segment, point, tuple(group.name for group in gathered), tuple(beside))
        name, work = f"{segment}/forward[{point}]", self._work(segment, is_beside=bool(beside))
        self._listing.emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), (left,), work)
        self._cuts.after(segment, point)

    def _work(self, segment: str, *, is_beside: bool) -> Work:
        """Return the work of forwarding `segment` at any point, or of one whose direction is added in products."""
        key = segment, is_beside
        if key not in self._works:
            self._works[key] = self._coded(self._counted(segment), segment, is_beside=is_beside)
        return self._works[key]

    def _coded(self, work: Work, segment: str, *, is_beside: bool) -> Work:
        """Return `work` where the segment's linear layers are codes."""
        plan, groups = self._plan, self._rank.model.groups_of(segment)
        linears = [one for group in groups for one in (*group.linears, *group.frozen_linears)]
        if plan.coding is None or not linears:
            return work
        low_bits = plan.low_bits
        return coded_forward_work(
            work,
            linears,
            plan.coding,
            kernel=low_bits.product,
            are_inputs_coded=low_bits.activations != "none",
            is_beside=is_beside,
        )

    def _counted(self, segment: str) -> Work:
        plan = self._plan
        work = forward_work(
            plan.model,
            segment,
            batch=self._rank.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            storage_dtype="tf32" if plan.compute_dtype == "tf32" else plan.weights.dtype,
            attention=plan.forward.attention,
            loss_chunk=plan.forward.loss_chunk_tokens,
        )
        if segment == HEAD:
            return work
        # The input stays alive until the output replaces it.
        workspace_bytes = work.workspace_bytes + self._rank.hidden_bytes(segment)
        return work.model_copy(update={"workspace_bytes": workspace_bytes})
