"""Models and plans with few blocks that stand for all of those that are built alike.

>>> from costmodel import read_model_spec
>>> shortened(read_model_spec("opt-125m")).segments
('embed', 'block.0', 'block.1', 'head')
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from costmodel.models.model_spec import (
    BACK,
    EMBED,
    FRONT,
    HEAD,
    ModelSpec,
    ParamGroup,
    block_index,
    block_segment,
)
from zosim.plans import Plan

NUM_BLOCKS = 2
"""Blocks of a shortened model."""


def shortened(model: ModelSpec) -> ModelSpec:
    """Return a model of which only the first two blocks are left, split inside as they were."""
    return with_blocks(model, range(NUM_BLOCKS))


def shortest(model: ModelSpec) -> ModelSpec:
    """Return a model of two blocks that tell all others, the model itself where blocks are unlike, split or as few."""
    blocks: dict[str, list[ParamGroup]] = defaultdict(list)
    for group in model.param_groups:
        for segment in group.segments:
            blocks[segment].append(group)
    # Blocks without their names: equal ones do the same work.
    distinct = {
        (
            *(
                group.model_copy(update={"name": "", "segments": ()})
                for group in blocks[block_segment(index)]
            ),
            *model.windows[index : index + 1],
            *model.boundary_elements[index + 1 : index + 2],
            *model.live_elements[index + 1 : index + 2],
            *(
                model.experts.shares[index : index + 1]
                if model.experts and len(model.experts.shares) > 1
                else ()
            ),
        )
        for index in range(model.num_blocks)
    }
    are_whole = set(model.segments) == {"embed", "head", *map(block_segment, range(model.num_blocks))}
    are_alike = are_whole and len(distinct) == 1
    return shortened(model) if model.num_blocks > NUM_BLOCKS and are_alike else model


def with_blocks(model: ModelSpec, kept: Sequence[int]) -> ModelSpec:
    """Return a model of these blocks alone, numbered anew."""
    number = {old: new for new, old in enumerate(kept)}
    segments = {segment: segment for segment in (EMBED, HEAD)}
    segments |= {
        block_segment(old) + part: block_segment(new) + part
        for old, new in number.items()
        for part in ("", FRONT, BACK)
    }
    param_groups = tuple(
        group.model_copy(
            update={
                "name": segments.get(group.name, group.name),
                "segments": tuple(segments[segment] for segment in group.segments),
            }
        )
        for group in model.param_groups
        if set(group.segments) <= set(segments)
    )
    split_blocks = tuple(number[block] for block in model.split_blocks if block in number)
    of_blocks: dict[str, Any] = {"windows": tuple(model.windows[old] for old in number if model.windows)}
    if model.boundary_elements:
        embed, *handed = model.boundary_elements
        of_blocks["boundary_elements"] = (embed, *(handed[old] for old in number))
    if model.live_elements:
        embed_moments, *moments, head_moments = model.live_elements
        of_blocks["live_elements"] = (embed_moments, *(moments[old] for old in number), head_moments)
    if model.experts is not None:
        dense = tuple(number[old] for old in model.experts.dense_blocks if old in number)
        rows = {
            name: tuple(of[old] for old in number) if len(of) > 1 else of
            for name in ("shares", "share_errors")
            for of in [getattr(model.experts, name)]
        }
        of_blocks["experts"] = model.experts.model_copy(update={"dense_blocks": dense, **rows})
    # Not model_copy, which would take the cached values along.
    changed = {
        "num_blocks": len(kept),
        "param_groups": param_groups,
        "split_blocks": split_blocks,
        **of_blocks,
    }
    return ModelSpec(**{**dict(model), **changed})


def shortened_stages(plan: Plan, rank: int) -> tuple[Plan, dict[str, range]]:
    """Return a plan of which `rank` keeps three whole blocks and each other stage one, and those that each stands for.

    The second of the three stands for those between: messages come with the first and go with the last. Halves of blocks
    stay as they are.
    """
    kept: list[int] = []
    halves: list[str] = []
    standing: dict[int, range] = {}
    pipeline = next(part for part in plan.mesh.pipelines if rank in part)
    for member in pipeline:
        blocks = [segment for segment in plan.segments_of(member) if segment not in (EMBED, HEAD)]
        whole = [block_index(segment) for segment in blocks if not segment.endswith((FRONT, BACK))]
        # First and last meet the neighbouring stages; the one between stands for all others.
        few = [*whole[:NUM_BLOCKS], whole[-1]] if member == rank and len(whole) > NUM_BLOCKS else whole
        few = few if member == rank else whole[:1]
        standing |= {block: range(block, block + 1) for block in few}
        if few:
            first = few[min(1, len(few) - 1)]
            standing[first] = range(first, first + 1 + len(whole) - len(few))
        halves += [segment for segment in blocks if segment.endswith((FRONT, BACK))]
        kept += few
    # A half needs its block, of which it is split.
    kept = sorted({*kept, *map(block_index, halves)})
    number = {old: new for new, old in enumerate(kept)}
    split_points = tuple(_renamed(split_point, kept, number) for split_point in plan.split_points)
    split = plan.split.model_copy(update={"split_points": split_points})
    small = plan.model_copy(update={"model": with_blocks(plan.model, kept), "split": split})
    stands_for = {block_segment(number[block]): blocks for block, blocks in standing.items()}
    for half in halves:
        block = block_index(half)
        name = half.replace(block_segment(block), block_segment(number[block]), 1)
        stands_for[name] = range(block, block + 1)
    return small, stands_for


def _renamed(split_point: str, kept: Sequence[int], number: dict[int, int]) -> str:
    """Return the split point behind the last block of those kept that are not behind `split_point`."""
    block = max(index for index in kept if index <= block_index(split_point))
    return block_segment(number[block]) + split_point.removeprefix(block_segment(block_index(split_point)))
