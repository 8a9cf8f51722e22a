"""Where the blocks live between their uses, and how they move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from costmodel.formats import FORMATS
from topology.limits import Slots
from zosim.plans.axis import Axis, Conflict

if TYPE_CHECKING:
    from zosim.plans import Plan

TransferDType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3"]


class Residency(Axis):
    """Where the blocks live between their uses.

    Attributes
    ----------
    blocks : str
        ``"resident"`` on the device, or ``"offloaded"`` to host memory.
    edges : str
        The same for embedding and head, which pass through one slot of their own.
    num_slots : int
        Device slots that offloaded blocks pass through. One slot serialises upload, compute and offload;
        three let all of them overlap.
    overlap : bool
        Whether copies run beside compute. Off, every copy waits for the compute before it and the other way
        round (ZO2's "no scheduler overlap" ablation).
    reuse_slots : bool
        Whether slots are allocated once. Off, each upload allocates its slot and each offload frees it
        (ZO2's "no reusable memory" ablation).
    transfers : str
        How several ranks share the host's copies. ``"private"``: every rank has a copy of its own and moves whole
        blocks. ``"shared"``: one copy per host; every rank uploads whole blocks and offloads its share of each.
        ``"sliced"``: as shared, and every rank uploads its share alone and gets the others from its peers
        (DistZO2's communication optimisation).
    share_group : str
        Ranks among whom blocks are shared out: those of one ``"host"``, or the whole ``"world"``.
    transfer_dtype : str or None
        Format in which offloaded blocks are kept on the host and cross the bus, :attr:`Plan.transfer_dtype`; None for
        that of the weights. A narrower one loses precision at every offload, and is only planned when loss is allowed.
    """

    blocks: Literal["resident", "offloaded"] = "resident"
    edges: Literal["resident", "offloaded"] = "resident"
    num_slots: Slots = 3
    overlap: bool = True
    reuse_slots: bool = True
    transfers: Literal["private", "shared", "sliced"] = "private"
    share_group: Literal["host", "world"] = "host"
    transfer_dtype: TransferDType | None = None

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what does not move, or not so."""
        if self.edges == "offloaded" and self.blocks == "resident":
            yield "edges=offloaded with blocks=resident saves little", "offload the blocks first"
        if self.edges == "offloaded" and plan.model.tied_head:
            yield (
                f"{plan.model.name} ties its head to its token table, so edges=offloaded frees no memory",
                "use edges=resident",
            )
        if FORMATS[plan.transfer_dtype].element_bytes > FORMATS[plan.weights.dtype].element_bytes:
            yield (
                f"transfer_dtype={plan.transfer_dtype} is wider than dtype={plan.weights.dtype}",
                f"use transfer_dtype={plan.weights.dtype}",
            )
        if self.transfers != "private":
            yield from self._conflicts_of_shares(plan)

    def _conflicts_of_shares(self, plan: Plan) -> Iterator[Conflict]:
        transfers = self.transfers
        if self.blocks == "resident":
            yield f"transfers={transfers}, but blocks=resident are not moved", "use blocks=offloaded"
        if plan.placement.world_size == 1:
            yield f"transfers={transfers} needs several ranks", "use transfers=private"
        if plan.mesh.stage > 1:
            yield f"transfers={transfers} with stages, which hold unlike blocks", "use transfers=private"
        if transfers == "shared" and self.share_group == "world" and len(plan.groups["host"]) > 1:
            yield "transfers=shared over several hosts, which share no memory", "use share_group=host"
        if len({len(ranks) for ranks in plan.groups["host"]}) > 1:
            yield (
                f"transfers={transfers} with unlike numbers of ranks per host",
                "use as many on every host",
            )
