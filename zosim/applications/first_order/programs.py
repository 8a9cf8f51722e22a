"""A first-order step as programs: what split training by backpropagation does on the ranks of a plan.

The baseline that a zeroth-order plan is held against, per step and on the same devices, split points and batch. The model stays
on the devices. A stage keeps what its backwards need, sends activations on and their gradients back, and ranks of one
stage sum their gradients. It is lowered, validated and simulated as every program is; nothing executes it.

*Microbatches.* ``gpipe`` forwards all of them, then goes back; ``1f1b`` keeps as many as there are stages behind.
*AQ-SGD* [1]_ sends a few bits of what changed in a sample's activation since the sample was last seen, and keeps the last
message of every sample at both ends of a boundary, on the host.

.. [1] J. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees",
   2022, algorithm 1.
.. [2] Y. Huang et al., "GPipe", 2019, section 2.3: the bubble's part of a step is ``(p - 1)/(m + p - 1)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from costmodel.models.backward import backward_work, optimizer_work
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import EMBED, HEAD, ParamGroup
from costmodel.param_passes import copy_work
from costmodel.work import Work
from topology.errors import PlanError
from zosim.applications.first_order.layout import ID_BYTES, FirstOrderLayout, Phase, Side
from zosim.applications.first_order.settings import PRESETS, FirstOrder, turns
from zosim.eval_points import BASE
from zosim.lowering.buckets import alignment_of
from zosim.lowering.hazards import connect, without_implied
from zosim.lowering.rank import Listing
from zosim.lowering.split import codec_work, expected_message_bytes
from zosim.plans import ForwardPass, Mesh, Plan, Residency, Weights
from zosim.program import Program
from zosim.program.instructions import Access, Stream
from zosim.program.operations import (
    Backward,
    Collective,
    Copy,
    Decode,
    Encode,
    Forward,
    Load,
    Optimize,
    Recv,
    Send,
)
from zosim.program.program_set import ProgramSet

REPLICAS = "replicas"
"""Ranks of one stage, which sum their gradients."""

ENDS = "ends"
"""First and last stage of a pipeline, which sum the gradients of a table that both hold."""

PIPELINE = "pipeline"

_NUM_BUFFERS = 4
"""Buffers of gathered weights, and of whole gradients: those in use and those on their way, at the model's ends two each."""


class FirstOrderWriter(Listing):
    """Writes a step in an order that would be right on a single stream."""

    def __init__(self, plan: Plan, settings: FirstOrder, rank: int) -> None:
        super().__init__()
        self.plan = plan
        self.model = plan.model
        self.settings = settings
        self.layout = FirstOrderLayout(plan, settings, rank)
        self._left: dict[str, str] = {}
        self._num_taken: Counter[str] = Counter()
        self._gathered: dict[str, tuple[Access, ...]] = {}
        self._summands: dict[str, tuple[Access, ...]] = {}

    # -- the step ----------------------------------------------------------------------------------------------

    def write_step(self) -> None:
        """Write one step: load, microbatches there and back, sums of gradients, updates."""
        load = copy_work(ID_BYTES * sum(self.layout.rows) * self.plan.seq)
        self.emit("load", Load(), Stream.H2D, "load", EMBED, (), (self.layout.batch,), load)
        for phase, number in turns(
            self.settings.schedule, self.settings.num_microbatches, self.plan.num_stages, self.layout.stage
        ):
            if phase == "forward":
                self._forward_model(number)
            else:
                self._backward_model(number)
        for group in reversed(self.layout.param_groups):
            if self.settings.sums_ends and self.layout.is_at_both_ends(group):
                self._sum(group, ENDS, "ends")
        for group in reversed(self.layout.param_groups):
            self._optimize(group)

    def _forward_model(self, number: int) -> None:
        if self.layout.stage:
            self._arrive("forward", number, self.layout.segments[0])
        for index, segment in enumerate(self.layout.segments):
            self._gather(self.layout.segments[index : index + 2], f"forward:m{number}")
            self._forward(segment, number)
        if not self.layout.is_last:
            self._leave("forward", number, self.layout.segments[-1])

    def _backward_model(self, number: int) -> None:
        if not self.layout.is_last:
            self._arrive("backward", number, self.layout.segments[-1])
        backwards = self.layout.segments[::-1]
        for index, segment in enumerate(backwards):
            self._gather(backwards[index : index + 2], f"backward:m{number}")
            self._backward(segment, number)
            if self.layout.num_shards > 1:
                self._share_out(segment, number)
            elif number == self.settings.num_microbatches - 1 and self.layout.num_replicas > 1:
                for group in self.model.param_groups_of(segment):
                    if self.layout.reader_of_last_gradient(group) == segment:
                        self._sum(group, REPLICAS, "mean")
        if self.layout.stage:
            self._leave("backward", number, self.layout.segments[0])

    def _forward(self, segment: str, number: int) -> None:
        reads = [*self._weights(segment)]
        reads += [self.layout.batch] if segment in (EMBED, HEAD) else []
        reads += [self.layout.hidden(self.layout.before(segment), number)] if segment != EMBED else []
        left = self.layout.loss(number) if segment == HEAD else self.layout.hidden(segment, number)
        kept = self.layout.kept(segment, number)
        work = forward_work(self.model, segment, **self.layout.shape_of(number))
        # What the backward needs is kept, and counted there; temporaries that are not are alive beside it.
        spare = max(0, work.workspace_bytes - self.layout.computed_bytes(segment, number))
        self.emit(
            f"{segment}/forward[m{number}]",
            Forward(segment, BASE, microbatch=number),
            Stream.COMPUTE,
            "forward",
            segment,
            tuple(reads),
            (left, *kept),
            work.model_copy(update={"workspace_bytes": spare}),
        )

    def _backward(self, segment: str, number: int) -> None:
        groups = self.model.param_groups_of(segment)
        reads = [*self._weights(segment), *self.layout.kept(segment, number)]
        reads += [self.layout.batch] if segment in (EMBED, HEAD) else []
        reads += [self.layout.hidden_gradient(segment, number)] if segment != HEAD else []
        writes = (
            [self.layout.hidden_gradient(self.layout.before(segment), number)] if segment != EMBED else []
        )
        is_unsharded = self.layout.num_shards == 1
        accumulates = is_unsharded and any(group.name in self._left for group in groups)
        for group in groups if is_unsharded else ():
            reads += [self.layout.gradient(group, self._left[group.name])] if group.name in self._left else []
            self._left[group.name] = f"{segment}:m{number}"
            writes.append(self.layout.gradient(group, self._left[group.name]))
        if not is_unsharded:
            self._summands[segment] = tuple(
                self._next_buffer("summand", group, f"m{number}") for group in groups
            )
            writes += self._summands[segment]
        work = backward_work(self.model, segment, accumulates=accumulates, **self.layout.shape_of(number))
        if self.layout.recomputes(segment):
            again = forward_work(self.model, segment, **self.layout.shape_of(number))
            kept = self.layout.computed_bytes(segment, number)
            work = (work + again).model_copy(update={"workspace_bytes": work.workspace_bytes + kept})
        self.emit(
            f"{segment}/backward[m{number}]",
            Backward(segment, number),
            Stream.COMPUTE,
            "backward",
            segment,
            tuple(reads),
            tuple(writes),
            work,
        )

    # -- weights that replicas share out -----------------------------------------------------------------------

    def _weights(self, segment: str) -> tuple[Access, ...]:
        """Return the accesses to the weights that a forward or a backward of `segment` reads."""
        if self.layout.num_shards > 1:
            return self._gathered[segment]
        return tuple(self.layout.weights(group) for group in self.model.param_groups_of(segment))

    def _next_buffer(
        self, buffer_type: Literal["gathered", "summand"], group: ParamGroup, left: str
    ) -> Access:
        """Return the next buffer of those that gathered weights, or whole gradients, take in turn."""
        self._num_taken[buffer_type] += 1
        return self.layout.whole(buffer_type, group, self._num_taken[buffer_type] % _NUM_BUFFERS, left)

    def _gather(self, segments: Sequence[str], left: str) -> None:
        """Write how replicas gather the weights of the segment that is next, and of the one behind it, unless they have."""
        for segment in segments if self.layout.num_shards > 1 else ():
            names = {str(access.what) for access in self._gathered.get(segment, ())}
            if any(left in name for name in names):
                continue
            accesses = []
            for group in self.model.param_groups_of(segment):
                whole = self._next_buffer("gathered", group, left)
                accesses.append(whole)
                read = self.layout.weights(group)
                num_ranks = self.layout.num_shards
                # A share is cast, and then sent to the others.
                work = Work(
                    link_bytes=whole.size_bytes * (num_ranks - 1) // num_ranks,
                    param_pass_bytes=read.size_bytes + whole.size_bytes // num_ranks,
                )
                op = Collective("all_gather", REPLICAS)
                self.emit(
                    f"{group.name}/gather[{left}]",
                    op,
                    Stream.LINK,
                    "gather",
                    segment,
                    (read,),
                    (whole,),
                    work,
                )
            self._gathered[segment] = tuple(accesses)

    def _share_out(self, segment: str, number: int) -> None:
        """Write the sums of a segment's gradients, of which every replica keeps and adds up its share."""
        num_ranks = self.layout.num_shards
        for group, whole in zip(self.model.param_groups_of(segment), self._summands[segment], strict=True):
            before = [self.layout.gradient(group, self._left[group.name])] if group.name in self._left else []
            self._left[group.name] = f"{segment}:m{number}"
            share = self.layout.gradient(group, self._left[group.name])
            work = Work(
                link_bytes=whole.size_bytes * (num_ranks - 1) // num_ranks,
                param_pass_bytes=(3 if before else 2) * share.size_bytes,
            )
            op = Collective("reduce_scatter", REPLICAS)
            self.emit(
                f"{group.name}/reduce_scatter[m{number}]", op, Stream.LINK, "all_reduce", segment,
                (whole, *before), (share,), work,
            )  # fmt: skip

    def _sum(self, group: ParamGroup, among: str, left: str) -> None:
        """Write the sum of a gradient over the ranks of a group."""
        num_ranks = self.layout.num_replicas if among == REPLICAS else 2
        read = self.layout.gradient(group, self._left[group.name])
        self._left[group.name] = left
        work = Work(link_bytes=2 * read.size_bytes * (num_ranks - 1) // num_ranks)
        self.emit(
            f"{group.name}/all_reduce[{among}]",
            Collective("all_reduce", among),
            Stream.LINK,
            "all_reduce",
            group.segments[-1],
            (read,),
            (self.layout.gradient(group, self._left[group.name]),),
            work,
        )

    def _optimize(self, group: ParamGroup) -> None:
        optimizer, state = self.settings.optimizer, self.layout.state(group, 0)
        work = optimizer_work(
            -(-group.num_parameters // self.layout.num_shards),
            optimizer,
            dtype=self.plan.storage_dtype,
            num_tensors=group.num_tensors,
            foreach=self.settings.foreach,
        )
        work = work.model_copy(update={"workspace_bytes": self.layout.update_copy_bytes})
        self.emit(
            f"{group.name}/optimize",
            Optimize(group.name, optimizer),
            Stream.COMPUTE,
            "update",
            group.segments[-1],
            (self.layout.weights(group), self.layout.gradient(group, self._left[group.name]), *state),
            (self.layout.weights(group, 1), *self.layout.state(group, 1)),
            work,
        )

    # -- messages ----------------------------------------------------------------------------------------------

    def _leave(self, phase: Phase, number: int, segment: str) -> None:
        """Write how what a stage leaves becomes a message, and goes."""
        boundary, offset = (self.layout.stage, 1) if phase == "forward" else (self.layout.stage - 1, -1)
        plan, rows, wire = (
            self.layout.encoded(phase),
            self.layout.rows[number],
            self.layout.wire(phase, "out", number),
        )
        codec = self.settings.codec_of(phase)
        tensor = self._boundary_tensor(phase, segment, number, leaves=True)
        work = self._with_change(codec_work(plan, boundary, rows, "encode"), tensor, phase)
        known = self._fetch(phase, "out", number, segment)
        self.emit(
            f"encode/{phase}[m{number}]", Encode(codec, codec), Stream.COMPUTE, "encode", segment,
            (tensor, *known), (wire, *known), work,
        )  # fmt: skip
        self._put_back(phase, "out", number, segment)
        link = Work(link_bytes=expected_message_bytes(plan, boundary, rows))
        send = Send(PIPELINE, offset)
        self.emit(f"send/{phase}[m{number}]", send, Stream.LINK, "send", segment, (wire,), (), link)

    def _arrive(self, phase: Phase, number: int, segment: str) -> None:
        """Write how a message comes, and becomes what it was."""
        boundary, offset = (self.layout.stage - 1, -1) if phase == "forward" else (self.layout.stage, 1)
        plan, rows, wire = (
            self.layout.encoded(phase),
            self.layout.rows[number],
            self.layout.wire(phase, "in", number),
        )
        link = Work(link_bytes=expected_message_bytes(plan, boundary, rows))
        recv = Recv(PIPELINE, offset)
        self.emit(f"recv/{phase}[m{number}]", recv, Stream.RECV, "recv", segment, (), (wire,), link)
        tensor = self._boundary_tensor(phase, segment, number, leaves=False)
        work = self._with_change(codec_work(plan, boundary, rows, "decode"), tensor, phase)
        known = self._fetch(phase, "in", number, segment)
        self.emit(
            f"decode/{phase}[m{number}]", Decode(), Stream.COMPUTE, "decode", segment,
            (wire, *known), (tensor, *known), work,
        )  # fmt: skip
        self._put_back(phase, "in", number, segment)

    def _boundary_tensor(self, phase: Phase, segment: str, number: int, *, leaves: bool) -> Access:
        """Return the access to what crosses at the edge of a stage that `segment` is at."""
        is_before = (phase == "forward") != leaves
        edge = self.layout.before(segment) if is_before else segment
        return (
            self.layout.hidden(edge, number)
            if phase == "forward"
            else self.layout.hidden_gradient(edge, number)
        )

    def _with_change(self, work: Work, tensor: Access, phase: Phase) -> Work:
        """Return the work of a message; of changes, with reading, adding and writing what is known of them."""
        if not self.layout.keeps(phase):
            return work
        return work.model_copy(update={"elementwise_bytes": 3 * tensor.size_bytes, "num_kernels": 2})

    def _fetch(self, phase: Phase, side: Side, number: int, segment: str) -> tuple[Access, ...]:
        """Write how the last messages of a microbatch's samples come to the device; return where."""
        if not self.layout.keeps(phase):
            return ()
        host, here = self.layout.known(side, number)
        name, work = f"messages/fetch/{side}[m{number}]", copy_work(host.size_bytes)
        self.emit(name, Copy(), Stream.H2D, "fetch", segment, (host,), (here,), work)
        return (here,)

    def _put_back(self, phase: Phase, side: Side, number: int, segment: str) -> None:
        if self.layout.keeps(phase):
            host, here = self.layout.known(side, number)
            name, work = f"messages/keep/{side}[m{number}]", copy_work(host.size_bytes)
            self.emit(name, Copy(), Stream.D2H, "keep", segment, (here,), (host,), work)


__all__ = ["PRESETS", "FirstOrder", "baseline_plan", "lower_first_order"]


def baseline_plan(plan: Plan) -> Plan:
    """Return the plan whose devices, split points, batch and formats a baseline of `plan` has.

    Ranks that forward other points of a zeroth-order step forward other sequences of a first-order one.

    Raises PlanError if there are fewer sequences than that takes, or part of the model is frozen.
    """
    if plan.model.num_trainable != plan.model.num_parameters:
        message = (
            f"{plan.model.num_parameters - plan.model.num_trainable} parameters of {plan.model.name} are "
            "frozen, but a first-order step tunes all"
        )
        raise PlanError(message, hint="plan with --tune all")
    return Plan(
        model=plan.model,
        placement=plan.placement,
        batch=plan.batch,
        seq=plan.seq,
        mesh=Mesh(data=len(plan.mesh.pipelines), stage=plan.num_stages),
        split=plan.split.model_copy(update={"codec": "none", "residual_codec": "none", "densities": ()}),
        residency=Residency(),
        weights=Weights(dtype=plan.storage_dtype),
        forward=ForwardPass(compute_dtype=plan.compute_dtype, attention=plan.forward.attention),
    )


def lower_first_order(plan: Plan, settings: FirstOrder) -> ProgramSet:
    """Return what all ranks of `plan` run in a first-order step.

    Raises PlanError if the plan cannot be its baseline's, or a rank has fewer sequences than microbatches.
    """
    plan = baseline_plan(plan)
    fewest = min(len(plan.rows_of(rank)) for rank in range(plan.placement.world_size))
    if settings.num_microbatches > fewest:
        message = (
            f"--microbatches {settings.num_microbatches} is more than the {fewest} sequences that one "
            "rank has"
        )
        raise PlanError(message, hint=f"use --microbatches {fewest} or less, or a larger batch")
    roles: dict[tuple[int, int], int] = {}
    programs: list[Program] = []
    of_rank = []
    for rank in range(plan.placement.world_size):
        role = (plan.mesh.coordinates(rank).stage, len(plan.rows_of(rank)))
        if role not in roles:
            roles[role] = len(programs)
            programs.append(_lower(plan, settings, rank))
        of_rank.append(roles[role])
    return ProgramSet(tuple(programs), tuple(of_rank), process_groups_of(plan))


def process_groups_of(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the plan's groups, and those in which gradients are summed."""
    pipelines = plan.mesh.pipelines
    ends = [
        subgroup
        for pipeline in pipelines
        for subgroup in ((pipeline[0], pipeline[-1]), *((r,) for r in pipeline[1:-1]))
    ]
    if plan.num_stages == 1:
        ends = list(pipelines)
    return {**plan.process_groups, REPLICAS: tuple(zip(*pipelines, strict=True)), ENDS: tuple(sorted(ends))}


def _lower(plan: Plan, settings: FirstOrder, rank: int) -> Program:
    writer = FirstOrderWriter(plan, settings, rank)
    writer.write_step()
    step, _ = connect(writer.instructions, (), overlap=True)
    at_rest = tuple(writer.layout.at_rest())
    process_groups = process_groups_of(plan)
    return without_implied(
        Program(
            name=f"{plan.model.name}/{settings.optimizer}",
            buffers=writer.layout.buffers(writer.instructions),
            initial=at_rest,
            final=at_rest,
            step=step,
            process_groups={
                name: len(next(subgroup for subgroup in subgroups if rank in subgroup))
                for name, subgroups in process_groups.items()
            },
            alignment_bytes=alignment_of(plan),
        )
    )
