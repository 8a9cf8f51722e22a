"""The forward axis: a segment at an evaluation point, and the batch that it is of.

Examples
--------
What the forward of a block at ``+ε`` reads and leaves:

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Placement, Plan
>>> place = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=place)
>>> forward = next(item for item in lower(plan).step if item.id == "block.3/forward[q0+]")
>>> [str(access.what) for access in forward.reads], [str(access.what) for access in forward.writes]
(['block.3@q0+', 'block.2:out@q0+'], ['block.3:out@q0+'])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodel.formats import FORMATS
from costmodel.models.forward import forward_work, shared_activation_bytes
from costmodel.models.model_spec import EMBED, HEAD, ParameterGroup
from costmodel.sweeps import copy_work
from costmodel.work import Attention, Matmul, Work
from zosim.lowering.directions import Directions
from zosim.lowering.mesh import Losses
from zosim.lowering.rank import AxisWriter, Listing, Rank
from zosim.lowering.split import Cuts
from zosim.lowering.weights import Points
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Forward, Load
from zosim.program.points import BASE, Point

_NUM_GATHERED = 5
"""Passes around the attention of packed rows: queries, keys and values are picked, what comes out is laid side by side and put back."""


class Forwards(AxisWriter):
    """Writes the load of a batch, and forwards.

    Parameters
    ----------
    rank, listing
        As of :class:`AxisWriter`.
    directions : Directions
    points : Points
    cuts : Cuts
    losses : Losses
    """

    def __init__(
        self, rank: Rank, listing: Listing, directions: Directions, points: Points, cuts: Cuts, losses: Losses
    ) -> None:
        super().__init__(rank, listing)
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
        points = rank.own_points
        if rank.is_together:
            size, points = size * len(points), points[:1]
        for point in points:
            yield Buffer(f"hidden.{point}", Space.DEVICE, size, "activations", dtype, dynamic=True)
        shared = shared_activation_bytes(
            plan.model,
            batch=rank.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            attention=plan.forward.attention,
            is_padded=not rank.is_together,
        )
        if shared:
            yield Buffer("shared", Space.DEVICE, shared, "activations", dtype)
        yield Buffer("batch", Space.DEVICE, rank.batch().size_bytes, "batch", "int64")

    def load(self) -> None:
        """Write the load of the batch."""
        batch = self._rank.batch()
        work = copy_work(batch.size_bytes) + Work(calls=("batch",))
        self._emit("load", Load(), Stream.H2D, "load", EMBED, (), (batch,), work)

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
        num_new_tokens = (self._plan.forward.num_new_tokens or 0) if segment == HEAD else 0
        if num_new_tokens:
            others = [group for group in rank.groups if segment not in group.segments]
            for group in others:
                reads += self._points.weights(group, rank.readers(group)[0], point)
        for group in gathered:
            # Rows go through what the table itself goes through later in the step: earlier queries leave their rounding,
            # unless they leave the table alone.
            is_left_alone = self._points.are_copies or rank.is_beside(group)
            first = point.query if is_left_alone else 0
            reads += [self._directions.rows(group, visited) for visited in range(first, point.query + 1)]
        reads += self._inputs(segment, point)
        left = self._losses.left_by_head(point) if segment == HEAD else rank.hidden(point, segment)
        taking_part = rank.groups if num_new_tokens else rank.model.groups_of(segment)
        beside = [
            group.name
            for group in taking_part
            if point.is_perturbed and rank.is_beside(group) and group not in gathered
        ]
        op = Forward(
            segment,
            point,
            tuple(group.name for group in gathered),
            tuple(beside),
            num_new_tokens=num_new_tokens,
        )
        name, work = f"{segment}/forward[{point}]", self._work(segment, is_beside=bool(beside))
        if num_new_tokens:
            work += self._generated(num_new_tokens, is_beside=bool(beside))
        self._emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), (left,), work)
        self._cuts.after(segment, point)

    def together(self, segment: str) -> None:
        """Write the forward of `segment` at all of this rank's points, side by side."""
        rank = self._rank
        points = rank.own_points
        if not points:
            return
        reads: list[Access] = []
        for group in rank.model.groups_of(segment):
            reads += self._points.weights(group, segment, BASE)
        queries = dict.fromkeys(point.query for point in points if point.is_perturbed)
        tuned = rank.trainable(segment)
        reads += [self._directions.drawn(group, query) for group in tuned for query in queries]
        reads += self._inputs(segment)
        left = (
            tuple(map(self._losses.left_by_head, points))
            if segment == HEAD
            else (self._side_by_side(segment),)
        )
        op = Forward(segment, points[0], beside=tuple(group.name for group in tuned), together=points)
        work = self._work_together(segment, tuned)
        name = f"{segment}/forward[{points[0]}..]"
        self._emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), left, work)

    def _inputs(self, segment: str, point: Point | None = None) -> Iterator[Access]:
        """Yield what `segment` reads besides weights: of the batch, and of the segment before, at one point or at all."""
        if segment in (EMBED, HEAD):
            yield self._rank.batch()
        if segment != EMBED:
            segments = self._rank.model.segments
            previous = segments[segments.index(segment) - 1]
            yield self._side_by_side(previous) if point is None else self._rank.hidden(point, previous)

    def _side_by_side(self, segment: str) -> Access:
        """Return the access to the hidden states that `segment` leaves at all points."""
        points = self._rank.own_points
        one = self._rank.hidden(points[0], segment)
        return replace(one, size_bytes=len(points) * one.size_bytes)

    def _work_together(self, segment: str, tuned: Sequence[ParameterGroup]) -> Work:
        """Return the work of `segment` at all points: embedded once, read once, no padding, logits of labelled tokens alone."""
        plan, num_points = self._plan, len(self._rank.own_points)
        num_copies = 1 if segment == EMBED else num_points
        num_rows = self._rank.num_sequences
        if segment != HEAD:
            num_rows = -(-num_rows // (plan.forward.num_answers or 1))
        num_sequences = num_rows * num_copies
        shared = 0 if segment == HEAD else plan.forward.num_shared or 0
        seq = plan.forward.num_tokens or plan.seq
        seq = min(plan.forward.num_labels or seq, seq) if segment == HEAD else seq - shared
        num_tokens = num_sequences * seq + num_copies * shared
        num_kept = self._num_kept(segment, num_tokens)
        work = self._counted(segment, num_sequences=num_sequences, seq=seq, num_kept=num_kept)
        if segment not in (EMBED, HEAD):
            work = self._packed_attention(work, num_tokens, seq, shared)
        if shared:
            work = self._with_shared(work, segment, num_copies, num_rows, shared, seq)
        work = self._stored(work, segment, is_beside=False)
        if plan.model.tunes_left_factors:
            # Open slot and closed ones are one pair of factors; of these there are as many in the end as they are bound to.
            linears = [(outputs, inputs) for _ in tuned for inputs, outputs in plan.model.adapter_shapes]
            rank = plan.model.adapter_rank
        else:
            linears = [one for group in tuned for one in group.linears]
            rank = plan.directions.rank or 0
        rows = [
            num_kept if num_kept and plan.model.intermediate_size in one else num_tokens for one in linears
        ]
        inner = tuple(
            Matmul(m=count, n=rank, k=inputs) for count, (_, inputs) in zip(rows, linears, strict=True)
        )
        outer = tuple(
            Matmul(m=count // num_points, n=outputs, k=rank, num=num_points)
            for count, (outputs, _) in zip(rows, linears, strict=True)
        )
        width = FORMATS[plan.compute_dtype].element_bytes
        moved = sum(count * outputs for count, (outputs, _) in zip(rows, linears, strict=True))
        return work + Work(
            dtype=work.dtype,
            matmuls=(*inner, *outer),
            elementwise_bytes=width * moved,
            num_kernels=2 * len(linears),
        )

    def _num_kept(self, segment: str, num_tokens: int) -> int | None:
        """Return how many tokens of all points go on behind the last attention, where few predict a label; None for all."""
        rank = self._rank
        if segment != rank.model.segments[-2] or not self._plan.forward.num_labels:
            return None
        num_kept = len(rank.own_points) * rank.num_sequences * self._plan.forward.num_labels
        return num_kept if 2 * num_kept <= num_tokens else None

    def _packed_attention(self, work: Work, num_tokens: int, seq: int, shared: int) -> Work:
        """Return `work` of a block with keys as they are beside a token on average, and what runs are picked and put back with."""
        plan, model = self._plan, self._plan.model
        attended = max(1, (plan.forward.num_attended or seq + shared) - shared)
        attention = tuple(one.model_copy(update={"key": attended}) for one in work.attention)
        size = FORMATS[plan.compute_dtype].bytes(num_tokens * model.num_heads * model.head_dim)
        moved_bytes = work.elementwise_bytes + 2 * _NUM_GATHERED * size
        return work.model_copy(update={"attention": attention, "elementwise_bytes": moved_bytes})

    def _with_shared(
        self, work: Work, segment: str, num_copies: int, num_rows: int, shared: int, seq: int
    ) -> Work:
        """Return `work` of a segment on what sequences go on with, and on what all of them begin with, in the same kernels."""
        model = self._plan.model
        num_kept = self._num_kept(segment, num_copies * (num_rows * seq + shared))
        begun = self._counted(segment, num_sequences=num_copies, seq=shared, num_kept=1 if num_kept else None)
        products = [
            one.model_copy(update={"m": one.m + other.m, "num": 1})
            if one.num == 1 and one.m != num_kept
            else one
            for one, other in zip(work.matmuls, begun.matmuls, strict=True)
        ]
        rows = () if segment == EMBED else (
            Attention(num=num_copies * num_rows * model.num_heads, query=seq, key=shared, head_dim=model.head_dim),
        )  # fmt: skip
        return work.model_copy(
            update={
                "matmuls": tuple(products),
                "attention": (*work.attention, *begun.attention, *rows),
                "elementwise_bytes": work.elementwise_bytes + begun.elementwise_bytes,
                "num_exponentials": work.num_exponentials + begun.num_exponentials,
                "workspace_bytes": work.workspace_bytes + begun.workspace_bytes,
            }
        )

    def _generated(self, num_new_tokens: int, *, is_beside: bool) -> Work:
        """Return the work of all new tokens but the first: forwards of the sequences as they are by then, about."""
        plan = self._plan
        longest = min(plan.seq + num_new_tokens - 1, plan.model.max_positions)
        seq = (plan.seq + longest + 1) // 2
        *blocks, head = (
            self._stored(self._counted(segment, seq=seq), segment, is_beside=is_beside)
            for segment in self._rank.segments
        )
        # Logits are compared, and no loss is made of them.
        once = sum(blocks, head.model_copy(update={"elementwise_bytes": 0, "num_exponentials": 0}))
        return once.repeated(num_new_tokens - 1)

    def _work(self, segment: str, *, is_beside: bool) -> Work:
        """Return the work of forwarding `segment` at any point, or of one whose direction is added in products."""
        key = segment, is_beside
        if key not in self._works:
            self._works[key] = self._stored(self._counted(segment), segment, is_beside=is_beside)
        return self._works[key]

    def _stored(self, work: Work, segment: str, *, is_beside: bool) -> Work:
        """Return the work of a segment whose parameters are stored as the plan says, from that with numbers."""
        return self._storage.forward_work(
            work,
            segment,
            self._rank.model.groups_of(segment),
            is_beside=is_beside,
            kept_bytes=self._rank.hidden_bytes(segment),
            num_tokens=self._rank.num_tokens,
            embed_dim=self._rank.model.embed_dim,
        )

    def _counted(
        self,
        segment: str,
        *,
        num_sequences: int | None = None,
        seq: int | None = None,
        num_kept: int | None = None,
    ) -> Work:
        plan, model = self._plan, self._plan.model
        if self._rank.is_together:  # what stands beside a linear is added at all points at once
            model = model.model_copy(update={"adapter_shapes": ()})
        work = forward_work(
            model,
            segment,
            batch=num_sequences or self._rank.num_sequences,
            seq=seq or plan.seq,
            dtype=plan.compute_dtype,
            storage_dtype="tf32" if plan.compute_dtype == "tf32" else plan.weights.dtype,
            attention=plan.forward.attention,
            loss_chunk=plan.forward.loss_chunk_tokens,
            num_kept=num_kept,
        )
        if segment == HEAD:
            return work
        # The input stays alive until the output replaces it.
        num_points = len(self._rank.own_points) if self._rank.is_together else 1
        workspace_bytes = work.workspace_bytes + num_points * self._rank.hidden_bytes(segment)
        return work.model_copy(update={"workspace_bytes": workspace_bytes})
