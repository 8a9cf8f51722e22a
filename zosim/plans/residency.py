"""Where the blocks live between their uses, and how they move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from costmodel.formats import FORMATS, TransferFormat
from topology.limits import Blocks, StagingBuffers
from zosim.plans.setting import Axis, Changes, Conflict, Setting
from zosim.plans.weights import in_full

if TYPE_CHECKING:
    from zosim.plans import Plan

TransferDType = Annotated[TransferFormat, BeforeValidator(in_full)]

_ROUNDING: Changes = "numbers where transfers round"


class Residency(Axis):
    """Where the blocks live between their uses.

    Attributes
    ----------
    blocks : str
        ``"resident"`` on the device, ``"offloaded"`` to host memory, or ``"nvme"``: on a drive, from which they come by
        way of host memory.
    num_resident_blocks : int or None
        Blocks that stay on the device where the others do not, spread evenly among these; None for none.
    num_disk_blocks : int or None
        Blocks on the drive where blocks are ``"nvme"``, spread evenly among those that host memory has; None for all.
    embedding_and_head : str
        The same for embedding and head, which pass through one staging buffer of their own. The planner's choice alone.
    num_staging_buffers : int
        Device buffers that offloaded blocks pass through; as many of host memory in each direction, of blocks on a drive. One staging buffer serialises upload, compute and offload;
        three let all of them overlap.
    overlap : bool
        Whether copies run beside compute. Off, every copy waits for the compute before it and the other way
        round (ZO2's "no scheduler overlap" ablation).
    reuse_staging_buffers : bool
        Whether staging buffers are allocated once. Off, each upload allocates its staging buffer and each offload frees it
        (ZO2's "no reusable memory" ablation, of plans that are written in Python or by hand).
    transfers : str
        How several ranks share the host's copies. ``"private"``: every rank has a copy of its own and moves whole
        blocks. ``"shared"``: one copy per host; every rank uploads whole blocks and offloads its share of each.
        ``"sliced"``: as shared, and every rank uploads its share alone and gets the others from its peers
        (DistZO2's communication optimisation).
    transfer_dtype : str or None
        Format in which offloaded blocks are kept on the host and cross the bus, :attr:`Plan.transfer_dtype`; None for
        that of the weights. A narrower one loses precision at every offload, and is only planned when loss is allowed.
    """

    heading = "Placement"

    blocks: Annotated[
        Literal["resident", "offloaded", "nvme"],
        Setting(
            "--residency",
            "Where transformer blocks live between uses: on the device, offloaded to host memory, or on an NVMe drive.",
            _ROUNDING,
            planned=True,
            recorded_as="blocks",
        ),
    ] = "resident"
    num_resident_blocks: Annotated[
        Blocks | None,
        Setting(
            "--resident-blocks",
            "Number of blocks that stay on the device with --residency offloaded or nvme.",
            _ROUNDING,
            planned=True,
            usual="as many as the device has space for, or none where --residency is given",
            expert=True,
        ),
    ] = None
    num_disk_blocks: Annotated[
        Blocks | None,
        Setting(
            "--disk-blocks",
            "Number of blocks on the drive with --residency nvme; host memory keeps the others.",
            _ROUNDING,
            planned=True,
            usual="all, or as many as host memory has no space for",
            expert=True,
        ),
    ] = None
    embedding_and_head: Annotated[
        Literal["resident", "offloaded"],
        Setting(
            help="Where the embeddings and the LM head live between uses.", changes=_ROUNDING, planned=True
        ),
    ] = "resident"
    num_staging_buffers: Annotated[
        StagingBuffers,
        Setting(
            "--staging-buffers",
            "Number of staging buffers on the device for offloaded blocks.",
            _ROUNDING,
            planned=True,
            # The first is the least memory; more than six never shortened a step that was tried.
            tried=(1, 2, 3, 4, 6),
            recorded_as="num_staging_buffers",
            expert=True,
        ),
    ] = 3
    overlap: Annotated[bool, Setting("--overlap", "Overlap copies with compute.", _ROUNDING, expert=True)] = (
        True
    )
    reuse_staging_buffers: Annotated[
        bool, Setting(help="Allocate staging buffers once, at the start.", changes=_ROUNDING)
    ] = True
    transfers: Annotated[
        Literal["private", "shared", "sliced"],
        Setting(
            "--transfers",
            "How the ranks of a host hold offloaded blocks: one copy each (private), one copy for all "
            "(shared), or one copy of which each rank uploads its slice (sliced).",
            planned=True,
            expert=True,
        ),
    ] = "private"
    transfer_dtype: Annotated[
        TransferDType | None,
        Setting(
            "--transfer-dtype",
            "Format of offloaded blocks in host memory and in transfers; narrower than --dtype is lossy.",
            _ROUNDING,
            usual="--dtype",
            expert=True,
            heading="Precision",
        ),
    ] = None

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield how the offloaded blocks of `plan` move."""
        if self.blocks == "resident":
            return
        if self.num_resident_blocks is not None:
            yield f"{self.num_resident_blocks} of {plan.model.num_blocks} blocks resident"
        if self.num_disk_blocks is not None:
            yield f"{self.num_disk_blocks} of {plan.model.num_blocks} blocks on the drive"
        yield f"{self.num_staging_buffers} staging buffer{'s' if self.num_staging_buffers > 1 else ''}"
        if plan.is_shared_out:
            yield "blocks sliced" if self.transfers == "sliced" else "host copy shared"
        if not self.overlap:
            yield "no overlap"
        if not self.reuse_staging_buffers:
            yield "staging buffers allocated anew"
        if self.embedding_and_head == "offloaded":
            yield "embedding and head offloaded"
        if plan.is_transfer_lossy:
            yield f"{plan.transfer_dtype} transfers (lossy)"

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield which blocks of `plan` cannot move, or not this way."""
        yield from self._conflicts_of_mixtures(plan)
        yield from self._conflicts_of_disks(plan)
        if self.embedding_and_head == "offloaded" and self.blocks == "resident":
            yield (
                "residency.embedding_and_head=offloaded needs residency.blocks=offloaded",
                "offload the blocks as well",
            )
        if self.embedding_and_head == "offloaded" and plan.model.tied_head:
            yield (
                (
                    f"{plan.model.name} shares one table between embeddings and LM head, so residency.embedding_and_head=offloaded "
                    "frees no memory"
                ),
                "use residency.embedding_and_head=resident",
            )
        if FORMATS[plan.transfer_dtype].element_bytes > FORMATS[plan.weights.dtype].element_bytes:
            yield (
                f"residency.transfer_dtype={plan.transfer_dtype} is wider than weights.dtype={plan.weights.dtype}",
                f"use residency.transfer_dtype={plan.weights.dtype}",
            )
        if self.transfers != "private":
            yield from self._conflicts_of_shares(plan)

    def offloaded(self, block: int, num_blocks: int) -> int | None:
        """Return the number of block `block` of `num_blocks` among those that do not stay on the device; None if it stays.

        Examples
        --------
        Copies of three of eight blocks have the computation of the others beside them:

        >>> residency = Residency(blocks="offloaded", num_resident_blocks=5)
        >>> [residency.offloaded(block, 8) for block in range(8)]
        [None, None, 0, None, None, 1, None, 2]
        """
        return (
            None if self.blocks == "resident" else _picked(block, num_blocks, self.num_offloaded(num_blocks))
        )

    def num_offloaded(self, num_blocks: int) -> int:
        """Return how many of `num_blocks` blocks do not stay on the device."""
        return 0 if self.blocks == "resident" else max(0, num_blocks - (self.num_resident_blocks or 0))

    def on_disk(self, block: int, num_blocks: int) -> int | None:
        """Return the number of block `block` of `num_blocks` among those on a drive; None if it is not on one.

        Examples
        --------
        Three of eight blocks, as far from each other as can be:

        >>> residency = Residency(blocks="nvme", num_disk_blocks=3)
        >>> [residency.on_disk(block, 8) for block in range(8)]
        [None, None, 0, None, None, 1, None, 2]
        """
        number, num_offloaded = self.offloaded(block, num_blocks), self.num_offloaded(num_blocks)
        if self.blocks != "nvme" or number is None:
            return None
        count = num_offloaded if self.num_disk_blocks is None else self.num_disk_blocks
        return _picked(number, num_offloaded, count)

    def _conflicts_of_mixtures(self, plan: Plan) -> Iterator[Conflict]:
        count, num_blocks = self.num_resident_blocks, plan.model.num_blocks
        if count is not None and self.blocks == "resident":
            yield (
                f"residency.num_resident_blocks={count} is a part of the blocks, but residency.blocks=resident keeps all",
                "use residency.blocks=offloaded, or leave residency.num_resident_blocks out",
            )
        elif count is not None and count >= num_blocks:
            yield (
                f"residency.num_resident_blocks={count} leaves none of the {num_blocks} blocks of {plan.model.name} to offload",
                "use residency.blocks=resident",
            )

    def _conflicts_of_disks(self, plan: Plan) -> Iterator[Conflict]:
        count, num_blocks = self.num_disk_blocks, self.num_offloaded(plan.model.num_blocks)
        if count is not None and self.blocks != "nvme":
            yield (
                f"residency.num_disk_blocks={count} needs blocks on a drive, but residency.blocks={self.blocks}",
                "use residency.blocks=nvme, or leave residency.num_disk_blocks out",
            )
        elif count is not None and count > num_blocks:
            yield (
                f"residency.num_disk_blocks={count} exceeds the {num_blocks} blocks of {plan.model.name}"
                + (" that do not stay on the device" if self.num_resident_blocks else ""),
                "leave it out for all",
            )
        if self.blocks == "nvme" and self.transfers != "private":
            yield (
                f"residency.transfers={self.transfers} does not apply to blocks on a drive, of which every rank has its own",
                "use residency.transfers=private",
            )

    def _conflicts_of_shares(self, plan: Plan) -> Iterator[Conflict]:
        transfers = self.transfers
        if self.blocks == "resident":
            yield (
                f"residency.transfers={transfers} applies to offloaded blocks, but residency.blocks=resident",
                "use residency.blocks=offloaded",
            )
        if plan.placement.world_size == 1:
            yield f"residency.transfers={transfers} needs several ranks", "use residency.transfers=private"
        if plan.mesh.stage > 1:
            yield (
                f"residency.transfers={transfers} does not apply to stages, which hold different blocks",
                "use residency.transfers=private",
            )
        if len({len(ranks) for ranks in plan.process_groups["host"]}) > 1:
            yield (
                f"residency.transfers={transfers} needs the same number of ranks on every host",
                "use the same number of ranks on every host, or residency.transfers=private",
            )


def _picked(index: int, count: int, num_picked: int) -> int | None:
    """Return the number of one of `count` things among those that are picked evenly; None if it is not."""
    number = index * num_picked // count
    return number if (index + 1) * num_picked // count > number else None
