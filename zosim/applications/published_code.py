"""What the papers' code does differently from ours, as edits of a program's works.

Both papers' algorithms (ZO2, Algorithms 1 and 3; DistZO2, Algorithm 3) draw a parameter's perturbation again for every
pass over it, and pass over parameters as the reference MeZO loop writes it, with a temporary for every product. Our
lowering draws once per visit and works in place. The instructions stay the same, their works do not:

* every perturbation and every update is ``literal`` and draws its perturbation itself; an update without weight decay,
  ``θ - (η g) z``, has one temporary: the factors before z are numbers;
* of perturbations without a forward between them only one is made: a rank that forwards one sign goes there and back;
* a table that embedding and head share is perturbed whole at both, not through gathered rows at the first;
* a softmax of stored fp16 scores reads them as they are and writes float32; that of bf16 scores needs a cast before
  (OPT's code asks for float16 by name);
* the loss reads a copy of all but the last token's logits;
* fused attention pads the heads to what its kernels are compiled for (80 in OPT-2.7B to 96);
* autocast keeps its casts of weights for as long as it is open, which is both forwards of a block; it normalises and
  adds residuals in float32, and casts what each product reads;
* one host thread issues everything in the order that ZO2's appendix D.1 gives, ``O(W_{i-1}), C(W_i), U(W_{i+1})``, and
  waits for ``C(W_{i-1})`` before it: an upload begins when the kernels of the block before it have been launched,
  some hundred of them, and not before the block before that has been computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodel.formats import FORMATS, DType
from costmodel.models.model_spec import EMBED, HEAD, ParamGroup
from costmodel.param_passes import perturb_work, sampling_work, update_work
from costmodel.work import AttentionKernel, Work
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.contents import ParamGroupWeights
from zosim.program.instructions import Access, Dependency, Instruction, Stream
from zosim.program.operations import Forward, Operation, Perturb, Sample, Update
from zosim.program.program_set import ProgramSet


def as_published(program: Program, plan: Plan, *, prefetches: bool = True, decays: bool = True) -> Program:
    """Return `program` with the works of the papers' code.

    `prefetches`: whether a block is uploaded while the one before it computes, behind that one's launches. Off, every upload
    waits for what was listed on the compute stream before it.
    """
    writer = _Writer(plan, decays=decays)
    step = [
        replace(item, work=writer.work(item, program.step[index + 1 :]))
        for index, item in enumerate(program.step)
    ]
    flush = [
        replace(item, work=writer.work(item, program.flush[index + 1 :]))
        for index, item in enumerate(program.flush)
    ]
    if plan.copies_overlap:
        step = list(_behind_launches(step) if prefetches else _without_prefetch(step))
    return replace(program, step=tuple(step), flush=tuple(flush))


def all_as_published(programs: ProgramSet, plan: Plan) -> ProgramSet:
    """Return the programs of all ranks with the works of published code.

    Its updates compute their weight decay whatever its value, zero by default: ``zo_update`` in the reference MeZO's
    ``large_models/trainer.py`` (https://github.com/princeton-nlp/MeZO), and ZO2 after it.
    """
    edited = tuple(as_published(program, plan) for program in programs.programs)
    return replace(programs, programs=edited)


def with_kernels(
    program: Program, *, attention: AttentionKernel | None = None, fuses_softmax: bool = False
) -> Program:
    """Return `program` with its fused attention done by one kernel, and stored scores scaled, masked and normalised by one."""

    def changed(work: Work) -> Work:
        ops = tuple(
            op if op.materialised else op.model_copy(update={"kernel": attention}) for op in work.attention
        )
        work = work.model_copy(update={"attention": ops})
        return _with_fused_softmax(work) if fuses_softmax else work

    step = [replace(item, work=changed(item.work)) if item.work.attention else item for item in program.step]
    return replace(program, step=tuple(step))


def only(program: Program, *labels: str) -> Program:
    """Return the part of a program's step under these labels: its transfers, say, isolated from the rest."""
    step = [item for item in program.step if item.label in labels]
    kept = {item.id for item in step}
    apart = tuple(
        replace(
            item,
            after=tuple(edge for edge in item.after if edge.instruction in kept and not edge.process_group),
        )
        for item in step
    )
    return replace(program, step=apart, flush=())


class _Writer:
    """Counts works. A perturbation is drawn where it is used, so the draws themselves become empty."""

    def __init__(self, plan: Plan, *, decays: bool) -> None:
        self.plan = plan
        self.decays = decays
        self.model = plan.model
        self.dtype: DType = plan.storage_dtype
        self.cast: set[str] = set()

    def work(self, item: Instruction, later: Sequence[Instruction]) -> Work:
        """Return the work of `item` as published; `later` is what the step still lists behind it."""
        match item.op:
            case Sample(param_group=name, keep="rows"):
                # A whole table is perturbed there, across and back, each with a draw.
                once = self._perturbed(self.model.param_group(name))
                return once + once + once
            case Sample():
                return Work()
            case Perturb(param_group=name) if isinstance(_next_use(name, later), Perturb):
                return Work()
            case Perturb(param_group=name):
                return self._perturbed(self.model.param_group(name))
            case Update(param_group=name):
                return self._updated(self.model.param_group(name))
            case Forward(segment=segment):
                return self._forwarded(segment, item.work)
        return item.work

    def _forwarded(self, segment: str, work: Work) -> Work:
        if self.plan.compute_dtype == "float16":
            work = _with_fused_softmax(work)
        work = _with_padded_heads(work)
        if segment == HEAD:
            # Logits and labels are shifted against each other by a copy, in float32 as the loss reads them.
            shifted = sum(op.m * op.n * op.num for op in work.matmuls) * FORMATS["float32"].element_bytes
            work = work.model_copy(update={"workspace_bytes": work.workspace_bytes + shifted})
        if self.plan.compute_dtype != self.dtype:
            work = self._under_autocast(segment, work)
        return work

    def _under_autocast(self, segment: str, work: Work) -> Work:
        """Return a forward's work with activations as autocast has them, and its weights cast at the first sign only."""
        hidden = sum(op.m * op.n for op in work.matmuls[:1]) if segment.startswith("block") else 0
        changes = {
            "elementwise_bytes": work.elementwise_bytes + _AUTOCAST_BYTES * hidden,
            "num_kernels": work.num_kernels + (_AUTOCAST_KERNELS if hidden else 0),
        }
        if (
            segment in self.cast or segment == EMBED
        ):  # a lookup is no product: autocast leaves its table alone
            groups = self.model.param_groups_of(segment)
            width = FORMATS[self.dtype].element_bytes + FORMATS[self.plan.compute_dtype].element_bytes
            changes["param_pass_bytes"] = work.param_pass_bytes - width * sum(
                group.num_parameters for group in groups
            )
            changes["num_kernels"] -= sum(group.num_tensors for group in groups)
        self.cast.add(segment)
        return work.model_copy(update=changes)

    def _perturbed(self, group: ParamGroup) -> Work:
        return self._sampled(group) + perturb_work(
            group.num_trainable,
            dtype=self.dtype,
            arithmetic="literal",
            num_tensors=group.num_trainable_tensors,
            largest_tensor=group.largest_trainable_tensor,
        )

    def _updated(self, group: ParamGroup) -> Work:
        return self._sampled(group) + update_work(
            group.num_trainable,
            dtype=self.dtype,
            arithmetic="literal" if self.decays else "scaled",
            num_tensors=group.num_trainable_tensors,
            largest_tensor=group.largest_trainable_tensor,
            weight_decay=self.decays,
        )

    def _sampled(self, group: ParamGroup) -> Work:
        return sampling_work(group.num_trainable, dtype=self.dtype, num_tensors=group.num_trainable_tensors)


_AUTOCAST_KERNELS = 4
_AUTOCAST_BYTES = 2 * (8 - 4) + _AUTOCAST_KERNELS * (4 + 2) + 2 * (10 - 6)
"""Per element of a hidden state in a block: two norms in float32, casts of what the four products read that do not follow
a product, and two additions of 16 bits to a float32 residual."""


def _with_fused_softmax(work: Work) -> Work:
    scores = sum(op.score_elements for op in work.attention if op.materialised)
    num_casts = sum(op.materialised for op in work.attention)
    saved = {
        "elementwise_bytes": work.elementwise_bytes - 8 * scores,
        "num_kernels": work.num_kernels - num_casts,
    }
    return work.model_copy(update=saved)


_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Head dimensions that FlashAttention 2 has kernels for."""


def _with_padded_heads(work: Work) -> Work:
    ops = [
        op
        if op.materialised
        else op.model_copy(
            update={"head_dim": next((dim for dim in _HEAD_DIMS if dim >= op.head_dim), op.head_dim)}
        )
        for op in work.attention
    ]
    return work.model_copy(update={"attention": tuple(ops)})


def _next_use(name: str, later: Sequence[Instruction]) -> Operation | None:
    """Return what happens next to a group's weights in the step."""
    for item in later:
        match item.op:
            case Perturb(param_group=group) | Update(param_group=group) if group == name:
                return item.op
            case Forward() if any(_is_of(access, name) for access in item.reads):
                return item.op
    return None


def _is_of(access: Access, group: str) -> bool:
    return isinstance(access.what, ParamGroupWeights) and access.what.param_group == group


def _behind_launches(step: Sequence[Instruction]) -> Iterator[Instruction]:
    """Let uploads wait for the launches that their host thread makes before them.

    The work of an upload gets the kernels that were listed since the upload before it, which cost a copy nothing else.
    """
    last, awaited, num_launched = "", "", 0
    for item in step:
        if item.label == "upload":
            after = (*item.after, Dependency(awaited)) if awaited else item.after
            yield replace(item, after=after, work=item.work + Work(num_kernels=num_launched))
            awaited, num_launched = last, 0
        else:
            yield item
        if item.stream is Stream.COMPUTE:
            last = item.id
            num_launched += item.work.num_kernels


def _without_prefetch(step: Sequence[Instruction]) -> Iterator[Instruction]:
    computed = ""
    for item in step:
        if item.label == "upload" and computed:
            yield replace(item, after=(*item.after, Dependency(computed)))
        else:
            yield item
        if item.stream is Stream.COMPUTE:
            computed = item.id
