"""Why the planner chose as it did, in words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from costmodel.devices.gpus import is_widened
from topology.units import format_bandwidth, format_bytes, format_seconds
from zosim.planning.pipelining import about_stages
from zosim.planning.predict import Contention, PlannedRun, Prediction
from zosim.planning.request import HOW_TO_STATE_MEMORY
from zosim.plans import Plan

if TYPE_CHECKING:
    from zosim.planning.planner import Candidate, Guarantee

_Value = TypeVar("_Value", bound=Hashable)

ALIKE = 5e-4
"""Step times that differ by less than this part are called as fast."""

# Part of a step that more memory must save to be mentioned.
_WORTH_MEMORY = 0.01
# A resource that is busy for so much of a step holds somebody up.
_BUSY = 0.7


def reasons(
    chosen: Candidate,
    prediction: Prediction,
    others: Sequence[Candidate],
    rejected: Sequence[Candidate],
) -> Iterator[str]:
    """Yield why the chosen one: what limits it, what came second, what its mesh gains, costs and shares."""
    limit = prediction.bottleneck
    seconds = format_seconds(prediction.step_time_s)
    yield f"{chosen.describe()}: {seconds} a step, {limit.share:.0%} of it {limit.description}"
    if others:
        second = next((candidate for candidate in others if candidate.is_simulated), others[0])
        yield f"second: {second.describe()}, {_slower(second, prediction.step_time_s)}{_larger(second, chosen)}"
    yield from _about_meshes(chosen, prediction, others)
    if chosen.plan.mesh.world_size > 1:
        yield from about_ranks(chosen.plan, prediction)
    if chosen.plan.num_stages > 1:
        yield from about_stages(chosen.planned)
    yield from about_host_memory(chosen.planned)
    yield from about_disks(chosen.planned)
    yield from about_formats(chosen.planned)
    yield from _about_quantization(chosen, others)
    if chosen.plan.perturbs_by_adapters:
        yield from _about_adapters(chosen.plan)
    yield from _about_memory(prediction, rejected)


def _about_memory(prediction: Prediction, rejected: Sequence[Candidate]) -> Iterator[str]:
    """Yield what is faster and does not fit: the fastest, and what the least more memory already buys."""
    worth = [c for c in rejected if c.seconds < prediction.step_time_s * (1 - _WORTH_MEMORY)]
    if not worth:
        return
    fastest, nearest = worth[0], min(worth, key=lambda candidate: candidate.bound.missing_bytes)
    yield f"would be faster but does not fit: {fastest.describe()} ({fastest.missing})"
    if nearest.bound.missing_bytes < fastest.bound.missing_bytes:
        saved = 1 - nearest.seconds / prediction.step_time_s
        more = format_bytes(nearest.bound.missing_bytes)
        yield f"with {more} more memory, {nearest.describe()} would save up to {saved:.1%} of a step"


def about_guarantee(guarantee: Guarantee) -> str:
    """Return how far the answer can be from the best of all plans."""
    if guarantee.is_optimal:
        claim = f"the best of {guarantee.num_plans:,} plans: no other is faster by more than {ALIKE:.2%}"
    else:
        claim = f"within {guarantee.within:.1%} of the best of {guarantee.num_plans:,} plans"
    return f"{claim} ({guarantee.num_bounded:,} bounded one by one, {guarantee.num_simulated:,} simulated)"


def about_host_memory(planned: PlannedRun) -> Iterator[str]:
    """Yield which NUMA domains a plan's copies reach, if not the nearest alone, and what of the host nobody stated."""
    if not planned.plan.is_offloaded:
        return
    topology, devices = planned.topology, planned.plan.placement.devices
    for rank, share in list(planned.far_shares.items())[:1]:
        machine = planned.machines[rank]
        rate = min(machine.capacities[name] for name in machine.far_routes["h2d"])
        near = topology.host_memory(devices[rank])
        yield (
            f"the host memory of {devices[rank]} exceeds the {format_bytes(near.memory_bytes)} of {near.id}, the nearest: "
            f"{share:.0%} is in another NUMA domain, which copies reach at {format_bandwidth(rate)}"
        )
    memories = {topology.host_memory(device).id: topology.host_memory(device) for device in devices}
    assumed = [
        node for node in memories.values() if node.bandwidth is not None and node.bandwidth.basis == "assumed"
    ]
    if assumed and any(topology.node(device).type == "gpu" for device in devices):
        description = format_bandwidth(assumed[0].bandwidth_bytes_per_s)
        yield f"the bandwidth of {assumed[0].id}, {description}, is assumed: {HOW_TO_STATE_MEMORY}"
    others = [
        f"the size of {node.id}, {format_bytes(node.memory_bytes)}"
        for node in memories.values()
        if node.capacity is not None and node.capacity.basis == "assumed"
    ]
    hosts = {topology.host_of(device).id for device in devices}
    others += [
        f"the {cpu.spec.num_cores} cores of {cpu.id}"
        for cpu in topology.of_type("cpu")
        if cpu.host in hosts and cpu.spec is not None and cpu.spec.cores.basis == "assumed"
    ]
    if others:
        yield f"assumed: {' and '.join(others)}"


def about_disks(planned: PlannedRun) -> Iterator[str]:
    """Yield whether the bandwidth of drives that blocks come from is assumed."""
    if planned.plan.uses_disks:
        disks = planned.topology.disks_of(planned.plan.placement.devices[0])
        assumed = [disk for disk in disks if disk.bandwidth is not None and disk.bandwidth.basis == "assumed"]
        for disk in assumed[:1]:
            rate = format_bandwidth(disk.bandwidth_bytes_per_s)
            yield f"the bandwidth of {disk.id}, {rate}, is assumed: state yours in a topology file"


def _about_quantization(chosen: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """Yield what plans do whose linear layers are kept in another format: the best with each, and what they move."""
    for linears, candidate in _best_of_others(chosen, others, lambda plan: plan.linear_format).items():
        ranks = candidate.plan.mesh.describe() or "one rank"
        blocks = "offloaded" if candidate.plan.is_offloaded else "resident"
        yield f"with {linears} linear layers: {ranks}, blocks {blocks}, {_slower(candidate, chosen.seconds)}"


def _about_adapters(plan: Plan) -> Iterator[str]:
    """Yield what one forward of all points saves and takes."""
    count = len(plan.eval_points)
    yield (
        f"one forward of all {count} evaluation points reads the weights once, and never changes them; its activations "
        f"are those of {count} batches"
    )
    if not plan.forward.has_facts:
        yield (
            "the prediction assumes that a forward computes every token; `zosim run` looks at its data, and skips padding, "
            "repeated beginnings, and logits of tokens without a label"
        )


def about_split_points(
    chosen: Candidate, others: Sequence[Candidate], printed: tuple[str, ...]
) -> Iterator[str]:
    """Yield how the best plans with other split points compare, SparQ's own choice among them."""
    of_mesh = [candidate for candidate in others if candidate.plan.mesh == chosen.plan.mesh]
    best = _best_of_others(chosen, of_mesh, lambda plan: plan.split_points)
    for split_points, candidate in list(best.items())[:1]:
        yield f"second best split point: {' and '.join(split_points)}, {_slower(candidate, chosen.seconds)}"
    if printed and printed == chosen.plan.split_points:
        yield f"SparQ's rule (the sparsest split point near the middle) also gives {' and '.join(printed)}"
    elif printed in best:
        description = _slower(best[printed], chosen.seconds)
        yield f"SparQ's rule (the sparsest split point near the middle) gives {' and '.join(printed)}: {description}"


def about_ranks(plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Yield what several ranks cost each other, and what follows from their being several."""
    if prediction.exchange_s:
        share = prediction.exchange_s / prediction.step_time_s
        of_blocks = " and shares of blocks" if plan.is_sliced else ""
        yield (
            f"the exchange of losses{of_blocks} takes {format_seconds(prediction.exchange_s)} of a rank's link "
            f"per step ({share:.1%})"
        )
    for item in prediction.contention[:1]:
        if item.share >= _BUSY:
            yield describe_contention(item)
    if plan.num_batch_shards > 1:
        yield (
            "losses equal those of one device up to rounding: each is the mean of the shards' losses, weighted by "
            "their numbers of labels"
        )
    hosts = len(plan.placement.ranks_by_host)
    if hosts > 1:
        yield (
            f"its ranks are on {hosts} hosts: `zosim run` prints the torchrun line to start on each of them"
        )


def about_formats(planned: PlannedRun) -> Iterator[str]:
    """Yield for each device without units for the format of the products what torch does there."""
    plan, topology = planned.plan, planned.topology
    dtype = plan.compute_dtype
    specs = {
        topology.device_spec(device).name: topology.device_spec(device) for device in plan.placement.devices
    }
    for name, spec in specs.items():
        if is_widened(spec, dtype):
            other = "; float16 is what it has units for" if "fp16" in spec.peak_dense else ""
            stored = plan.forward.attention == "sdpa" and dtype == "bfloat16"
            fused = (
                ", and torch has no fused attention in it there: its scores come on top of the memory"
                if stored
                else ""
            )
            yield f"{name} declares no peak for {dtype}: multiplied in float32{fused}{other}"


def describe_contention(item: Contention) -> str:
    """Return who shares what, and how busy it is."""
    ranks = ", ".join(map(str, item.ranks)) if len(item.ranks) <= 4 else f"{item.ranks[0]}..{item.ranks[-1]}"
    return f"ranks {ranks} share {item.resource}, which their work keeps busy for {item.share:.0%} of a step"


def _about_meshes(chosen: Candidate, prediction: Prediction, others: Sequence[Candidate]) -> Iterator[str]:
    """Yield how the best plans of the other meshes compare."""
    listed = list(_best_of_others(chosen, others, lambda plan: plan.mesh).values())
    # What several ranks gain is measured against one.
    alone = next((c for c in listed if c.plan.mesh.world_size == 1), None)
    if alone is not None and alone is not others[0]:
        word = "" if alone.is_simulated else "at least "
        times = alone.seconds / prediction.step_time_s
        yield f"on one device: {alone.describe()}, {word}{format_seconds(alone.seconds)} a step, {times:.2f} times as long"
    rivals = [c for c in listed if c is not alone and c is not others[0]]
    if rivals:
        # The best of those with stages is among them, wherever it stands.
        staged = next((c for c in rivals[3:] if c.plan.num_stages > 1), None)
        if chosen.plan.num_stages > 1 or any(c.plan.num_stages > 1 for c in (*others[:1], *rivals[:3])):
            staged = None
        shown = "; ".join(
            f"{c.plan.mesh.describe()} {_slower(c, prediction.step_time_s)}"
            for c in (*rivals[:3], *((staged,) if staged else ()))
        )
        yield f"other meshes at their best: {shown}"


def _best_of_others(
    chosen: Candidate, others: Sequence[Candidate], value: Callable[[Plan], _Value]
) -> dict[_Value, Candidate]:
    """Return the first plan for each value that the chosen one does not have, the best first."""
    best: dict[_Value, Candidate] = {}
    for candidate in others:
        if value(candidate.plan) != value(chosen.plan):
            # Candidates come best first.
            best.setdefault(value(candidate.plan), candidate)
    return best


def _larger(candidate: Candidate, chosen: Candidate) -> str:
    """Return why one that is as fast was not chosen, where it is the memory that it takes."""
    taken = candidate.footprints.largest.device_bytes
    is_alike = candidate.seconds < chosen.seconds * (1 + ALIKE)
    if not is_alike or taken <= chosen.footprints.largest.device_bytes:
        return ""
    return f", but takes {format_bytes(taken)} of device memory"


def _slower(candidate: Candidate, seconds: float) -> str:
    slower = candidate.seconds / seconds - 1
    # A bound that is not above the best says nothing for sure.
    if slower < ALIKE:
        return "as fast" if candidate.is_simulated else "perhaps as fast"
    return f"{'' if candidate.is_simulated else 'at least '}{slower:.1%} slower"
