"""How many blocks a plan keeps on the device, as many as it has space for, and on drives, as few as leave host memory enough.

Host memory holds five of twelve blocks:

>>> from costmodel import read_model_spec
>>> from zosim.plans import Placement, Residency
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0",))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=1, seq=16, placement=placement)
>>> few = fewest_on_disk(plan, lambda plan: 12 - (plan.residency.num_disk_blocks or 12) <= 5)
>>> few.residency.num_disk_blocks
7

A device with space for four and a half more of them:

>>> offloaded = plan.model_copy(update={"residency": Residency(blocks="offloaded")})
>>> many = most_resident(offloaded, lambda plan: 450 - 100 * (plan.residency.num_resident_blocks or 0))
>>> many.residency.num_resident_blocks
4
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from zosim.planning.request import Request
from zosim.plans import Plan, Residency, fields_of

_BUFFERS_BESIDE = (2, 3)
"""Staging buffers that are tried where some blocks stay on the device."""
_MOST_BUFFERS = max(fields_of(Residency)["num_staging_buffers"].tried)


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
    num_blocks = plan.residency.model_copy(update={"blocks": "nvme"}).num_offloaded(plan.model.num_blocks)

    def spilled(count: int) -> Plan:
        residency = plan.residency.model_copy(
            update={"blocks": "nvme", "num_disk_blocks": None if count == num_blocks else count}
        )
        return plan.model_copy(update={"residency": residency})

    counts = range(1, num_blocks + 1)
    index = bisect_left(counts, True, key=lambda count: fits(spilled(count)))
    return spilled(counts[index]) if index < num_blocks else None


def may_mix(request: Request) -> bool:
    """Whether the request leaves it open where blocks live, so that some may stay on the device while others move."""
    given = request.config.residency.given
    is_open = given("blocks") is None and given("num_resident_blocks") is None
    # ZO2 offloads all blocks, and on a CPU both memories are one.
    return is_open and request.config.search.method != "zo2" and not request.hardware.is_on_cpus


def may_keep_blocks(request: Request, plan: Plan) -> bool:
    """Whether some blocks of an offloaded plan may stay on the device: stages would need a number each."""
    return may_mix(request) and plan.is_offloaded and plan.num_stages == 1


def keeping(plan: Plan, num_blocks: int) -> Plan:
    """Return an offloaded plan with so many of its blocks on the device."""
    residency = plan.residency.model_copy(update={"num_resident_blocks": num_blocks})
    return plan.model_copy(update={"residency": residency})


def most_resident(plan: Plan, left_bytes: Callable[[Plan], int]) -> Plan | None:
    """Return an offloaded plan with as many blocks on the device as it has space for; None where it has for none, or for all.

    `left_bytes`: returns what a plan leaves of the memory of the fullest device.
    """
    left = left_bytes(plan)
    each = left - left_bytes(keeping(plan, 1)) if left > 0 and plan.model.num_blocks > 1 else 0
    # Blocks take as much as each other, or nearly.
    count = min(left // each, plan.model.num_blocks) if each > 0 else 0
    while 0 < count < plan.model.num_blocks and left_bytes(keeping(plan, count)) < 0:
        count -= 1
    return keeping(plan, count) if 0 < count < plan.model.num_blocks else None


def may_be_mixed(request: Request, plan: Plan) -> bool:
    """Whether :func:`mixtures` are made of a plan: of those that differ in staging buffers alone, the one with most."""
    num_buffers = plan.residency.num_staging_buffers
    return may_keep_blocks(request, plan) and (_names_buffers(request) or num_buffers == _MOST_BUFFERS)


def _names_buffers(request: Request) -> bool:
    return request.config.residency.given("num_staging_buffers") is not None


def mixtures(request: Request, plan: Plan, left_bytes: Callable[[Plan], int]) -> Iterator[Plan]:
    """Yield an offloaded plan with as many blocks on the device as it has space for, beside few staging buffers.

    A buffer more is a block less that stays. Plans that differ in buffers alone have these in common.
    """
    if not may_be_mixed(request, plan):
        return
    named = (plan.residency.num_staging_buffers,)
    for num_buffers in named if _names_buffers(request) else _BUFFERS_BESIDE:
        residency = plan.residency.model_copy(update={"num_staging_buffers": num_buffers})
        mixed = most_resident(plan.model_copy(update={"residency": residency}), left_bytes)
        if mixed is not None:
            yield mixed


def num_kept(request: Request, plan: Plan) -> int:
    """Return how many blocks of an offloaded plan stay on the device, where the request leaves that open; else 0."""
    return plan.residency.num_resident_blocks or 0 if may_keep_blocks(request, plan) else 0
