"""The schedule axis: in which order a step visits segments and points, and when it updates.

Two orders of the same forwards, of a model with two blocks and two perturbations, as block and point:

>>> from costmodel import read_model_spec
>>> from zosim.simulators.shortening import shortened
>>> from zosim.program.operations import Forward
>>> from zosim.plans import Estimator, Placement, Schedule
>>> model, placement = (
...     shortened(read_model_spec("opt-125m")),
...     Placement(topology="cpu-laptop", devices=("cpu0",)),
... )
>>> for traversal in ("full", "blockwise"):
...     axes = {"schedule": Schedule(traversal=traversal), "estimator": Estimator(num_perturbations=2)}
...     writer = StepWriter(Plan(model=model, batch=1, seq=16, placement=placement, **axes))
...     writer.write_step()
...     order = [
...         i.op for i in writer.instructions if isinstance(i.op, Forward) and i.segment.startswith("block")
...     ]
...     print(f"{traversal:10}", *(f"{op.segment[-1]}:{op.eval_point}" for op in order))
full       0:q0+ 1:q0+ 0:q0- 1:q0- 0:q1+ 1:q1+ 0:q1- 1:q1-
blockwise  0:q0+ 0:q0- 0:q1+ 0:q1- 1:q0+ 1:q0- 1:q1+ 1:q1-
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from costmodel.models.model_spec import ParamGroup
from costmodel.work import Work
from zosim.eval_points import BASE
from zosim.lowering.forward import Forwards
from zosim.lowering.mesh import Losses
from zosim.lowering.perturbations import Perturbations
from zosim.lowering.rank import Listing, Rank
from zosim.lowering.residency import Homes
from zosim.lowering.split import Boundaries
from zosim.lowering.weights import EvalPoints, Transition
from zosim.plans import Plan
from zosim.program.instructions import Access, Buffer, Instruction


class StepWriter:
    """Writes the instructions of one part of a program, in an order that would be right on a single stream."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self._plan = plan
        self._rank = Rank(plan, rank)
        self._listing = Listing()
        common = self._rank, self._listing
        # Each axis asks those that are made before it, none behind.
        self.homes = Homes(*common)
        self._perturbations = Perturbations(*common)
        self._losses = Losses(*common)
        self._boundaries = Boundaries(*common)
        self._eval_points = EvalPoints(*common, self.homes, self._perturbations, self._losses)
        self._forwards = Forwards(
            *common, self._perturbations, self._eval_points, self._boundaries, self._losses
        )

    @property
    def instructions(self) -> list[Instruction]:
        """What has been written."""
        return self._listing.instructions

    def buffers(self) -> tuple[Buffer, ...]:
        """Return every buffer that the rank needs."""
        axes = (
            self.homes,
            self._perturbations,
            self._eval_points,
            self._forwards,
            self._boundaries,
            self._losses,
        )
        return tuple(chain.from_iterable(axis.buffers() for axis in axes))

    def loss_work(self) -> Work:
        """Return the work of one forward of the head."""
        return self._forwards.loss_work()

    def initial(self) -> Iterator[Access]:
        """Yield what is there before the first step; what belongs to the step before it is there and void."""
        yield from self.homes.at_rest(delayed_by=1)
        yield from self._losses.initial()
        delayed = [g for g in self._rank.param_groups if self._rank.is_delayed(g) and g.num_trainable]
        for perturbation in range(self._plan.estimator.num_perturbations if delayed else 0):
            yield self._losses.gradient(perturbation, -1)
            for group in delayed:
                yield from self._perturbations.pending(group, perturbation)

    # -- parts -------------------------------------------------------------------------------------------------

    def write_step(self) -> None:
        """Write one step: load, forwards at every point, projected gradients, immediate updates."""
        # Loaded first: rows of token tables are sampled for the tokens of the batch.
        self._forwards.load()
        self._boundaries.receive_all()
        if self._rank.is_batched:
            self._batched()
        elif self._rank.is_full_pass:
            self._full_pass()
        else:
            self._blockwise()
        # One exchange a step, behind all forwards: latency counts for it, not bytes.
        self._losses.exchange_losses()
        for perturbation in range(self._plan.estimator.num_perturbations):
            self._losses.projected_gradient(perturbation)
        self._immediate_updates()

    def write_flush(self) -> None:
        """Write the updates that are still pending when no step follows."""
        for segment in self._rank.segments:
            # No step follows whose visit would apply it.
            if any(map(self._rank.is_delayed, self._updated_with(segment))):
                self._execute_block(segment, step_before=True)

    # -- traversals --------------------------------------------------------------------------------------------

    def _blockwise(self) -> None:
        for segment in self._rank.segments:
            self.homes.upload(segment)
            self._pending_updates(segment)
            if self._plan.estimator.difference == "forward":
                self._forwards.segment(segment, BASE)
            for perturbation in range(self._plan.estimator.num_perturbations):
                self._both_points(segment, perturbation)
            self.homes.offload(segment, changed=self._eval_points.leaves_changed(segment))

    def _batched(self) -> None:
        """Write one forward of each segment at all points, from the factors of every perturbation's perturbation."""
        for segment in self._rank.segments:
            self.homes.upload(segment)
            self._pending_updates(segment)
            for perturbation in range(self._plan.estimator.num_perturbations):
                for group in self._rank.trainable(segment):
                    self._perturbations.sample(group, perturbation, segment=segment)
            self._forwards.batched(segment)
            self.homes.offload(segment, changed=self._eval_points.leaves_changed(segment))

    def _both_points(self, segment: str, perturbation: int) -> None:
        """Write the forwards of `segment` for one perturbation, which is sampled once."""
        path = self._eval_points.path(perturbation)
        if not path:
            return
        # Perturbations of a segment's groups lie side by side; gathered rows have a buffer of their own.
        offset = self._perturbations.fresh_offset(segment)
        for group in self._rank.trainable(segment):
            rows = self._rank.gathers(group, segment)
            self._perturbations.sample(
                group,
                perturbation,
                keep="rows" if rows else "all",
                offset_bytes=offset,
                # An update that finds the perturbation still there needs z, not the z·ε that perturbations are content with.
                scaled=not self._is_updated_next(group, segment),
                segment=segment,
            )
            offset += 0 if rows else self._perturbations.perturbation_bytes(group)
        whole = self._rank.perturbed_whole(segment)
        for transition in chain(*path):
            self._eval_points.perturb(whole, segment, perturbation, transition)
            if transition.eval_point.is_perturbed:
                self._forwards.segment(segment, transition.eval_point)

    def _full_pass(self) -> None:
        if self._plan.estimator.difference == "forward":
            self._forwards.model(BASE)
        for perturbation in range(self._plan.estimator.num_perturbations):
            for transitions in self._eval_points.path(perturbation):
                self._full_pass_of(perturbation, transitions)
                for transition in transitions:
                    if transition.eval_point.is_perturbed:
                        self._forwards.model(transition.eval_point)

    def _full_pass_of(self, perturbation: int, transitions: tuple[Transition, ...]) -> None:
        """Write the reference loop's pass: every group's perturbation is drawn, used and forgotten."""
        for group in self._perturbations.sampling_order:
            if group in self._rank.param_groups:
                segment = self._rank.readers(group)[0]
                # One buffer serves group after group, so each sampling overwrites the last.
                self._perturbations.forget()
                self._perturbations.sample(group, perturbation, scaled=True, segment=segment)
                # A group that stays as it is takes its part of the generator's numbers all the same.
                for transition in () if self._rank.has_side_path(group) else transitions:
                    self._eval_points.perturb((group,), segment, perturbation, transition)
        self._perturbations.forget()

    # -- updates -----------------------------------------------------------------------------------------------

    def _pending_updates(self, segment: str) -> None:
        for group in self._rank.trainable(segment):
            if self._rank.is_delayed(group):
                self._eval_points.update(group, segment, step=-1)

    def _immediate_updates(self) -> None:
        """Write the updates that use this step's gradient."""
        # The last segment first, whose perturbations are still there.
        *others, last = self._rank.segments
        for segment in (last, *others):
            if any(not self._rank.is_delayed(group) for group in self._updated_with(segment)):
                self._execute_block(segment, step_before=False)

    def _updated_with(self, segment: str) -> list[ParamGroup]:
        return [group for group in self._rank.updated_with(segment) if group.num_trainable]

    def _is_updated_next(self, group: ParamGroup, segment: str) -> bool:
        """Whether the update of `group` finds the perturbation of its perturbations in `segment` still there."""
        is_last = segment == self._rank.segments[-1] and self._plan.estimator.num_perturbations == 1
        return is_last and not self._rank.is_delayed(group)

    def _execute_block(self, segment: str, *, step_before: bool) -> None:
        """Write the updates of the groups that `segment` owns, fetching them first where they are offloaded."""
        suffix = ":update"
        self.homes.upload(segment, suffix)
        for group in self._updated_with(segment):
            # In a flush what is due is the update of the step before, elsewhere this step's.
            if self._rank.is_delayed(group) == step_before:
                self._eval_points.update(group, segment, step=-1 if step_before else 0)
        self.homes.offload(segment, changed=True, suffix=suffix)
