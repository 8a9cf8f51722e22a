"""How many blocks a plan keeps on drives: as few as leave host memory enough for the others.

Examples
--------
Host memory holds five of twelve blocks:

>>> from costmodel import read_model_spec
>>> from zosim.plans import Placement
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement)
>>> few = fewest_on_disk(plan, lambda plan: 12 - (plan.residency.num_disk_blocks or 12) <= 5)
>>> few.residency.num_disk_blocks
7
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from zosim.planning.request import Request
from zosim.plans import Plan


def may_use_disks(request: Request, plan: Plan) -> bool:
    """Whether the request leaves it open how many blocks of a plan lie on drives, and there are any."""
    residency, topology = request.config.residency, request.hardware.topology
    is_open = (
        "nvme" in request.blocks
        and residency.given("blocks") in (None, "nvme")
        and residency.given("num_disk_blocks") is None
    )
    moves = plan.is_offloaded and plan.residency.transfers == "private"
    return is_open and moves and all(topology.disks_of(device) for device in plan.placement.devices)


def fewest_on_disk(plan: Plan, fits: Callable[[Plan], bool]) -> Plan | None:
    """Return a plan with the fewest of its blocks on drives that fit; None if not even those of all do."""
    num_blocks = plan.model.num_blocks

    def spilled(count: int) -> Plan:
        residency = plan.residency.model_copy(
            update={"blocks": "nvme", "num_disk_blocks": None if count == num_blocks else count}
        )
        return plan.model_copy(update={"residency": residency})

    counts = range(1, num_blocks + 1)
    index = bisect_left(counts, True, key=lambda count: fits(spilled(count)))
    return spilled(counts[index]) if index < num_blocks else None
