"""One step, instruction by instruction, in an order that would be right on a single stream."""

from __future__ import annotations

from itertools import chain

from costmodel.forward import activation_bytes, forward_work
from costmodel.model_spec import EMBED, HEAD, ParameterGroup
from costmodel.sweeps import copy_work, update_work
from costmodel.work import Work
from zosim.instructions import Access, Instruction, Stream
from zosim.lowering.directions import Directions
from zosim.lowering.exchanges import Exchanges
from zosim.lowering.layout import Layout
from zosim.lowering.listing import Listing
from zosim.lowering.points import Leg, Points
from zosim.lowering.transfers import Transfers
from zosim.operations import Forward, Load, Update
from zosim.plans import Plan


class StepWriter:
    """Writes the instructions of one part of a program.

    Holds what lowering knows at each point of the listing: which directions are at hand, and how far each
    query's generator has been walked.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan = plan
        self.listing = Listing(plan, rank)
        self.layout = self.listing.layout
        self.model = plan.model
        self._directions = Directions(self.listing)
        self._transfers = Transfers(self.listing)
        self._points = Points(self.listing, self._directions)
        self._forward_works: dict[str, Work] = {}
        self._exchanges = Exchanges(self.listing)

    @property
    def instructions(self) -> list[Instruction]:
        """What has been written."""
        return self.listing.instructions

    # -- parts -------------------------------------------------------------------------------------------------

    def write_step(self) -> None:
        """Write one step: load, forwards at every point, projected gradients, immediate updates."""
        self.listing.emit(
            "load", Load(), Stream.H2D, "load", EMBED, (), (self.layout.batch(),), _load_work(self.layout)
        )
        {"sweep": self._sweep, "blockwise": self._blockwise, "querywise": self._querywise}[
            self.plan.schedule.traversal
        ]()
        if self.plan.placement.world_size > 1:
            self._exchanges.exchange_losses()
        for query in range(self.plan.estimator.num_queries):
            self._exchanges.projected_gradient(query)
        self._immediate_updates()

    def write_flush(self) -> None:
        """Write the updates that are still pending when no step follows."""
        for segment in self.layout.segments:
            if any(
                self.layout.is_delayed(group) and group.num_trainable for group in self.listing.own(segment)
            ):
                self._visit(segment, step_before=True)

    # -- traversals --------------------------------------------------------------------------------------------

    def _blockwise(self) -> None:
        self._exchanges.receive_all()
        for segment in self.layout.segments:
            self._transfers.upload(segment)
            self._pending_updates(segment)
            if self.plan.estimator.difference == "forward":
                self._forward(segment, "")
            for query in range(self.plan.estimator.num_queries):
                self._both_points(segment, query)
            perturbed = self.listing.perturbed_in_place(segment)
            changed = any(self._points.leaves_changed(group) for group in perturbed)
            self._transfers.offload(segment, changed=changed)

    def _querywise(self) -> None:
        self._exchanges.receive_all()
        if self.plan.estimator.difference == "forward":
            self._forward_model("")
        for query in range(self.plan.estimator.num_queries):
            for segment in self.layout.segments:
                self._both_points(segment, query)

    def _both_points(self, segment: str, query: int) -> None:
        """Write one query's forwards of `segment`, from one draw of its direction."""
        way = self._points.way(query)
        if not way:
            return
        offset = self._directions.fresh_offset(segment)
        in_place = self.listing.perturbed_in_place(segment)
        for group in self.listing.trainable(segment):
            rows = self.layout.gathers(group, segment)
            self._directions.draw(
                group,
                query,
                keep="rows" if rows else "all",
                offset_bytes=offset,
                scaled=not self._updates_at_hand(group, segment),
                segment=segment,
            )
            offset += 0 if rows else self.layout.direction_bytes(group)
        for leg in chain(*way):
            self._points.go(in_place, segment, query, leg)
            if leg.point:
                self._forward(segment, leg.point)

    def _sweep(self) -> None:
        self._exchanges.receive_all()
        if self.plan.estimator.difference == "forward":
            self._forward_model("")
        for query in range(self.plan.estimator.num_queries):
            for legs in self._points.way(query):
                self._sweep_perturb(query, legs)
                for leg in legs:
                    if leg.point:
                        self._forward_model(leg.point)

    def _sweep_perturb(self, query: int, legs: tuple[Leg, ...]) -> None:
        """Write the reference loop's pass: every group's direction is drawn, used and forgotten."""
        for group in self._swept:
            segment = self.layout.readers(group)[0]
            self._directions.forget()
            self._directions.draw(group, query, scaled=True, segment=segment)
            for leg in legs:
                self._points.go((group,), segment, query, leg)
        self._directions.forget()

    def _forward_model(self, point: str) -> None:
        for segment in self.layout.segments:
            self._forward(segment, point)

    @property
    def _swept(self) -> tuple[ParameterGroup, ...]:
        """Groups that this rank perturbs, in the order in which they are drawn."""
        return tuple(group for group in self._directions.walk_order if group in self.layout.groups)

    # -- updates -----------------------------------------------------------------------------------------------

    def _pending_updates(self, segment: str) -> None:
        for group in self.listing.trainable(segment):
            if self.layout.is_delayed(group):
                self._update_group(group, segment, step=-1)

    def _immediate_updates(self) -> None:
        """Write the updates that use this step's gradient, the segments in the order in which they ran.

        The last segment comes first: its directions are still at hand.
        """
        segments = list(self.layout.segments)
        for segment in (segments[-1], *segments[:-1]):
            if any(
                not self.layout.is_delayed(group)
                for group in self.listing.own(segment)
                if group.num_trainable
            ):
                self._visit(segment, step_before=False)

    def _updates_at_hand(self, group: ParameterGroup, segment: str) -> bool:
        """Whether the update of `group` finds the direction of its perturbations in `segment` at hand."""
        is_last = segment == self.layout.segments[-1] and self.plan.estimator.num_queries == 1
        return is_last and not self.layout.is_delayed(group)

    def _visit(self, segment: str, *, step_before: bool) -> None:
        """Write the updates of the groups that `segment` owns, fetching them first where they are offloaded."""
        suffix = ":update"
        self._transfers.upload(segment, suffix)
        for group in self.listing.own(segment):
            if group.num_trainable and self.layout.is_delayed(group) == step_before:
                self._update_group(group, segment, step=-1 if step_before else 0)
        self._transfers.offload(segment, changed=True, suffix=suffix)

    def _update_group(self, group: ParameterGroup, segment: str, *, step: int) -> None:
        num_queries = self.plan.estimator.num_queries
        place = self.layout.place(group, segment)
        for query in range(num_queries):
            direction = self._directions.draw(group, query, step=step, segment=segment, suffix=":update")
            before = f"u{query - 1}" if query else ""
            is_last = query == num_queries - 1
            read = self.layout.trainable(group, place, step, before)
            left = self.layout.trainable(
                group, place, step + 1 if is_last else step, "" if is_last else f"u{query}"
            )
            reads = (read, direction, self.layout.gradient(query, step))
            work = update_work(
                group.num_trainable,
                dtype=self.plan.weights.dtype,
                num_tensors=group.num_trainable_tensors,
                arithmetic="fused" if self._is_sign else "pieces",
                is_watched=self.plan.loses_updates,
            )
            name = f"{group.name}/update[q{query}]"
            op, stream = Update(group.name, step, query), self.listing.sweeps
            self.listing.emit(name, op, stream, "update", segment, reads, (left,), work)

    @property
    def _is_sign(self) -> bool:
        return self.plan.directions.distribution == "rademacher"

    # -- single instructions -----------------------------------------------------------------------------------

    def _forward(self, segment: str, point: str) -> None:
        if point not in self.layout.own_points:
            return
        if segment == self.layout.segments[0] and not self.layout.is_first_stage:
            before = self.model.segments[self.model.segments.index(segment) - 1]
            number = self.layout.stage - 1
            self._exchanges.decode(segment, before, point, self.layout.wire(point, number, "in"), number)
        gathered = [
            group
            for group in self.listing.trainable(segment)
            if point and self.layout.gathers(group, segment)
        ]
        reads: list[Access] = []
        for group in self.model.groups_of(segment):
            at = "" if group in gathered else point
            reads += self._points.weights(group, segment, at)
        query = int(point[1:-1]) if point else 0
        # Rows go through what the table itself goes through later in the step: earlier queries leave their rounding,
        # unless they are over, or leave the table alone.
        by_query = self.plan.schedule.traversal == "querywise"
        first = query if by_query or self._points.are_copies else 0
        reads += [
            self.layout.direction(group, visited, 0, offset_bytes=0, rows=True)
            for group in gathered
            for visited in range(first, query + 1)
        ]
        if segment in (EMBED, HEAD):
            reads.append(self.layout.batch())
        if segment != EMBED:
            previous = self.model.segments[self.model.segments.index(segment) - 1]
            reads.append(self.layout.hidden(point, previous))
        left = self._exchanges.loss(point) if segment == HEAD else self.layout.hidden(point, segment)
        op = Forward(segment, point, tuple(group.name for group in gathered))
        name = f"{segment}/forward[{point or 'base'}]"
        work = self._forward_work(segment)
        self.listing.emit(name, op, Stream.COMPUTE, "forward", segment, tuple(reads), (left,), work)
        if segment == self.layout.segments[-1] and not self.layout.is_last_stage:
            self._exchanges.hand_on(segment, point)
        elif (cut := self.plan.coded_in_place.get(segment)) is not None:
            wire = self.layout.wire(point, cut, "here")
            self._exchanges.encode(segment, segment, point, wire, cut)
            self._exchanges.decode(segment, segment, point, wire, cut)

    def _forward_work(self, segment: str) -> Work:
        """Return the work of forwarding `segment` at any point."""
        if segment not in self._forward_works:
            self._forward_works[segment] = self._counted_forward(segment)
        return self._forward_works[segment]

    def _counted_forward(self, segment: str) -> Work:
        plan = self.plan
        work = forward_work(
            self.model,
            segment,
            batch=self.layout.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            storage_dtype="tf32" if plan.compute_dtype == "tf32" else plan.weights.dtype,
            attention=plan.forward.attention,
            loss_chunk=plan.forward.loss_chunk_tokens,
        )
        if segment == HEAD:
            return work
        # The input stays alive until the output replaces it.
        output = activation_bytes(
            self.model,
            batch=self.layout.num_sequences,
            seq=plan.seq,
            dtype=plan.compute_dtype,
            segment=segment,
        )
        return work.model_copy(update={"workspace_bytes": work.workspace_bytes + output})


def _load_work(layout: Layout) -> Work:
    return copy_work(3 * 8 * layout.num_tokens) + Work(calls=("batch",))
