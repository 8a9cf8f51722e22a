"""One step, instruction by instruction, in an order that would be right on a single stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from costmodel.forward import activation_bytes, forward_work
from costmodel.model_spec import EMBED, HEAD, ParameterGroup
from costmodel.sweeps import Distribution, cast_work, copy_work, draw_work, perturb_work, update_work
from costmodel.work import Work
from zosim.lowering.layout import Layout
from zosim.plan import Plan
from zosim.program import (
    Access,
    Allocate,
    Cast,
    Collective,
    Copy,
    Draw,
    Forward,
    Free,
    Instruction,
    Load,
    Operation,
    Perturb,
    Scalar,
    Stream,
    Update,
)

Keep = Literal["all", "rows", "none"]


class StepWriter:
    """Writes the instructions of one part of a program.

    Holds what lowering knows at each point of the listing: which directions are at hand, and how far each
    query's generator has been walked.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan = plan
        self.layout = Layout(plan, rank)
        self.model = plan.model
        self.instructions: list[Instruction] = []
        self._at_hand: list[Access] = []
        self._walked: dict[int, int] = {}
        self._walk_order = _walk_order(plan)
        self._halves = 0
        self._named: dict[str, int] = {}

    # -- parts -------------------------------------------------------------------------------------------------

    def write_step(self) -> None:
        """Write one step: load, forwards at every point, projected gradients, immediate updates."""
        self._emit(
            "load", Load(), Stream.H2D, "load", EMBED, (), (self.layout.batch(),), _load_work(self.layout)
        )
        if self.plan.runtime.traversal == "sweep":
            self._sweep()
        else:
            self._blockwise()
        if self.plan.placement.world_size > 1:
            self._exchange_losses()
        for query in range(self.plan.estimator.num_queries):
            self._projected_gradient(query)
        self._immediate_updates()

    def write_flush(self) -> None:
        """Write the updates that are still pending when no step follows."""
        for segment in self.model.segments:
            if any(self.layout.is_delayed(group) and group.num_trainable for group in self._own(segment)):
                self._visit(segment, step_before=True)

    # -- traversals --------------------------------------------------------------------------------------------

    def _blockwise(self) -> None:
        for segment in self.model.segments:
            self._upload(segment)
            self._pending_updates(segment)
            if self.plan.estimator.difference == "forward":
                self._forward(segment, "")
            for query in range(self.plan.estimator.num_queries):
                self._both_points(segment, query)
            self._offload(segment, changed=not self._only_gathers(segment))

    def _both_points(self, segment: str, query: int) -> None:
        """Write one query's forwards of `segment`, from one draw of its direction."""
        offset = self._fresh_offset(segment)
        in_place = self._perturbed_in_place(segment)
        for group in self._trainable(segment):
            rows = self.layout.gathers(group, segment)
            self._draw(group, query, keep="rows" if rows else "all", offset_bytes=offset, segment=segment)
            offset += 0 if rows else self.layout.direction_bytes(group)
        previous = ""
        for sign, scale in self._signs():
            point = f"q{query}{sign}"
            self._perturb_all(in_place, segment, query, scale, previous, point)
            self._forward(segment, point)
            previous = point
        restore = -sum(scale for _, scale in self._signs())
        self._perturb_all(in_place, segment, query, restore, previous, "")

    def _sweep(self) -> None:
        if self.plan.estimator.difference == "forward":
            self._forward_model("")
        for query in range(self.plan.estimator.num_queries):
            previous = ""
            for sign, scale in self._signs():
                point = f"q{query}{sign}"
                self._sweep_perturb(query, scale, previous, point)
                self._forward_model(point)
                previous = point
            self._sweep_perturb(query, -sum(scale for _, scale in self._signs()), previous, "")

    def _sweep_perturb(self, query: int, scale: int, before: str, after: str) -> None:
        """Write the reference loop's pass: every group's direction is drawn, used once and forgotten."""
        for group in self._walk_order:
            self._at_hand.clear()
            self._draw(group, query, segment=group.segments[0])
            self._perturb(group, group.segments[0], query, scale, before, after)
        self._at_hand.clear()

    def _forward_model(self, point: str) -> None:
        for segment in self.model.segments:
            self._forward(segment, point)

    def _signs(self) -> tuple[tuple[str, int], ...]:
        """Evaluation points of one query with the perturbation that leads to each from the one before."""
        return (("+", 1), ("-", -2)) if self.plan.estimator.difference == "central" else (("+", 1),)

    # -- updates -----------------------------------------------------------------------------------------------

    def _pending_updates(self, segment: str) -> None:
        for group in self._trainable(segment):
            if self.layout.is_delayed(group):
                self._update_group(group, segment, step=-1)

    def _immediate_updates(self) -> None:
        """Write the updates that use this step's gradient, the segments in the order in which they ran.

        The last segment comes first: its directions are still at hand.
        """
        segments = list(self.model.segments)
        for segment in (segments[-1], *segments[:-1]):
            if any(not self.layout.is_delayed(group) for group in self._own(segment) if group.num_trainable):
                self._visit(segment, step_before=False)

    def _visit(self, segment: str, *, step_before: bool) -> None:
        """Write the updates of the groups that `segment` owns, fetching them first where they are offloaded."""
        suffix = ":update"
        self._upload(segment, suffix)
        for group in self._own(segment):
            if group.num_trainable and self.layout.is_delayed(group) == step_before:
                self._update_group(group, segment, step=-1 if step_before else 0)
        self._offload(segment, changed=True, suffix=suffix)

    def _update_group(self, group: ParameterGroup, segment: str, *, step: int) -> None:
        num_queries = self.plan.estimator.num_queries
        place = self.layout.place(group, segment)
        for query in range(num_queries):
            direction = self._draw(group, query, step=step, segment=segment, suffix=":update")
            before = f"u{query - 1}" if query else ""
            is_last = query == num_queries - 1
            read = self.layout.trainable(group, place, step, before)
            left = self.layout.trainable(
                group, place, step + 1 if is_last else step, "" if is_last else f"u{query}"
            )
            reads = (read, direction, self.layout.gradient(query, step))
            work = update_work(
                group.num_trainable,
                dtype=self.plan.precision.storage,
                num_tensors=group.num_trainable_tensors,
                arithmetic="pieces",
                # A decay of 0 takes its passes as well: it may change a zero's sign.
                weight_decay=True,
            )
            name = f"{group.name}/update[q{query}]"
            self._emit(
                name, Update(group.name, step, query), Stream.COMPUTE, "update", segment, reads, (left,), work
            )

    # -- single instructions -----------------------------------------------------------------------------------

    def _draw(
        self,
        group: ParameterGroup,
        query: int,
        *,
        segment: str,
        step: int = 0,
        keep: Keep = "all",
        offset_bytes: int | None = None,
        suffix: str = "",
    ) -> Access:
        """Write the draw of a direction, unless it is still at hand, and return where it is."""
        if offset_bytes is None:
            offset_bytes = self._fresh_offset(segment)
        target = self.layout.direction(group, query, step, offset_bytes=offset_bytes, rows=keep == "rows")
        for held in self._at_hand:
            if (held.what, held.step, held.point) == (target.what, target.step, target.point):
                return held
        reads, writes = self._generator_accesses(group, query, step)
        op = self._draw_op(group, query, step, keep)
        self._emit(
            f"{group.name}/draw[q{query}{'@t-1' if step else ''}]{suffix}",
            op,
            self._draw_stream,
            "draw",
            segment,
            reads if keep != "rows" else (*reads, self.layout.batch()),
            (target, *writes),
            self._draw_work(group, num_kept_rows=self.layout.num_tokens if keep == "rows" else 0),
        )
        self._at_hand = [held for held in self._at_hand if not held.overlaps(target)]
        self._at_hand.append(target)
        return target

    def _draw_op(self, group: ParameterGroup, query: int, step: int, keep: Keep) -> Draw:
        estimator = self.plan.estimator
        return Draw(group.name, step, query, keep, estimator.rng, estimator.direction)

    def _generator_accesses(
        self, group: ParameterGroup, query: int, step: int
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """Return the generator states that drawing `group` reads and writes, walking up to it if need be."""
        if self.plan.estimator.rng == "counter":
            return (), ()
        position = self._walk_order.index(group)
        if step < 0 or position < self._walked.get(query, 0):
            return (self.layout.rng_before(group, query, step),), ()
        while self._walked.get(query, 0) < position:
            self._walk_past(self._walk_order[self._walked.get(query, 0)], query)
        return self._walking_accesses(position, query)

    def _walking_accesses(self, position: int, query: int) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        group = self._walk_order[position]
        self._walked[query] = position + 1
        reads = (self.layout.rng_after(self._walk_order[position - 1], query),) if position else ()
        return reads, (self.layout.rng_before(group, query, 0), self.layout.rng_after(group, query))

    def _walk_past(self, group: ParameterGroup, query: int) -> None:
        reads, writes = self._walking_accesses(self._walked.get(query, 0), query)
        op = self._draw_op(group, query, 0, "none")
        work = self._draw_work(group)
        name = f"{group.name}/walk[q{query}]"
        self._emit(name, op, self._draw_stream, "draw", group.segments[0], reads, writes, work)

    def _draw_work(self, group: ParameterGroup, *, num_kept_rows: int = 0) -> Work:
        distributions: dict[str, Distribution] = {"gaussian": "normal", "rademacher": "rademacher"}
        return draw_work(
            group.num_trainable,
            dtype=self.plan.precision.storage,
            distribution=distributions[self.plan.estimator.direction],
            num_tensors=group.num_trainable_tensors,
            num_kept_rows=num_kept_rows,
        )

    @property
    def _draw_stream(self) -> Stream:
        return Stream.DRAW if self.plan.runtime.draw_ahead else Stream.COMPUTE

    def _perturb_all(
        self, groups: Iterable[ParameterGroup], segment: str, query: int, scale: int, before: str, after: str
    ) -> None:
        for group in groups:
            self._perturb(group, segment, query, scale, before, after)

    def _perturb(
        self, group: ParameterGroup, segment: str, query: int, scale: int, before: str, after: str
    ) -> None:
        place = self.layout.place(group, segment)
        held = f"z:{group.name}"
        direction = next(z for z in self._at_hand if (z.what, z.step, z.point) == (held, 0, f"q{query}"))
        label = "perturb" if after else "restore"
        self._emit(
            f"{group.name}/{label}[{after or f'q{query}'}]",
            Perturb(group.name, scale, query),
            Stream.COMPUTE,
            label,
            segment,
            (self.layout.trainable(group, place, 0, before), direction),
            (self.layout.trainable(group, place, 0, after),),
            perturb_work(
                group.num_trainable,
                dtype=self.plan.precision.storage,
                arithmetic="pieces",
            ),
        )

    def _forward(self, segment: str, point: str) -> None:
        if point not in self.layout.own_points:
            return
        gathered = [
            group for group in self._trainable(segment) if point and self.layout.gathers(group, segment)
        ]
        reads: list[Access] = []
        for group in self.model.groups_of(segment):
            at = "" if group in gathered else point
            reads += self.layout.weights(group, self.layout.place(group, segment), 0, at)
        query = int(point[1:-1]) if point else 0
        # Rows go through what the table itself goes through later in the step: earlier queries leave their rounding.
        reads += [
            self.layout.direction(group, visited, 0, offset_bytes=0, rows=True)
            for group in gathered
            for visited in range(query + 1)
        ]
        if segment in (EMBED, HEAD):
            reads.append(self.layout.batch())
        if segment != EMBED:
            previous = self.model.segments[self.model.segments.index(segment) - 1]
            reads.append(self.layout.hidden(point, previous))
        left = self._loss(point) if segment == HEAD else self.layout.hidden(point, segment)
        op = Forward(segment, point, tuple(group.name for group in gathered))
        name = f"{segment}/forward[{point or 'base'}]"
        self._emit(
            name, op, Stream.COMPUTE, "forward", segment, tuple(reads), (left,), self._forward_work(segment)
        )

    def _forward_work(self, segment: str) -> Work:
        plan = self.plan
        work = forward_work(
            self.model,
            segment,
            batch=self.layout.num_sequences,
            seq=plan.seq,
            dtype=plan.precision.compute,
            storage_dtype="tf32" if plan.precision.compute == "tf32" else plan.precision.storage,
            attention=plan.runtime.attention,
            loss_chunk=plan.runtime.loss_chunk_tokens,
        )
        if segment == HEAD:
            return work
        # The input stays alive until the output replaces it.
        output = activation_bytes(
            self.model, batch=self.layout.num_sequences, seq=plan.seq, dtype=plan.precision.compute
        )
        return work.model_copy(update={"workspace_bytes": work.workspace_bytes + output})

    def _loss(self, point: str) -> Access:
        """Return where the head leaves its loss: at once in its place, or among those to be exchanged."""
        alone = self.plan.placement.world_size == 1
        return self.layout.loss(point) if alone else self.layout.own_loss(point)

    def _exchange_losses(self) -> None:
        """Write how losses of a part of the batch, at some of the points, become those of all."""
        layout = self.layout
        packed, gathered = layout.packed_losses(), layout.gathered_losses()
        scalar, link = Work(num_kernels=1), Work(link_bytes=gathered.size_bytes - packed.size_bytes)
        own = tuple(layout.own_loss(point) for point in layout.own_points)
        losses = tuple(layout.loss(point) for point in self.plan.points)
        self._emit(
            "losses/pack", Scalar("pack_losses"), Stream.COMPUTE, "scalar", HEAD, own, (packed,), scalar
        )
        self._emit(
            "losses/all_gather",
            Collective("all_gather", "world"),
            Stream.LINK,
            "exchange",
            HEAD,
            (packed,),
            (gathered,),
            link,
        )
        self._emit(
            "losses/mean", Scalar("mean_loss"), Stream.COMPUTE, "scalar", HEAD, (gathered,), losses, scalar
        )

    def _projected_gradient(self, query: int) -> None:
        central = self.plan.estimator.difference == "central"
        losses = (f"q{query}+", f"q{query}-") if central else (f"q{query}+", "")
        self._emit(
            f"projected_gradient[q{query}]",
            Scalar("projected_gradient", query),
            Stream.COMPUTE,
            "scalar",
            HEAD,
            tuple(self.layout.loss(point) for point in losses),
            (self.layout.gradient(query, 0),),
            Work(num_kernels=3),
        )

    # -- residency ---------------------------------------------------------------------------------------------

    def _upload(self, segment: str, suffix: str = "") -> None:
        groups = self._offloaded(segment)
        if not groups:
            return
        if not self.plan.residency.reuse_slots:
            self._allocate(segment, suffix)
        lossy = self.plan.precision.is_lossy
        for group in groups:
            step = -1 if self.layout.is_delayed(group) else 0
            dtype = self.plan.precision.transfer
            target = self.layout.staging(segment) if lossy else self.layout.slot(segment)
            home = self.layout.weights(group, self.layout.home(group), step, dtype=dtype)
            here = self.layout.weights(group, target, step, dtype=dtype)
            if self.plan.residency.transfers == "sliced":
                self._upload_sliced(group, segment, home, here, suffix)
            else:
                work = copy_work(sum(access.size_bytes for access in home))
                name = f"{group.name}/upload{suffix}"
                self._emit(name, Copy(), Stream.H2D, "upload", segment, home, here, work)
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
        self._emit(
            f"{group.name}/upload{suffix}",
            Copy(),
            Stream.H2D,
            "upload",
            segment,
            layout.shared_out(home),
            own,
            copy_work(total // layout.num_shares),
        )
        self._emit(
            f"{group.name}/all_gather{suffix}",
            Collective("all_gather", layout.share),
            Stream.LINK,
            "gather",
            segment,
            own,
            here,
            Work(link_bytes=total - total // layout.num_shares),
        )

    def _offload(self, segment: str, *, changed: bool, suffix: str = "") -> None:
        groups = self._offloaded(segment)
        if not groups:
            return
        lossy = self.plan.precision.is_lossy
        for group in groups:
            if not (changed and group.num_trainable):
                continue
            step = 1 if suffix and not self.layout.is_delayed(group) else 0
            if lossy:
                self._cast(group, segment, step, f"{group.name}/narrow{suffix}", widen=False)
            dtype = self.plan.precision.transfer
            source = self.layout.staging(segment) if lossy else self.layout.slot(segment)
            read = self.layout.trainable(group, source, step, dtype=dtype)
            left = self.layout.trainable(group, self.layout.home(group), step, dtype=dtype)
            work = copy_work(read.size_bytes // self.layout.num_shares)
            name = f"{group.name}/offload{suffix}"
            reads, writes = self.layout.shared_out((read,)), self.layout.shared_out((left,))
            self._emit(name, Copy(), Stream.D2H, "offload", segment, reads, writes, work)
        if not self.plan.residency.reuse_slots:
            self._free(segment, suffix)

    def _cast(self, group: ParameterGroup, segment: str, step: int, name: str, *, widen: bool) -> None:
        precision = self.plan.precision
        slot, staging = self.layout.slot(segment), self.layout.staging(segment)
        if widen:
            reads = self.layout.weights(group, staging, step, dtype=precision.transfer)
            writes = self.layout.weights(group, slot, step)
            work = cast_work(group.num_parameters, source=precision.transfer, target=precision.storage)
        else:
            reads = (self.layout.trainable(group, slot, step),)
            writes = (self.layout.trainable(group, staging, step, dtype=precision.transfer),)
            work = cast_work(group.num_trainable, source=precision.storage, target=precision.transfer)
        label = "widen" if widen else "narrow"
        self._emit(name, Cast(), Stream.COMPUTE, label, segment, reads, writes, work)

    def _allocate(self, segment: str, suffix: str) -> None:
        slot, size = self.layout.slot(segment), self._slot_bytes(segment)
        work = Work(num_allocations=1, allocation_bytes=size)
        left = Access(slot, "unset", None, size)
        self._emit(
            f"{segment}/allocate{suffix}", Allocate(slot), Stream.H2D, "allocate", segment, (), (left,), work
        )

    def _free(self, segment: str, suffix: str) -> None:
        slot, size = self.layout.slot(segment), self._slot_bytes(segment)
        left = Access(slot, "freed", None, size)
        work = Work(num_allocations=1)
        self._emit(f"{segment}/free{suffix}", Free(slot), Stream.D2H, "free", segment, (), (left,), work)

    # -- what is where -----------------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        op: Operation,
        stream: Stream,
        label: str,
        segment: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        work: Work,
    ) -> None:
        count = self._named.get(name, 0) + 1
        self._named[name] = count
        unique = name if count == 1 else f"{name}#{count}"
        self.instructions.append(
            Instruction(unique, op, stream, label, segment, reads=reads, writes=writes, work=work)
        )

    def _own(self, segment: str) -> tuple[ParameterGroup, ...]:
        """Return the groups that are updated with `segment`: a tied one with the last segment that reads it."""
        return tuple(group for group in self.model.groups_of(segment) if group.segments[-1] == segment)

    def _trainable(self, segment: str) -> tuple[ParameterGroup, ...]:
        return tuple(group for group in self.model.groups_of(segment) if group.num_trainable)

    def _perturbed_in_place(self, segment: str) -> tuple[ParameterGroup, ...]:
        return tuple(g for g in self._trainable(segment) if not self.layout.gathers(g, segment))

    def _only_gathers(self, segment: str) -> bool:
        return not self._perturbed_in_place(segment)

    def _offloaded(self, segment: str) -> tuple[ParameterGroup, ...]:
        return tuple(group for group in self.model.groups_of(segment) if self.layout.is_offloaded(group))

    def _slot_bytes(self, segment: str) -> int:
        sizes = {buffer.name: buffer.size_bytes for buffer in self.layout.buffers()}
        return sizes[self.layout.slot(segment)]

    def _fresh_offset(self, segment: str) -> int:
        """Return where the next direction goes: alternate halves for blocks that are drawn ahead."""
        if not self.plan.runtime.draw_ahead or self.layout.is_edge(segment):
            return 0
        self._halves += 1
        return self.layout.block_direction_bytes * (self._halves % 2)


def _walk_order(plan: Plan) -> list[ParameterGroup]:
    """Return the trainable groups in the order in which the ``mezo`` generator visits them."""
    groups = [group for group in plan.model.groups if group.num_trainable]
    if plan.estimator.order == "registration":
        return groups
    return sorted(groups, key=lambda group: plan.model.segments.index(group.segments[0]))


def _load_work(layout: Layout) -> Work:
    return copy_work(3 * 8 * layout.num_tokens)
