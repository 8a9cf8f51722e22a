"""Blocks on drives, as few as host memory lacks space for, and blocks that stay on the device, as many as it has space for."""

from __future__ import annotations

import pytest

from costmodel import read_model_spec
from tests.support.requests import request_for
from topology import load_preset
from topology.errors import DoesNotFit, PlanError
from topology.figures import Figure
from zosim.hardware.profiles import profile_for
from zosim.planning.bounds import Bounds
from zosim.planning.planner import candidates, choose
from zosim.plans import Residency, Weights

GIB = 2**30
MACHINE = load_preset("rtx4090-1x-nvme")


def request(topology=MACHINE, **fields):
    fields = {
        "batch": 1,
        "seq": 64,
        "weights": Weights(dtype="float32"),
        "max_device_bytes": 8 * GIB,
    } | fields
    return request_for(
        read_model_spec("llama-3-8b"), topology, profile=profile_for(topology, "gpu0"), **fields
    )


def with_drive(**figures):
    nodes = [
        node.model_copy(
            update={name: Figure(value=value, unit=unit) for name, (value, unit) in figures.items()}
        )
        if node.type == "disk"
        else node
        for node in MACHINE.nodes
    ]
    return MACHINE.model_copy(update={"nodes": tuple(nodes)})


def test_the_planner_keeps_on_the_drive_what_host_memory_does_not_hold():
    fixed = {"schedule": {"update": "delayed"}}  # half as many plans to look at
    roomy, tight = choose(request(fixed=fixed)), choose(request(max_host_bytes=20 * GIB, fixed=fixed))
    assert roomy.plan.residency.blocks == "offloaded"
    chosen = tight.chosen
    assert chosen.plan.residency.blocks == "nvme"
    host = chosen.footprints.fullest
    block_bytes = host.disk_bytes / chosen.plan.residency.num_disk_blocks
    assert host.size_bytes <= 20 * GIB < host.size_bytes + block_bytes
    assert tight.prediction.step_time_s > roomy.prediction.step_time_s


@pytest.mark.slow
def test_a_step_that_waits_for_the_drive_takes_its_reads_and_writes():
    """All blocks are read once and written once a step, and a drive does one or the other."""
    decision = choose(request(residency=Residency(blocks="nvme", num_disk_blocks=32)))
    moved = decision.chosen.footprints.fullest.disk_bytes
    assert decision.prediction.step_time_s == pytest.approx(moved / 7.45e9 + moved / 6.9e9, rel=0.1)
    assert decision.prediction.bottleneck.limiter == "drive"


@pytest.mark.slow
def test_drives_of_one_host_are_read_together():
    disk, link = MACHINE.node("disk0"), next(link for link in MACHINE.links if link.target == "disk0")
    other = (
        disk.model_copy(update={"id": "disk1"}),
        link.model_copy(update={"id": "l1", "source": "numa0", "target": "disk1"}),
    )
    two = MACHINE.model_copy(
        update={"nodes": (*MACHINE.nodes, other[0]), "links": (*MACHINE.links, other[1])}
    )
    fixed = {"residency": Residency(blocks="nvme", num_disk_blocks=32, num_staging_buffers=3)}
    one_s, two_s = (choose(request(topology, **fixed)).prediction.step_time_s for topology in (MACHINE, two))
    assert two_s == pytest.approx(one_s / 2, rel=0.1)


@pytest.mark.slow
def test_bounds_of_blocks_on_drives_are_below_their_simulations():
    requested = request(max_host_bytes=20 * GIB)
    listed = [c for c in candidates(requested) if not c.missing]
    assert {c.plan.residency.num_disk_blocks for c in listed} != {None}
    for candidate in listed[:: max(1, len(listed) // 4)]:
        assert Bounds(requested).of(candidate.plan).seconds <= candidate.planned.step_time_s * (1 + 1e-9)


def test_a_drive_that_is_too_small_is_named():
    small = with_drive(capacity=(2, "GB"))
    with pytest.raises(DoesNotFit, match="on the drives of host0"):
        choose(request(small, residency=Residency(blocks="nvme", num_disk_blocks=32)))


def test_a_host_without_a_drive_is_refused():
    bare = load_preset("a100-80gb-milan")
    with pytest.raises(PlanError, match=r"host0 of .* has none") as raised:
        choose(request(bare, residency=Residency(blocks="nvme")))
    assert "type disk" in raised.value.hint


def test_blocks_that_the_device_has_space_for_stay_there_among_those_that_move():
    """The more of them stay, the faster; bounds are below simulations, and memory is exact."""
    seconds = [choose(request(method="zo2")).chosen.seconds]
    block_bytes = 870 * 2**20  # 218 million parameters
    for limit in (10, 24):
        requested = request(max_device_bytes=limit * GIB)
        decision = choose(requested)
        chosen, lean = decision.chosen, decision.chosen.footprints.largest.device_bytes
        assert 0 < chosen.plan.residency.num_resident_blocks < 32
        as_fast = [c for c in (chosen, *decision.others) if c.seconds < chosen.seconds * 1.0005]
        assert lean == min(c.footprints.largest.device_bytes for c in as_fast)
        most = max(c.footprints.largest.device_bytes for c in as_fast)
        assert lean <= most <= limit * GIB < most + block_bytes
        bound = Bounds(requested).of(chosen.plan)
        assert bound.seconds <= chosen.seconds * (1 + 1e-9)
        assert bound.footprints == chosen.planned.prediction.footprints
        seconds.append(chosen.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_an_offloaded_plan_that_is_asked_for_moves_all_blocks_unless_some_are_named():
    fixed = {"blocks": "offloaded", "num_staging_buffers": 3}
    for named in ({}, {"num_resident_blocks": 4}):
        residency = Residency.model_construct(set(fixed | named), **(fixed | named))
        plan = choose(request(residency=residency, max_device_bytes=16 * GIB)).plan
        assert plan.residency.num_resident_blocks == named.get("num_resident_blocks")
