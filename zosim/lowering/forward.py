"""The forward axis: a segment at an evaluation point, and the batch that it is of.

What the forward of a block at ``+ε`` reads and leaves:

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Placement, Plan
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement)
>>> forward = next(item for item in lower(plan).step if item.id == "block.3/forward[q0+]")
>>> [str(access.what) for access in forward.reads], [str(access.what) for access in forward.writes]
(['block.3@q0+', 'block.2:out@q0+'], ['block.3:out@q0+'])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodel.formats import FORMATS
from costmodel.models.forward import forward_work, shared_activation_bytes
from costmodel.models.model_spec import EMBED, HEAD, ParamGroup
from costmodel.param_passes import copy_work
from costmodel.work import Attention, Matmul, Work
from zosim.eval_points import BASE, EvalPoint
from zosim.lowering.mesh import Losses
from zosim.lowering.perturbations import Perturbations
from zosim.lowering.rank import AxisWriter, Listing, Rank
from zosim.lowering.split import Boundaries
from zosim.lowering.weights import EvalPoints
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Forward, Load

# Passes around the attention of packed rows: queries, keys and values are picked, what comes out is laid side by side and put back.
_NUM_GATHERED = 5


class Forwards(AxisWriter):
    """Writes the load of a batch, and forwards (`rank`, `listing`: as of :class:`AxisWriter`)."""

    def __init__(
        self,
        rank: Rank,
        listing: Listing,
        perturbations: Perturbations,
        eval_points: EvalPoints,
        boundaries: Boundaries,
        losses: Losses,
    ) -> None:
        super().__init__(rank, listing)
        self._perturbations = perturbations
        self._eval_points = eval_points
        self._boundaries = boundaries
        self._losses = losses
        self._works: dict[tuple[str, bool], Work] = {}

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of hidden states, of what all blocks read, and of the batch."""
        rank, plan = self._rank, self._plan
        dtype = "float32" if plan.compute_dtype == "tf32" else plan.compute_dtype
        first = rank.model.segments.index(rank.segments[0])
        # What the stage before left comes into the same buffers, and may be wider.
        received = rank.model.segments[max(first - 1, 0) : first]
        size = max(map(rank.hidden_bytes, (*received, *rank.segments)))
        eval_points = rank.own_eval_points
        if rank.is_batched:
            size, eval_points = size * len(eval_points), eval_points[:1]
        for eval_point in eval_points:
            yield Buffer(f"hidden.{eval_point}", Space.DEVICE, size, "activations", dtype, dynamic=True)
        shared = shared_activation_bytes(
            plan.model,
            batch=rank.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            attention=plan.attention,
            is_padded=not rank.is_batched,
        )
        if shared:
            yield Buffer("shared", Space.DEVICE, shared, "activations", dtype)
        yield Buffer("batch", Space.DEVICE, rank.batch().size_bytes, "batch", "int64")

    def loss_work(self) -> Work:
        """Return the work of one forward of the head, which no perturbation stands beside."""
        return self._work(HEAD, has_side_path=False)

    def load(self) -> None:
        """Write the load of the batch."""
        batch = self._rank.batch()
        work = copy_work(batch.size_bytes) + Work(calls=("batch",))
        self._emit("load", Load(), Stream.H2D, "load", EMBED, (), (batch,), work)

    def model(self, eval_point: EvalPoint) -> None:
        """Write the forwards of all segments at `eval_point`."""
        for segment in self._rank.segments:
            self.segment(segment, eval_point)

    def segment(self, segment: str, eval_point: EvalPoint) -> None:
        """Write the forward of `segment` at `eval_point`, if that is one of this rank's."""
        rank = self._rank
        # Another rank forwards this point; weights in place pass through it all the same.
        if eval_point not in rank.number_of_own:
            return
        self._boundaries.before(segment, eval_point)
        gathered = [
            group
            for group in rank.trainable(segment)
            if eval_point.is_perturbed and rank.gathers(group, segment)
        ]
        reads: list[Access] = []
        for group in rank.model.param_groups_of(segment):
            # A gathered table is perturbed later in the step: until then only the batch's rows are at the point.
            reads += self._eval_points.weights(group, segment, BASE if group in gathered else eval_point)
        num_new_tokens = (self._plan.forward.num_new_tokens or 0) if segment == HEAD else 0
        if num_new_tokens:
            # Text is generated by the whole model, of which every new token takes a forward.
            others = [group for group in rank.param_groups if segment not in group.segments]
            for group in others:
                reads += self._eval_points.weights(group, rank.readers(group)[0], eval_point)
        for group in gathered:
            # Rows go through what the table itself goes through later in the step: earlier perturbations leave their rounding,
            # unless they perturb copies.
            first = eval_point.perturbation if self._eval_points.are_copies else 0
            reads += [
                self._perturbations.rows(group, earlier)
                for earlier in range(first, eval_point.perturbation + 1)
            ]
        reads += self._inputs(segment, eval_point)
        left = self._losses.left_by_head(eval_point) if segment == HEAD else rank.hidden(eval_point, segment)
        taking_part = rank.param_groups if num_new_tokens else rank.model.param_groups_of(segment)
        side_paths = [
            group.name for group in taking_part if eval_point.is_perturbed and rank.has_side_path(group)
        ]
        op = Forward(
            segment,
            eval_point,
            tuple(group.name for group in gathered),
            tuple(side_paths),
            num_new_tokens=num_new_tokens,
        )
        name, work = f"{segment}/forward[{eval_point}]", self._work(segment, has_side_path=bool(side_paths))
        if num_new_tokens:
            work += self._generated(num_new_tokens, has_side_path=bool(side_paths))
        self._emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), (left,), work)
        self._boundaries.after(segment, eval_point)

    def batched(self, segment: str) -> None:
        """Write the forward of `segment` at all of this rank's points, side by side."""
        rank = self._rank
        eval_points = rank.own_eval_points
        if not eval_points:
            return
        reads: list[Access] = []
        for group in rank.model.param_groups_of(segment):
            reads += self._eval_points.weights(group, segment, BASE)
        perturbations = dict.fromkeys(
            eval_point.perturbation for eval_point in eval_points if eval_point.is_perturbed
        )
        tuned = rank.trainable(segment)
        reads += [
            self._perturbations.sampled(group, perturbation)
            for group in tuned
            for perturbation in perturbations
        ]
        reads += self._inputs(segment)
        left = (
            tuple(map(self._losses.left_by_head, eval_points))
            if segment == HEAD
            else (self._side_by_side(segment),)
        )
        op = Forward(
            segment,
            eval_points[0],
            side_paths=tuple(group.name for group in tuned),
            batched_eval_points=eval_points,
        )
        work = self._work_together(segment, tuned)
        name = f"{segment}/forward[{eval_points[0]}..]"
        self._emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), left, work)

    def _inputs(self, segment: str, eval_point: EvalPoint | None = None) -> Iterator[Access]:
        """Yield what `segment` reads besides weights: of the batch, and of the segment before, at one point or at all."""
        if segment in (EMBED, HEAD):
            yield self._rank.batch()
        if segment != EMBED:
            segments = self._rank.model.segments
            previous = segments[segments.index(segment) - 1]
            yield (
                self._side_by_side(previous)
                if eval_point is None
                else self._rank.hidden(eval_point, previous)
            )

    def _side_by_side(self, segment: str) -> Access:
        """Return the access to the hidden states that `segment` leaves at all points."""
        eval_points = self._rank.own_eval_points
        one = self._rank.hidden(eval_points[0], segment)
        return replace(one, size_bytes=len(eval_points) * one.size_bytes)

    def _work_together(self, segment: str, tuned: Sequence[ParamGroup]) -> Work:
        """Return the work of `segment` at all points: embedded once, read once, no padding, logits of labelled tokens alone."""
        plan, num_eval_points = self._plan, len(self._rank.own_eval_points)
        num_copies = 1 if segment == EMBED else num_eval_points
        num_rows = self._rank.num_sequences
        # Answers to one prompt share its row until the head, which sees each by itself.
        if segment != HEAD:
            num_rows = -(-num_rows // (plan.forward.num_answers or 1))
        num_sequences = num_rows * num_copies
        # What all sequences begin with is forwarded once for each point, not in each row.
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
        work = self._stored(work, segment, has_side_path=False)
        if plan.model.tunes_left_factors:
            # Open increment and closed ones are one pair of factors; of these there are as many in the end as they are bound to.
            linears = [(outputs, inputs) for _ in tuned for inputs, outputs in plan.model.adapter_shapes]
            rank = plan.model.adapter_rank
        else:
            linears = [one for group in tuned for one in group.linears]
            rank = plan.perturbations.rank or 0
        rows = [
            num_kept if num_kept and plan.model.intermediate_size in one else num_tokens for one in linears
        ]
        # All rows by the right factor in one product, then the rows of each point by its own left factor.
        inner = tuple(
            Matmul(m=count, n=rank, k=inputs) for count, (_, inputs) in zip(rows, linears, strict=True)
        )
        outer = tuple(
            Matmul(m=count // num_eval_points, n=outputs, k=rank, num=num_eval_points)
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
        # It pays only where at least half of the tokens drop out.
        num_kept = len(rank.own_eval_points) * rank.num_sequences * self._plan.forward.num_labels
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
        # Tokens of a row attend to the beginning as well.
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

    def _generated(self, num_new_tokens: int, *, has_side_path: bool) -> Work:
        """Return the work of all new tokens but the first: forwards of the sequences as they are by then, about."""
        plan = self._plan
        longest = min(plan.seq + num_new_tokens - 1, plan.model.max_positions)
        # Sequences grow by a token at a time: counted at their mean length.
        seq = (plan.seq + longest + 1) // 2
        *blocks, head = (
            self._stored(self._counted(segment, seq=seq), segment, has_side_path=has_side_path)
            for segment in self._rank.segments
        )
        # Logits are compared, and no loss is made of them.
        once = sum(blocks, head.model_copy(update={"elementwise_bytes": 0, "num_exponentials": 0}))
        return once.repeated(num_new_tokens - 1)

    def _work(self, segment: str, *, has_side_path: bool) -> Work:
        """Return the work of forwarding `segment` at any point, or of one whose perturbation is added in products."""
        key = segment, has_side_path
        if key not in self._works:
            self._works[key] = self._stored(self._counted(segment), segment, has_side_path=has_side_path)
        return self._works[key]

    def _stored(self, work: Work, segment: str, *, has_side_path: bool) -> Work:
        """Return the work of a segment whose parameters are stored as the plan says, from that with numbers."""
        return self._storage.forward_work(
            work,
            self._rank.model.param_groups_of(segment),
            has_side_path=has_side_path,
            kept_bytes=self._rank.hidden_bytes(segment),
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
        if self._rank.is_batched:  # what stands beside a linear is added at all points at once
            model = model.model_copy(update={"adapter_shapes": ()})
        work = forward_work(
            model,
            segment,
            batch=num_sequences or self._rank.num_sequences,
            seq=seq or plan.seq,
            dtype=plan.compute_dtype,
            storage_dtype="tf32" if plan.compute_dtype == "tf32" else plan.weights.dtype,
            attention=plan.attention,
            loss_chunk=plan.forward.loss_chunk_tokens,
            num_kept=num_kept,
        )
        if segment == HEAD:
            return work
        # The input stays alive until the output replaces it.
        num_eval_points = len(self._rank.own_eval_points) if self._rank.is_batched else 1
        workspace_bytes = work.workspace_bytes + num_eval_points * self._rank.hidden_bytes(segment)
        return work.model_copy(update={"workspace_bytes": workspace_bytes})
