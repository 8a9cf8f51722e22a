"""Draws of directions: when, from which generator state, into which part of the buffer."""

from __future__ import annotations

from math import expm1, log1p
from typing import Literal

from costmodel.model_spec import ParameterGroup
from costmodel.sweeps import Distribution, draw_work
from costmodel.work import DType, Work
from zosim.instructions import Access, Stream
from zosim.lowering.layout import (
    COUNTER_BLOCK_ELEMENTS,
    COUNTER_SIGN_BLOCKS,
    JUMP_WORDS,
    SHARED_DRAW_ELEMENTS,
)
from zosim.lowering.listing import Listing
from zosim.lowering.walk import walk_order
from zosim.operations import Draw
from zosim.plans import Directions as DirectionsAxis

Keep = Literal["all", "rows", "none"]

SCALED = "*eps"
"""Ends the point of a direction that is kept as ``w = z·ε``, rounded: good for perturbations alone."""

_DISTRIBUTIONS: dict[str, Distribution] = {"gaussian": "normal", "rademacher": "rademacher"}
_SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
_GROUP_OF_NORMALS = 16
"""A CPU's generator makes normals in groups of so many: rows of other widths are not drawn apart."""

_SMALLEST_DRAWN = 1e-25
"""Below every normal but 0 that torch draws."""


class Directions:
    """Writes draws, and knows which directions are at hand and how far each query's generator has been walked.

    Parameters
    ----------
    listing : Listing
    """

    def __init__(self, listing: Listing) -> None:
        self.plan = listing.plan
        self.layout = listing.layout
        self.walk_order = walk_order(listing.plan)
        self._places = {group.name: place for place, group in enumerate(self.walk_order)}
        self._kept_states = frozenset(group.name for group in listing.layout.kept_states)
        self._listing = listing
        self._kept = listing.plan.directions.kept
        self._at_hand: list[Access] = []
        self._walked: dict[int, int] = {}
        self._halves = 0

    def forget(self) -> None:
        """Let what is at hand be overwritten, where directions share a buffer."""
        if not self._kept:
            self._at_hand.clear()

    def held(self, group: ParameterGroup, query: int) -> Access:
        """Return where this step's direction of `group` is, which must be at hand."""
        wanted = (f"z:{group.name}", 0, f"q{query}")
        return next(z for z in self._at_hand if (z.what, z.step, z.point.removesuffix(SCALED)) == wanted)

    def draw(
        self,
        group: ParameterGroup,
        query: int,
        *,
        segment: str,
        step: int = 0,
        keep: Keep = "all",
        offset_bytes: int | None = None,
        scaled: bool = False,
        suffix: str = "",
    ) -> Access:
        """Write the draw of a direction, unless it is still at hand, and return where it is.

        With `scaled`, it may be kept as ``z·ε``, where that loses nothing. Where directions are kept until their updates,
        those of the step before are at hand, and rows are those of the whole.
        """
        if self._kept:
            keep, scaled = "all", False
        if offset_bytes is None:
            offset_bytes = self.fresh_offset(segment)
        target = self.layout.direction(
            group,
            query,
            step,
            offset_bytes=offset_bytes,
            rows=keep == "rows",
            suffix=SCALED if scaled and self._can_scale else "",
        )
        if self._kept and step < 0:
            return target
        for held in self._at_hand:
            if (held.what, held.step, held.point) == (target.what, target.step, target.point):
                return held
        reads, writes = self._generator_accesses(group, query, step)
        op = self._operation(group, query, step, keep)
        self._listing.emit(
            f"{group.name}/draw[q{query}{'@t-1' if step else ''}]{suffix}",
            op,
            self._stream,
            "draw",
            segment,
            reads if keep != "rows" else (*reads, self.layout.batch()),
            (target, *writes),
            self._work(group, keep, is_again=not writes, is_scaled=target.point.endswith(SCALED)),
        )
        self._at_hand = [held for held in self._at_hand if not held.overlaps(target)]
        self._at_hand.append(target)
        return target

    @property
    def _can_scale(self) -> bool:
        """Whether ``(s·z)·ε`` is ``s·w`` to the last bit: no ``w`` may be subnormal. Signs are as fast without."""
        smallest = self.plan.estimator.epsilon * _SMALLEST_DRAWN
        return (
            self.plan.directions.distribution == "gaussian"
            and smallest >= _SMALLEST_NORMAL[self.plan.weights.dtype]
        )

    def _operation(self, group: ParameterGroup, query: int, step: int, keep: Keep) -> Draw:
        directions = self.plan.directions
        return Draw(group.name, step, query, keep, directions.rng, directions.distribution)

    def _generator_accesses(
        self, group: ParameterGroup, query: int, step: int
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """Return the generator states that drawing `group` reads and writes, walking up to it if need be."""
        if self.plan.directions.rng == "counter":
            return (), ()
        position = self._places[group.name]
        if step < 0 or position < self._walked.get(query, 0):
            return (self.layout.rng_before(group, query, step),), ()
        while self._walked.get(query, 0) < position:
            self._walk_past(self.walk_order[self._walked.get(query, 0)], query)
        return self._walking_accesses(position, query)

    def _walking_accesses(self, position: int, query: int) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        group = self.walk_order[position]
        self._walked[query] = position + 1
        reads = (self.layout.rng_after(self.walk_order[position - 1], query),) if position else ()
        before = (self.layout.rng_before(group, query, 0),) if group.name in self._kept_states else ()
        return reads, (*before, self.layout.rng_after(group, query))

    def _walk_past(self, group: ParameterGroup, query: int) -> None:
        reads, writes = self._walking_accesses(self._walked.get(query, 0), query)
        op = self._operation(group, query, 0, "none")
        work = self._work(group, "none")
        name = f"{group.name}/walk[q{query}]"
        self._listing.emit(name, op, self._stream, "draw", group.segments[0], reads, writes, work)

    def _work(
        self, group: ParameterGroup, keep: Keep, *, is_again: bool = False, is_scaled: bool = False
    ) -> Work:
        """Return the work of a draw: what is made, by how many threads, and what is passed over.

        Normals are drawn by all of a CPU's threads at once where each can begin by itself: in ``counter``'s blocks, where a
        walk has kept its states, and where a walk is so long that a jump into its middle pays. Signs are made by torch's own
        threads in any case.
        """
        directions, total = self.plan.directions, group.num_trainable
        if keep == "none":
            return passing_work(total, directions, self.plan.weights.dtype)
        if directions.rng == "counter":
            return self._counted_work(group, keep, is_scaled=is_scaled)
        is_normal = directions.distribution == "gaussian"
        is_cut = is_normal and total >= (SHARED_DRAW_ELEMENTS if is_again else 2 * JUMP_WORDS)
        num_rows, made, skipped = self._rows_of(total) if keep == "rows" else (0, total, 0)
        return draw_work(
            made,
            dtype=self.plan.weights.dtype,
            distribution=_DISTRIBUTIONS[directions.distribution],
            num_tensors=group.num_trainable_tensors,
            num_skipped=skipped,
            num_kept_rows=num_rows,
            is_shared=is_cut,
            is_scaled=is_scaled,
            num_split_walks=int(is_cut and not is_again),
        )

    def _counted_work(self, group: ParameterGroup, keep: Keep, *, is_scaled: bool) -> Work:
        """Return the work of a ``counter`` draw, each of whose blocks has a generator of its own."""
        directions, total = self.plan.directions, group.num_trainable
        is_normal = directions.distribution == "gaussian"
        length = COUNTER_BLOCK_ELEMENTS * (1 if is_normal else COUNTER_SIGN_BLOCKS)
        num_kernels, made, skipped = group.num_trainable_tensors, total, 0
        num_blocks = float(-(-total // length) + num_kernels - 1)
        if keep == "rows":
            num_kernels, num_blocks, made, skipped = self._counted_rows(total, length)
        return draw_work(
            made,
            dtype=self.plan.weights.dtype,
            distribution=_DISTRIBUTIONS[directions.distribution],
            num_tensors=num_kernels,
            num_skipped=skipped,
            is_shared=is_normal and keep == "all" and total > COUNTER_BLOCK_ELEMENTS,
            is_scaled=is_scaled,
            num_seeds=round(num_blocks),
        )

    def _rows_of(self, table_elements: int) -> tuple[int, int, int]:
        """Return how many rows of a table are picked one by one, and the numbers that are made and passed over for them.

        Tokens are taken to be drawn evenly from the vocabulary: those of text repeat more often.
        """
        width = self.layout.model.embed_dim
        num_rows = self._num_rows(table_elements)
        if self.plan.directions.distribution != "gaussian" or width % _GROUP_OF_NORMALS:
            # The whole table is drawn piece by piece, and rows are gathered from each.
            return 0, table_elements, 0
        wanted = min(round(num_rows * width), table_elements)
        return round(num_rows), wanted, table_elements - wanted

    def _counted_rows(self, table_elements: int, length: int) -> tuple[int, float, int, int]:
        """Return the same where a table has blocks: rows, blocks that hold any, numbers made and passed over."""
        num_rows = self._num_rows(table_elements)
        num_blocks = _num_touched(max(1.0, table_elements / length), self.layout.num_tokens)
        per_block = num_rows / num_blocks
        # Rows part a block in as many pieces and one more, the last of which nobody needs.
        to_last = round(min(table_elements, num_blocks * length * per_block / (per_block + 1)))
        if self.plan.directions.distribution != "gaussian":
            return round(num_rows), num_blocks, to_last, 0
        before_first = round(to_last / per_block)
        wanted = round(num_rows * self.layout.model.embed_dim)
        made = min(table_elements, max(wanted, to_last - before_first))
        return round(num_rows), num_blocks, made, min(before_first, table_elements - made)

    def _num_rows(self, table_elements: int) -> float:
        """Return how many rows of a table a batch is expected to name."""
        return _num_touched(max(1, table_elements // self.layout.model.embed_dim), self.layout.num_tokens)

    @property
    def _stream(self) -> Stream:
        return Stream.DRAW if self.plan.directions.drawn_ahead else Stream.COMPUTE

    def fresh_offset(self, segment: str) -> int:
        """Return where the next direction goes: alternate halves for blocks that are drawn ahead."""
        if not self.layout.draws_in_halves or self.layout.is_edge(segment):
            return 0
        self._halves += 1
        return self.layout.block_direction_bytes * (self._halves % 2)


def passing_work(num_elements: int, directions: DirectionsAxis, dtype: DType) -> Work:
    """Return the work of passing over a group's numbers, in one jump where they are many: nothing for ``counter``."""
    if directions.rng == "counter":
        return Work()
    is_long = directions.distribution == "gaussian" and num_elements >= JUMP_WORDS
    return draw_work(
        0,
        dtype=dtype,
        distribution=_DISTRIBUTIONS[directions.distribution],
        num_skipped=num_elements,
        num_jumped=num_elements if is_long else 0,
    )


def _num_touched(num_places: float, num_balls: int) -> float:
    """Return how many of some places are expected to be hit by balls that fall on each alike."""
    return num_places * -expm1(num_balls * log1p(-1 / num_places)) if num_places > 1 else 1.0
