"""The weights axis: how they come to an evaluation point, and what is written into them.

One state of them is perturbed from point to point where it lies, or a copy is written for each point.

In place, three perturbations bring the weights from the base to one sign, to the other, and back. Copies are written for each
sign on its own, from weights that stay as they are.

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Placement, Plan, Weights
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> for perturbation in ("serial", "copies"):
...     weights = Weights(perturbation=perturbation)
...     plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement, weights=weights)
...     for item in lower(plan).step:
...         if item.segment == "block.0" and isinstance(item.op, Perturb):
...             print(
...                 f"{item.id:23} {item.op.scale:+d} z of {item.reads[0].what} into {item.writes[0].buffer}"
...             )
block.0/perturb[q0+]    +1 z of block.0 into device.block.0
block.0/perturb[q0-]    -2 z of block.0@q0+ into device.block.0
block.0/restore[q0]     +1 z of block.0@q0- into device.block.0
block.0/perturb[q0+]    +1 z of block.0 into copy.0
block.0/perturb[q0-]    -1 z of block.0 into copy.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import cycle
from typing import NamedTuple

from costmodel.formats import FORMATS
from costmodel.models.model_spec import ParamGroup
from costmodel.param_passes import closing_work, perturb_work, update_work
from costmodel.work import Work
from zosim.eval_points import BASE, EvalPoint
from zosim.lowering.mesh import Losses
from zosim.lowering.perturbations import Perturbations
from zosim.lowering.rank import AxisWriter, Listing, Rank, is_embedding_or_head
from zosim.lowering.residency import Homes
from zosim.program.contents import UPDATE_SUM, Named, ParamGroupWeights, is_scaled
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Perturb, Update

SCRATCH_ELEMENTS = 1 << 20
"""Elements of the temporaries that passes over parameters on a CPU keep from one to the next, all together."""

SIGN_SCRATCH_ELEMENTS = 1 << 16
"""The same where perturbations are signs, whose passes need temporaries for a weight decay only."""


class Transition(NamedTuple):
    """One perturbation on the path of a perturbation."""

    before: EvalPoint
    eval_point: EvalPoint
    scale: int  # multiple of the perturbation


class EvalPoints(AxisWriter):
    """Writes perturbations and updates, and knows where the weights of each point lie (`rank`, `listing`: as of :class:`AxisWriter`)."""

    def __init__(
        self, rank: Rank, listing: Listing, homes: Homes, perturbations: Perturbations, losses: Losses
    ) -> None:
        super().__init__(rank, listing)
        self._homes = homes
        self._perturbations = perturbations
        self._losses = losses
        perturbed = filter(lambda eval_point: eval_point.is_perturbed, rank.own_eval_points)
        self._perturbed = {eval_point: number for number, eval_point in enumerate(perturbed)}
        self._copies: dict[tuple[str, EvalPoint], Access] = {}
        self._turn = 0

    @property
    def are_copies(self) -> bool:
        """Whether each point is written beside the weights, which evaluations leave alone."""
        return self._plan.weights.perturbation == "copies"

    @property
    def _stream(self) -> Stream:
        """The stream that perturbs and updates: compute, which reads what it changes, unless that reads copies."""
        return Stream.SAMPLE if self._plan.perturbations.sampled_ahead and self.are_copies else Stream.COMPUTE

    # -- points ------------------------------------------------------------------------------------------------

    def path(self, perturbation: int) -> tuple[tuple[Transition, ...], ...]:
        """Return the perturbations `z` of one index, grouped by the draw that serves them where a full pass forgets perturbations in between.

        Weights in place go through all points, whoever forwards them, and back. Copies are made for this rank's own; where
        it has none, its perturbations are drawn if they are kept, or so that the step after can draw them again.
        """
        plus, minus = EvalPoint(perturbation, 1), EvalPoint(perturbation, -1)
        if self.are_copies:
            # Each copy is made of the weights as they are, not of the other copy.
            transitions = (Transition(BASE, plus, 1), Transition(BASE, minus, -1))
            own = tuple(transition for transition in transitions if transition.eval_point in self._perturbed)
            is_recorded = self._plan.schedule.update == "delayed" and self._plan.perturbations.rng == "mezo"
            return (own,) if own or is_recorded or self._plan.perturbations.kept else ()
        if self._plan.estimator.difference == "central":
            # From one sign to the other in one pass, of twice the distance.
            # Each leap rounds: the sum of the three is not zero, which is the drift of MeZO's loop.
            return (Transition(BASE, plus, 1),), (Transition(plus, minus, -2),), (Transition(minus, BASE, 1),)
        return (Transition(BASE, plus, 1),), (Transition(plus, BASE, -1),)

    def perturb(
        self, groups: Iterable[ParamGroup], segment: str, perturbation: int, transition: Transition
    ) -> None:
        """Write one perturbation of `groups`."""
        # Copies that are written ahead take turns in two buffers.
        number = self._take_turn(segment, transition.eval_point)
        for group in groups:
            buffer = self._homes.buffer_of(group, segment)
            read = self._homes.trainable(group, buffer, 0, ParamGroupWeights(group.name, transition.before))
            left = self._homes.trainable(
                group, buffer, 0, ParamGroupWeights(group.name, transition.eval_point)
            )
            if self.are_copies:
                left = self._copy(group, segment, transition.eval_point, number)
                self._copies[group.name, transition.eval_point] = left
            self._perturb_one(group, segment, perturbation, transition, read, left)

    def weights(self, group: ParamGroup, segment: str, eval_point: EvalPoint) -> tuple[Access, ...]:
        """Return what a forward of `segment` at `eval_point` reads of `group`."""
        buffer = self._homes.buffer_of(group, segment)
        if eval_point.is_perturbed and self._rank.has_side_path(group):
            return (
                *self._homes.weights(group, buffer, 0),
                self._perturbations.sampled(group, eval_point.perturbation),
            )
        if not (self.are_copies and eval_point.is_perturbed and group.num_trainable):
            return self._homes.weights(group, buffer, 0, eval_point)
        return (*self._homes.frozen(group, buffer), self._copies[group.name, eval_point])

    def leaves_changed(self, segment: str) -> bool:
        """Whether a visit of a step leaves parameters of `segment` in other bits than they came in."""
        stays = self.are_copies
        return any(
            self._rank.is_delayed(group) or not (stays or self._rank.has_side_path(group))
            for group in self._rank.trainable(segment)
            if not self._rank.gathers(group, segment)
        )

    def _perturb_one(
        self,
        group: ParamGroup,
        segment: str,
        perturbation: int,
        transition: Transition,
        read: Access,
        left: Access,
    ) -> None:
        z = self._perturbations.sampled(group, perturbation)
        is_fused = self._storage.keeps_signs or is_scaled(z.what)
        label, at = (
            ("perturb", str(transition.eval_point))
            if transition.eval_point.is_perturbed
            else ("restore", f"q{perturbation}")
        )
        self._emit(
            f"{group.name}/{label}[{at}]",
            Perturb(group.name, transition.scale, perturbation),
            self._stream,
            label,
            segment,
            (read, z),
            (left,),
            self._storage.with_taking_out(
                perturb_work(
                    group.num_trainable,
                    dtype=self._plan.weights.dtype,
                    perturbation_dtype=self._storage.row_format,
                    arithmetic="fused" if is_fused else "chunked",
                ),
                group.num_trainable,
                SCRATCH_ELEMENTS,
            ),
        )

    # -- copies ------------------------------------------------------------------------------------------------

    @cached_property
    def _num_copies(self) -> int:
        """Copies of a group that exist at one time, each at another point."""
        if not (self.are_copies and self._perturbed):
            return 0
        is_ahead = self._plan.perturbations.sampled_ahead
        # Forwards read one copy at a time; who writes ahead needs another one meanwhile.
        if not self._rank.is_full_pass:
            return 2 if is_ahead else 1
        # Both signs of a perturbation come of one draw, so both copies of the whole model are there at once.
        of_perturbation = max(Counter(eval_point.perturbation for eval_point in self._perturbed).values())
        return min(len(self._perturbed), 2) if is_ahead else of_perturbation

    def _copy(self, group: ParamGroup, segment: str, eval_point: EvalPoint, number: int) -> Access:
        """Return the access to the copy of `group` at `eval_point` in one of the buffers for them."""
        copied = self._copied(segment)
        before = copied[: copied.index(group)]
        offset = sum(map(self._trainable_bytes, before))
        what = ParamGroupWeights(group.name, eval_point)
        return Access(f"copy.{number}", what, 0, self._trainable_bytes(group), offset)

    def _copied(self, segment: str) -> tuple[ParamGroup, ...]:
        """Return the groups that are at a point together: those of a segment, or in full passes all."""
        if self._rank.is_full_pass:
            return tuple(group for group in self._rank.param_groups if group.num_trainable)
        return self._rank.perturbed_whole(segment)

    def _trainable_bytes(self, group: ParamGroup) -> int:
        return self._homes.trainable_bytes(group, self._plan.weights.dtype)

    def _take_turn(self, segment: str, eval_point: EvalPoint) -> int:
        """Return the number of the buffer that a copy goes into."""
        # Embedding and head always use the first buffer.
        if self._num_copies < 2 or not self._takes_turns(segment):
            return 0
        if self._rank.is_full_pass:
            return self._perturbed[eval_point] % self._num_copies
        self._turn += 1
        return self._turn % self._num_copies

    def _takes_turns(self, segment: str) -> bool:
        """Whether copies of `segment` go into all of the buffers: embedding and head, often larger than a block, into one."""
        return self._rank.is_full_pass or not is_embedding_or_head(segment)

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of copies, and of what passes over parameters keep."""
        dtype = self._plan.weights.dtype
        for number in range(self._num_copies):
            sizes = [
                sum(map(self._trainable_bytes, self._copied(segment)))
                for segment in self._rank.segments
                if number == 0 or self._takes_turns(segment)
            ]
            if sizes:
                yield Buffer(f"copy.{number}", Space.DEVICE, max(sizes), "copies", dtype)
        # Passes over a group are made in chunks, so that their temporaries stay small.
        most = SIGN_SCRATCH_ELEMENTS if self._storage.keeps_signs else SCRATCH_ELEMENTS
        perturbations_bytes = self._perturbations.perturbation_bytes
        pass_bytes = (
            self._storage.pass_bytes(group, perturbations_bytes(group)) for group in self._rank.param_groups
        )
        largest = max(pass_bytes, default=0)
        if sums := max(map(self._storage.sum_bytes, self._rank.param_groups), default=0):
            yield Buffer("sums", Space.DEVICE, sums, "perturbations", "float32", dynamic=True)
        if scratch := min(largest, FORMATS[dtype].bytes(most)):
            yield Buffer("scratch", Space.DEVICE, scratch, "scratch", dtype)

    # -- updates -----------------------------------------------------------------------------------------------

    def update(self, group: ParamGroup, segment: str, *, step: int) -> None:
        """Write the update of `group` with the projected gradients of `step`, one perturbation after the other."""
        num_perturbations = self._plan.estimator.num_perturbations
        buffer = self._homes.buffer_of(group, segment)
        # In the order of their indices, as replaying does: each update rounds, so another order has other bits.
        divisor = self._storage.update_divisor
        for perturbation in range(num_perturbations):
            z = self._perturbations.sample(
                group,
                perturbation,
                step=step,
                segment=segment,
                rounding=self._storage.update_rounding,
                for_update=True,
                suffix=":update",
            )
            is_last = perturbation == num_perturbations - 1
            # Between the updates of two perturbations weights are in a state of their own, which nothing but the next may read.
            before = ParamGroupWeights(group.name, updated_to=perturbation - 1 if perturbation else None)
            after = ParamGroupWeights(group.name, updated_to=None if is_last else perturbation)
            read = self._homes.trainable(group, buffer, step, before)
            left = self._homes.trainable(group, buffer, step + is_last, after)
            added = self._sum(group, perturbation - 1, step) if perturbation else ()
            adding = () if is_last else self._sum(group, perturbation, step)
            work = self._update_work(group, is_summed=bool(adding))
            self._emit(
                f"{group.name}/update[q{perturbation}]",
                Update(group.name, step, perturbation, divisor),
                self._stream,
                "update",
                segment,
                (read, z, self._losses.gradient(perturbation, step), *added),
                (left, *adding),
                self._with_closing(group, work) if is_last else work,
            )

    def _sum(self, group: ParamGroup, perturbation: int, step: int) -> tuple[Access, ...]:
        """Return the access to what the quantized values of `group` change by, over all perturbations up to `perturbation`; none if each is rounded."""
        size = self._storage.sum_bytes(group)
        return (
            (Access("sums", Named(UPDATE_SUM, f"{group.name}:q{perturbation}"), step, size),) if size else ()
        )

    def _with_closing(self, group: ParamGroup, work: Work) -> Work:
        """Return `work` with a step's share of closing the increments beside the linears of `group`, where its rank would exceed the bound."""
        model = self._plan.model
        if not model.adapter_lazy_steps:
            return work
        left_factors = [(one.name, rank) for one in model.param_groups for _, rank in one.trainable_matrices]
        works = (
            closing_work(outputs, inputs, rank=rank, closed_rank=model.adapter_rank - rank)
            for (name, rank), (inputs, outputs) in zip(
                left_factors, cycle(model.adapter_shapes), strict=False
            )
            if name == group.name
        )
        return work + sum(works, Work()).one_in(model.adapter_lazy_steps)

    def _update_work(self, group: ParamGroup, *, is_summed: bool) -> Work:
        num_numbers = self._storage.num_numbers(group)
        numbers = update_work(
            num_numbers,
            dtype=self._plan.weights.dtype,
            perturbation_dtype=self._storage.row_format,
            num_tensors=group.num_trainable_tensors,
            arithmetic="fused" if self._storage.keeps_signs else "chunked",
            is_watched=self._plan.loses_updates,
        )
        if self._rank.adds_factors:  # products are made in chunks that stay in cache
            products = self._perturbations.products(group)
            numbers += Work(dtype=numbers.dtype, matmuls=products, num_kernels=len(products))
        numbers = self._storage.with_taking_out(numbers, num_numbers, SCRATCH_ELEMENTS)
        return self._storage.update_work(group, numbers, is_summed=is_summed)
