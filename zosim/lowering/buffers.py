"""Which buffers a rank of a plan needs."""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.forward import shared_activation_bytes
from costmodel.model_spec import EMBED
from costmodel.work import DTYPE_BYTES
from zosim.instructions import Buffer, Space
from zosim.lowering.layout import (
    BATCH,
    COPY,
    DIRECTIONS,
    GRADIENTS,
    LOSS_BYTES,
    LOSSES,
    NUM_RNG_MARKS,
    OWN_LOSSES,
    RNG_STATE_BYTES,
    ROWS,
    SCALAR_BYTES,
    WALK,
    Layout,
    Side,
    kept_direction,
)
from zosim.lowering.messages import is_coded

SCRATCH_ELEMENTS = 1 << 20
"""Elements of the temporaries that sweeps over parameters on a CPU keep from one to the next, all together."""

SIGN_SCRATCH_ELEMENTS = 1 << 16
"""The same where directions are signs, whose sweeps need temporaries for a weight decay only."""


def buffers_of(layout: Layout) -> tuple[Buffer, ...]:
    """Return every buffer of one rank."""
    return (
        *_weight_buffers(layout),
        *_slot_buffers(layout),
        *_direction_buffers(layout),
        *_copy_buffers(layout),
        *_activation_buffers(layout),
        *_scalar_buffers(layout),
    )


def _weight_buffers(layout: Layout) -> Iterator[Buffer]:
    plan = layout.plan
    for group in layout.groups:
        offloaded = layout.is_offloaded(group)
        dtype = plan.transfer_dtype if offloaded else plan.weights.dtype
        space = Space.HOST if offloaded else Space.DEVICE
        shared = offloaded and bool(layout.share)
        yield Buffer(
            layout.home(group), space, layout.group_bytes(group, dtype), "weights", dtype, shared=shared
        )


def _slot_buffers(layout: Layout) -> Iterator[Buffer]:
    plan = layout.plan
    sizes: dict[str, int] = {}
    staging: dict[str, int] = {}
    for segment in layout.segments:
        groups = [group for group in layout.model.groups_of(segment) if layout.is_offloaded(group)]
        if not groups:
            continue
        slot, side = layout.slot(segment), layout.staging(segment)
        size = sum(layout.group_bytes(group, plan.weights.dtype) for group in groups)
        sizes[slot] = max(sizes.get(slot, 0), size)
        if plan.is_transfer_lossy:
            size = sum(layout.group_bytes(group, plan.transfer_dtype) for group in groups)
            staging[side] = max(staging.get(side, 0), size)
    for name, size in sizes.items():
        yield Buffer(name, Space.DEVICE, size, "slots", plan.weights.dtype)
    for name, size in staging.items():
        yield Buffer(name, Space.DEVICE, size, "staging", plan.transfer_dtype)


def _direction_buffers(layout: Layout) -> Iterator[Buffer]:
    dtype = layout.plan.weights.dtype
    if layout.plan.directions.kept:
        yield from (
            Buffer(
                kept_direction(group, query),
                Space.DEVICE,
                layout.direction_bytes(group),
                "directions",
                dtype,
            )
            for group in layout.groups
            if group.num_trainable
            for query in range(layout.plan.estimator.num_queries)
        )
        return
    size = max(layout.segment_direction_bytes(segment) for segment in layout.segments)
    if layout.draws_in_halves:
        size = max(size, 2 * layout.block_direction_bytes)
    yield Buffer(DIRECTIONS, Space.DEVICE, size, "directions", dtype)
    if any(layout.gathers(group, EMBED) for group in layout.groups):
        rows = layout.rows_bytes * layout.plan.estimator.num_queries
        yield Buffer(ROWS, Space.DEVICE, rows, "directions", dtype)


def _copy_buffers(layout: Layout) -> Iterator[Buffer]:
    dtype = layout.plan.weights.dtype
    for number in range(layout.num_copies):
        sizes = [
            sum(layout.trainable_bytes(group, dtype) for group in layout.copied(segment))
            for segment in layout.segments
            if number == 0 or layout.takes_turns(segment)
        ]
        if sizes:
            yield Buffer(f"{COPY}.{number}", Space.DEVICE, max(sizes), "copies", dtype)


def _largest_hidden_bytes(layout: Layout) -> int:
    """Bytes of the largest hidden state that a segment of this rank takes or leaves."""
    before = layout.model.segments.index(layout.segments[0]) - 1
    handing = (*layout.model.segments[max(before, 0) : before + 1], *layout.segments)
    return max(layout.hidden_bytes(segment) for segment in handing)


def _activation_buffers(layout: Layout) -> Iterator[Buffer]:
    plan = layout.plan
    dtype = "float32" if plan.compute_dtype == "tf32" else plan.compute_dtype
    for point in layout.own_points:
        name = f"hidden.{point or 'base'}"
        size = _largest_hidden_bytes(layout)
        yield Buffer(name, Space.DEVICE, size, "activations", dtype, dynamic=True)
        cuts = dict(_crossings(layout))
        wires = [(cut, layout.wire(point, cut, side)) for cut, side in cuts.items()]
        for name in dict.fromkeys(wire.buffer for _, wire in wires):
            size = max(wire.size_bytes for _, wire in wires if wire.buffer == name)
            coded = any(is_coded(plan, cut) for cut, wire in wires if wire.buffer == name)
            space = Space.HOST if coded else Space.DEVICE
            yield Buffer(name, space, size, "activations", "uint8", dynamic=True)
    shared = shared_activation_bytes(
        plan.model,
        batch=layout.num_sequences,
        seq=plan.seq,
        dtype=plan.compute_dtype,
        attention=plan.forward.attention,
    )
    if shared:
        yield Buffer("shared", Space.DEVICE, shared, "activations", dtype)


def _crossings(layout: Layout) -> Iterator[tuple[int, Side]]:
    """Yield the cuts on either side of this rank's stage, and those within it."""
    for cut in layout.plan.coded_in_place.values():
        yield cut, "here"
    if not layout.is_first_stage:
        yield layout.stage - 1, "in"
    if not layout.is_last_stage:
        yield layout.stage, "out"


def _scalar_buffers(layout: Layout) -> Iterator[Buffer]:
    estimator, directions = layout.plan.estimator, layout.plan.directions
    is_sign = directions.distribution == "rademacher"
    most = SIGN_SCRATCH_ELEMENTS if is_sign else SCRATCH_ELEMENTS
    largest = max((layout.direction_bytes(group) for group in layout.groups), default=0)
    scratch = min(largest, most * DTYPE_BYTES[layout.plan.weights.dtype])
    if scratch:
        yield Buffer("scratch", Space.DEVICE, scratch, "scratch", layout.plan.weights.dtype)
    yield Buffer(BATCH, Space.DEVICE, layout.batch().size_bytes, "batch", "int64")
    yield Buffer(LOSSES, Space.DEVICE, SCALAR_BYTES * len(layout.plan.points), "scalars", "float64")
    if layout.plan.placement.world_size > 1:
        own = LOSS_BYTES * len(layout.own_points)
        yield Buffer(OWN_LOSSES, Space.DEVICE, own, "scalars", "float64")
        for access in (layout.packed_losses(), layout.gathered_losses()):
            yield Buffer(access.buffer, Space.DEVICE, access.size_bytes, "scalars", "float64")
    yield Buffer(GRADIENTS, Space.HOST, SCALAR_BYTES * estimator.num_queries, "scalars", "float64")
    if directions.rng == "mezo":
        for query in range(estimator.num_queries):
            yield Buffer(f"{WALK}.q{query}", Space.HOST, RNG_STATE_BYTES, "rng", "uint8")
            for group in layout.kept_states:
                name = f"rng.{group.name}.q{query}"
                yield Buffer(name, Space.HOST, NUM_RNG_MARKS * RNG_STATE_BYTES, "rng", "uint8")
