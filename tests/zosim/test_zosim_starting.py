"""What a run takes before its first step: memory that is pinned, at the rate of the profile."""

from __future__ import annotations

import pytest

from costmodel import read_model_spec
from costmodel.memory import pinned_slabs
from topology import load_preset
from zosim.hardware.profiles import profile_for
from zosim.lowering import lower_all
from zosim.planning.footprint import pinned_by, pinning
from zosim.plans import Placement, Plan
from zosim.program.instructions import Space


def planned(hardware, **axes):
    """Return the programs of a plan of OPT-1.3B, and its device's profile."""
    topology = load_preset(hardware)
    device = topology.compute_devices[0].id
    place = Placement(topology=hardware, devices=(device,))
    plan = Plan(model=read_model_spec("opt-1.3b"), batch=1, seq=128, placement=place, **axes)
    return lower_all(plan), profile_for(topology, device)


def test_the_blocks_of_an_offloaded_plan_are_pinned_at_the_rate_of_the_profile():
    programs, profile = planned("a100-80gb-milan", residency={"blocks": "offloaded"})
    (program,) = programs.programs
    held = [buffer.size_bytes for buffer in program.buffers if buffer.space is Space.HOST]
    took = pinning(programs, profile)
    assert took.size_bytes == sum(size for size, _ in pinned_slabs(held)) >= sum(held)
    rate = profile.constant("pin_bandwidth")
    assert took[1:] == pytest.approx([took.size_bytes / each for each in (rate.value, rate.high, rate.low)])
    assert "GiB of the host are pinned in" in took.description


def test_what_ranks_share_is_pinned_as_it_is():
    topology = load_preset("dgx-a100")
    devices = tuple(node.id for node in topology.compute_devices[:2])
    place = Placement(topology="dgx-a100", devices=devices)
    shared = {"blocks": "offloaded", "transfers": "shared"}
    plan = Plan(
        model=read_model_spec("opt-1.3b"),
        batch=2,
        seq=128,
        placement=place,
        mesh={"data": 2},
        residency=shared,
    )
    for program in lower_all(plan).programs:
        own, once = (
            [b.size_bytes for b in program.buffers if b.space is Space.HOST and b.shared is is_shared]
            for is_shared in (False, True)
        )
        assert once
        assert pinned_by(program) == sum(once) + sum(size for size, _ in pinned_slabs(own))


def test_nothing_is_pinned_on_a_cpu_nor_said_where_the_rate_is_not_known():
    assert pinning(*planned("cpu-laptop")) is None
    programs, profile = planned("a100-80gb-milan", residency={"blocks": "offloaded"})
    kept = tuple(constant for constant in profile.constants if constant.quantity != "pin_bandwidth")
    assert pinning(programs, profile.model_copy(update={"constants": kept})) is None
