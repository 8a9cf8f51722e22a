"""What the papers' code does differently from ours, as edits of a program's works.

Both papers' algorithms (ZO2, Algorithms 1 and 3; DistZO2, Algorithm 3) draw a parameter's direction again for every
pass over it, and pass over parameters as the reference MeZO loop writes it, with a temporary for every product. Our
lowering draws once per visit and works in place. The instructions stay the same, their works do not:

* every perturbation and every update is ``literal`` and draws its direction itself;
* of perturbations without a forward between them only one is made: a rank that forwards one sign goes there and back;
* a table that embedding and head share is perturbed whole at both, not through gathered rows at the first;
* a softmax of stored fp16 scores reads them as they are and writes float32; that of bf16 scores needs a cast before
  (OPT's code asks for float16 by name).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodel.model_spec import ParameterGroup
from costmodel.sweeps import draw_work, perturb_work, update_work
from costmodel.work import DType, Work
from zosim.instructions import Dependency, Instruction, Stream
from zosim.operations import Draw, Forward, Operation, Perturb, Update
from zosim.plan import Plan
from zosim.program import Program


def as_published(program: Program, plan: Plan, *, prefetches: bool = True) -> Program:
    """Return `program` with the works of the papers' code.

    Parameters
    ----------
    program : Program
        What one rank of `plan` is lowered to.
    plan : Plan
    prefetches : bool
        Whether a block is uploaded while the one before it computes. Off, every upload waits for what was listed on
        the compute stream before it.
    """
    writer = _Writer(plan)
    step = [
        replace(item, work=writer.work(item, program.step[place + 1 :]))
        for place, item in enumerate(program.step)
    ]
    flush = [
        replace(item, work=writer.work(item, program.flush[place + 1 :]))
        for place, item in enumerate(program.flush)
    ]
    return replace(program, step=tuple(step if prefetches else _without_prefetch(step)), flush=tuple(flush))


def only(program: Program, *labels: str) -> Program:
    """Return the part of a program's step under these labels: its transfers, say, isolated from the rest."""
    step = [item for item in program.step if item.label in labels]
    kept = {item.id for item in step}
    apart = tuple(
        replace(item, after=tuple(edge for edge in item.after if edge.instruction in kept and not edge.group))
        for item in step
    )
    return replace(program, step=apart, flush=())


class _Writer:
    """Counts works. A direction is drawn where it is used, so the draws themselves become empty."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = plan.model
        self.dtype: DType = plan.precision.storage

    def work(self, item: Instruction, later: Sequence[Instruction]) -> Work:
        """Return the work of `item` as published; `later` is what the step still lists behind it."""
        match item.op:
            case Draw(group=name, keep="rows"):
                return self._visited(self.model.group(name))
            case Draw():
                return Work()
            case Perturb(group=name) if isinstance(_next_use(name, later), Perturb):
                return Work()
            case Perturb(group=name):
                return self._perturbed(self.model.group(name))
            case Update(group=name):
                return self._updated(self.model.group(name))
            case Forward() if self.plan.precision.compute == "float16":
                return _with_fused_softmax(item.work)
        return item.work

    def _perturbed(self, group: ParameterGroup) -> Work:
        return self._drawn(group) + perturb_work(
            group.num_trainable,
            dtype=self.dtype,
            arithmetic="literal",
            num_tensors=group.num_trainable_tensors,
            largest_tensor=group.largest_trainable_tensor,
        )

    def _updated(self, group: ParameterGroup) -> Work:
        return self._drawn(group) + update_work(
            group.num_trainable,
            dtype=self.dtype,
            arithmetic="literal",
            num_tensors=group.num_trainable_tensors,
            largest_tensor=group.largest_trainable_tensor,
            weight_decay=True,
        )

    def _drawn(self, group: ParameterGroup) -> Work:
        return draw_work(group.num_trainable, dtype=self.dtype, num_tensors=group.num_trainable_tensors)

    def _visited(self, group: ParameterGroup) -> Work:
        """Return the work of perturbing a whole table there, across and back, each with a draw."""
        once = self._perturbed(group)
        return once + once + once


def _with_fused_softmax(work: Work) -> Work:
    scores = sum(part.score_elements for part in work.attention if part.materialised)
    num_casts = sum(part.materialised for part in work.attention)
    saved = {
        "elementwise_bytes": work.elementwise_bytes - 8 * scores,
        "num_kernels": work.num_kernels - num_casts,
    }
    return work.model_copy(update=saved)


def _next_use(name: str, later: Sequence[Instruction]) -> Operation | None:
    """Return what happens next to a group's weights in the step."""
    for item in later:
        match item.op:
            case Perturb(group=group) | Update(group=group) if group == name:
                return item.op
            case Forward() if any(access.what == name for access in item.reads):
                return item.op
    return None


def _without_prefetch(step: Sequence[Instruction]) -> Iterator[Instruction]:
    computed = ""
    for item in step:
        if item.label == "upload" and computed:
            yield replace(item, after=(*item.after, Dependency(computed)))
        else:
            yield item
        if item.stream is Stream.COMPUTE:
            computed = item.id
