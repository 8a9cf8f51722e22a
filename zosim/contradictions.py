"""Which axes of a plan cannot stand together, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.codecs import codec_spec
from costmodel.work import DTYPE_BYTES
from zosim.axes import INSIDE, last_before

if TYPE_CHECKING:
    from zosim.plan import Plan


def contradictions(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why the axes of `plan` cannot stand together, with its remedy."""
    model, found = plan.model, []
    if plan.seq > model.max_positions:
        found.append(
            (
                f"seq={plan.seq} exceeds the {model.max_positions} positions of {model.name}",
                f"use --seq {model.max_positions} or less",
            )
        )
    if plan.residency.blocks == "offloaded" and plan.runtime.traversal == "sweep":
        found.append(
            (
                "traversal=sweep needs every block at once, but residency.blocks=offloaded",
                "use traversal=blockwise",
            )
        )
    if plan.runtime.traversal == "sweep" and plan.runtime.update == "delayed":
        found.append(
            (
                "update=delayed is fused into a segment's turn, which traversal=sweep does not have",
                "use traversal=blockwise or update=immediate",
            )
        )
    if plan.runtime.traversal == "querywise" and plan.runtime.update == "delayed":
        found.append(
            (
                "traversal=querywise visits a block once per query, so update=delayed has no one turn",
                "use update=immediate",
            )
        )
    if plan.runtime.traversal == "querywise" and plan.residency.blocks == "offloaded":
        found.append(
            ("traversal=querywise would upload every block once per query", "use traversal=blockwise")
        )
    if plan.residency.edges == "offloaded" and plan.residency.blocks == "resident":
        found.append(("edges=offloaded with blocks=resident saves little", "offload the blocks first"))
    if plan.residency.edges == "offloaded" and model.tied_head:
        found.append(
            (
                f"{model.name} ties its head to its token table, so edges=offloaded frees no memory",
                "use edges=resident",
            )
        )
    if DTYPE_BYTES[plan.precision.transfer] > DTYPE_BYTES[plan.precision.storage]:
        found.append(
            (
                f"transfer={plan.precision.transfer} is wider than storage={plan.precision.storage}",
                f"use transfer={plan.precision.storage}",
            )
        )
    if plan.precision.compute == "tf32" and plan.precision.storage != "float32":
        found.append(
            (f"compute=tf32 reads float32, but storage={plan.precision.storage}", "use storage=float32")
        )
    return found + _contradictions_of_ranks(plan)


def _contradictions_of_ranks(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why mesh, placement and transfers cannot stand together, with its remedy."""
    mesh, placement, found = plan.mesh, plan.placement, []
    if mesh.world_size != placement.world_size:
        found.append(
            (
                f"data={mesh.data} x perturb={mesh.perturb} x stage={mesh.stage} needs {mesh.world_size} ranks, not "
                + str(placement.world_size),
                "name one device per rank, or change the mesh",
            )
        )
    if mesh.data > plan.batch:
        found.append(
            (
                f"a batch of {plan.batch} cannot be shared by data={mesh.data}: some rank would have none",
                f"use data={plan.batch} or less, or a larger batch",
            )
        )
    if mesh.perturb > len(plan.points):
        found.append(
            (
                f"perturb={mesh.perturb} shares out {len(plan.points)} evaluation points: some rank has none",
                f"use perturb={len(plan.points)} or less, or more queries",
            )
        )
    if placement.hosts and len(placement.hosts) != placement.world_size:
        found.append(
            (f"{len(placement.hosts)} hosts for {placement.world_size} devices", "name one per device")
        )
    if plan.residency.transfers != "private":
        found += _contradictions_of_shares(plan)
    return found + _contradictions_of_stages(plan)


def _contradictions_of_stages(plan: Plan) -> list[tuple[str, str]]:
    """Every reason why cuts and stages cannot stand together, with its remedy."""
    split, segments, found = plan.split, plan.model.segments, []
    if plan.mesh.stage > 1 and len(split.cuts) != plan.mesh.stage - 1:
        found.append(
            (f"stage={plan.mesh.stage} needs {plan.mesh.stage - 1} cuts, not {len(split.cuts)}", "see --cut")
        )
    unknown = [cut for cut in split.cuts if last_before(cut, segments) not in segments[1:-1]]
    if unknown:
        inside = unknown[0].endswith(INSIDE)
        found.append(
            (
                f"there is no cut {unknown[0]!r} in {plan.model.name}",
                "read the model with that block cut"
                if inside
                else f"cuts are block.0.mlp to block.{plan.model.num_blocks - 1}",
            )
        )
    elif list(split.cuts) != sorted(
        set(split.cuts), key=lambda cut: segments.index(last_before(cut, segments))
    ):
        found.append(
            (f"cuts {', '.join(split.cuts)} are not in the model's order", "sort them, name each once")
        )
    if split.densities and len(split.densities) != len(split.cuts):
        found.append((f"{len(split.densities)} densities for {len(split.cuts)} cuts", "give one per cut"))
    if any(isinstance(density, float) and not 0 <= density <= 1 for density in split.densities):
        found.append((f"densities={split.densities} must be from 0 to 1", "the part that is not zero"))
    for name in (split.codec, split.residual_codec):
        codec_spec(name)
    return found


def _contradictions_of_shares(plan: Plan) -> list[tuple[str, str]]:
    transfers, found = plan.residency.transfers, []
    if plan.residency.blocks == "resident":
        found.append((f"transfers={transfers}, but blocks=resident are not moved", "use blocks=offloaded"))
    if plan.placement.world_size == 1:
        found.append((f"transfers={transfers} needs several ranks", "use transfers=private"))
    if plan.mesh.stage > 1:
        found.append(
            (f"transfers={transfers} with stages, which hold unlike blocks", "use transfers=private")
        )
    if transfers == "shared" and plan.residency.share_group == "world" and len(plan.groups["host"]) > 1:
        found.append(("transfers=shared over several hosts, which share no memory", "use share_group=host"))
    if len({len(ranks) for ranks in plan.groups["host"]}) > 1:
        found.append(
            (f"transfers={transfers} with unlike numbers of ranks per host", "use as many on every host")
        )
    return found
