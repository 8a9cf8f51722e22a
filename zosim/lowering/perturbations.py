"""The perturbations axis: when each is drawn, from which generator state, and where it lies until it is used.

Sequential draws read the state that the draw before has left; keyed draws need no state:

>>> from costmodel import read_model_spec
>>> from zosim.lowering import lower
>>> from zosim.plans import Placement, Plan
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> for rng in ("mezo", "counter"):
...     axis = PerturbationsAxis(rng=rng)
...     plan = Plan(
...         model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement, perturbations=axis
...     )
...     draw = next(item for item in lower(plan).step if item.id == "block.1/sample[q0]")
...     print(
...         rng,
...         "reads",
...         *(access.what for access in draw.reads),
...         "writes",
...         *(access.what for access in draw.writes),
...     )
mezo reads rng:block.0+@q0 writes z:block.1@q0*eps rng:block.1@q0 rng:block.1+@q0
counter reads writes z:block.1@q0*eps
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import expm1, log1p
from typing import Literal

from costmodel.formats import FORMATS, DType
from costmodel.formats.distributions import (
    COUNTER_BLOCK_ELEMENTS,
    DISTRIBUTIONS,
    JUMP_RAW,
    NUM_RNG_MARKS,
    RNG_STATE_BYTES,
    SHARED_SAMPLING_ELEMENTS,
)
from costmodel.formats.low_bits import samples_for_rows
from costmodel.models.model_spec import EMBED, ParamGroup
from costmodel.param_passes import sampling_work
from costmodel.work import Matmul, Work
from zosim.lowering.buckets import bucket_bytes
from zosim.lowering.rank import AxisWriter, Listing, Rank, is_embedding_or_head
from zosim.plans import Perturbations as PerturbationsAxis
from zosim.plans import Plan
from zosim.program.contents import (
    Contents,
    GeneratorState,
    Perturbation,
    PerturbationFactors,
    PerturbationRows,
    is_scaled,
)
from zosim.program.instructions import Access, Buffer, Space, Stream
from zosim.program.operations import Sample
from zosim.program.ranges import Ranges

Keep = Literal["all", "rows", "factors", "none"]

_PERTURBATIONS = "perturbations"
_ROWS = "perturbation_rows"
_FACTORS = "perturbation_factors"


class Perturbations(AxisWriter):
    """Writes draws, and knows which perturbations lie where and how far each perturbation's generator has come."""

    def __init__(self, rank: Rank, listing: Listing) -> None:
        super().__init__(rank, listing)
        self._are_kept = rank.plan.perturbations.kept or rank.is_batched
        self.sampling_order = sampling_order(rank.plan)
        self._positions = {group.name: position for position, group in enumerate(self.sampling_order)}
        # Perturbations that are there, by what they hold and by the bytes that they lie in: a new one replaces what it overlaps.
        self._sampled: dict[tuple[Contents, int | None], Access] = {}
        self._sampled_in: dict[str, Ranges[Access | None]] = defaultdict(
            lambda: Ranges(None, lambda access: access)
        )
        # Groups that each perturbation's generator has passed.
        self._num_passed: dict[int, int] = {}
        # States of this step that lie apart until the update of the step before has read its own.
        self._apart: set[tuple[str, int]] = set()
        self._halves = 0

    # -- places ------------------------------------------------------------------------------------------------

    def perturbation_bytes(self, group: ParamGroup) -> int:
        """Return the bytes of a perturbation of `group`."""
        return bucket_bytes(
            group.num_trainable,
            group.num_trainable_tensors,
            self._storage.perturbation_format,
            self._rank.alignment_bytes,
        )

    def place(self, group: ParamGroup, perturbation: int, step: int, offset_bytes: int = 0) -> Access:
        """Return the access to the perturbation of `group`: in a buffer of its own where it, or its factors, are kept."""
        if self._rank.adds_factors:
            what = PerturbationFactors(group.name, perturbation)
            return Access(_kept(group, perturbation), what, step, self._factor_bytes((group,)))
        buffer, offset = (_kept(group, perturbation), 0) if self._are_kept else (_PERTURBATIONS, offset_bytes)
        return Access(
            buffer, Perturbation(group.name, perturbation), step, self.perturbation_bytes(group), offset
        )

    def rows(self, group: ParamGroup, perturbation: int) -> Access:
        """Return the access to the rows of the perturbation of `group` that the batch names; to the whole where perturbations are kept."""
        if self._are_kept:
            return self.place(group, perturbation, 0)
        size = self._rows_bytes
        return Access(_ROWS, PerturbationRows(group.name, perturbation), 0, size, perturbation * size)

    @cached_property
    def _rows_bytes(self) -> int:
        rank = self._rank
        return FORMATS[self._storage.row_format].bytes(rank.num_tokens * rank.model.embed_dim)

    def fresh_offset(self, segment: str) -> int:
        """Return where the next perturbation goes: alternate halves for blocks that are drawn ahead."""
        if not self._samples_in_halves or is_embedding_or_head(segment):
            return 0
        self._halves += 1
        return self._block_bytes * (self._halves % 2)

    @property
    def _samples_in_halves(self) -> bool:
        """Whether a block's perturbation is drawn while that of the block before is used: by another stream."""
        return self._plan.perturbations.sampled_ahead and self._plan.perturbs_in_place

    @cached_property
    def _block_bytes(self) -> int:
        """Bytes of the largest perturbation of any block."""
        blocks = (segment for segment in self._rank.segments if not is_embedding_or_head(segment))
        return max(map(self._segment_bytes, blocks), default=0)

    def _segment_bytes(self, segment: str) -> int:
        """Return the bytes of the perturbations of `segment` that lie in the buffer together: in full passes one at a time."""
        groups = self._rank.model.param_groups_of(segment)
        sizes = [self.perturbation_bytes(g) for g in groups if not self._rank.gathers(g, segment)]
        return (max if self._rank.is_full_pass else sum)(sizes or [0])

    def _factor_bytes(self, groups: Iterable[ParamGroup], *, lefts: bool = True, rights: bool = True) -> int:
        """Return the bytes of the factors of one perturbation of some groups, both or one of them."""
        rank = self._plan.perturbations.rank or 0
        shapes = [shape for group in groups for shape in group.trainable_matrices]
        sides = sum(lefts * rows + rights * columns for rows, columns in shapes)
        return FORMATS[self._storage.sampling_format].bytes(rank * sides)

    @cached_property
    def _passing_factor_bytes(self) -> int:
        """Bytes of the factors that are there besides kept ones: each perturbation's ``V`` of all matrices, and one group's ``U``.

        An update that waits for the next step may need the ``V`` before, which is drawn anew meanwhile.
        """
        groups = [group for group in self._rank.param_groups if group.num_trainable]
        num_kept = (2 if self._plan.schedule.update == "delayed" else 1) - self._rank.adds_factors
        rights = num_kept * self._plan.estimator.num_perturbations * self._factor_bytes(groups, lefts=False)
        if self._rank.adds_factors:
            return rights
        return rights + max((self._factor_bytes((group,), rights=False) for group in groups), default=0)

    def state_before(
        self, group: ParamGroup, perturbation: int, step: int, *, is_apart: bool = False
    ) -> Access:
        """Return the access to the kept generator states before `group` and on the way through it."""
        # States at marks on the way let several threads go on at once when it is sampled again.
        size, what = NUM_RNG_MARKS * RNG_STATE_BYTES, GeneratorState(group.name, perturbation)
        return Access(f"rng.{group.name}.q{perturbation}", what, step, size, size if is_apart else 0)

    def _state_after(self, group: ParamGroup, perturbation: int) -> Access:
        """Return the access to the running generator state after `group`."""
        state = GeneratorState(group.name, perturbation, is_after=True)
        return Access(f"rng.q{perturbation}", state, 0, RNG_STATE_BYTES)

    @cached_property
    def _kept_states(self) -> dict[str, ParamGroup]:
        """Groups before which the ``mezo`` generator's state is kept, because they are drawn (again) behind others."""
        trainable = {group.name: group for group in self._rank.param_groups if group.num_trainable}
        if not self._are_kept:
            return trainable
        # A kept perturbation is drawn once: only one that the generator has passed by then needs a state to begin from.
        return {name: group for name, group in trainable.items() if name in self._late}

    @cached_property
    def _late(self) -> frozenset[str]:
        return frozenset(group.name for group in _sampled_late(self._plan, self._rank.segments))

    def _needs_two_states(self, group: ParamGroup) -> bool:
        """Whether the generator passes `group` in this step before the update of the step before has drawn from its state."""
        return group.name in self._late and self._rank.is_delayed(group) and not self._are_kept

    def pending(self, group: ParamGroup, perturbation: int) -> Iterator[Access]:
        """Yield what a delayed update draws its perturbation from, or its perturbation, as the step before left it."""
        if self._are_kept:
            yield self.place(group, perturbation, -1)
        elif self._plan.perturbations.rng == "mezo":
            yield self.state_before(group, perturbation, -1)

    def buffers(self) -> Iterator[Buffer]:
        """Yield those of perturbations, of rows of them, and of generator states."""
        rank, perturbations = self._rank, range(self._plan.estimator.num_perturbations)
        dtype = self._storage.perturbation_format
        if self._are_kept:
            for group in rank.param_groups:
                for perturbation in perturbations if group.num_trainable else ():
                    size = self.place(group, perturbation, 0).size_bytes
                    kept_format = self._storage.sampling_format if rank.adds_factors else dtype
                    yield Buffer(_kept(group, perturbation), Space.DEVICE, size, "perturbations", kept_format)
        else:
            size = max(map(self._segment_bytes, rank.segments))
            if self._samples_in_halves:
                size = max(size, 2 * self._block_bytes)
            yield Buffer(_PERTURBATIONS, Space.DEVICE, size, "perturbations", dtype)
            if any(rank.gathers(group, EMBED) for group in rank.param_groups):
                rows = self._rows_bytes * len(perturbations)
                yield Buffer(_ROWS, Space.DEVICE, rows, "perturbations", self._storage.row_format)
        # Sparse perturbations move some rows, whose numbers stay from draw to update.
        if size := self._storage.nonzero_rows_bytes(self._rank.param_groups):
            yield Buffer("nonzero_rows", Space.DEVICE, size, "perturbations", "int64", dynamic=True)
        if size := self._passing_factor_bytes:
            yield Buffer(_FACTORS, Space.DEVICE, size, "perturbations", self._storage.sampling_format)
        for perturbation in perturbations if self._plan.perturbations.rng == "mezo" else ():
            yield Buffer(f"rng.q{perturbation}", Space.HOST, RNG_STATE_BYTES, "rng", "uint8")
            for name, group in self._kept_states.items():
                size = NUM_RNG_MARKS * RNG_STATE_BYTES * (2 if self._needs_two_states(group) else 1)
                yield Buffer(f"rng.{name}.q{perturbation}", Space.HOST, size, "rng", "uint8")

    # -- draws -------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let what has been drawn be overwritten, where perturbations share a buffer."""
        if not self._are_kept:
            self._sampled.clear()

    def sampled(self, group: ParamGroup, perturbation: int) -> Access:
        """Return where this step's perturbation of `group` is, which must have been drawn."""
        forms: tuple[Contents, ...] = (
            *(Perturbation(group.name, perturbation, is_scaled) for is_scaled in (False, True)),
            PerturbationFactors(group.name, perturbation),
        )
        return next(self._sampled[what, 0] for what in forms if (what, 0) in self._sampled)

    def sample(
        self,
        group: ParamGroup,
        perturbation: int,
        *,
        segment: str,
        step: int = 0,
        keep: Keep = "all",
        offset_bytes: int | None = None,
        scaled: bool = False,
        rounding: int = 0,
        for_update: bool = False,
        suffix: str = "",
    ) -> Access:
        """Write the draw of a perturbation, unless it is there, and return where it is.

        With `scaled`, it may be kept as ``z·ε``, where that loses nothing. Where perturbations are kept until their updates,
        those of the step before are there, and rows are those of the whole. One that is drawn `for_update` alone is drawn again
        where the distribution draws another one then.
        """
        if offset_bytes is None:
            offset_bytes = self.fresh_offset(segment)
        if self._are_kept:
            # A kept perturbation serves perturbing and updating, which needs z itself.
            keep, scaled = "factors" if self._rank.adds_factors else "all", False
        target = (
            self.rows(group, perturbation)
            if keep == "rows"
            else self.place(group, perturbation, step, offset_bytes)
        )
        if scaled and self._storage.keeps_scaled(self._plan.estimator.epsilon) and keep == "all":
            target = replace(target, what=Perturbation(group.name, perturbation, is_scaled=True))
        if rounding:
            target = replace(target, what=Perturbation(group.name, perturbation, rounding=rounding))
        # The step before has left it where it was drawn.
        if self._are_kept and step < 0:
            return target
        is_resampled = for_update and self._rank.distribution.is_resampled
        if (target.what, target.step) in self._sampled and not is_resampled:
            return self._sampled[target.what, target.step]
        reads, writes = self._generator_accesses(group, perturbation, step)
        self._emit(
            f"{group.name}/sample[q{perturbation}{'@t-1' if step else ''}]{suffix}",
            self._operation(group, perturbation, step, keep, rounding, for_update=is_resampled),
            self._stream,
            "sample",
            segment,
            reads if keep != "rows" else (*reads, self._rank.batch()),
            (target, *writes),
            self._work(group, keep, is_again=not writes, is_scaled=is_scaled(target.what)),
        )
        self._remember(target)
        return target

    def _remember(self, target: Access) -> None:
        """Note that a perturbation is there, and that what shared bytes with it no longer is."""
        samples = self._sampled_in[target.buffer]
        for access in samples.over(target.offset_bytes, target.end_bytes):
            if access is not None and self._sampled.get((access.what, access.step)) is access:
                del self._sampled[access.what, access.step]
        samples.put(target.offset_bytes, target.end_bytes, target)
        self._sampled[target.what, target.step] = target

    def _operation(
        self,
        group: ParamGroup,
        perturbation: int,
        step: int,
        keep: Keep,
        rounding: int = 0,
        *,
        for_update: bool = False,
    ) -> Sample:
        perturbations = self._plan.perturbations
        return Sample(
            group.name,
            step,
            perturbation,
            keep,
            perturbations.rng,
            perturbations.distribution,
            self._storage.bits,
            rounding,
            self._storage.sparsity,
            perturbations.rank or 0,
            perturbations.lazy_steps or 1,
            for_update,
        )

    def _generator_accesses(
        self, group: ParamGroup, perturbation: int, step: int
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """Return the generator states that drawing `group` reads and writes; skip the groups before it if need be."""
        # Keyed draws begin anywhere.
        if self._plan.perturbations.rng == "counter":
            return (), ()
        position = self._positions[group.name]
        # The generator has passed this group: it is drawn again from the state that was kept before it.
        if step < 0 or position < self._num_passed.get(perturbation, 0):
            is_apart = step == 0 and (group.name, perturbation) in self._apart
            source = self.state_before(group, perturbation, step, is_apart=is_apart)
            if not is_apart:
                return (source,), ()
            self._apart.remove((group.name, perturbation))
            return (source,), (self.state_before(group, perturbation, 0),)
        # Numbers come in one order, so those of groups in between are passed over first.
        while self._num_passed.get(perturbation, 0) < position:
            passed = self.sampling_order[self._num_passed.get(perturbation, 0)]
            accesses = self._sequential_accesses(self._num_passed.get(perturbation, 0), perturbation)
            op, work = self._operation(passed, perturbation, 0, "none"), self._work(passed, "none")
            name = f"{passed.name}/skip[q{perturbation}]"
            self._emit(name, op, self._stream, "sample", passed.segments[0], *accesses, work)
        return self._sequential_accesses(position, perturbation)

    def _sequential_accesses(
        self, position: int, perturbation: int
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        group = self.sampling_order[position]
        self._num_passed[perturbation] = position + 1
        reads = (self._state_after(self.sampling_order[position - 1], perturbation),) if position else ()
        after = self._state_after(group, perturbation)
        if group.name not in self._kept_states:
            return reads, (after,)
        is_apart = self._needs_two_states(group)
        if is_apart:
            self._apart.add((group.name, perturbation))
        return reads, (self.state_before(group, perturbation, 0, is_apart=is_apart), after)

    def _work(
        self, group: ParamGroup, keep: Keep, *, is_again: bool = False, is_scaled: bool = False
    ) -> Work:
        """Return the work of a draw: what is made, by how many threads, and what is passed over.

        Normals are drawn by all of a CPU's threads at once where each can begin by itself: in ``counter``'s blocks, where a
        draw has kept its states, and where a group is so long that a jump into its middle pays. Signs are made by torch's own
        threads in any case.
        """
        perturbations, total = self._plan.perturbations, group.num_trainable
        if keep == "none":
            return passing_work(
                num_sampled(group, perturbations), perturbations, self._storage.sampling_format
            )
        if perturbations.rank is not None:
            return self._factored_work(group, keep)
        if perturbations.rng == "counter":
            return self._counted_work(group, keep, is_scaled=is_scaled)
        # Threads begin at marks that an earlier draw has kept; without these the second half begins with a jump, which pays for large groups.
        is_shared = self._rank.distribution.is_single_threaded and total >= (
            SHARED_SAMPLING_ELEMENTS if is_again else 2 * JUMP_RAW
        )
        num_rows, made, skipped = self._rows_of(total) if keep == "rows" else (0, total, 0)
        return sampling_work(
            made,
            dtype=self._storage.sampling_format,
            distribution=self._rank.distribution.sampling_class,
            num_tensors=group.num_trainable_tensors,
            num_skipped=skipped,
            num_rounded=self._storage.num_rounded(made),
            num_kept_rows=num_rows,
            is_shared=is_shared,
            is_scaled=is_scaled,
            num_split_sequences=int(is_shared and not is_again),
        ) + self._storage.rounding_work(
            made,
            group.num_trainable_tensors,
            is_whole=keep == "all",
            sequential_elements=group.largest_trainable_tensor,
        )

    def _counted_work(self, group: ParamGroup, keep: Keep, *, is_scaled: bool) -> Work:
        """Return the work of a ``counter`` draw, each of whose blocks has a generator of its own."""
        distribution, total = self._rank.distribution, group.num_trainable
        length = distribution.counter_elements
        num_kernels, skipped = group.num_trainable_tensors, 0
        num_blocks = float(-(-total // length) + num_kernels - 1)
        made = sampled = self._storage.num_nonzero(group)
        num_uniforms = self._storage.num_rounded(made)
        sparse, share = self._storage.sparse(group), 1 - self._storage.sparsity
        if sparse:
            # Rows that a sparse perturbation leaves alone are drawn where they lie between others, or passed over.
            num_nonzero = made - total + sum(outputs * inputs for outputs, inputs in sparse)
            of_rows = samples_for_rows(sparse, share, length)
            num_blocks += of_rows.num_blocks - (num_nonzero + total - made) / length
            sampled, skipped = sampled + of_rows.num_sampled - num_nonzero, of_rows.num_passed
            if num_uniforms:
                of_rows = samples_for_rows(sparse, share, COUNTER_BLOCK_ELEMENTS)
                num_blocks, skipped = num_blocks + of_rows.num_blocks, skipped + of_rows.num_passed
                num_uniforms += of_rows.num_sampled - num_nonzero
        if keep == "rows":
            num_kernels, num_blocks, made, skipped = self._counted_rows(total, length)
            sampled, num_uniforms = made, self._storage.num_rounded(made)
        return sampling_work(
            sampled,
            dtype=self._storage.sampling_format,
            distribution=self._rank.distribution.sampling_class,
            num_tensors=num_kernels,
            num_skipped=skipped,
            num_rounded=num_uniforms,
            is_shared=distribution.is_single_threaded and keep == "all" and total > COUNTER_BLOCK_ELEMENTS,
            is_scaled=is_scaled,
            num_seeds=round(num_blocks),
        ) + self._storage.rounding_work(
            made, group.num_trainable_tensors, is_whole=keep == "all", sparse=sparse
        )

    def products(self, group: ParamGroup) -> tuple[Matmul, ...]:
        """Return the products of factors that the matrices of a perturbation are."""
        rank = self._plan.perturbations.rank
        assert rank is not None
        return tuple(Matmul(m=rows, n=columns, k=rank) for rows, columns in group.trainable_matrices)

    def _factored_work(self, group: ParamGroup, keep: Keep) -> Work:
        """Return the work of drawing factors, and of multiplying them if need be; rows are picked of a whole product."""
        width = FORMATS[self._storage.sampling_format].element_bytes
        # Factors are multiplied out unless they are all that is wanted.
        products = self.products(group) if keep != "factors" else ()
        scaled = (
            sum(product.m * product.n for product in products) if self._rank.distribution.rank_power else 0
        )
        num_rows = self._num_rows(group.num_trainable) * self._rank.model.embed_dim if keep == "rows" else 0
        return sampling_work(
            num_sampled(group, self._plan.perturbations),
            dtype=self._storage.sampling_format,
            num_tensors=len(group.trainable_matrices) + group.num_trainable_tensors,
        ) + Work(
            dtype=self._storage.sampling_format,
            matmuls=products,
            param_pass_bytes=width * (2 * scaled + 2 * round(num_rows)),
            num_kernels=len(products) if scaled else 0,
        )

    def _rows_of(self, table_elements: int) -> tuple[int, int, int]:
        """Return how many rows of a table are picked one by one, and the numbers that are made and passed over for them.

        Tokens are taken to be drawn evenly from the vocabulary: those of text repeat more often.
        """
        width = self._rank.model.embed_dim
        num_rows = self._num_rows(table_elements)
        if not self._rank.distribution.has_rows_apart(width):
            # The whole table is drawn chunk by chunk, and rows are gathered from each.
            return 0, table_elements, 0
        wanted = min(round(num_rows * width), table_elements)
        return round(num_rows), wanted, table_elements - wanted

    def _counted_rows(self, table_elements: int, length: int) -> tuple[int, float, int, int]:
        """Return the same where a table has blocks: rows, blocks that hold any, numbers made and passed over."""
        num_rows = self._num_rows(table_elements)
        num_blocks = _num_touched(max(1.0, table_elements / length), self._rank.num_tokens)
        per_block = num_rows / num_blocks
        # Rows part a block in as many chunks and one more, the last of which nobody needs.
        to_last = round(min(table_elements, num_blocks * length * per_block / (per_block + 1)))
        if not self._rank.distribution.is_single_threaded:
            return round(num_rows), num_blocks, to_last, 0
        before_first = round(to_last / per_block)
        wanted = round(num_rows * self._rank.model.embed_dim)
        made = min(table_elements, max(wanted, to_last - before_first))
        return round(num_rows), num_blocks, made, min(before_first, table_elements - made)

    def _num_rows(self, table_elements: int) -> float:
        """Return how many rows of a table a batch is expected to name."""
        return _num_touched(max(1, table_elements // self._rank.model.embed_dim), self._rank.num_tokens)

    @property
    def _stream(self) -> Stream:
        return Stream.SAMPLE if self._plan.perturbations.sampled_ahead else Stream.COMPUTE


def sampling_order(plan: Plan) -> list[ParamGroup]:
    """Return the trainable groups in the order in which the ``mezo`` generator visits them."""
    groups = [group for group in plan.model.param_groups if group.num_trainable]
    if plan.perturbations.order == "registration":
        return groups
    return sorted(groups, key=lambda group: plan.model.segments.index(group.segments[0]))


def _sampled_late(plan: Plan, segments: Sequence[str]) -> list[ParamGroup]:
    """Return the groups that a rank with these segments draws when the generator has passed them.

    They come before a group, in the generator's order, that an earlier segment needs.
    """
    if plan.schedule.traversal == "full":
        return []
    # A segment earlier in the step may need what is later in the generator's order.
    turns = {
        group.name: min(segments.index(segment) for segment in group.segments if segment in segments)
        for group in sampling_order(plan)
        if set(group.segments) & set(segments)
    }
    own = [group for group in sampling_order(plan) if group.name in turns]
    return [
        group
        for index, group in enumerate(own)
        if any(turns[behind.name] < turns[group.name] for behind in own[index + 1 :])
    ]


def num_sampled(group: ParamGroup, perturbations: PerturbationsAxis) -> int:
    """Return the numbers that a perturbation of `group` takes: of factors ``V``, which are kept for several steps, a step's share."""
    if perturbations.rank is None:
        return group.num_trainable
    rank, steps = perturbations.rank, perturbations.lazy_steps or 1
    lefts = sum(rows for rows, _ in group.trainable_matrices)
    rights = sum(columns for _, columns in group.trainable_matrices)
    return group.num_outside_matrices + rank * lefts + round(rank * rights / steps)


def passing_work(num_elements: int, perturbations: PerturbationsAxis, dtype: DType) -> Work:
    """Return the work of passing over a group's numbers, in one jump where they are many: nothing for ``counter``."""
    if perturbations.rng == "counter":
        return Work()
    distribution = DISTRIBUTIONS[perturbations.distribution]
    # A jump pays where one thread would pass over many numbers by itself.
    is_alone = distribution.is_single_threaded and not distribution.is_factored
    is_long = is_alone and num_elements >= JUMP_RAW
    return sampling_work(
        0,
        dtype=dtype,
        distribution=distribution.sampling_class,
        num_skipped=num_elements,
        num_jumped=num_elements if is_long else 0,
    )


def _num_touched(num_rows: float, num_balls: int) -> float:
    """Return how many of some places are expected to be hit by balls that fall on each alike."""
    # n·(1 - (1 - 1/n)^k), which keeps its digits where 1/n is small.
    return num_rows * -expm1(num_balls * log1p(-1 / num_rows)) if num_rows > 1 else 1.0


def _kept(group: ParamGroup, perturbation: int) -> str:
    """Return the buffer in which a perturbation stays from its draw to its update."""
    return f"{_PERTURBATIONS}.{group.name}.q{perturbation}"
