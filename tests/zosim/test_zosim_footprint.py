"""Memory of several ranks: each on its device, all of them on their hosts."""

from __future__ import annotations

import pytest

from costmodel import read_model_spec
from costmodel.memory import MemoryComponent
from topology import load_preset
from zosim.hardware.profiles import profile_for
from zosim.planning.footprint import ARENAS, Footprint, footprints
from zosim.planning.predict import PlannedRun
from zosim.plans import Mesh, Placement, Plan, Residency, Schedule, Weights

MIB = 2**20


def rank(*, host_mib: int = 3, shared_mib: int = 0, device_mib: int = 7, is_cpu: bool = False) -> Footprint:
    components = (
        MemoryComponent("staging buffers", device_mib * MIB, "device"),
        MemoryComponent("weights", host_mib * MIB, "host"),
    )
    shared = (MemoryComponent("weights", shared_mib * MIB, "host"),) if shared_mib else ()
    return Footprint(components, shared, is_cpu)


def test_private_copies_add_up_and_a_shared_one_counts_once() -> None:
    private = footprints([rank()] * 4, {"a": [0, 1], "b": [2, 3]})
    assert [host.size_bytes for host in private.hosts] == [6 * MIB, 6 * MIB]
    # Of the three MiB of each rank, two are in the copy that all share: 2 + 4 x 1.
    shared = footprints([rank(shared_mib=2)] * 4, {"a": [0, 1, 2, 3]})
    assert shared.fullest.size_bytes == 6 * MIB


def test_the_largest_rank_and_the_fullest_host_are_told_apart() -> None:
    taken = footprints([rank(device_mib=1, host_mib=9), rank(device_mib=5), rank()], {"a": [0], "b": [1, 2]})
    assert taken.largest_rank == 2
    assert taken.largest.device_bytes == 7 * MIB
    assert taken.fullest.host == "a"


def test_where_devices_are_cpus_the_host_gives_their_memory_too() -> None:
    taken = footprints([rank(is_cpu=True)] * 2, {"a": [0, 1]})
    assert taken.fullest.size_bytes == 2 * (3 + 7) * MIB
    assert ARENAS in taken.fullest.describe()


def offloaded(transfers: str) -> PlannedRun:
    """OPT-125M from the host's memory to two GPUs."""
    topology = load_preset("rtx4090-2x")
    plan = Plan(
        model=read_model_spec("opt-125m"),
        placement=Placement(topology="rtx4090-2x", devices=("gpu0", "gpu1")),
        batch=2,
        seq=64,
        mesh=Mesh(perturb=2),
        weights=Weights(dtype="float16"),
        schedule=Schedule(update="delayed"),
        residency=Residency(blocks="offloaded", transfers=transfers),
    )
    return PlannedRun(plan, topology, profile_for(topology, "gpu0"))


@pytest.mark.parametrize("transfers", ["private", "shared", "sliced"])
def test_a_host_holds_one_copy_of_the_blocks_or_one_per_rank(transfers: str) -> None:
    planned = offloaded(transfers)
    model = planned.plan.model
    blocks = sum(group.num_parameters for group in model.param_groups if group.name.startswith("block."))
    weights = next(part for part in planned.footprints.fullest.components if part.name == "weights")
    copies = 2 if transfers == "private" else 1
    # Alignment adds less than 256 bytes to each of the sixteen tensors of a block.
    assert (
        copies * blocks * 2 <= weights.size_bytes <= copies * (blocks * 2 + model.num_blocks * 17 * 256 * 2)
    )
